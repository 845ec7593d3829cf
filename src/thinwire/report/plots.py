"""The picture of a comparison: the metric over steps and over slow-link bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.errors import ConfigError
from thinwire.report.records import BASELINE, Run
from thinwire.report.tables import ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974")
_MARGIN = 0.05


def draw(runs: list[Run], rows: list[dict[str, Any]], path: Path) -> None:
    """Write the picture as PNG: one line a method, the mean over seeds, with the seeds as thin lines."""
    figure, (over_steps, over_bytes) = two_panels()
    for colour, row in zip(colours(len(rows)), rows):
        mine = [run for run in runs if run.summary["method"] == row["method"]]
        _curve(over_steps, mine, "step", 1, colour, row["method"])
        _curve(over_bytes, mine, "counted_bytes", 1e6, colour, _label(row))
    metric = rows[0]["metric"]
    for axes, below, beside in ((over_steps, "steps", metric), (over_bytes, "slow-link bytes a node (MB)", "")):
        dress(axes, below, beside)
        axes.set_xlim(left=0)
    if metric == "accuracy":
        from matplotlib.ticker import PercentFormatter

        over_steps.yaxis.set_major_formatter(PercentFormatter(1.0))
    _frame(over_steps, runs, metric)
    figure.suptitle(f"{rows[0]['recipe']}: {metric} over steps and over what crossed the slow link")
    figure.savefig(path)


def two_panels() -> tuple[Figure, tuple[Axes, Axes]]:
    """An empty picture with two panels that share their upright axis."""
    # Loaded here: it takes a second, and is an extra that only pictures need.
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("drawing needs matplotlib: pip install 'thinwire[plot]'") from error
    figure = Figure(figsize=(11, 4.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    return figure, (left, right)


def colours(count: int) -> list[str]:
    """One a line."""
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def _label(row: dict[str, Any]) -> str:
    share = row["traffic_vs_allreduce_fp32"]
    return (
        row["method"]
        if share is None or row["method"] == BASELINE
        else f"{row['method']} ({ratio(share)} of all-reduce)"
    )


def _curve(axes: Axes, runs: list[Run], across: str, unit: float, colour: str, label: str) -> None:
    points = [_points(run, across) for run in runs]
    points = [p for p in points if len(p)]
    if not points:
        return
    shortest = min(len(p) for p in points)
    mean = np.mean([p[:shortest] for p in points], axis=0)  # (evaluations, 2)
    if len(points) > 1:
        for p in points:
            axes.plot(p[:, 0] / unit, p[:, 1], color=colour, alpha=0.3, linewidth=0.8)
    marker = "o" if shortest <= 30 else None
    axes.plot(mean[:, 0] / unit, mean[:, 1], color=colour, linewidth=2, marker=marker, markersize=3, label=label)


def _points(run: Run, across: str) -> np.ndarray:
    return np.array([(r[across], r[run.metric]) for r in run.evaluations()], dtype=float).reshape(-1, 2)


def dress(axes: Axes, below: str, beside: str) -> None:
    """Labels, grid and legend."""
    axes.set_xlabel(below)
    axes.set_ylabel(beside)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best")


def _frame(axes: Axes, runs: list[Run], metric: str) -> None:
    """Show where training spends its time: the first evaluations may lie far off the rest."""
    values = np.concatenate([_points(run, "step")[:, 1] for run in runs])
    if len(values) < 8:
        return
    if metric == "accuracy":
        low, high = np.quantile(values, 0.1), values.max()
    else:
        low, high = values.min(), np.quantile(values, 0.9)
    space = _MARGIN * (high - low) or 0.01
    axes.set_ylim(low - space, high + space)
