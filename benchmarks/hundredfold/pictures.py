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
import sys
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.report.plots import blank, colours, dress
from thinwire.report.runs import show

sys.path.append(str(Path(__file__).resolve().parents[1] / "study"))
import pareto
from results import Row, by_name, mean_and_spread, shown

_AVERAGES = 4
"""How many averages the thick lines of agreement.png are means over: AB decomposes every four by default."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="vgg16bn-cifar10")
    pareto.add_arguments(parser)
    given = parser.parse_args()
    found = json.loads(given.results.read_text(encoding="utf-8"))
    rows = pareto.of(found["runs"], given.recipe, given.split)
    usual = pareto.with_usual(rows, "workers")
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = pareto.named(usual, given.names)
    pareto.pareto(chosen, given.out / "pareto.png")
    pareto.pareto(near(chosen), given.out / "pareto-near.png")
    over_steps(usual, found["defaults"], given.out / "over-steps.png")
    agreement(usual, found["defaults"], given.out / "agreement.png")
    by_groups(rows, given.out / "groups.png")


def near(rows: list[Row]) -> list[Row]:
    """All-reduce, and what sends at most a fiftieth and is less than 1.5 points below the best that does."""
    cheap = {name: own for name, own in by_name(rows).items() if own[0]["bytes"] <= 0.02}
    means = {name: mean_and_spread([shown(row) for row in own])[0] for name, own in cheap.items()}
    names = {name for name, mean in means.items() if mean > max(means.values()) - 1.5}
    return [row for row in rows if row["method"] == "allreduce" or row["name"] in names]


def over_steps(rows: list[Row], defaults: dict[str, Any], path: Path) -> None:
    """Accuracy over steps; dotted lines where weights become factors."""
    figure = blank(11, 4.6)
    panels = figure.subplots(1, 2, sharey=True)
    values = [shown(row) for row in rows if row["method"] == "allreduce"]
    for axes, field in zip(panels, ("train", "factor_at"), strict=True):
        for colour, (value, own) in zip(colours(9), variants(rows, field, defaults).items(), strict=False):
            curve = _mean_curve([_percent_curve(row) for row in own])
            axes.plot(*curve.T, color=colour, linewidth=1.8, marker="o", markersize=3, label=f"{field}={value}")
            values += [accuracy for step, accuracy in curve if step > 0.3 * curve[-1, 0]]
            for step in [step for step, phase in own[0]["phases"] if phase == "factored"][:1]:
                axes.axvline(step, color=colour if field == "factor_at" else "#555555", linestyle=":", linewidth=1)
        pareto.draw_baseline(axes, rows)
        dress(axes, "steps; dotted: weights become factors", pareto.metric_of(rows) if field == "train" else "")
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
    for axes, curves in zip(panels, (left, right), strict=True):
        for colour, (name, own) in zip(colours(9), curves.items(), strict=False):
            steps, ratios = _mean_curve([row["agreement"] for row in own]).T
            axes.plot(steps, ratios, color=colour, linewidth=0.5, alpha=0.35)
            steps, ratios = (np.convolve(values, np.ones(_AVERAGES) / _AVERAGES, "valid") for values in (steps, ratios))
            axes.plot(steps, ratios, color=colour, linewidth=1.8, label=name)
        apart = rows[0]["groups"] ** 0.5
        for level, text in ((1, "all move alike"), (apart, f"nothing in common: √{rows[0]['groups']}")):
            axes.axhline(level, **pareto.LINE)
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
        families.setdefault(key, {}).setdefault(row["groups"], []).append(shown(row))
    families = {key: found for key, found in families.items() if len(found) > 1}
    if not families:
        print("no setting has runs with several numbers of groups: groups.png is not drawn")
        return
    figure = blank(6.4, 4.4)
    axes = figure.subplots()
    for (method, _), found in families.items():
        counts = sorted(found)
        means, spreads = zip(*(mean_and_spread(found[count]) for count in counts), strict=True)
        axes.errorbar(counts, means, spreads, color=pareto.colour_of(method), marker="o", capsize=3, label=method)
    pareto.draw_baseline(axes, rows)
    axes.set_xscale("log", base=2)
    ticks = sorted({count for found in families.values() for count in found})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    dress(axes, "groups", pareto.metric_of(rows))
    figure.savefig(path)


if __name__ == "__main__":
    main()
