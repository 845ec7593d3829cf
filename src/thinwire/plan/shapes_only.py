"""Tensors without values: their shapes are all that a simulation looks at, and torch takes its time to find them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_CHANGES = ("copy_", "add_", "sub_", "mul_", "div_", "lerp_", "zero_", "fill_", "addcmul_", "addcdiv_", "bernoulli_")
"""Changes in place that leave a tensor's shape; those of lists of tensors are called _foreach_NAME."""
_DRAWS = ("uniform_", "normal_")
"""First values of new layers, which nothing looks at."""
_MOST = 1 << 16

_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""What is known of a tensor without values: its shape, strides and type."""
_results: dict[Any, _Form] = {}
"""The form of what an operation gives, by the forms of what it is given."""


class NoInitialValues(TorchDispatchMode):
    """Draws no random first values: tensors hold whatever was in their memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in _DRAWS:
            return args[0]
        return func(*args, **(kwargs or {}))


class ShapesOnly(TorchDispatchMode):
    """Finds the form of each result once, and changes values of tensors that have none: not at all."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and newer versions of torch would guard every operation against it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _kinds[func] if func in _kinds else _kind_of(func)
        if kind == "change":
            several = isinstance(args[0], list)
            if all(t.is_meta for t in (args[0] if several else args[:1])):
                return None if several else args[0]
        elif kind == "draw":
            return args[0]
        elif kind == "make":
            return _made(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _made(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A tensor like the one that this operation gave for arguments of the same forms."""
    forms = _form(args)
    key = None if forms is None else (func, forms, tuple(kwargs.items()))
    known = _results.get(key)
    if known is not None:
        return torch.empty_strided(known[0], known[1], dtype=known[2], device="meta")
    result = func(*args, **kwargs)
    if key is not None and isinstance(result, Tensor) and result.is_meta and len(_results) < _MOST:
        _results[key] = result.shape, result.stride(), result.dtype
    return result


_kinds: dict[Any, str] = {}


def _kind_of(func: Any) -> str:
    """Whether an operation changes tensors and leaves their shapes, makes one new tensor, or does something else."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    if name.removeprefix("_foreach_") in _CHANGES:
        kind = "change"
    elif name in _DRAWS:
        kind = "draw"
    else:
        single = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
        makes = single and not schema.is_mutable and schema.returns[0].alias_info is None
        kind = "make" if makes else "other"
    _kinds[func] = kind
    return kind


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
