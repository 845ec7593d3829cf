"""The charts of a report as files for a paper, from the same data as the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.base.files import on_file, refuse_link
from thinwire.report.plots import blank, colours, dress, shades, strokes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
Data = dict[str, Any]
_ACROSS = {"steps": ("step", "steps"), "bytes": ("mb", "slow-link bytes per node (MB)"), "time": ("s", "seconds")}
_PARTS = {"purposes": "bytes by purpose", "phases": "bytes by phase", "links": "bytes by link", "seconds": "seconds"}
_LARGE = 20
"""Ratio of most to least bytes from which their axis is logarithmic."""
_MOST_NAMED = 16
_SMOOTH = 50


def write_figures(data: Data, folder: Path, kind: str) -> list[Path]:
    """Write each chart of the page as a PNG or SVG, named by what it shows; returns the files."""
    from matplotlib import rc_context

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in _charts(data):
        path = folder / f"{name}.{kind}"
        refuse_link(path)
        # Names are shown as they are, and a file is the same each time.
        with rc_context({"text.parse_math": False, "svg.hashsalt": name}), on_file(path):
            draw().savefig(path, metadata={"Date": None} if kind == "svg" else None)
        written.append(path)
    return written


def _charts(data: Data) -> Iterator[tuple[str, Callable[[], Figure]]]:
    runs = data["runs"]
    for picture in data["pareto"]:
        several = f"-{_file_name(picture['recipe'])}-{picture['split']}" if len(data["pareto"]) > 1 else ""
        yield f"pareto{several}", partial(_pareto, picture, _looks(runs))
    for bench in data["benches"]:
        yield f"step-time-{_file_name(bench['recipe'])}", partial(_bench, bench)
    for metric in dict.fromkeys(run["metric"] for run in runs):
        own = [run for run in runs if run["metric"] == metric]
        for across in _ACROSS:
            yield f"{_file_name(metric)}-over-{across}", partial(_curves, own, "metric", metric, across)
    for across in _ACROSS:
        yield f"loss-over-{across}", partial(_curves, runs, "loss", "training loss", across)
    for field, text in _PARTS.items():
        if any(run[field] for run in runs):
            yield text.replace(" ", "-"), partial(_parts, runs, field, text)
    if any(run["layers"]["agrees"] for run in runs):
        yield "divergence", partial(_divergence, runs)
    for run in runs:
        for field, draw in (("ranks", _ranks), ("spectra", _spectra), ("stability", _heat), ("agreement", _heat)):
            if table := run["layers"][field]:
                yield f"{field}-{_file_name(run['name'])}", partial(draw, table, field)


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip(".-")[:80] or "unnamed"


def _panel(width: float = 6.0, height: float = 4.2) -> tuple[Figure, Axes]:
    figure = blank(width, height)
    return figure, figure.subplots()


def _logarithmic(axes: Axes, which: str, base: int = 10) -> None:
    """With plain numbers beside it; those of matplotlib are formulas."""
    from matplotlib.ticker import NullFormatter

    getattr(axes, f"set_{which}scale")("log", base=base)
    axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())


def _looks(runs: list[Data]) -> dict[str, Data]:
    labels = list(dict.fromkeys(run["label"] for run in runs))
    return dict(zip(labels, strokes(len(labels)), strict=True))


def _pareto(picture: Data, looks: dict[str, Data]) -> Figure:
    figure, axes = _panel()
    points, metric = picture["points"], picture["metric"]
    scale, unit = (100, " (%)") if metric == "accuracy" else (1, "")
    for point in points:
        look = {"fmt": "o", "capsize": 3, "color": looks[point["label"]]["color"], "label": point["label"]}
        axes.errorbar(point["bytes"] / 1e6, scale * point["y"], scale * (point["std"] or 0) or None, **look)
    front = [point for point in points if point["front"]]
    if front:
        at = [point["bytes"] / 1e6 for point in front], [scale * point["y"] for point in front]
        axes.step(*at, where="post", color="#888888", linewidth=1, linestyle="--", zorder=0)
    _logarithmic(axes, "x")
    dress(axes, "slow-link bytes per node (MB)", f"{metric} on {picture['examples']}{unit}")
    return figure


def _curves(runs: list[Data], kind: str, name: str, across: str) -> Figure:
    figure, axes = _panel()
    field, text = _ACROSS[across]
    looks, seen = _looks(runs), set()
    for run in runs:
        curve, label = run["curves"][kind], run["label"]
        # Of several values at the same place, the last, as in the page.
        points = {x: y for x, y in zip(curve[field], curve["y"], strict=True) if x is not None and y is not None}
        if points:
            xs, ys = np.array(sorted(points.items()), dtype=float).T
            axes.plot(xs, _smooth(ys) if kind == "loss" else ys, **looks[label], label="" if label in seen else label)
            seen.add(label)
    ends = [end for run in runs if (end := next(iter(run["curves"][kind][field][-1:]), None))]
    if across == "bytes" and ends and max(ends) > _LARGE * min(ends):
        _logarithmic(axes, "x")
        axes.set_xlim(left=min(ends) / 10)
    if kind == "loss":
        _logarithmic(axes, "y")
    on = {run["examples"] for run in runs} if kind == "metric" else set()
    dress(axes, text, f"{name} on {on.pop()}" if len(on) == 1 else name)
    if name == "accuracy":
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    return figure


def _smooth(values: np.ndarray) -> np.ndarray:
    """The running mean of the page."""
    half = len(values) // _SMOOTH // 2
    sums = np.cumsum(np.concatenate([[0.0], values]))
    at = np.arange(len(values))
    start, stop = np.maximum(0, at - half), np.minimum(len(values), at + half + 1)
    return (sums[stop] - sums[start]) / (stop - start)


def _parts(runs: list[Data], field: str, text: str) -> Figure:
    own = [run for run in runs if run[field]]
    figure, axes = _panel(7.0, 1.2 + 0.28 * len(own))
    names = list(dict.fromkeys(name for run in own for name in run[field]))
    unit = 1.0 if field == "seconds" else 1e6
    left = np.zeros(len(own))
    for colour, name in zip(colours(len(names)), names, strict=True):
        amounts = np.array([run[field].get(name, 0.0) for run in own]) / unit
        axes.barh([f"{run['label']}, seed {run['seed']}" for run in own], amounts, left=left, color=colour, label=name)
        left += amounts
    axes.invert_yaxis()
    dress(axes, text if field == "seconds" else f"{text} (MB)", "")
    return figure


def _divergence(runs: list[Data]) -> Figure:
    figure, axes = _panel()
    looks, seen = _looks(runs), set()
    for run in runs:
        if found := run["layers"]["agrees"]:
            label = run["label"]
            axes.plot(found["step"], found["y"], **looks[label], label="" if label in seen else label)
            seen.add(label)
    dress(axes, "steps", "length of changes / length of their mean")
    return figure


def _bench(bench: Data) -> Figure:
    figure, axes = _panel(7.0, 4.2)
    methods = list(dict.fromkeys(row["label"] for at in bench["rates"] for row in at["methods"]))
    width = 0.8 / len(methods)
    for place, (colour, method) in enumerate(zip(colours(len(methods)), methods, strict=True)):
        found = [(i, row) for i, at in enumerate(bench["rates"]) for row in at["methods"] if row["label"] == method]
        at = [i + (place - (len(methods) - 1) / 2) * width for i, _ in found]
        axes.bar(at, [row["step_s"] for _, row in found], width, color=colour, label=method)
        axes.hlines([row["planned_s"] for _, row in found], np.array(at) - width / 2, np.array(at) + width / 2, "black")
    axes.set_xticks(range(len(bench["rates"])), [at["rate"] for at in bench["rates"]])
    _logarithmic(axes, "y")
    dress(axes, "links (lines: planned)", "seconds per step")
    return figure


def _ranks(table: Data, _: str) -> Figure:
    figure, axes = _panel()
    end = max(table["end"] or 0, table["steps"][-1])
    for colour, (name, ranks) in zip(shades(len(table["layers"])), table["layers"].items(), strict=True):
        axes.step([*table["steps"], end], [*_known(ranks), _known(ranks)[-1]], where="post", color=colour, label=name)
    _logarithmic(axes, "y", base=2)
    dress(axes, "steps", "rank", legend=len(table["layers"]) <= _MOST_NAMED)
    return figure


def _spectra(times: list[Data], _: str) -> Figure:
    figure = blank(4.0 * len(times), 3.6)
    panels = figure.subplots(1, len(times), sharey=True, squeeze=False)[0]
    for axes, at in zip(panels, times, strict=True):
        for colour, (name, values) in zip(shades(len(at["layers"])), at["layers"].items(), strict=True):
            places = np.linspace(0, 1, len(values))
            axes.plot(places, [value or np.nan for value in values], color=colour, label=name)
        _logarithmic(axes, "y")
        axes.set_title(f"step {at['step']:,}", fontsize="medium")
        dress(axes, "index / full rank", "", legend=False)
    panels[0].set_ylabel("singular value / largest")
    if len(times[0]["layers"]) <= _MOST_NAMED:
        panels[-1].legend(frameon=False, fontsize="x-small")
    return figure


def _heat(table: Data, text: str) -> Figure:
    figure, axes = _panel(7.0, 1.4 + 0.22 * len(table["layers"]))
    cells = np.array([_known(values) for values in table["layers"].values()], dtype=float)
    low = float(np.nanquantile(cells, 0.01))
    drawn = axes.pcolormesh(np.ma.masked_invalid(cells), cmap="viridis", vmin=low)
    axes.set_yticks(np.arange(len(cells)) + 0.5, list(table["layers"]), fontsize="small")
    steps = table["steps"]
    some = range(0, len(steps), -(-len(steps) // 8))
    axes.set_xticks([i + 0.5 for i in some], [f"{steps[i]:,}" for i in some])
    axes.set_xlabel("step")
    axes.invert_yaxis()
    figure.colorbar(drawn, label="divergence of groups" if text == "agreement" else text)
    return figure


def _known(values: list[Any]) -> list[float]:
    return [np.nan if value is None else value for value in values]
