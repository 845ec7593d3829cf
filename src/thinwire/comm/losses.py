"""How gloo, nccl and torch's store report that another worker is gone or unreachable."""

import re
from collections.abc import Callable
from typing import Any

_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|remote process exited|timed out|"
    r"wait timeout|monitoredbarrier|socket|no route to host|network is unreachable",
    re.IGNORECASE,
)


def tried(work: Callable[[], Any]) -> str | None:
    """Do it; if that fails because another worker is gone, say how.

    The error itself is dropped: its traceback would keep process groups alive, and with them the connections by whose
    end others notice that this worker has left.
    """
    try:
        work()
    except RuntimeError as error:
        if not is_loss(error):
            raise
        return in_short(error)
    return None


def is_loss(error: BaseException) -> bool:
    """Whether an error says that another worker is gone or unreachable."""
    return bool(_LOST.search(str(error)))


def in_short(error: BaseException) -> str:
    """What gloo says, without its source file and its advice."""
    text = re.sub(r"^\[\S*\.cc:\d+\]\s*", "", str(error))
    return text.split(". This is typically")[0].splitlines()[0]
