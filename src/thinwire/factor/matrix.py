"""View any weight as a tall 2-D matrix, and convert back.

A weight of shape (d0, d1, …) is the (d0, d1·…) matrix; a matrix wider than tall is transposed first.
So the factors of `W = A B` are A (m, k) and B (k, n) with m ≥ n.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MatrixView:
    """How one weight is viewed as a tall matrix."""

    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of the flattened weight, before any transposition."""
        return self.shape[0]

    @property
    def columns(self) -> int:
        """Columns of the flattened weight, before any transposition."""
        return math.prod(self.shape[1:])

    @property
    def transposed(self) -> bool:
        return self.rows < self.columns

    @property
    def tall(self) -> tuple[int, int]:
        """(m, n) with m ≥ n."""
        return max(self.rows, self.columns), min(self.rows, self.columns)

    def to_matrix(self, weight: Tensor) -> Tensor:
        """(d0, d1, …) -> (m, n)"""
        flat = weight.reshape(self.rows, self.columns)
        return flat.t() if self.transposed else flat

    def to_weight(self, matrix: Tensor) -> Tensor:
        """(m, n) -> (d0, d1, …)"""
        flat = matrix.t() if self.transposed else matrix
        return flat.reshape(self.shape)

    def sides(self, *factors: Tensor) -> tuple[Tensor, ...]:
        """Factors of the flattened weight as the layer uses it: from (rows, k) to (k, columns)."""
        return tuple(f.t() for f in reversed(factors)) if self.transposed else factors

    def rebuild(self, *factors: Tensor) -> Tensor:
        """The weight from its factors."""
        return self.to_weight(product(factors))

    def is_smaller(self, rank: int) -> bool:
        """Whether factors of this rank have fewer elements than the weight."""
        m, n = self.tall
        return rank * (m + n) < m * n


def product(factors: Sequence[Tensor]) -> Tensor:
    """(m, k) @ … @ (k, n), from the right, where the matrices are smaller."""
    found = factors[-1]
    for factor in reversed(factors[:-1]):
        found = factor @ found
    return found


def wide(t: Tensor) -> Tensor:
    """In fp32 at least: half precision is not accurate enough for linear algebra."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def view_of(weight: Tensor | torch.Size) -> MatrixView:
    """The view of a weight, or of a shape, of two dimensions or more."""
    shape = weight.shape if isinstance(weight, Tensor) else weight
    return MatrixView(tuple(shape))
