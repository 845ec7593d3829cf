"""Pictures of results.json.

python benchmarks/hundredfold/pictures.py results.json --out docs

pareto.png        accuracy against bytes, one marker per setting
pareto-near.png   the same where settings are crowded: few bytes, high accuracy
over-steps.png    accuracy over steps: what AB trains, and when it factors
agreement.png     how far groups agreed at each average
groups.png        accuracy against the number of groups
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import labels
import numpy as np
from results import Row, by_name, mean_and_spread

from thinwire.report.plots import blank, colours, dress
from thinwire.report.records import show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BASELINE = {"color": "#555555", "linestyle": "--", "linewidth": 1}
_AVERAGES = 4
"""How many averages the thick lines of agreement.png are means over: AB decomposes every four by default."""
_FAMILIES = ("ab", "ab-paper", "localsgd", "diloco", "powersgd", "topk", "daso", "oialr", "onebit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="vgg16bn-cifar10")
    parser.add_argument("--split", choices=("test", "validation"), default="test")
    parser.add_argument("--names", help="only these settings in pareto.png, by comma")
    given = parser.parse_args()
    found = json.loads(given.results.read_text(encoding="utf-8"))
    rows = [row for row in found["runs"] if (row["recipe"], row["split"]) == (given.recipe, given.split)]
    if not rows:
        parser.error(f"there are no runs of {given.recipe} on {given.split} data")
    steps = Counter(row["steps"] for row in rows).most_common(1)[0][0]
    rows = [row for row in rows if row["steps"] == steps]
    workers = Counter(row["workers"] for row in rows).most_common(1)[0][0]
    usual = [row for row in rows if row["workers"] == workers]
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = [row for row in usual if not given.names or row["name"] in ("allreduce", *given.names.split(","))]
    pareto(chosen, given.out / "pareto.png")
    pareto(near(chosen), given.out / "pareto-near.png")
    over_steps(usual, found["defaults"], given.out / "over-steps.png")
    agreement(usual, found["defaults"], given.out / "agreement.png")
    by_groups(rows, given.out / "groups.png")


def colour_of(method: str) -> str:
    """The same in every picture."""
    return colours(len(_FAMILIES) + 1)[_FAMILIES.index(method) if method in _FAMILIES else -1]


def near(rows: list[Row]) -> list[Row]:
    """All-reduce, and what sends at most a fiftieth and is less than 1.5 points below the best that does."""
    cheap = {name: own for name, own in by_name(rows).items() if own[0]["bytes"] <= 0.02}
    means = {name: mean_and_spread([row["accuracy"] for row in own])[0] for name, own in cheap.items()}
    names = {name for name, mean in means.items() if mean > max(means.values()) - 0.015}
    return [row for row in rows if row["method"] == "allreduce" or row["name"] in names]


def pareto(rows: list[Row], path: Path) -> None:
    """Accuracy against bytes, both means over seeds with their spread; the area of a marker is the compression."""
    figure = blank(11, 6.6)
    axes = figure.subplots()
    points, texts, bars = [], [], []
    for name, own in by_name(rows).items():
        if own[0]["method"] == "allreduce":
            continue
        (share, _), (accuracy, spread) = (mean_and_spread([100 * row[f] for row in own]) for f in ("bytes", "accuracy"))
        size, _ = mean_and_spread([row["compression"] for row in own])
        colour, many = colour_of(own[0]["method"]), len(own) > 1
        axes.errorbar(share, accuracy, spread if many else None, color=colour, elinewidth=1, capsize=2)
        axes.scatter(share, accuracy, 14 * size, color=colour, alpha=0.75, edgecolors="white", linewidths=0.5, zorder=3)
        points.append((share, accuracy))
        bars.append(((share, accuracy - spread), (share, accuracy + spread)))
        texts.append(f"{name}, {size:.1f}×" if size > 1.05 else name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_share_and_ratio)
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    _widen(axes, [point[0] for point in points])
    baseline(axes, rows)
    _family_legend(axes, sorted({row["method"] for row in rows} - {"allreduce"}))
    dress(axes, "bytes sent, share of all-reduce in fp32", _accuracy_of(rows), legend=False)
    legend = axes.get_legend()
    figure.draw_without_rendering()
    taken = [labels.around(axes, *ends) for ends in bars] + ([legend.get_window_extent()] if legend else [])
    labels.label(axes, points, texts, taken)
    figure.savefig(path)


def _share_and_ratio(value: float, _: Any) -> str:
    return f"{value:g} %\n1 : {100 / value:.3g}"


def _widen(axes: "Axes", shares: list[float]) -> None:
    """Whole ticks on both sides, whatever the points span: 1, 2 and 5 times a power of ten."""
    ticks = np.array([m * 10.0**e for e in range(-3, 3) for m in (1, 2, 5)])
    low, high = ticks[ticks <= min(shares) * 0.9].max(), ticks[ticks >= max(shares) * 1.1].min()
    axes.set_xlim(low * 0.9, high * 1.1)
    axes.set_xticks(ticks[(ticks >= low) & (ticks <= high)])


def _family_legend(axes: "Axes", methods: list[str]) -> None:
    for method in methods:
        axes.scatter([], [], 40, color=colour_of(method), label=method)
    for size in (1, 5):
        axes.scatter([], [], 14 * size, color="#bbbbbb", label=f"model 1/{size}" if size > 1 else "model of full size")
    axes.legend(frameon=False, fontsize="small", loc="lower right")


def baseline(axes: "Axes", rows: list[Row]) -> None:
    """All-reduce as a line, with the spread over its seeds."""
    own = [100 * row["accuracy"] for row in rows if row["method"] == "allreduce"]
    if own:
        mean, spread = mean_and_spread(own)
        axes.axhline(mean, **_BASELINE, label=f"all-reduce, {mean:.2f} %")
        axes.axhspan(mean - spread, mean + spread, color="#999999", alpha=0.15, linewidth=0)


def _accuracy_of(rows: list[Row]) -> str:
    return f"{rows[0]['split']} accuracy (%)"


def over_steps(rows: list[Row], defaults: dict[str, Any], path: Path) -> None:
    """Accuracy over steps; dotted lines where weights become factors."""
    figure = blank(11, 4.6)
    panels = figure.subplots(1, 2, sharey=True)
    values = [100 * row["accuracy"] for row in rows if row["method"] == "allreduce"]
    for axes, field in zip(panels, ("train", "factor_at"), strict=True):
        for colour, (value, own) in zip(colours(9), variants(rows, field, defaults).items(), strict=False):
            curve = _mean_curve([_percent_curve(row) for row in own])
            axes.plot(*curve.T, color=colour, linewidth=1.8, marker="o", markersize=3, label=f"{field}={value}")
            values += [accuracy for step, accuracy in curve if step > 0.3 * curve[-1, 0]]
            for step in [step for step, phase in own[0]["phases"] if phase == "factored"][:1]:
                axes.axvline(step, color=colour if field == "factor_at" else "#555555", linestyle=":", linewidth=1)
        baseline(axes, rows)
        dress(axes, "steps; dotted: weights become factors", _accuracy_of(rows) if field == "train" else "")
        axes.legend(frameon=False, loc="lower right", fontsize="small")
        axes.set_xlim(left=0)
    if values:
        space = 0.08 * (max(values) - min(values))
        panels[0].set_ylim(min(values) - space, max(values) + space)
    figure.savefig(path)


def _percent_curve(row: Row) -> list[list[float]]:
    """Without an evaluation that is followed at once by that of the last step."""
    curve, last = row["curve"], row["steps"]
    return [[step, 100 * accuracy] for step, _, accuracy in curve if step == last or step < 0.99 * last]


def variants(rows: list[Row], field: str, defaults: dict[str, Any]) -> dict[str, list[Row]]:
    """Runs of AB that differ in this field alone, by its value: of all such families, that with the most values."""
    families: dict[str, dict[str, list[Row]]] = {}
    for row in (row for row in rows if row["method"] == "ab"):
        others = json.dumps({name: value for name, value in row["config"].items() if name != field}, sort_keys=True)
        value = show(row["config"].get(field, defaults["ab"][field]))
        families.setdefault(others, {}).setdefault(value, []).append(row)
    largest = max(families.values(), key=len, default={})
    return dict(sorted(largest.items()))


def _mean_curve(curves: list[list[list[float]]]) -> np.ndarray:
    """(points, 2): the mean of runs that have their points at the same steps."""
    shortest = min(len(curve) for curve in curves)
    return np.mean([curve[:shortest] for curve in curves], axis=0)


def agreement(rows: list[Row], defaults: dict[str, Any], path: Path) -> None:
    """The ratio at each average, thin, and its mean over a few: it jumps when factors are decomposed anew."""
    figure = blank(11, 4.6)
    panels = figure.subplots(1, 2, sharey=True)
    others = {name: own for name, own in by_name(rows).items() if own[0]["method"] != "ab" and own[0]["agreement"]}
    right = others or {f"factor_at={value}": own for value, own in variants(rows, "factor_at", defaults).items()}
    left = {f"train={value}": own for value, own in variants(rows, "train", defaults).items()}
    for axes, shown in zip(panels, (left, right), strict=True):
        for colour, (name, own) in zip(colours(9), shown.items(), strict=False):
            steps, ratios = _mean_curve([row["agreement"] for row in own]).T
            axes.plot(steps, ratios, color=colour, linewidth=0.5, alpha=0.35)
            steps, ratios = (np.convolve(values, np.ones(_AVERAGES) / _AVERAGES, "valid") for values in (steps, ratios))
            axes.plot(steps, ratios, color=colour, linewidth=1.8, label=name)
        apart = rows[0]["groups"] ** 0.5
        for level, text in ((1, "all move alike"), (apart, f"nothing in common: √{rows[0]['groups']}")):
            axes.axhline(level, **_BASELINE)
            axes.text(0.01, level, text, fontsize="x-small", va="bottom", transform=axes.get_yaxis_transform())
        dress(axes, "steps", "length of groups' changes / length of their mean" if axes is panels[0] else "")
        axes.legend(frameon=False, loc="lower left", fontsize="small")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
    figure.savefig(path)


def by_groups(rows: list[Row], path: Path) -> None:
    """Accuracy against the number of groups, for methods that ran with several numbers and otherwise alike."""
    families: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in (row for row in rows if row["method"] != "allreduce"):
        key = row["method"], json.dumps(row["config"], sort_keys=True)
        families.setdefault(key, {}).setdefault(row["groups"], []).append(100 * row["accuracy"])
    families = {key: found for key, found in families.items() if len(found) > 1}
    if not families:
        print("no setting has runs with several numbers of groups: groups.png is not drawn")
        return
    figure = blank(6.4, 4.4)
    axes = figure.subplots()
    for (method, _), found in families.items():
        counts = sorted(found)
        means, spreads = zip(*(mean_and_spread(found[count]) for count in counts), strict=True)
        axes.errorbar(counts, means, spreads, color=colour_of(method), marker="o", capsize=3, label=method)
    baseline(axes, rows)
    axes.set_xscale("log", base=2)
    ticks = sorted({count for found in families.values() for count in found})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    dress(axes, "groups", _accuracy_of(rows))
    figure.savefig(path)


if __name__ == "__main__":
    main()
