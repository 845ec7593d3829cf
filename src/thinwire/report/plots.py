"""The plot of a comparison: the metric over steps, over slow-link bytes and over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.base.errors import ConfigError
from thinwire.base.files import refuse_link
from thinwire.base.units import time
from thinwire.report.comparison import grouped
from thinwire.report.runs import BASELINE, Run
from thinwire.report.tables import examples, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974")
_STYLES = ("-", "--", ":", "-.")
_MARGIN = 0.05
_LEGEND_CHARACTERS = 190
"""Width of the legend below the panels, in characters."""
_LARGE = 20
"""Ratio of most to least bytes from which their axis is logarithmic."""


def draw(
    runs: list[Run], rows: list[dict[str, Any]], path: Path, known: Mapping[Path, np.ndarray] | None = None
) -> None:
    """Write a PNG with one curve per row, the mean over seeds, and the seeds as thin lines.

    `known` are evaluations by folder, as rows of step, bytes, seconds and metric, of runs whose records need not be
    read again.
    """
    refuse_link(path)
    over_steps, over_bytes, over_time = (figure := blank(14, 4.4)).subplots(1, 3, sharey=True)
    by_label = grouped(runs)
    known = known or {}
    points = {run.folder: known[run.folder] if run.folder in known else _points(run) for run in runs}
    for stroke, row in zip(strokes(len(rows)), rows):
        own = [points[run.folder] for run in by_label[row["label"]]]
        for axes, column, unit in ((over_steps, 0, 1.0), (over_bytes, 1, 1e6), (over_time, 2, 1.0)):
            _curve(axes, [p[:, [column, 3]] for p in own], unit, stroke, _legend_text(row))
    metric = rows[0]["metric"]
    captions = {over_steps: "steps", over_bytes: "slow-link bytes per node (MB)", over_time: _seconds(rows)}
    for axes, below in captions.items():
        dress(axes, below, f"{metric} on {examples(rows[0])}" if axes is over_steps else "", legend=False)
        axes.set_xlim(left=0)
    totals = [row["slow_bytes_mean"] for row in rows]
    if _spreads(totals):
        _logarithmic(over_bytes, least=min(totals) / 1e6)
    _legend_below(figure, over_bytes)
    if metric == "accuracy":
        from matplotlib.ticker import PercentFormatter

        over_steps.yaxis.set_major_formatter(PercentFormatter(1.0))
    _frame(over_steps, np.concatenate([p[:, 3] for p in points.values()]), metric)
    figure.suptitle(f"{rows[0]['recipe']}: {metric} over steps, slow-link bytes and time")
    figure.savefig(path)


def _seconds(rows: list[dict[str, Any]]) -> str:
    """What the seconds are of: on one machine, without shaped links, bytes cost no time."""
    (link,) = {row["link"] for row in rows} if len({row["link"] for row in rows}) == 1 else (None,)
    return f"seconds, with links of {link}" if link else "seconds"


def blank(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    # Imported here: it takes a second and is an optional dependency.
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plotting needs matplotlib: pip install 'thinwire[plot]'") from error
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def two_panels() -> tuple[Figure, tuple[Axes, Axes]]:
    """An empty figure with two panels that share their y axis."""
    figure = blank(11, 4.4)
    left, right = figure.subplots(1, 2, sharey=True)
    return figure, (left, right)


def colours(count: int) -> list[str]:
    """One colour per curve."""
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def strokes(count: int) -> list[dict[str, Any]]:
    """Colour and line style per curve; when colours repeat, the style changes."""
    return [
        {"color": colour, "linestyle": _STYLES[i // len(_COLOURS) % len(_STYLES)]}
        for i, colour in enumerate(colours(count))
    ]


def _legend_text(row: dict[str, Any]) -> str:
    share, seconds = row["traffic_vs_allreduce_fp32"], row["wall_s_mean"]
    is_usual = share is None or (row["method"] == BASELINE and share == 1.0)
    known = ([] if is_usual else [f"{ratio(share)} of all-reduce"]) + ([] if seconds is None else [time(seconds)])
    return f"{row['label']} ({', '.join(known)})" if known else row["label"]


def _legend_below(figure: Figure, axes: Axes) -> None:
    """One legend below the panels, where it hides no curve; the figure grows by its height."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(3, _LEGEND_CHARACTERS // max(map(len, labels))))
    lines = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + 0.21 * lines)
    style = {"frameon": False, "fontsize": "small", "handlelength": 3}
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, **style)


def _spreads(amounts: list[float]) -> bool:
    """Whether a linear axis would hide the small ones; a logarithmic axis cannot show zero."""
    return 0 < _LARGE * min(amounts) < max(amounts)


def _logarithmic(axes: Axes, least: float) -> None:
    """Start at 1/20 of the least total: a method that has sent almost nothing yet would take up the axis."""
    from matplotlib.ticker import FuncFormatter

    axes.set_xscale("log")
    axes.autoscale(axis="x")
    axes.set_xlim(left=max(least / 20, axes.get_xlim()[0]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _curve(axes: Axes, found: list[np.ndarray], unit: float, stroke: dict[str, Any], label: str) -> None:
    points = [p for p in found if len(p)]
    if not points:
        return
    shortest = min(len(p) for p in points)
    mean = np.mean([p[:shortest] for p in points], axis=0)  # (evaluations, 2)
    if len(points) > 1:
        for p in points:
            axes.plot(p[:, 0] / unit, p[:, 1], **stroke, alpha=0.3, linewidth=0.8)
    marker = "o" if shortest <= 30 else None
    axes.plot(mean[:, 0] / unit, mean[:, 1], **stroke, linewidth=2, marker=marker, markersize=3, label=label)


def _points(run: Run) -> np.ndarray:
    """Step, bytes, seconds and metric of each evaluation."""
    found = [(r["step"], r["counted_bytes"], r["wall_s"], r[run.metric]) for r in run.evaluations()]
    return np.array(found, dtype=float).reshape(-1, 4)


def dress(axes: Axes, below: str, beside: str, *, legend: bool = True) -> None:
    """Labels, grid and legend."""
    axes.set_xlabel(below)
    axes.set_ylabel(beside)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best")


def _frame(axes: Axes, values: np.ndarray, metric: str) -> None:
    """Limit the y axis to where most evaluations are: the first ones may be far off."""
    values = values[np.isfinite(values)]  # a run that diverged must not cost the others their picture
    if len(values) < 8:
        return
    if metric == "accuracy":
        low, high = np.quantile(values, 0.1), values.max()
    else:
        low, high = values.min(), np.quantile(values, 0.9)
    space = _MARGIN * (high - low) or 0.01
    axes.set_ylim(low - space, high + space)
