"""The metric against bytes, one marker per setting, from results.json.

python benchmarks/study/pareto.py results.json --out FILE.png [--recipe RECIPE] [--split validation] [--names 'ab*']
"""

import argparse
import json
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import labels
import numpy as np
from results import Row, baseline, by_name, mean_and_spread, most_common, shown

from thinwire.report.plots import blank, colours, dress

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE = {"color": "#555555", "linestyle": "--", "linewidth": 1}
"""How levels to compare with are drawn."""
_FAMILIES = ("ab", "ab-paper", "localsgd", "diloco", "powersgd", "topk", "daso", "oialr", "onebit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", help="that of most runs if not given")
    add_arguments(parser)
    given = parser.parse_args()
    rows = json.loads(given.results.read_text(encoding="utf-8"))["runs"]
    recipe = given.recipe or most_common([row["recipe"] for row in rows])
    pareto(named(with_usual(of(rows, recipe, given.split), "workers"), given.names), given.out)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--split", choices=("test", "validation"), default="test")
    parser.add_argument("--names", help="only these settings, patterns by comma; all-reduce is always there")


def of(rows: list[Row], recipe: str, split: str) -> list[Row]:
    """The runs of a recipe that are as long as most of them."""
    found = [row for row in rows if (row["recipe"], row["split"]) == (recipe, split)]
    if not found:
        raise SystemExit(f"there are no runs of {recipe} on {split} data")
    return with_usual(found, "steps")


def with_usual(rows: list[Row], field: str) -> list[Row]:
    """Those that have the most common value of this field."""
    usual = most_common([row[field] for row in rows])
    return [row for row in rows if row[field] == usual]


def named(rows: list[Row], patterns: str | None) -> list[Row]:
    wanted = ["allreduce", *patterns.split(",")] if patterns else ["*"]
    return [row for row in rows if any(fnmatch(row["name"], pattern) for pattern in wanted)]


def pareto(rows: list[Row], path: Path) -> None:
    """The metric against bytes, both means over seeds with their spread; the area of a marker is the compression."""
    figure = blank(11, 6.6)
    axes = figure.subplots()
    points, texts, bars = [], [], []
    line = baseline(rows)
    for name, own in by_name(rows).items():
        if own[0] in line:
            continue
        share, _ = mean_and_spread([100 * row["bytes"] for row in own])
        value, spread = mean_and_spread([shown(row) for row in own])
        size, _ = mean_and_spread([row["compression"] for row in own])
        colour, many = colour_of(own[0]["method"]), len(own) > 1
        axes.errorbar(share, value, spread if many else None, color=colour, elinewidth=1, capsize=2)
        axes.scatter(share, value, 14 * size, color=colour, alpha=0.75, edgecolors="white", linewidths=0.5, zorder=3)
        points.append((share, value))
        bars.append(((share, value - spread), (share, value + spread)))
        texts.append(f"{name}, {size:.1f}×" if size > 1.05 else name)
    if not points:
        raise SystemExit("there is nothing but all-reduce: no picture is drawn")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_share_and_ratio)
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    _widen(axes, [point[0] for point in points])
    draw_baseline(axes, rows)
    _family_legend(axes, [row for row in rows if row not in line])
    dress(axes, "bytes sent, share of all-reduce in fp32", metric_of(rows), legend=False)
    legend = axes.get_legend()
    figure.draw_without_rendering()
    taken = [labels.around(axes, *ends) for ends in bars] + ([legend.get_window_extent()] if legend else [])
    labels.label(axes, points, texts, taken)
    figure.savefig(path)


def colour_of(method: str) -> str:
    """The same in every picture."""
    return colours(len(_FAMILIES))[_FAMILIES.index(method)] if method in _FAMILIES else "#333333"


def metric_of(rows: list[Row]) -> str:
    """What an axis says."""
    metric = rows[0]["metric"]
    return f"{rows[0]['split']} {metric}" + (" (%)" if metric == "accuracy" else "")


def draw_baseline(axes: "Axes", rows: list[Row]) -> None:
    """All-reduce as a line, with the spread over its seeds."""
    by_seed = {row["seed"]: shown(row) for row in baseline(rows)}
    if by_seed:
        mean, spread = mean_and_spread(list(by_seed.values()))
        unit = " %" if rows[0]["metric"] == "accuracy" else ""
        axes.axhline(mean, **LINE, label=f"all-reduce, {mean:.2f}{unit}")
        axes.axhspan(mean - spread, mean + spread, color="#999999", alpha=0.15, linewidth=0)


def _share_and_ratio(value: float, _: Any) -> str:
    return f"{value:g} %\n1 : {100 / value:.3g}"


def _widen(axes: "Axes", shares: list[float]) -> None:
    """Whole ticks on both sides, whatever the points span: 1, 2 and 5 times a power of ten."""
    ticks = np.array([m * 10.0**e for e in range(-3, 3) for m in (1, 2, 5)])
    low, high = ticks[ticks <= min(shares) * 0.9].max(), ticks[ticks >= max(shares) * 1.1].min()
    axes.set_xlim(low * 0.9, high * 1.1)
    axes.set_xticks(ticks[(ticks >= low) & (ticks <= high)])


def _family_legend(axes: "Axes", rows: list[Row]) -> None:
    """In the corner of many bytes and bad results, where a method is rarely."""
    for method in sorted({row["method"] for row in rows}):
        axes.scatter([], [], 40, color=colour_of(method), label=method)
    for size in (1, 5) if any(row["compression"] > 1.05 for row in rows) else ():
        axes.scatter([], [], 14 * size, color="#bbbbbb", label=f"model 1/{size}" if size > 1 else "model of full size")
    corner = "lower right" if rows[0]["metric"] == "accuracy" else "upper right"
    axes.legend(frameon=False, fontsize="small", loc=corner)


if __name__ == "__main__":
    main()
