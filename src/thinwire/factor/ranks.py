"""Choose ranks for a model's layers: by a cutoff, by a rank, or by the size of the model."""

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.base.checks import check_cutoff, is_number
from thinwire.base.errors import ConfigError
from thinwire.factor import matrix
from thinwire.factor.convert import Layer
from thinwire.factor.matrix import Factors, decompose, rank_of

_POINTS = 101
"""Number of cutoffs from 0 to 1 at which the model's size is computed."""
_FINE = 1e-9
"""Precision of the cutoff for a target size; that of the singular values."""


@dataclass(frozen=True)
class Part:
    """One layer and its decomposition, up to the rank at which factors are smaller than the weight."""

    layer: Layer
    factors: Factors
    own: int | None
    """Its rank, if it was low-rank before."""
    present: int
    """Elements that the weight consists of now."""

    @classmethod
    def of(cls, layer: Layer, own: int | None = None, present: int | None = None) -> "Part":
        """Decompose a layer; `own` and `present` are its rank and size if it was low-rank before."""
        weight = layer.matrix()
        if not torch.isfinite(weight).all():
            raise ConfigError(f"`{layer.key}` has non-finite values, and so no singular values; fix them first")
        m, n = layer.view.tall
        factors = decompose(weight, 0.0, rank=min((m * n - 1) // (m + n), own or n))
        factors.sigma[own or n :] = 0  # only rounding errors
        return cls(layer, factors, own, m * n if present is None else present)

    @property
    def full_rank(self) -> int:
        return self.own or self.layer.view.tall[1]

    def size(self, rank: int) -> int:
        """Elements at a rank; a layer whose factors would not be smaller stays full."""
        m, n = self.layer.view.tall
        return rank * (m + n) if self.layer.view.is_smaller(rank) else m * n


@dataclass(frozen=True)
class Whole:
    """The layers of a model that can be truncated, and the model's size."""

    parameters: int
    parts: Sequence[Part]
    saved: int = 0
    """Parameters saved in other layers: a third factor, or factors larger than the weight."""

    def size(self, ranks: Sequence[int]) -> int:
        """The model's size at these ranks."""
        cut = sum(part.size(rank) for part, rank in zip(self.parts, ranks, strict=True))
        return self.parameters - self.saved - sum(part.present for part in self.parts) + cut

    def ranks_at(self, cutoff: float) -> list[int]:
        """The ranks at a cutoff."""
        return [rank_of(part.factors.sigma, cutoff) for part in self.parts]

    def size_at(self, cutoff: float) -> int:
        """The model's size at this cutoff."""
        return self.size(self.ranks_at(cutoff))

    def sizes(self) -> tuple[tuple[float, int], ...]:
        """The model's size over all cutoffs."""
        cutoffs = [i / (_POINTS - 1) for i in range(_POINTS)]
        return tuple((cutoff, self.size_at(cutoff)) for cutoff in cutoffs)


Chosen = tuple[list[int], float | None]
"""A rank per part, and the cutoff if there is one."""


def chooser(cutoff: Any, rank: Any, target: Any) -> Callable[[Whole], Chosen]:
    """Choose ranks by whichever argument is given; validated here, before anything is decomposed."""
    given = [name for name, value in (("cutoff", cutoff), ("rank", rank), ("target", target)) if value is not None]
    if len(given) != 1:
        message = f"{' and '.join(given)} are given" if given else "none is given"
        raise ConfigError(f"give one of `cutoff`, `rank` and `target`: {message}; try cutoff=0.15")
    if cutoff is not None:
        check_cutoff(cutoff, zero_allowed=True)
        return lambda whole: (whole.ranks_at(cutoff), cutoff)
    if rank is not None:
        _check_rank(rank)
        return lambda whole: ([_limited(part, rank) for part in whole.parts], None)
    if not (is_number(target) and target > 1):
        raise ConfigError(f"`target`={target!r} must be above 1: how many times fewer parameters, try 2")
    return lambda whole: _within(whole, target)


def _check_rank(rank: Any) -> None:
    whole = isinstance(rank, numbers.Integral) and not isinstance(rank, bool) and int(rank) >= 1
    if not (whole or (is_number(rank) and 0 < rank < 1)):
        raise ConfigError(
            f"`rank`={rank!r} must be a whole number from 1 on, or a share of each layer's full rank between 0 and 1"
        )


def _limited(part: Part, rank: float) -> int:
    most = rank if rank >= 1 else max(1, round(rank * part.layer.view.tall[1]))
    return min(int(most), part.full_rank)


def _within(whole: Whole, target: float) -> Chosen:
    """The smallest cutoff, which loses least, that leaves at most 1/target of the model."""
    wanted, least = whole.parameters / target, whole.size_at(1.0)
    if least > wanted:
        best = math.floor(100 * whole.parameters / least) / 100
        raise ConfigError(
            f"`target`={target!r} cannot be reached: with rank 1 in every layer that can be truncated the model is "
            f"{best:g} times smaller; use at most that, or keep fewer layers full"
        )
    low, high = 0.0, 1.0
    while high - low > _FINE:
        middle = (low + high) / 2
        low, high = (low, middle) if whole.size_at(middle) <= wanted else (middle, high)
    return whole.ranks_at(high), high


def smallest_size(parameters: int, layers: Sequence[Layer]) -> int:
    """Elements of a model of this size with rank 1 in each of these layers."""
    tall = [layer.view.tall for layer in layers]
    return parameters - sum(m * n - (m + n) for m, n in tall)


def ranks_within(
    found: Sequence[tuple[Layer, torch.Tensor, torch.Tensor]], parameters: int, target: float
) -> list[int]:
    """The ranks at one cutoff for all layers that leave a model at most 1/target of its `parameters`.

    Layers come with their factors A = U√Σ and B at the highest rank that is allowed; 0 stands for a layer that stays
    full.
    """
    parts = []
    for layer, a, b in found:
        m, n = layer.view.tall
        parts.append(Part(layer, Factors(a, b, a.double().square().sum(0)), None, m * n))
    ranks, _ = _within(Whole(parameters, parts), target)
    return [rank if part.layer.view.is_smaller(rank) else 0 for part, rank in zip(parts, ranks, strict=True)]


# One layer, in training.


def find_basis(layer: Layer, cutoff: float, max_shrink: float) -> tuple[Tensor, ...]:
    """U, S and Vᵀ of a layer: of its weight, or of its S alone, folded into its bases, where it has them already.

    An update may drop `max_shrink` of the layer's ranks at most.
    """
    if not layer.is_factored:
        u, s, vt, _ = matrix.find_basis(layer.matrix(), cutoff)
    else:
        old_u, old_s, old_vt = (p.detach().double() for p in layer.factors)
        least = math.ceil((1 - max_shrink) * len(old_s))
        u, s, vt, _ = matrix.find_basis(old_s, cutoff, least=max(1, least))
        u, vt = old_u @ u, vt @ old_vt
    dtype = layer.parameters[0].dtype
    return tuple(t.to(dtype).contiguous() for t in (u, s, vt))


def find_factors(layer: Layer, cutoff: float | None) -> tuple[Tensor, ...] | None:
    """Factors of a layer at a cutoff, or at the highest rank at which they are smaller; None where there are none."""
    if cutoff is None:
        m, n = layer.view.tall
        rank = min((m * n - 1) // (m + n), layer.rank or n)
        return matrix.decompose(layer.matrix(), 0.0, rank=rank)[:2] if rank else None
    factors = matrix.decompose_if_smaller(layer.matrix(), cutoff)
    return (factors.a, factors.b) if factors is not None else None
