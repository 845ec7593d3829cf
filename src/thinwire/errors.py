"""What goes wrong, said so that a stranger can mend it."""

from collections.abc import Iterable


class ThinwireError(Exception):
    """Base of every error that Thinwire raises on purpose."""


class ConfigError(ThinwireError, ValueError):
    """A value the user gave cannot work; the message has the value, what is allowed and what to do."""


class DisagreementError(ThinwireError, RuntimeError):
    """Workers that must hold the same thing do not; the message names the ranks."""


class DivergedError(ThinwireError, RuntimeError):
    """A loss or a parameter is not finite; the message names the group."""


def unknown(kind: str, given: object, known: Iterable[str]) -> ConfigError:
    """The error for a name nobody knows: it lists the names there are."""
    return ConfigError(f"unknown {kind} {given!r}, choose from: {', '.join(sorted(known))}")
