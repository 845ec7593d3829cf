"""Weights as tall matrices, and fast truncated decompositions of these.

A weight of shape (d0, d1, …) is the (d0, d1·…) matrix; a matrix wider than tall is transposed first.
So the factors of `W = A B` are A (m, k) and B (k, n) with m ≥ n.

Decompositions have deterministic signs, so that all workers agree. The eigenvectors V of the small Gram matrix WᵀW cost
a fraction of an SVD. In fp64 they are accurate enough for fp32 weights: W V Vᵀ = W whatever the error of the singular
values, which are accurate to about 1e-8 of the largest. `svd` is the simple version: the fallback, and the tests'
oracle.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Largest deviation from orthogonality at which a Gram decomposition is accepted.
RESIDUAL = 1e-4
_PROBES = 8
_ROWS = 2048
_COLUMNS = 192


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


class Factors(NamedTuple):
    """W ≈ A B with A = U√Σ (m, k), B = √ΣVᵀ (k, n), and every singular value of W, largest first."""

    a: Tensor
    b: Tensor
    sigma: Tensor


class Basis(NamedTuple):
    """W ≈ U S Vᵀ with orthonormal columns in U (m, k) and V (n, k), in fp64, and every singular value of W.

    S (k, k) is upper-triangular, diagonal up to the precision of the Gram matrix. It is trained as a full matrix, so
    it need not be exactly diagonal; U and V are orthonormal even for tiny singular values.
    """

    u: Tensor
    s: Tensor
    vt: Tensor
    sigma: Tensor


def find_basis(matrix: Tensor, cutoff: float, *, least: int = 1) -> Basis:
    """Bases of a tall matrix, truncated at singular values of `cutoff` × the largest; at least `least` are kept.

    A cutoff of 0 keeps all, zeros too: dropped directions can never be trained again.
    """
    exact = matrix.double()
    found = _eigen(exact)
    if found is None:  # a matrix of zeros, or one that eigh does not converge for
        u, sigma, vt = torch.linalg.svd(exact, full_matrices=False)
        vectors = vt.t()
    else:
        sigma, vectors = found
    v = vectors[:, : max(least, rank_of(sigma, cutoff)) if cutoff else len(sigma)]
    v = v * _signs(v)
    u, s = torch.linalg.qr(exact @ v)  # (m, k), (k, k): W V = U S, so W V Vᵀ = U S Vᵀ
    flip = torch.where(s.diagonal() < 0, -1.0, 1.0).to(s)
    return Basis(u * flip, s * flip[:, None], v.t(), sigma)


def decompose(matrix: Tensor, cutoff: float, *, rank: int | None = None) -> Factors:
    """Factors of a tall matrix, truncated at singular values of `cutoff` × the largest, or at `rank`."""
    found = _eigen(matrix)
    if found is None:
        return svd(matrix, cutoff, rank=rank)
    sigma, vectors = found
    return _factors(matrix, sigma, vectors[:, : rank or rank_of(sigma, cutoff)]) or svd(matrix, cutoff, rank=rank)


def decompose_if_smaller(matrix: Tensor, cutoff: float) -> Factors | None:
    """The same, or None if the factors would not be smaller than the matrix."""
    found = _eigen(matrix)
    if found is None:
        factors = svd(matrix, cutoff)
        return factors if view_of(matrix).is_smaller(factors.a.shape[1]) else None
    sigma, vectors = found
    rank = rank_of(sigma, cutoff)
    if not view_of(matrix).is_smaller(rank):
        return None
    return _factors(matrix, sigma, vectors[:, :rank]) or svd(matrix, cutoff, rank=rank)


def smallest_cutoff(matrix: Tensor) -> float:
    """The smallest cutoff at which the factors of a tall matrix are smaller than it."""
    m, n = matrix.shape
    sigma = torch.linalg.svdvals(matrix.double())
    largest_rank = max(1, (m * n - 1) // (m + n))
    return float(sigma[largest_rank] / sigma[0]) if largest_rank < n and sigma[0] > 0 else 0.0


def rank_of(sigma: Tensor, cutoff: float) -> int:
    """How many singular values exceed `cutoff` × the largest; at least 1."""
    return max(1, int((sigma > cutoff * sigma[0]).sum()))


def svd(matrix: Tensor, cutoff: float, *, rank: int | None = None) -> Factors:
    """`decompose` by `torch.linalg.svd` in fp64."""
    u, sigma, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    k = rank or rank_of(sigma, cutoff)
    signs = _signs(vt[:k].t())
    root = sigma[:k].sqrt()
    a = u[:, :k] * (root * signs)  # (m, k)
    b = vt[:k] * (root * signs)[:, None]  # (k, n)
    return _as_dtype(a, b, sigma, matrix)


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """Singular values and right vectors (n, n) in fp64, largest first; None if eigh fails."""
    try:
        squares, vectors = torch.linalg.eigh(_gram(matrix))  # ascending, from the lower triangle
    except torch.linalg.LinAlgError:
        return None
    sigma = squares.flip(0).clamp_min(0).sqrt()
    if not (torch.isfinite(sigma).all() and sigma[0] > 0):
        return None
    return sigma, vectors.flip(1)


def _gram(matrix: Tensor) -> Tensor:
    """The lower triangle of WᵀW in fp64.

    In chunks of rows, to avoid a copy of the whole weight in fp64, and in blocks of columns, because the upper triangle
    is not used.
    """
    n = matrix.shape[1]
    gram = matrix.new_zeros(n, n, dtype=torch.float64)
    for piece in matrix.split(_ROWS):
        exact = piece.double()
        for start in range(0, n, _COLUMNS):
            block = slice(start, start + _COLUMNS)
            gram[start:, block].addmm_(exact[:, start:].t(), exact[:, block])
    return gram


def _factors(matrix: Tensor, sigma: Tensor, v: Tensor) -> Factors | None:
    """Factors from right vectors (n, k); None if the resulting left vectors are not orthogonal."""
    v = v * _signs(v)
    # Clamp directions below the precision of the Gram matrix, to avoid division by zero.
    root = sigma[: v.shape[1]].clamp_min(1e-9 * sigma[0]).sqrt()
    # Only the Gram matrix squares the condition number; the product with V is as accurate as the weight.
    working = matrix if matrix.dtype in (torch.float32, torch.float64) else matrix.float()
    a = (working @ v.to(working.dtype)) / root.to(working.dtype)  # (m, n) @ (n, k)
    return _as_dtype(a, (v * root).t(), sigma, matrix) if _is_orthogonal(a, root, sigma) else None


def _is_orthogonal(a: Tensor, root: Tensor, sigma: Tensor) -> bool:
    """Check AᵀA = Σ on a few random sign vectors, which is cheaper than the whole product."""
    fixed = torch.Generator().manual_seed(0)
    probes = torch.randint(0, 2, (a.shape[1], _PROBES), generator=fixed).mul_(2).sub_(1).to(a)  # (k, probes)
    off = a.t() @ (a @ probes) - root.square().to(a.dtype)[:, None] * probes
    return bool(off.abs().max() <= RESIDUAL * sigma[0])


def _signs(v: Tensor) -> Tensor:
    """±1 per column, making each column's largest element positive."""
    largest = v.gather(0, v.abs().argmax(dim=0, keepdim=True))[0]
    return torch.where(largest < 0, -1.0, 1.0).to(v.dtype)


def _as_dtype(a: Tensor, b: Tensor, sigma: Tensor, like: Tensor) -> Factors:
    return Factors(a.to(like.dtype).contiguous(), b.to(like.dtype).contiguous(), sigma)
