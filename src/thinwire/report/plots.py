"""Plots of a comparison: the metric over steps, bytes and time, and what runs reached over one or two settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.base.errors import ConfigError, unknown
from thinwire.base.files import refuse_link
from thinwire.base.units import time
from thinwire.report.comparison import grouped, share_of_baseline, spread
from thinwire.report.runs import BASELINE, Run, is_measured_baseline
from thinwire.report.tables import examples, ratio
from thinwire.report.tables import figure as in_words

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
    if 0 < _LARGE * min(totals) < max(totals):  # a logarithmic axis cannot show zero
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
    links = {row["link"] for row in rows}
    return f"seconds, with links of {rows[0]['link']}" if len(links) == 1 and rows[0]["link"] else "seconds"


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


def shades(count: int) -> list[Any]:
    """One colour per layer, from the first (dark) to the last."""
    from matplotlib import colormaps

    return [colormaps["viridis"](i / max(1, count - 1)) for i in range(count)]


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


def _logarithmic(axes: Axes, least: float) -> None:
    """Start at 1/20 of the least total: a method that has sent almost nothing yet would take up the axis."""
    axes.set_xscale("log")
    axes.autoscale(axis="x")
    axes.set_xlim(left=max(least / 20, axes.get_xlim()[0]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


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


_COUNTED = ("nodes", "groups")
"""Settings that are the length of a list in the summary."""
_PLAIN = ("batch", "steps", "world_size", "lr", "weight_decay")
_DOUBLINGS = 8
"""Ratio of the largest to the smallest setting from which their axis is logarithmic."""


@dataclass(frozen=True)
class Cell:
    """A figure over seeds."""

    mean: float
    std: float
    seeds: int


Places = dict[str, dict[tuple[float, ...], dict[str, Cell]]]
"""By label, then by the settings, then by what is shown."""


def places(runs: list[Run], over: list[str], show: list[str]) -> Places:
    """The figures of all runs that have these settings; the label leaves them out."""
    figures = _figures(runs)
    for name in show:
        if name not in figures:
            raise unknown("figure", name, list(figures))
    having = [run for run in runs if all(_setting(run, name) is not None for name in over)]
    if not having:
        raise ConfigError(f"no run has {' and '.join(over)}, choose from: {', '.join(sorted(_settings(runs)))}")
    found: Places = {}
    for label, alike in grouped(having, ignoring=_changing(over)).items():
        at: dict[tuple[float, ...], list[Run]] = {}
        for run in alike:
            at.setdefault(tuple(_setting(run, name) or 0.0 for name in over), []).append(run)
        found[label] = {place: {name: _cell(figures[name], own) for name in show} for place, own in sorted(at.items())}
    return found


def _changing(over: list[str]) -> set[str]:
    """The settings, and those that change with them: with a larger batch, as many epochs have fewer steps."""
    sizes = {"world_size", "batch", "steps", "total_steps"}
    return {*over, *(sizes if (sizes | {*_COUNTED}) & {*over} else ())}


def draw_over(runs: list[Run], over: list[str], show: list[str], path: Path) -> Places:
    """Draw one panel per figure and, for a grid, per method, in the format of the ending; returns the figures."""
    refuse_link(path)
    found = places(runs, over, show)
    drawn = _curves(found, over[0], show, runs) if len(over) == 1 else _grids(found, over, show, runs)
    drawn.savefig(path)
    return found


def _figures(runs: list[Run]) -> dict[str, Callable[[Run], float | None]]:
    measured = [run for run in runs if is_measured_baseline(run)]
    return {
        runs[0].metric: lambda run: run.summary[run.metric],
        "bytes": lambda run: run.counted_bytes / 1e6,
        "share": lambda run: share_of_baseline(run, measured),
        "compression": lambda run: run.summary.get("compression"),
        "seconds": lambda run: run.summary.get("wall_s"),
    }


_AXES = {"bytes": "slow-link MB per node", "share": "bytes, of fp32 all-reduce's", "compression": "times smaller"}


def _cell(figure: Callable[[Run], float | None], runs: Iterable[Run]) -> Cell:
    values = [value for run in runs if (value := figure(run)) is not None]
    if not values:
        return Cell(float("nan"), 0.0, 0)
    return Cell(fmean(values), spread(values), len(values))


def _setting(run: Run, name: str) -> float | None:
    """A number of the run's summary or of its method's settings."""
    if name in _COUNTED:
        listed = run.summary.get(name)
        return float(len(listed)) if listed else None
    value = run.summary.get(name) if name in _PLAIN else run.summary["config"].get(name)
    return float(value) if isinstance(value, int | float) else None


def _settings(runs: list[Run]) -> set[str]:
    names = {*_COUNTED, *_PLAIN, *(name for run in runs for name in run.summary["config"])}
    return {name for name in names if any(_setting(run, name) is not None for run in runs)}


def _curves(found: Places, over: str, show: list[str], runs: list[Run]) -> Figure:
    figure = blank(5.2 * len(show) + 0.6, 4.2)
    panels = figure.subplots(1, len(show), squeeze=False)[0]
    for axes, name in zip(panels, show, strict=True):
        for stroke, (label, at) in zip(strokes(len(found)), found.items(), strict=True):
            across = [place[0] for place in at]
            cells = [row[name] for row in at.values()]
            spread = [cell.std for cell in cells] if any(cell.seeds > 1 for cell in cells) else None
            axes.errorbar(across, [c.mean for c in cells], yerr=spread, label=label, marker="o", capsize=3, **stroke)
        dress(axes, over.replace("_", " "), _AXES.get(name, name), legend=name == show[0])
        shown = [row[name].mean for at in found.values() for row in at.values()]
        _scale(axes, [place[0] for at in found.values() for place in at], shown, name)
    figure.suptitle(f"{runs[0].summary['recipe']}: {', '.join(show)} over {over.replace('_', ' ')}")
    return figure


def _scale(axes: Axes, across: list[float], shown: list[float], name: str) -> None:
    """Settings that double, and bytes, on logarithmic axes, which cannot show 0; ticks where there are runs."""
    from matplotlib.ticker import NullLocator, PercentFormatter

    ticks = sorted(set(across))
    if ticks[0] > 0 and ticks[-1] >= _DOUBLINGS * ticks[0]:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    if name in ("bytes", "share") and 0 not in shown:
        axes.set_yscale("log")
    if name == "accuracy":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))


def _grids(found: Places, over: list[str], show: list[str], runs: list[Run]) -> Figure:
    """A heat map per method and figure: the first setting downwards, the second across."""
    figure = blank(5.2 * len(show) + 0.6, 0.6 + 3.6 * len(found))
    panels = figure.subplots(len(found), len(show), squeeze=False)
    for row, (label, at) in zip(panels, found.items(), strict=True):
        down, across = (sorted({place[i] for place in at}) for i in (0, 1))
        for axes, name in zip(row, show, strict=True):
            cells = [[at.get((d, a), {}).get(name) for a in across] for d in down]
            _heat(axes, cells, name)
            axes.set_xticks(range(len(across)), [f"{a:g}" for a in across])
            axes.set_yticks(range(len(down)), [f"{d:g}" for d in down])
            axes.set_xlabel(over[1].replace("_", " "))
            axes.set_ylabel(over[0].replace("_", " "))
            axes.set_title(f"{label}: {_AXES.get(name, name)}", fontsize="medium")
    figure.suptitle(f"{runs[0].summary['recipe']}: {over[0]} × {over[1]}")
    return figure


def _heat(axes: Axes, cells: list[list[Cell | None]], name: str) -> None:
    """Each cell with its figure in words; settings without a run stay empty."""
    values = [[float("nan") if cell is None else cell.mean for cell in row] for row in cells]
    known = [value for row in values for value in row if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    high = high if high > low else low + 1  # all the same: dark
    axes.imshow(values, aspect="auto", cmap="viridis", vmin=low, vmax=high)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value == value:
                dark = value < (low + high) / 2
                axes.text(x, y, _in_cell(name, value), ha="center", va="center", color="white" if dark else "black")


def _in_cell(name: str, value: float) -> str:
    return in_words(name, value) if name == "accuracy" else f"{value:.3g}"


def as_rows(found: Places, over: list[str]) -> list[dict[str, Any]]:
    """The same figures as plain values, for JSON."""
    return [
        {"label": label, **dict(zip(over, place, strict=True)), **{name: vars(cell) for name, cell in row.items()}}
        for label, at in found.items()
        for place, row in at.items()
    ]
