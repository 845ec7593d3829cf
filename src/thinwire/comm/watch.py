"""The seam between a wire and whoever watches its peers.

A wire says here when it makes process groups, when it waits in a collective, and in which call all groups take part.
By default nobody watches and errors pass as they are. Where a run goes on without groups that are lost
(`thinwire.elastic`), every failure of a collective becomes a `CollectiveError`, whatever its text says: who is gone is
not for the error to decide.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from thinwire.base.errors import CollectiveError

_NOTHING: AbstractContextManager[None] = nullcontext()


class Watch:
    """Watches nothing."""

    def collective(self) -> AbstractContextManager[None]:
        """Enter around each call of torch.distributed that waits for others."""
        return _NOTHING

    def joint(self, call: str) -> AbstractContextManager[None]:
        """Enter around what all groups do together, under the name that a user knows."""
        return _NOTHING

    def check(self) -> None:
        """Raise a `CollectiveError` if it is in vain to wait for others; for waits that are no collectives."""

    def opening(self, *, within: bool = False) -> AbstractContextManager[None]:
        """Enter around the making of process groups; `within` this worker's own group, or between groups."""
        return _NOTHING


def attempt(work: Callable[[], Any]) -> CollectiveError | None:
    """Do it; return the error if a collective failed in it.

    The error comes without its traceback, which would keep process groups alive, and with them the connections by
    whose end others notice that this worker has left.
    """
    try:
        work()
    except CollectiveError as error:
        error.__context__ = None
        error.original.__context__ = error.original.__cause__ = None
        error.original.__traceback__ = None
        return error.with_traceback(None)
    return None
