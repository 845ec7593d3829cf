"""Tensors without values: their shapes are all that a rehearsal looks at, and torch takes its time to find them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_CHANGES = ("copy_", "add_", "sub_", "mul_", "div_", "lerp_", "zero_", "fill_", "addcmul_", "addcdiv_", "bernoulli_")
"""Changes in place that leave a tensor's shape; those of lists of tensors are called _foreach_NAME."""
_MOST = 1 << 16

_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""What is known of a tensor without values: its shape, strides and type."""
_results: dict[Any, _Form] = {}
"""The form of what an operation gives, by the forms of what it is given."""


class Still(TorchDispatchMode):
    """Finds the form of each result once, and changes values of tensors that have none: not at all."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name.removeprefix("_foreach_") in _CHANGES:
            several = isinstance(args[0], list)
            if all(t.is_meta for t in (args[0] if several else args[:1])):
                return None if several else args[0]
        if not _makes_a_tensor(func):
            return func(*args, **kwargs)
        forms = _form(args)
        key = None if forms is None else (func, forms, tuple(kwargs.items()))
        if key in _results:
            shape, strides, dtype = _results[key]
            return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        result = func(*args, **kwargs)
        if key is not None and isinstance(result, Tensor) and result.is_meta and len(_results) < _MOST:
            _results[key] = result.shape, result.stride(), result.dtype
        return result


_kinds: dict[Any, bool] = {}


def _makes_a_tensor(func: Any) -> bool:
    """Whether an operation gives one new tensor and changes none."""
    if func not in _kinds:
        schema = func._schema
        single = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
        _kinds[func] = single and not schema.is_mutable and schema.returns[0].alias_info is None
    return _kinds[func]


def _form(given: Any) -> Any:
    """What the form of a result may depend on; None where that is a tensor with values, or something unknown."""
    if isinstance(given, Tensor):
        return (given.shape, given.stride(), given.dtype) if given.is_meta else None
    if isinstance(given, tuple | list):
        forms = tuple(_form(each) for each in given)
        return None if None in forms else forms
    if given is None:
        return "none"
    if isinstance(given, float):
        return "number"  # no shape depends on it
    return given if isinstance(given, int | str | torch.dtype | torch.device | torch.memory_format) else None
