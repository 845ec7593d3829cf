"""Pictures of results.json for docs/training-apart.md.

python benchmarks/words/pictures.py benchmarks/words/results.json --out docs

words-bytes.png   perplexity against bytes, one marker per setting, at its best rate
words-steps.png   perplexity over the second half of training, for each choice of what Adam divides by
"""

import argparse
import json
import re
import sys
from pathlib import Path

from thinwire.report.plots import blank, colours, dress

sys.path.append(str(Path(__file__).resolve().parents[1] / "study"))
import pareto
from results import Row, baseline, is_fp32_allreduce

RECIPE = "gpt-wikitext2"
SHOWN = {
    "allreduce-lr2e-3-1workers": "all-reduce",
    "localsgd-3-shared-lr2e-3": "every 3, shared",
    "localsgd-4-shared-lr2e-3": "every 4, shared",
    "localsgd-4-shared-lr2e-3-every_max32": "every 4 to 32, shared",
    "localsgd-4-shared-seen-lr2e-3": 'every 4, shared and rows="seen"',
    "localsgd-9-shared-lr2e-3": "every 9, shared",
    "localsgd-4-estimate-seen-lr2e-3": 'every 4, estimate, rows="seen"',
    "localsgd-8-lr2e-3": "every 8, group",
}
"""Settings of words-steps.png, all at the same rate, and what it calls them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = json.loads(given.results.read_text(encoding="utf-8"))["runs"]
    found = pareto.of(rows, RECIPE, "validation")
    given.out.mkdir(parents=True, exist_ok=True)
    pareto.pareto(baseline(found) + at_best_rates(found), given.out / "words-bytes.png")
    over_steps(found, given.out / "words-steps.png")


def at_best_rates(rows: list[Row]) -> list[Row]:
    """Each setting once, at the rate that suits it best; its name without that rate."""
    found: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row["value"]):
        if not is_fp32_allreduce(row):
            name = re.sub(r"-lr[\d.e-]+\d", "", row["name"])
            found.setdefault(name, row | {"name": name})
    return list(found.values())


def over_steps(rows: list[Row], path: Path) -> None:
    """One line per setting, as far as it has run; the best in the end come first in the legend."""
    figure = blank(9, 5)
    axes = figure.subplots()
    own = sorted((row for row in rows if row["name"] in SHOWN), key=lambda row: row["value"])
    for colour, row in zip(colours(len(own)), own, strict=True):
        half = [(step, value) for step, _, value in row["curve"] if step >= row["steps"] / 2]
        dashed = "--" if row["method"] == "allreduce" else "-"
        label = f"{SHOWN[row['name']]}: {row['value']:.1f}"
        axes.plot(*zip(*half, strict=True), dashed, color=colour, linewidth=1.8, marker="o", markersize=3, label=label)
    axes.legend(frameon=False, fontsize="small", loc="upper right")
    dress(axes, "steps", pareto.metric_of(rows), legend=False)
    figure.savefig(path)


if __name__ == "__main__":
    main()
