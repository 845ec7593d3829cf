"""Metric against bytes: one point per method and settings, and the front of those that no other beats in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

from thinwire.report.metrics import BETTER_HIGH, BETTER_LOW
from thinwire.report.page.numbers import number
from thinwire.report.records import Run, compare, grouped
from thinwire.report.tables import examples

Key = tuple[str, str, str]
"""Recipe, metric and split: runs that differ in none of them can be compared."""


def comparable(runs: Sequence[Run]) -> dict[Key, list[Run]]:
    """Runs by what they can be compared in; of a netbench, those at its first rate, since the others repeat them."""
    first = next((link for run in runs if (link := run.summary.get("link"))), None)
    found: dict[Key, list[Run]] = {}
    for run in runs:
        if run.summary.get("link") in (None, first):
            found.setdefault((run.summary["recipe"], run.metric, run.split), []).append(run)
    return found


def pictures(runs: Sequence[Run], labels: Mapping[Path, str]) -> list[dict[str, Any]]:
    """For each recipe, metric and split its points, the fewest bytes first; `labels` are those of the runs' folders."""
    found = [_picture(key, own, labels) for key, own in comparable(runs).items()]
    return [picture for picture in found if len(picture["points"]) > 1]


def _picture(key: Key, runs: list[Run], labels: Mapping[Path, str]) -> dict[str, Any]:
    recipe, metric, split = key
    by_label = grouped(runs)
    points = [_point(row, by_label[row["label"]], labels) for row in compare(runs)]
    shown = sorted((point for point in points if point["bytes"] and point["y"] is not None), key=lambda p: p["bytes"])
    for point in shown:
        point["front"] = any(point is other for other in front(shown, metric))
    return {
        "recipe": recipe,
        "metric": metric,
        "split": split,
        "examples": examples(runs[0].summary),
        "better": "high" if metric in BETTER_HIGH else "low" if metric in BETTER_LOW else None,
        "points": shown,
        "left_out": len(points) - len(shown),
    }


def _point(row: dict[str, Any], runs: list[Run], labels: Mapping[Path, str]) -> dict[str, Any]:
    metric, several = row["metric"], len(runs) > 1
    return {
        "label": labels[runs[0].folder],
        "bytes": number(row["slow_bytes_mean"]),
        "bytes_std": number(stdev(run.counted_bytes for run in runs)) if several else None,
        "y": number(row[f"{metric}_mean"]),
        "std": number(row[f"{metric}_std"]) if several else None,
        "seeds": len(runs),
        "share": number(row["traffic_vs_allreduce_fp32"]),
    }


def front(points: Sequence[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Of points in order of their bytes, those that are better than all with fewer; none if better is not known."""
    if metric not in (*BETTER_HIGH, *BETTER_LOW):
        return []
    sign = -1 if metric in BETTER_HIGH else 1
    found: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda p: (p["bytes"], sign * p["y"])):
        if not found or sign * point["y"] < sign * found[-1]["y"]:
            found.append(point)
    return found
