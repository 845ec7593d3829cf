"""What runs reached, sent and took over one of their settings, as curves, or over two, as a grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from thinwire.base.errors import ConfigError, unknown
from thinwire.base.files import refuse_link
from thinwire.report.comparison import grouped, share_of_baseline, spread
from thinwire.report.plots import blank, dress, strokes
from thinwire.report.runs import Run, is_measured_baseline
from thinwire.report.tables import figure as in_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COUNTED = {"nodes": "nodes", "groups": "groups"}
"""Settings that are the length of a list in the summary."""
_PLAIN = ("batch", "steps", "world_size", "lr", "weight_decay")
_SPREADS = 8
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
        listed = run.summary.get(_COUNTED[name])
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
    if ticks[0] > 0 and ticks[-1] >= _SPREADS * ticks[0]:
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
                axes.text(x, y, _short(name, value), ha="center", va="center", color="white" if dark else "black")


def _short(name: str, value: float) -> str:
    return in_words(name, value) if name == "accuracy" else f"{value:.3g}"


def as_rows(found: Places, over: list[str]) -> list[dict[str, Any]]:
    """The same figures as plain values, for JSON."""
    return [
        {"label": label, **dict(zip(over, place, strict=True)), **{name: vars(cell) for name, cell in row.items()}}
        for label, at in found.items()
        for place, row in at.items()
    ]
