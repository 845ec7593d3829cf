"""The median rule: a trial that is worse than half of the others were at the same point is stopped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from thinwire.report.records import read_records

LEAST, BEGINS = 4, 0.25
"""Ended trials without which there is no median, and the share of a run before which no trial is stopped."""


def curve_of(folder: Path, metric: str, steps: int) -> list[list[float]]:
    """The share of the run and the metric there, where it is a number; of a run that may still be running."""
    found = read_records(folder / "records.jsonl", "evaluation")
    at = ((record["step"] / steps, record.get(metric, math.nan)) for record in found)
    return [[share, value] for share, value in at if math.isfinite(value)]


def best_until(curve: Sequence[Sequence[float]], share: float, lower: bool) -> float | None:
    """The best metric up to this share of a run."""
    seen = [value for at, value in curve if at <= share + 1e-9]
    return (min if lower else max)(seen, default=None)


def reason_to_stop(curve: Sequence[Sequence[float]], others: Iterable[Sequence[Sequence[float]]], lower: bool) -> str:
    """Why a trial with this curve so far should be stopped; nothing if it should go on."""
    if not curve or curve[-1][0] < BEGINS or curve[-1][0] >= 1:
        return ""
    share = curve[-1][0]
    there = [best for other in others if (best := best_until(other, share, lower)) is not None]
    own = best_until(curve, share, lower)
    if len(there) < LEAST or own is None:
        return ""
    middle = median(there)
    if own <= middle if lower else own >= middle:
        return ""
    return (
        f"{own:.4g} after {100 * share:.0f} % of the run, where half of {len(there)} trials had {middle:.4g} or better"
    )
