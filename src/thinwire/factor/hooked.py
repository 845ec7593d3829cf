"""Weights that a hook computes before each forward pass: old `weight_norm` and `spectral_norm`, pruning.

Such a weight is a plain attribute, computed from parameters with a suffixed name. These are never factored.
"""

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

_KINDS: dict[type[Any], tuple[str, str]] = {
    WeightNorm: ("name", "normed by torch.nn.utils.weight_norm"),
    SpectralNorm: ("name", "normed by torch.nn.utils.spectral_norm"),
    BasePruningMethod: ("_tensor_name", "pruned by torch.nn.utils.prune"),
}


def why_hooked(module: nn.Module, parameter: str) -> str | None:
    """What computes a weight from this parameter, or None."""
    for hook in module._forward_pre_hooks.values():
        for kind, (attribute, why) in _KINDS.items():
            if isinstance(hook, kind) and parameter.startswith(f"{getattr(hook, attribute)}_"):
                return why
    return None


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy; tensors computed by hooks are copied as plain values, since deepcopy refuses non-leaf tensors."""
    return copy.deepcopy(model, {id(t): t.detach().clone() for t in _computed(model)})


def _computed(model: nn.Module) -> Iterator[Tensor]:
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Tensor) and not value.is_leaf)
