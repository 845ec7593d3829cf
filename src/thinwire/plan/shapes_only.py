"""Dispatch modes for tensors without values: a simulation needs only shapes, and torch is slow to compute them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_CHANGES = ("copy_", "zero_", "fill_", "bernoulli_")
"""In-place operations that keep a tensor's shape, beside those of one element at a time and those of lists."""
_DRAWS = ("uniform_", "normal_")
"""Initial values of new layers, which a simulation does not use."""
_MOST = 1 << 16

_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""A tensor without values: its shape, strides and dtype."""
_results: dict[Any, _Form | list[_Form]] = {}
"""The form of an operation's result, by the forms of its arguments; of each, where it has a list of results."""


class NoInitialValues(TorchDispatchMode):
    """Skips random initial values: tensors hold whatever was in their memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in _DRAWS:
            return args[0]
        return func(*args, **(kwargs or {}))


class ShapesOnly(TorchDispatchMode):
    """Computes the form of each kind of result once, and skips in-place changes of tensors without values."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; newer versions of torch would otherwise add a guard to every operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _kinds[func] if func in _kinds else _kind_of(func)
        if kind == "change":
            several = isinstance(args[0], list)
            if all(t.is_meta for t in (args[0] if several else args[:1])):
                return None if several else args[0]
        elif kind == "write":
            if kwargs["out"].is_meta and kwargs["out"].numel():  # an empty one may be resized
                return kwargs["out"]
        elif kind == "draw":
            return args[0]
        elif kind == "make":
            return _new_tensor(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _new_tensor(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result, in the form known from arguments of the same forms."""
    forms = _form(args)
    key = None if forms is None else (func, forms, tuple(kwargs.items()))
    known = _results.get(key)
    if known is not None:
        return [_empty(form) for form in known] if isinstance(known, list) else _empty(known)
    result = func(*args, **kwargs)
    several = isinstance(result, list)
    if key is not None and len(_results) < _MOST and all(t.is_meta for t in (result if several else [result])):
        _results[key] = [_form(t) for t in result] if several else _form(result)
    return result


def _empty(form: _Form) -> Tensor:
    return torch.empty_strided(form[0], form[1], dtype=form[2], device="meta")


_kinds: dict[Any, str] = {}


def _kind_of(func: Any) -> str:
    """Whether an operation changes or writes tensors, draws random values, makes new ones, or something else."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    by_element = torch.Tag.pointwise in func.tags or name.startswith("_foreach_")
    if name in _DRAWS:
        kind = "draw"
    elif schema.is_mutable:
        keeps = name in _CHANGES or (by_element and name.endswith("_"))
        kind = "change" if keeps else "write" if by_element and func._overloadname == "out" else "other"
    else:
        makes = len(schema.returns) == 1 and str(schema.returns[0].type) in ("Tensor", "List[Tensor]")
        kind = "make" if makes and schema.returns[0].alias_info is None else "other"
    _kinds[func] = kind
    return kind


def _form(given: Any) -> Any:
    """What a result's form may depend on; None for a tensor with values, unless it is a number, or an unknown type."""
    if isinstance(given, Tensor):
        if given.is_meta:
            return given.shape, given.stride(), given.dtype
        return ("number", given.dtype) if given.dim() == 0 else None
    if isinstance(given, tuple | list):
        forms = tuple(_form(each) for each in given)
        return None if None in forms else forms
    if given is None:
        return "none"
    if isinstance(given, float):
        return "number"  # no shape depends on it
    return given if isinstance(given, int | str | torch.dtype | torch.device | torch.memory_format) else None
