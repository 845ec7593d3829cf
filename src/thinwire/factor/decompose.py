"""Singular values and vectors, fast; the rank they leave; signs that every worker agrees on.

The eigenvectors V of the small Gram matrix WᵀW cost a fraction of an SVD. In fp64 they are exact
enough for fp32 weights: W V Vᵀ = W whatever the singular values' own error, and singular values are
right to about 1e-8 of the largest. `svd` is the plain way: the fallback, and the tests' oracle.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Orthogonality of the scaled left vectors that a Gram decomposition must reach to be used.
RESIDUAL = 1e-4


class Factors(NamedTuple):
    """W ≈ A B with A = U√Σ (m, k), B = √ΣVᵀ (k, n), and every singular value of W, largest first."""

    a: Tensor
    b: Tensor
    sigma: Tensor


def decompose(matrix: Tensor, cutoff: float, *, rank: int | None = None) -> Factors:
    """Factors of a tall matrix, cut where singular values fall to `cutoff` of the largest, or at `rank`."""
    factors = _by_gram(matrix, cutoff, rank)
    return factors if factors is not None else svd(matrix, cutoff, rank=rank)


def rank_of(sigma: Tensor, cutoff: float) -> int:
    """How many singular values exceed `cutoff` of the largest; at least 1."""
    return max(1, int((sigma > cutoff * sigma[0]).sum()))


def svd(matrix: Tensor, cutoff: float, *, rank: int | None = None) -> Factors:
    """The same by `torch.linalg.svd` in fp64."""
    u, sigma, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    k = rank or rank_of(sigma, cutoff)
    signs = _signs(vt[:k].t())
    root = sigma[:k].sqrt()
    a = u[:, :k] * (root * signs)  # (m, k)
    b = vt[:k] * (root * signs)[:, None]  # (k, n)
    return _as_dtype(a, b, sigma, matrix)


def _by_gram(matrix: Tensor, cutoff: float, rank: int | None) -> Factors | None:
    exact = matrix.double()
    try:
        squares, vectors = torch.linalg.eigh(exact.t() @ exact)  # (n, n), ascending
    except torch.linalg.LinAlgError:
        return None
    sigma = squares.flip(0).clamp_min(0).sqrt()
    if not (torch.isfinite(sigma).all() and sigma[0] > 0):
        return None
    k = rank or rank_of(sigma, cutoff)
    v = vectors.flip(1)[:, :k]  # (n, k)
    v = v * _signs(v)
    # Directions below the Gram matrix's own precision are kept at its floor, so that nothing is divided by zero.
    root = sigma[:k].clamp_min(1e-9 * sigma[0]).sqrt()
    # Only the Gram matrix squares the condition number; the product with V is as exact as the weight itself.
    working = matrix if matrix.dtype in (torch.float32, torch.float64) else matrix.float()
    a = (working @ v.to(working.dtype)) / root.to(working.dtype)  # (m, n) @ (n, k)
    if not _is_orthogonal(a, root, sigma):
        return None
    return _as_dtype(a, (v * root).t(), sigma, matrix)


def _is_orthogonal(a: Tensor, root: Tensor, sigma: Tensor) -> bool:
    """AᵀA = Σ to RESIDUAL of the largest singular value."""
    gram = a.t() @ a  # (k, k)
    gram.diagonal().sub_(root.square())
    return bool(gram.abs().max() <= RESIDUAL * sigma[0])


def _signs(v: Tensor) -> Tensor:
    """±1 a column, so that each column's largest element becomes positive."""
    largest = v.gather(0, v.abs().argmax(dim=0, keepdim=True))[0]
    return torch.where(largest < 0, -1.0, 1.0).to(v.dtype)


def _as_dtype(a: Tensor, b: Tensor, sigma: Tensor, like: Tensor) -> Factors:
    return Factors(a.to(like.dtype).contiguous(), b.to(like.dtype).contiguous(), sigma)
