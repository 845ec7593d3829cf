"""Waiting for what other processes do, and not for ever."""

import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 300


def until(condition: Callable[[], Any], what: str) -> Any:
    """What `condition` gives as soon as it gives something."""
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s for {what}"
        time.sleep(0.05)
    return value
