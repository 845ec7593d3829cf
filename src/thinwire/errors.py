"""What goes wrong, said so that a stranger can mend it."""

import errno
from collections.abc import Iterable

_REFUSALS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR),
}


class ThinwireError(Exception):
    """Base of every error that Thinwire raises on purpose."""


class ConfigError(ThinwireError, ValueError):
    """A value the user gave cannot work; the message has the value, what is allowed and what to do."""


class DisagreementError(ThinwireError, RuntimeError):
    """Workers that must hold the same thing do not; the message names the ranks."""


class ConsequenceError(ThinwireError, RuntimeError):
    """Another worker failed or did not come: whatever stopped that one is the reason, and not this error."""


class MissingRankError(DisagreementError, ConsequenceError):
    """Not every worker made a call that all must make; the message names those that did not."""


class OtherRankError(ConsequenceError):
    """What all workers do together failed on another one; the message says on which and why."""


class DamagedError(ConfigError):
    """A file is not what was written once; the message names it."""


class DivergedError(ThinwireError, RuntimeError):
    """A loss or a parameter is not finite; the message names the group."""


def is_refusal(error: BaseException) -> bool:
    """Whether it says all by itself: a disk that is full, broken or not for this user, and the file."""
    return isinstance(error, OSError) and error.errno in _REFUSALS and error.filename is not None


def one_line(error: BaseException) -> str:
    """What went wrong without a traceback; what the system refused in its own words, with the file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) if isinstance(error, ThinwireError) else f"{type(error).__name__}: {error}"


def unknown(kind: str, given: object, known: Iterable[str]) -> ConfigError:
    """The error for a name nobody knows: it lists the names there are."""
    return ConfigError(f"unknown {kind} {given!r}, choose from: {', '.join(sorted(known))}")
