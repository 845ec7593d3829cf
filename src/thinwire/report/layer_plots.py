"""Plots of a model's layers: ranks and stability of their bases over the steps, and singular values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.base.errors import DamagedError
from thinwire.base.files import refuse_link
from thinwire.report.plots import blank, dress, shades, two_panels
from thinwire.report.records import read_records
from thinwire.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_RANKS_FILE = "ranks.png"
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
    path = run.folder / _RANKS_FILE
    refuse_link(path)
    figure.savefig(path)
    return path


def _ranks(axes: Axes, found: list[dict[str, Any]], end: int) -> None:
    labels = list(dict.fromkeys(label for record in found for label in record["ranks"]))
    for colour, label in zip(shades(len(labels)), labels, strict=True):
        own = [(r["step"], r["ranks"][label]) for r in found if label in r["ranks"]]
        steps, ranks = [*(step for step, _ in own), end], [*(rank for _, rank in own), own[-1][1]]
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


_STABILITY_FILE = "stability.png"
_PANELS = (
    ("stability", "Stability of the bases", "viridis", "#31688e"),
    ("similarity", "Similarity of the mixing matrices", "magma", "#b63679"),
)
_MOST_LABELS = 32
_LONGEST_LABEL = 32
_MOST_COLUMNS = 100_000
_OUTLIERS = 0.01
"""Share of the lowest cells outside the colour range: one outlier would leave one colour for all others."""


def draw_stability(run: Run) -> Path | None:
    """Write the plot next to the run's records and return its path; None if the run did not measure its bases."""
    source, path = run.folder / "records.jsonl", run.folder / _STABILITY_FILE
    records = [r for r in read_records(source, "stability") if r["layers"]]
    if not records:
        return None
    steps = [r["step"] for r in records]
    every = min(np.diff(steps), default=1)
    if every < 1 or (steps[-1] - steps[0]) // every > _MOST_COLUMNS:
        raise DamagedError(f"`{source}` is damaged, its measurements of bases are not in order; restore the file")
    refuse_link(path)
    about = run.summary
    draw_looks(records, f"{about['recipe']}, {about['method']}, seed {about['seed']}", path)
    return path


def draw_looks(records: list[dict[str, Any]], title: str, path: Path) -> None:
    """Plot records as `thinwire.Stability` returns them."""
    labels = list(dict.fromkeys(label for r in records for label in r["layers"]))
    edges, columns = _columns([r["step"] for r in records])
    tall = min(6.5, max(2.0, 0.24 * len(labels)))
    figure = blank(12, tall + 2.4)
    # Twice a heat map and its colour bar; below each heat map its mean.
    grid = figure.add_gridspec(2, 4, height_ratios=(tall, 1.2), width_ratios=(30, 1, 30, 1))
    for place, panel in enumerate(_PANELS):
        cells = _cells(records, panel[0], labels, columns, len(edges) - 1)
        heat, bar, below = (figure.add_subplot(grid[at]) for at in ((0, 2 * place), (0, 2 * place + 1), (1, 2 * place)))
        _heat_map(figure, heat, bar, edges, cells, panel)
        _mean_line(below, edges, cells, panel[3])
        below.sharex(heat)
        _name_layers(heat, labels if place == 0 else [])
        below.set_ylabel("mean" if place == 0 else "")
    figure.suptitle(f"{title}: every layer against itself {_since(records)} before")
    figure.savefig(path)


def _since(records: list[dict[str, Any]]) -> str:
    apart = records[-1]["step"] - records[-1]["before"]
    return f"{apart} steps" if apart > 1 else "a step"


def _columns(steps: list[int]) -> tuple[np.ndarray, list[int]]:
    """Edges of one column per record, and the column of each; gaps of a resumed run stay empty."""
    every = min(np.diff(steps), default=steps[0])
    columns = [int(step - steps[0]) // int(every) for step in steps]
    return steps[0] + every * (np.arange(columns[-1] + 2) - 0.5), columns


def _cells(
    records: list[dict[str, Any]], measure: str, labels: list[str], columns: list[int], width: int
) -> np.ndarray:
    cells = np.full((len(labels), width), np.nan)
    row = {label: i for i, label in enumerate(labels)}
    for column, record in zip(columns, records, strict=True):
        for label, measures in record["layers"].items():
            cells[row[label], column] = measures[measure]
    return cells


def _heat_map(
    figure: Figure, axes: Axes, bar: Axes, edges: np.ndarray, cells: np.ndarray, panel: tuple[str, str, str, str]
) -> None:
    known = cells[np.isfinite(cells)]
    low = float(np.quantile(known, _OUTLIERS)) if known.size else 0.0
    rows, shown = np.arange(len(cells) + 1) - 0.5, np.ma.masked_invalid(cells)
    drawn = axes.pcolormesh(edges, rows, shown, cmap=panel[2], vmin=min(low, 0.999), vmax=1)
    axes.set_facecolor("#e8e8e8")
    if len(cells) <= _MOST_LABELS:
        axes.hlines(rows[1:-1], edges[0], edges[-1], color="white", linewidth=0.8)
    axes.set_title(panel[1], fontsize="medium")
    axes.invert_yaxis()  # first layer at the top
    axes.tick_params(axis="x", labelbottom=False, length=0)
    axes.spines[:].set_visible(False)
    figure.colorbar(drawn, cax=bar, extend="min" if known.size and known.min() < low else "neither")
    bar.tick_params(labelsize="small")
    bar.locator_params(axis="y", nbins=6)
    bar.ticklabel_format(axis="y", useOffset=False)


def _mean_line(axes: Axes, edges: np.ndarray, cells: np.ndarray, colour: str) -> None:
    known = np.isfinite(cells)
    mean = np.full(cells.shape[1], np.nan)
    some = known.any(axis=0)
    mean[some] = np.nanmean(np.where(known, cells, np.nan)[:, some], axis=0)
    centres = (edges[:-1] + edges[1:]) / 2
    axes.plot(centres, mean, color=colour, linewidth=1.8, marker="o" if len(mean) <= 30 else None, markersize=3)
    axes.set_xlabel("steps")
    axes.locator_params(axis="y", nbins=4)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.locator_params(axis="x", nbins=8, integer=True)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _name_layers(axes: Axes, labels: list[str]) -> None:
    """Label every layer, or evenly spaced ones where labels would overlap."""
    apart = -(-len(labels) // _MOST_LABELS)
    shown = range(0, len(labels), apart or 1)
    axes.set_yticks(list(shown), [_short(labels[i]) for i in shown], fontsize="small")
    axes.tick_params(axis="y", length=0)


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST_LABEL else "…" + label[1 - _LONGEST_LABEL :]


_MOST_SPECTRA = 12
"""Most layers with a legend."""


def draw_spectra(
    path: Path,
    spectra: Mapping[str, Sequence[float]],
    ranks: Mapping[str, int],
    sizes: Sequence[tuple[float, int]],
    parameters: int,
    cutoff: float | None,
) -> None:
    """Write a PNG; `sizes` are pairs of cutoff and parameters, `parameters` those of the truncated model."""
    figure, (of_layers, of_model) = two_panels()
    _spectra(of_layers, spectra, ranks)
    unit, name = (1e6, "millions") if sizes[0][1] >= 1e6 else (1e3, "thousands")
    of_model.step([size / unit for _, size in sizes], [at for at, _ in sizes], color="#4c72b0", linewidth=2)
    of_model.axvline(parameters / unit, color="#c44e52", linewidth=1, label=f"chosen: {parameters:,} parameters")
    for axes in (of_layers, of_model):
        if cutoff is not None:
            axes.axhline(cutoff, color="#c44e52", linewidth=1, linestyle="--")
        axes.set_xlim(left=0)
    dress(of_layers, "index / full rank", "singular value / largest", legend=False)
    dress(of_model, f"parameters of the whole model ({name})", "")
    figure.suptitle("Singular values from the first layer (dark) to the last, with chosen ranks; size at every cutoff")
    figure.savefig(path)


def _spectra(axes: Axes, spectra: Mapping[str, Sequence[float]], ranks: Mapping[str, int]) -> None:
    for colour, (label, sigma) in zip(shades(len(spectra)), spectra.items(), strict=True):
        places = [(place + 1) / len(sigma) for place in range(len(sigma))]
        shares = [value / (sigma[0] or 1.0) for value in sigma]
        rank = ranks.get(label)
        text = f"{label}: {rank or 'all'} of {len(sigma)}"
        axes.plot(places, shares, color=colour, linewidth=1.2, label=text)
        if rank:
            axes.plot(places[rank - 1], shares[rank - 1], "o", color=colour, markersize=5)
    if 0 < len(spectra) <= _MOST_SPECTRA:
        axes.legend(frameon=False, fontsize="x-small", loc="upper right")
