"""Errors: each message says what was given, what is allowed and what to do."""

import errno
from collections.abc import Iterable

_REFUSALS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR),
}


class ThinwireError(Exception):
    """Base of every error that Thinwire raises on purpose."""


class ConfigError(ThinwireError, ValueError):
    """An invalid value from the user; the message has the value, what is allowed and what to do."""


class DisagreementError(ThinwireError, RuntimeError):
    """Workers that must agree do not; the message names the ranks."""


class ConsequenceError(ThinwireError, RuntimeError):
    """Another worker failed or is missing; the cause is what stopped that worker, not this error."""


class MissingRankError(DisagreementError, ConsequenceError):
    """Not every worker made a collective call; the message names those that did not."""


class OtherRankError(ConsequenceError):
    """A collective operation failed on another worker; the message says on which one and why."""


class CollectiveError(ConsequenceError):
    """A collective failed in a run that may go on without some of its groups: a peer is gone, late, or neither."""

    def __init__(self, why: str, original: Exception, waited: float = 0.0) -> None:
        super().__init__(why)
        self.original = original
        self.waited = waited
        """Seconds that this worker waited in it."""


class LostError(ConsequenceError):
    """This worker cannot go on: its group was given up, too few are left, or the store is gone."""


class GivenUpError(LostError):
    """The others went on without this worker's group, which may join them again."""


class DamagedError(ConfigError):
    """A file is corrupt or incomplete; the message names it."""


class Stopped(ThinwireError):
    """A signal asked for a stop, and it was followed in order; the message says what is saved and how to go on."""


class SaveError(ThinwireError, OSError):
    """A save could not be written; raised on all workers, the message has the rank, the file and the reason."""


class AbandonedSaveError(SaveError):
    """A save was given up because a group was lost while it was written; raised on all workers that are left."""


class DivergedError(ThinwireError, RuntimeError):
    """A loss or a parameter is not finite; the message names the group."""


def is_refusal(error: BaseException) -> bool:
    """Whether the system refused access to a file (full disk, no permission); needs no traceback to be understood."""
    return isinstance(error, OSError) and error.errno in _REFUSALS and error.filename is not None


def one_line(error: BaseException) -> str:
    """An error without its traceback; for a system error, its message and the file."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) if isinstance(error, ThinwireError) else f"{type(error).__name__}: {error}"


def printable(text: str) -> str:
    """A text with other characters escaped, which a file may hold to control a terminal; lines stay lines."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def unknown(kind: str, given: object, known: Iterable[str]) -> ConfigError:
    """The error for an unknown name; lists the known ones."""
    return ConfigError(f"unknown {kind} {given!r}, choose from: {', '.join(sorted(known))}")
