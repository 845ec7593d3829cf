"""Which ranks decompositions will find: those of a finished run, typical ones, or the lowest and highest possible."""

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from thinwire.base.errors import ConfigError
from thinwire.factor.convert import Layer
from thinwire.report.records import read_records
from thinwire.report.runs import read_run
from thinwire.shape.agree import empty_factors

RankPredictor = Callable[[Layer, float, float | None], int | None]
"""The rank of a layer at a progress from 0 to 1 and a cutoff; None where it stays full."""

Curve = Sequence[tuple[float, float]]

# Progress, and the share of a layer's ranks that is left: medians of runs on digits, shakespeare and VGG16 with
# CIFAR-10. At 0.15, of the published cycle, they lay between 0.16 and 0.95 after a fifth, 0.04 and 0.33 at the end. At
# 0.2, of AB, they lay between 0.15 and 0.20 from three quarters on; before, the curve falls as at 0.15.
_CURVES: dict[float, Curve] = {
    0.15: ((0.0, 1.0), (0.2, 0.37), (0.3, 0.33), (0.5, 0.31), (1.0, 0.30)),
    0.2: ((0.0, 1.0), (0.2, 0.25), (0.3, 0.22), (0.5, 0.21), (1.0, 0.20)),
}


def lowest(layer: Layer, progress: float, cutoff: float | None) -> int | None:
    """Rank 1: nothing can send less."""
    return 1


def highest(layer: Layer, progress: float, cutoff: float | None) -> int | None:
    """Every layer stays full: nothing can send more."""
    return None


def typical(layer: Layer, progress: float, cutoff: float | None) -> int | None:
    """The share of a layer's ranks that survives a cutoff in the runs we measured.

    Between their cutoffs, and from there to 0, which cuts nothing, and 1, which cuts everything, it is interpolated.
    """
    over_cutoffs = [(0.0, 1.0), *((at, _on_curve(curve, progress)) for at, curve in _CURVES.items()), (1.0, 0.0)]
    return _rank(layer, _on_curve(over_cutoffs, cutoff or 0.0))


def uniform(layers: Sequence[Layer], parameters: int, target: float) -> list[int]:
    """Ranks that make a model of so many `parameters` so many times smaller: the same share of each layer's.

    0 stands for a layer that stays full.
    """

    def size(share: float) -> int:
        saved = 0
        for layer in layers:
            m, n = layer.view.tall
            saved += max(0, m * n - _rank(layer, share) * (m + n))
        return parameters - saved

    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if size(middle) <= parameters / target else (low, middle)
    ranks = [_rank(layer, low) for layer in layers]
    return [rank if layer.view.is_smaller(rank) else 0 for layer, rank in zip(layers, ranks, strict=True)]


class Recorded:
    """What a finished run found; exact where the plan has the same steps."""

    def __init__(self, folder: Path) -> None:
        summary = read_run(folder).summary
        self.recipe: str = summary["recipe"]
        self.steps = max(1, summary["steps"])
        found = read_records(folder / "records.jsonl", "ranks")
        if not found:
            raise ConfigError(
                f"`{folder}` holds no ranks: its method ({summary['method']}) factored nothing, or it is of an older "
                "version; give the folder of a finished run that did"
            )
        self.found: list[dict[str, int]] = [r["ranks"] for r in found]
        self.progress = [r["step"] / self.steps for r in found]
        self.labels = {label for ranks in self.found for label in ranks}

    def __call__(self, layer: Layer, progress: float, cutoff: float | None) -> int | None:
        """The rank at the decomposition nearest in progress."""
        after = bisect.bisect_left(self.progress, progress)
        places = (i for i in (after - 1, after) if 0 <= i < len(self.progress))
        near = min(places, key=lambda i: abs(self.progress[i] - progress))
        return self.found[near].get(layer.label)


def basis(layer: Layer, rank: int | None, max_shrink: float) -> tuple[Tensor, ...]:
    """U, S and Vᵀ without values: of that rank, or as near as one update may get; of the present rank if None."""
    now = layer.rank or min(layer.view.tall)
    least = math.ceil((1 - max_shrink) * now)
    return empty_factors(layer, now if rank is None else min(now, max(1, least, rank)), 3)


def most(layer: Layer) -> int:
    """The highest rank at which factors are smaller than the weight, and not above the present one."""
    m, n = layer.view.tall
    return min((m * n - 1) // (m + n), layer.rank or n)


def factors(layer: Layer, rank: int | None) -> tuple[Tensor, ...] | None:
    """Factors of that rank without values; None where they would not be smaller."""
    if not rank or not layer.view.is_smaller(rank):
        return None
    return empty_factors(layer, rank)


def _rank(layer: Layer, share: float) -> int:
    return max(1, round(share * min(layer.view.tall)))


def _on_curve(curve: Curve, at: float) -> float:
    for (left, low), (right, high) in itertools.pairwise(curve):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    return curve[-1][1]
