"""Markdown tables of what run.py has trained, and results.json, from which pictures are drawn.

python benchmarks/study/tables.py OUT [OUT …] [--json results.json]
"""

import argparse
from pathlib import Path
from statistics import fmean

import results
from results import Row, is_fp32_allreduce, mean_and_spread, shown

HEADINGS = ("bytes", "1 : x", "bytes to the ideal", "model", "agreement")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="+")
    parser.add_argument("--json", type=Path, help="where to write results.json; in the first folder if not given")
    given = parser.parse_args()
    found = results.read(given.out)
    results.write(given.json or given.out[0] / "results.json", found)
    rows = found["runs"]
    for recipe, split in sorted({(row["recipe"], row["split"]) for row in rows}):
        table(recipe, split, [row for row in rows if (row["recipe"], row["split"]) == (recipe, split)])


def table(recipe: str, split: str, rows: list[Row]) -> None:
    """One line per setting; `to all-reduce` is over the seeds that both have, in points of accuracy or in percent."""
    metric = rows[0]["metric"]
    figures = ("accuracy %", "to all-reduce") if metric == "accuracy" else (metric, "to all-reduce %")
    headings = ("setting", "seeds", *figures, *HEADINGS)
    print(f"\n{recipe}, {split} data\n\n| {' | '.join(headings)} |")
    print("| --- " * len(headings) + "|")
    for name, own in results.by_name(rows).items():
        print(f"| {' | '.join([name, *cells(own, rows)])} |")


def cells(own: list[Row], rows: list[Row]) -> list[str]:
    """All but the name."""
    share = fmean(row["bytes"] for row in own)
    agreement = [ratio for row in own for _, ratio in row["agreement"]]
    return [
        str(len(own)),
        mean_of([shown(row) for row in own]),
        "" if is_fp32_allreduce(own[0]) else mean_of(results.differences(own, rows), sign="+"),
        f"{100 * share:.3g} %",
        f"1 : {1 / share:.3g}",
        f"{100 * fmean(row['ideal'] for row in own):.3g} %",
        f"{fmean(row['compression'] for row in own):.2f} : 1",
        f"{fmean(agreement):.2f}" if agreement else "",
    ]


def mean_of(values: list[float], sign: str = "") -> str:
    """Mean ± standard deviation; nothing if there are no values."""
    if not values:
        return ""
    mean, spread = mean_and_spread(values)
    return f"{mean:{sign}.2f}" + (f" ± {spread:.2f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
