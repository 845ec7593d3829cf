"""Which ranks decompositions will find: those of a finished run, typical ones, or the lowest and highest possible."""

import bisect
import itertools
import math
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.factor.convert import Layer
from thinwire.methods.agree import empty_factors
from thinwire.report.records import read_records, read_run

RankPredictor = Callable[[Layer, float], int | None]
"""The rank of a layer at a progress from 0 to 1; None where it stays full."""

# Progress, and the share of a layer's ranks that is left at a cutoff of 0.15: the median of AB's runs on digits,
# shakespeare and VGG16 with CIFAR-10. They lay between 0.16 and 0.95 after a fifth, 0.04 and 0.33 at the end.
_CURVE = ((0.0, 1.0), (0.2, 0.37), (0.3, 0.33), (0.5, 0.31), (1.0, 0.30))


def lowest(layer: Layer, progress: float) -> int | None:
    """Rank 1: nothing can send less."""
    return 1


def highest(layer: Layer, progress: float) -> int | None:
    """Every layer stays full: nothing can send more."""
    return None


def typical(layer: Layer, progress: float) -> int | None:
    """The share of a layer's ranks that survives a cutoff of 0.15 in the runs we measured."""
    m, n = layer.view.tall
    return max(1, round(_on_curve(progress) * min(m, n)))


class Recorded:
    """What a finished run found; exact where the plan has the same steps."""

    def __init__(self, folder: Path) -> None:
        summary = read_run(folder).summary
        self.recipe: str = summary["recipe"]
        self.steps = int(summary["steps"])
        found = [r for r in read_records(folder / "records.jsonl") if r["kind"] == "ranks"]
        if not found:
            raise ConfigError(
                f"`{folder}` holds no ranks: its method ({summary['method']}) factored nothing, or it is of an older "
                "version; give the folder of a finished run that did"
            )
        self.found: list[dict[str, int]] = [r["ranks"] for r in found]
        self.progress = [r["step"] / self.steps for r in found]
        self.labels = {label for ranks in self.found for label in ranks}

    def __call__(self, layer: Layer, progress: float) -> int | None:
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


def factors(layer: Layer, rank: int | None) -> tuple[Tensor, ...] | None:
    """Factors of that rank without values; None where they would not be smaller."""
    if rank is None or not layer.view.is_smaller(rank):
        return None
    return empty_factors(layer, rank)


def _on_curve(progress: float) -> float:
    for (left, low), (right, high) in itertools.pairwise(_CURVE):
        if progress <= right:
            return low + (high - low) * (progress - left) / (right - left)
    return _CURVE[-1][1]
