"""What a report says of a comparison, in words and as points of metric against bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

from thinwire.base.units import count
from thinwire.report.comparison import BETTER_HIGH, BETTER_LOW, baseline_row, comparable, compare, grouped, resolution
from thinwire.report.page.history import number
from thinwire.report.runs import Run
from thinwire.report.tables import examples, figure, size

_MOST_SENTENCES = 8
_SAME_SIZE = 1.005
"""Compression up to which a model counts as of the same size."""


def sentences(runs: list[Run]) -> list[str]:
    """For each recipe, metric and split what its methods sent, lost and won."""
    return [sentence for own in _comparable(runs) for sentence in _of_recipe(own)]


def _of_recipe(runs: list[Run]) -> list[str]:
    rows = compare(runs)
    base = baseline_row(rows)
    others = [row for row in rows if row is not base]
    found = [_what_was_run(runs, rows)]
    if base is not None:
        found.append(f"All-reduce {_reached(base, None)} and sent {size(base['slow_bytes_mean'])} per node.")
    if len(others) > _MOST_SENTENCES:
        return found + [f"{why}: {_of_row(row, base)}" for why, row in _picked(others)]
    return found + [_of_row(row, base) for row in others]


def _what_was_run(runs: list[Run], rows: list[dict[str, Any]]) -> str:
    workers = sorted({run.summary["world_size"] for run in runs if "world_size" in run.summary})
    *fewer, most = workers or [0]
    counted = f", on {' or '.join([*map(str, fewer), count(most, 'worker')])}" if workers else ""
    seeds = sorted({len(set(row["seeds"])) for row in rows})
    counts = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    each = f", {counts} seeds each" if seeds[-1] > 1 else ""
    links = {row["link"] for row in rows}
    over = f", links of {rows[0]['link']}" if len(links) == 1 and rows[0]["link"] else ""
    what = f"{count(len(runs), 'finished run')} of {rows[0]['recipe']}"
    settings = count(len(rows), "method or setting", "methods or settings")
    return f"{what}: {settings}{each}{counted}{over}, {examples(rows[0])}."


def _of_row(row: dict[str, Any], base: dict[str, Any] | None) -> str:
    parts = [_sent(row), *_took(row, base), _reached(row, base)]
    if (row["compression_mean"] or 0.0) >= _SAME_SIZE:
        parts.append(f"its model is {row['compression_mean']:.1f} times smaller")
    return f"{row['label']} {', '.join(parts[:-1])}{',' if len(parts) > 2 else ''} and {parts[-1]}."


def _sent(row: dict[str, Any]) -> str:
    share, sent = row["traffic_vs_allreduce_fp32"], size(row["slow_bytes_mean"])
    return (
        f"sent {sent} per node" if share is None else f"sent {percent(share)} of all-reduce's bytes ({sent} per node)"
    )


def _took(row: dict[str, Any], base: dict[str, Any] | None) -> list[str]:
    """Seconds, where links are slow and known: elsewhere the same methods may take other times."""
    seconds, link = row["wall_s_mean"], row["link"]
    if base is None or link is None or base["link"] != link or not (seconds and base["wall_s_mean"]):
        return []
    return [f"took {seconds:.0f} s where all-reduce took {base['wall_s_mean']:.0f} s"]


def _reached(row: dict[str, Any], base: dict[str, Any] | None) -> str:
    metric = row["metric"]
    own, other = row[f"{metric}_mean"], base[f"{metric}_mean"] if base else math.nan
    if not math.isfinite(own):
        return "diverged"
    if base is None or not math.isfinite(other):
        std = row[f"{metric}_std"] if len(row["seeds"]) > 1 else None
        return f"reached {metric} {figure(metric, own, std)}"
    text = figure(metric, abs(own - other)).removesuffix(" %")
    points = f"{text} points of accuracy" if metric == "accuracy" else f"{text} of {metric}"
    against = f"{figure(metric, own)} against {figure(metric, other)}"
    if float(text) == 0:
        return f"reached the same {metric} ({against})"
    seeds = ", one seed" if len(row["seeds"]) == 1 else ""
    if row["differs_from_allreduce"] is False:
        tells = figure(metric, resolution(row, base) or 0.0).removesuffix(" %")
        unit = " points" if metric == "accuracy" else ""
        return f"showed no measurable difference in {metric} ({against}, up to {tells}{unit} may be chance{seeds})"
    return f"{_direction(metric, own - other)} {points} ({against}{seeds})"


def _direction(metric: str, change: float) -> str:
    if metric in BETTER_HIGH:
        return "gained" if change > 0 else "lost"
    if metric in BETTER_LOW:
        return "is worse by" if change > 0 else "is better by"
    return "is higher by" if change > 0 else "is lower by"


def _picked(rows: list[dict[str, Any]]) -> Iterable[tuple[str, dict[str, Any]]]:
    """Of many rows those that somebody would look for; a row that is several of them is mentioned once."""
    metric = rows[0]["metric"]
    sign = -1 if metric in BETTER_HIGH else 1
    means = [row[f"{metric}_mean"] for row in rows]
    best = min(zip(means, rows, strict=True), key=lambda each: (not math.isfinite(each[0]), sign * each[0]))[1]
    least = min(rows, key=lambda row: row["slow_bytes_mean"])
    smallest = max(rows, key=lambda row: row["compression_mean"] or 0.0)
    found: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for why, row in ((f"best {metric}", best), ("fewest bytes", least), ("smallest model", smallest)):
        found.setdefault(row["label"], ([], row))[0].append(why)
    return [(" and ".join(why).capitalize(), row) for why, row in found.values()]


def percent(share: float) -> str:
    """Two digits that mean something: 0.52 %, 5.2 %, 52 %."""
    value = 100 * share
    digits = 0 if value <= 0 else max(0, 1 - math.floor(math.log10(value)))
    return f"{value:.{min(digits, 6)}f} %"


def _comparable(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs by what they can be compared in; of a netbench, those at its first rate, since the others repeat them."""
    first = next((link for run in runs if (link := run.summary.get("link"))), None)
    return comparable(run for run in runs if run.summary.get("link") in (None, first))


def pareto(runs: Sequence[Run], labels: Mapping[Path, str]) -> list[dict[str, Any]]:
    """For each recipe, metric and split its points, the fewest bytes first; `labels` are those of the runs' folders."""
    found = [_picture(own, labels) for own in _comparable(runs)]
    return [picture for picture in found if len(picture["points"]) > 1]


def _picture(runs: list[Run], labels: Mapping[Path, str]) -> dict[str, Any]:
    metric = runs[0].metric
    by_label = grouped(runs)
    points = [_point(row, by_label[row["label"]], labels) for row in compare(runs)]
    shown = sorted((point for point in points if point["bytes"] and point["y"] is not None), key=lambda p: p["bytes"])
    for point in shown:
        point["front"] = any(point is other for other in front(shown, metric))
    return {
        "recipe": runs[0].summary["recipe"],
        "metric": metric,
        "split": runs[0].split,
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
