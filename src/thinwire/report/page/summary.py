"""What a report says in words: sentences computed from the rows of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from thinwire.base.units import count
from thinwire.report.metrics import BETTER_HIGH, BETTER_LOW, resolution
from thinwire.report.page.pareto import comparable
from thinwire.report.records import Run, baseline_row, compare
from thinwire.report.tables import examples, figure, size

_MOST_SENTENCES = 8
_SAME_SIZE = 1.005
"""Compression up to which a model counts as of the same size."""


def sentences(runs: list[Run]) -> list[str]:
    """For each recipe, metric and split what its methods sent, lost and won."""
    return [sentence for own in comparable(runs).values() for sentence in _of_recipe(own)]


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
    if smaller := _smaller(row["compression_mean"]):
        parts.append(smaller)
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
    if base is None:
        return f"reached {_result(row)}" if math.isfinite(row[f"{metric}_mean"]) else "diverged"
    own, other = row[f"{metric}_mean"], base[f"{metric}_mean"]
    if not math.isfinite(own):
        return "diverged"
    if not math.isfinite(other):
        return f"reached {_result(row)}"
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


def _smaller(compression: float | None) -> str:
    if compression is None or compression < _SAME_SIZE:
        return ""
    return f"its model is {compression:.1f} times smaller"


def _result(row: dict[str, Any]) -> str:
    metric = row["metric"]
    several = len(row["seeds"]) > 1
    return f"{metric} {figure(metric, row[f'{metric}_mean'], row[f'{metric}_std'] if several else None)}"


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
