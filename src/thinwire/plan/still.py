"""Tensors without values: their shapes are all that a rehearsal looks at, and torch takes its time to find them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_CHANGES = ("copy_", "add_", "sub_", "mul_", "div_", "lerp_", "zero_", "fill_", "addcmul_", "addcdiv_", "bernoulli_")
"""Changes in place that leave a tensor's shape; those of lists of tensors are called _foreach_NAME."""
_COPIES = ("clone", "empty_like", "zeros_like")
"""New tensors like one that is given."""
_SUMS = ("add", "sub", "mul", "div")
"""New tensors like the first one given, if the other is a number or has the same shape and type."""


class Still(TorchDispatchMode):
    """Changes values of tensors that have none: not at all, instead of checking shapes at length."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name.removeprefix("_foreach_") in _CHANGES:
            several = isinstance(args[0], list)
            if all(t.is_meta for t in (args[0] if several else args[:1])):
                return None if several else args[0]
        if args and isinstance(args[0], Tensor) and args[0].is_meta and _is_like(name, args, kwargs or {}):
            first = args[0]
            return torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device="meta")
        return func(*args, **(kwargs or {}))


def _is_like(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the result is a tensor like the first argument."""
    first = args[0]
    if name in _COPIES:
        return all(value is None or value is False for value in kwargs.values())
    if name not in _SUMS or "out" in kwargs or not first.is_floating_point():
        return False
    other = args[1]
    return isinstance(other, int | float) or (
        isinstance(other, Tensor) and other.shape == first.shape and other.dtype == first.dtype
    )
