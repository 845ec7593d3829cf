"""The plot of a compressed model: its layers' singular values, and its size over the cutoff."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.report.plots import dress, two_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_NAMED = 12
"""Most layers with a legend."""


def draw(
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
    from matplotlib import colormaps

    shades = colormaps["viridis"]
    for i, (label, sigma) in enumerate(spectra.items()):
        colour = shades(i / max(1, len(spectra) - 1))
        places = [(place + 1) / len(sigma) for place in range(len(sigma))]
        shares = [value / (sigma[0] or 1.0) for value in sigma]
        rank = ranks.get(label)
        text = f"{label}: {rank or 'all'} of {len(sigma)}"
        axes.plot(places, shares, color=colour, linewidth=1.2, label=text)
        if rank:
            axes.plot(places[rank - 1], shares[rank - 1], "o", color=colour, markersize=5)
    if 0 < len(spectra) <= _MOST_NAMED:
        axes.legend(frameon=False, fontsize="x-small", loc="upper right")
