"""The plot of a run's ranks: every decomposed layer's, and trained parameters, over the steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.base.files import refuse_link
from thinwire.report.plots import blank, dress
from thinwire.report.records import Run, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAME = "ranks.png"
_MOST_NAMED = 16
"""Most layers with a legend."""


def draw_ranks(run: Run) -> Path | None:
    """Write the plot next to the run's records and return its path; None if the run factored nothing."""
    records = read_records(run.folder / "records.jsonl", "ranks", "evaluation")
    found = [r for r in records if r["kind"] == "ranks" and r["ranks"]]
    if not found:
        return None
    figure = blank(11, 4.4)
    of_layers, of_model = figure.subplots(1, 2)
    _ranks(of_layers, found, run.summary["steps"])
    _trained(of_model, [r for r in records if r["kind"] == "evaluation" and "trainable" in r], run.summary)
    about = run.summary
    figure.suptitle(f"{about['recipe']}, {about['method']}, seed {about['seed']}: ranks and trained parameters")
    path = run.folder / _NAME
    refuse_link(path)
    figure.savefig(path)
    return path


def _ranks(axes: Axes, found: list[dict[str, Any]], end: int) -> None:
    from matplotlib import colormaps

    labels = list(dict.fromkeys(label for record in found for label in record["ranks"]))
    for i, label in enumerate(labels):
        own = [(r["step"], r["ranks"][label]) for r in found if label in r["ranks"]]
        steps, ranks = [*(step for step, _ in own), end], [*(rank for _, rank in own), own[-1][1]]
        colour = colormaps["viridis"](i / max(1, len(labels) - 1))
        axes.step(steps, ranks, where="post", color=colour, linewidth=1.4, label=label)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlim(0, end)
    dress(axes, "steps", "rank, from the first layer (dark) to the last", legend=False)
    if len(labels) <= _MOST_NAMED:
        axes.legend(frameon=False, fontsize="x-small", loc="best")


def _trained(axes: Axes, found: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Without the finished model, in which all is trainable again."""
    full = about.get("trainable_full")
    points = [(r["step"], 100 * r["trainable"] / full) for r in found if full and r["model"] != "finished"]
    if points:
        axes.plot(*zip(*points), color="#4c72b0", linewidth=2, marker="o", markersize=3)
    axes.set_xlim(0, about["steps"])
    axes.set_ylim(bottom=0)
    dress(axes, "steps", "trained parameters (% of the full model's)", legend=False)
