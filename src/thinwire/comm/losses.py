"""How gloo, nccl and torch's store report that another worker is gone or unreachable."""

import re

_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|remote process exited|timed out|"
    r"wait timeout|socket|no route to host|network is unreachable",
    re.IGNORECASE,
)


def is_loss(error: BaseException) -> bool:
    """Whether an error says that another worker is gone or unreachable."""
    return bool(_LOST.search(str(error)))


def in_short(error: BaseException) -> str:
    """What gloo says, without its source file and its advice."""
    text = re.sub(r"^\[\S*\.cc:\d+\]\s*", "", str(error))
    return text.split(". This is typically")[0].splitlines()[0]
