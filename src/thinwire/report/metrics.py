"""Which metrics are better high, and which low; and which differences mean something."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev
from typing import Any

BETTER_HIGH = ("accuracy",)
BETTER_LOW = ("perplexity", "mse", "mae", "loss")
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Standard errors that 95 % of all differences by chance stay below, by degrees of freedom from 1."""
_STANDARD_ERRORS = 2.0
"""The same where a standard error is well known."""


def spread(values: Sequence[float]) -> float:
    """The standard deviation over seeds: 0 of one, nan where one of several diverged."""
    if len(values) < 2:
        return 0.0
    return stdev(values) if all(map(math.isfinite, values)) else math.nan


def is_measurable(row: dict[str, Any], other: dict[str, Any]) -> bool | None:
    """Whether the metrics of two rows of a comparison differ by more than chance; None where nothing tells.

    Nothing does where one of them diverged.
    """
    mean = f"{row['metric']}_mean"
    if not (math.isfinite(row[mean]) and math.isfinite(other[mean])):
        return None
    smallest = resolution(row, other)
    return None if smallest is None else abs(row[mean] - other[mean]) > smallest


def resolution(row: dict[str, Any], other: dict[str, Any]) -> float | None:
    """The difference of two rows' metrics up to which it may be chance, at 95 %; None where nothing tells.

    It is the larger of two. A test set of n examples shows an accuracy p with a standard error of sqrt(p (1 - p) / n),
    and two of them with sqrt(2) times that; less where both fail on the same examples, which is not recorded. Over
    several seeds it is Student's t times the standard error of the difference of two means.
    """
    metric = row["metric"]
    limits = [_by_examples(row, other)] if metric == "accuracy" else []
    limits.append(_by_seeds(row, other))
    return max((limit for limit in limits if limit is not None), default=None)


def _by_examples(row: dict[str, Any], other: dict[str, Any]) -> float | None:
    sizes = row.get("split_size"), other.get("split_size")
    if not (sizes[0] and sizes[1]):
        return None
    p = (row["accuracy_mean"] + other["accuracy_mean"]) / 2
    return _STANDARD_ERRORS * math.sqrt(max(0.0, p * (1 - p)) * (1 / sizes[0] + 1 / sizes[1]))


def _by_seeds(row: dict[str, Any], other: dict[str, Any]) -> float | None:
    std, counts = f"{row['metric']}_std", (len(row["seeds"]), len(other["seeds"]))
    freedom = sum(counts) - 2
    if freedom < 1:
        return None
    variance = sum((count - 1) * each[std] ** 2 for count, each in zip(counts, (row, other), strict=True)) / freedom
    times = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _STANDARD_ERRORS
    return times * math.sqrt(variance * (1 / counts[0] + 1 / counts[1]))
