"""Numbers and values as they may stand in a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

_DIGITS = 5
_T = TypeVar("_T")


def number(value: Any, *, digits: int | None = _DIGITS) -> Any:
    """A finite number, rounded unless `digits` is None; None for anything else: JSON has no NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if digits is None or isinstance(value, int) else float(f"{value:.{digits}g}")


def plain(value: Any) -> Any:
    """The same in JSON, which has no NaN."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def evenly(values: Sequence[_T], most: int) -> list[_T]:
    """At most about `most` of them, evenly spaced, the first and the last among them."""
    thin = list(values[:: -(-len(values) // max(1, most))]) if values else []
    return thin if not thin or thin[-1] is values[-1] else [*thin, values[-1]]
