"""Initial values: orthogonal ones, and models whose values do not depend on how they are constructed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor, nn

from thinwire.base.errors import ThinwireError

M = TypeVar("M", bound=nn.Module)
_LINEAR = (nn.Linear, nn.modules.conv._ConvNd)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_STD = 0.02
_SMALL = 2**16
"""Weights up to this many elements are not worth copying to a GPU."""
_LARGE = 2**23
"""Weights from this many elements on take seconds to decompose by QR on one core; VGG16 has two."""
_TALL = 4
"""Ratio of rows to columns: a random matrix of such a shape has a condition number below 3."""
_BLOCK = 512
"""Columns at a time: large enough for fast products, small enough to skip most of the zeros."""
_ROUGH: ContextVar[bool] = ContextVar("rough", default=False)


def build(make: Callable[[], M], *, orthogonal: bool = False) -> M:
    """What `make` builds, with its own initial values or orthogonal ones.

    Takes one number from torch's global random state and seeds everything else with it. So neither orthogonal values
    nor later random numbers depend on how much the construction draws, and a library's model starts like ours.
    """
    seed = int(torch.randint(2**62, (), device="cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = make()
        if orthogonal:
            torch.default_generator.manual_seed(seed)
            orthogonal_values(model)
    return model


def without_values(make: Callable[[], M]) -> M:
    """What `make` builds, on the meta device if that is possible, else with values.

    Leaves the random state as it is.
    """
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return make()
        except ThinwireError:
            raise
        except Exception:  # a model may do anything while it is built, even read values
            return make()


@contextmanager
def rough_values() -> Iterator[None]:
    """In this block large orthogonal weights are only nearly orthogonal: as drawn, at the same scale. Not for a run."""
    token = _ROUGH.set(True)
    try:
        yield
    finally:
        _ROUGH.reset(token)


@torch.no_grad()
def orthogonal_values(model: M) -> M:
    """Give every Linear and convolution an orthogonal weight, and return the model.

    All singular values are 1 once the dimensions after the first are flattened. Biases are zero, norms one and zero.
    Embeddings, a head tied to one, and parameters of other modules (positions, a class token) are normal with standard
    deviation 0.02; vectors among the latter stay as they are. Values are drawn on the CPU, in the order of names, so
    they are the same for any model with these names, and on any device up to rounding.
    """
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for _, module in sorted(model.named_modules(), key=lambda item: item[0]):
        if isinstance(module, _NORMS):
            module.reset_parameters()
        elif isinstance(module, _LINEAR):
            if id(module.weight) not in embedded:
                module.weight.copy_(_orthogonal(module.weight))
            if module.bias is not None:
                module.bias.zero_()
        else:
            for _, parameter in sorted(module.named_parameters(recurse=False), key=lambda item: item[0]):
                if parameter.dim() > 1:
                    parameter.copy_(nn.init.normal_(_empty(parameter), std=_STD))
    return model


def _orthogonal(like: Tensor) -> Tensor:
    """As `nn.init.orthogonal_`, drawn on the CPU; a GPU decomposes large ones, where there is one."""
    if like.is_meta:
        return like
    drawn = _empty(like).flatten(1).normal_()
    wide = drawn.shape[0] < drawn.shape[1]
    tall = drawn.t() if wide else drawn
    if tall.numel() > _SMALL and torch.cuda.is_available():
        q = by_qr(tall.cuda())
    elif tall.numel() < _LARGE:
        q = by_qr(tall)
    elif _ROUGH.get():
        q = tall / tall.shape[0] ** 0.5
    else:
        q = by_cholesky(tall) if tall.shape[0] >= _TALL * tall.shape[1] else by_qr(tall)
    return (q.t() if wide else q).reshape(like.shape)


def by_qr(tall: Tensor) -> Tensor:
    """The orthogonal factor of a (m, n) matrix, m >= n, whose triangular one has a positive diagonal."""
    q, r = torch.linalg.qr(tall)
    return q * r.diagonal().sign()  # else it would not be uniform over all orthogonal matrices


def by_cholesky(tall: Tensor) -> Tensor:
    """The same factor up to rounding, in a third of the time, for well-conditioned matrices: AᵀA = LLᵀ, Q = AL⁻ᵀ."""
    rows = tall.t().contiguous()  # (n, m)
    n = rows.shape[0]
    gram = rows.new_zeros(n, n)
    for i in range(0, n, _BLOCK):
        gram[i : i + _BLOCK, : i + _BLOCK] = rows[i : i + _BLOCK] @ rows[: i + _BLOCK].t()
    factor = torch.linalg.cholesky(gram)  # reads the lower triangle only
    for i in range(0, n, _BLOCK):
        block = rows[i : i + _BLOCK]
        block -= factor[i : i + _BLOCK, :i] @ rows[:i]
        corner = factor[i : i + _BLOCK, i : i + _BLOCK]
        rows[i : i + _BLOCK] = torch.linalg.solve_triangular(corner, block, upper=False)
    return rows.t()


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=torch.float32, device="meta" if like.is_meta else "cpu")
