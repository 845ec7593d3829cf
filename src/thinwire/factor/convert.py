"""Which layers can be factored, and conversion in both directions.

`find_layers` finds the weights that can be factored and gives a reason for every other; `OrderOfUse` tells it which is
the first and which the last. `to_factors` and `to_full` convert one layer; the caller replaces its parameters in the
optimizer.
"""

import copy
import fnmatch
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import RemovableHandle

from thinwire.factor import layers as factored
from thinwire.factor.matrix import MatrixView, product, view_of, wide

# Their weights are looked up, not multiplied.
TABLES = (nn.Embedding, nn.EmbeddingBag)
# Class tokens, position tables: parameters that do not belong to a layer, and so are neither first nor last.
_NO_LAYER = "not a layer's weight"
# A weight that one of these hooks computes before each forward pass is a plain attribute, and a parameter with a
# suffixed name is what it is computed from. Such parameters are never factored.
_HOOKS: dict[type[Any], tuple[str, str]] = {
    WeightNorm: ("name", "normed by torch.nn.utils.weight_norm"),
    SpectralNorm: ("name", "normed by torch.nn.utils.spectral_norm"),
    BasePruningMethod: ("_tensor_name", "pruned by torch.nn.utils.prune"),
}


@dataclass(frozen=True)
class Layer:
    """One weight that may be factored: `module.parameter`, known to users as `name`."""

    name: str
    module: nn.Module
    parameter: str
    view: MatrixView

    @property
    def key(self) -> str:
        """The weight's key in the dense model's state dict."""
        return f"{self.name}.{self.parameter}" if self.name else self.parameter

    @property
    def label(self) -> str:
        """The name shown to users: the layer's, or the weight's if it is not called `weight`."""
        return self.name if self.parameter == "weight" else self.key

    @property
    def is_factored(self) -> bool:
        return self.parameter in factored.factored_names(self.module)

    @property
    def weight(self) -> nn.Parameter:
        """The full weight; only while the layer is full."""
        return self.module._parameters[self.parameter]  # type: ignore[return-value]

    @property
    def factors(self) -> tuple[nn.Parameter, ...]:
        """A (m, k) and B (k, n), or U (m, k), S (k, k) and Vᵀ (k, n); only while the layer is factored."""
        return factored.factors_of(self.module, self.parameter)

    @property
    def rank(self) -> int | None:
        """k, or None while the layer is full."""
        return self.factors[0].shape[1] if self.is_factored else None

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The weight's current parameters: (W,), (A, B) or (U, S, Vᵀ)."""
        return self.factors if self.is_factored else (self.weight,)

    def matrix(self) -> Tensor:
        """The weight as a tall matrix (m, n), full or factored."""
        with torch.no_grad():
            if self.is_factored:
                return product([wide(f) for f in self.factors]).to(self.factors[0].dtype)
            return self.view.to_matrix(self.weight.detach())


@dataclass(frozen=True)
class Kept:
    """A weight that stays full, and why."""

    name: str
    why: str


def layer_of(model: nn.Module, key: str) -> Layer:
    """The layer whose weight has this key in the dense model's state dict, full or factored."""
    path, _, parameter = key.rpartition(".")
    module = model.get_submodule(path)
    view = factored.factored_names(module).get(parameter)
    return Layer(path, module, parameter, view or view_of(module._parameters[parameter]))  # type: ignore[arg-type]


def find_layers(
    model: nn.Module,
    *,
    trained: Iterable[nn.Parameter],
    order: Sequence[str] = (),
    keep_first: bool = True,
    keep_last: bool = True,
    keep: Sequence[str] = (),
) -> tuple[list[Layer], list[Kept]]:
    """Every weight of two dimensions or more: those to factor, and those kept full with the reason.

    `trained` are the optimizer's parameters; `order` has the names of modules in the order of a forward
    pass; other modules follow in the order of registration.
    """
    candidates = _in_order_of_use(list(_matrices(model)), order)
    reasons = _Reasons(model, trained, keep)
    kept = {layer.key: why for layer in candidates if (why := reasons.why_full(layer))}
    ends = [layer for layer in candidates if kept.get(layer.key) != _NO_LAYER]
    if ends and keep_first:
        kept.setdefault(ends[0].key, "first layer")
    if ends and keep_last:
        kept.setdefault(ends[-1].key, "last layer")
    to_factor = [layer for layer in candidates if layer.key not in kept]
    return to_factor, [Kept(layer.key, kept[layer.key]) for layer in candidates if layer.key in kept]


def warn_unmatched_patterns(model: nn.Module, keep: Sequence[str]) -> None:
    """Warn of patterns that match nothing: likely a misspelt name."""
    layers = list(_matrices(model))
    for pattern in keep:
        if not any(_matches(layer, pattern) for layer in layers):
            known = ", ".join([layer.name for layer in layers[:6]] + ["…"] * (len(layers) > 6))
            warnings.warn(f"keep pattern {pattern!r} matches no layer; there are {known}", stacklevel=2)


def _matches(layer: Layer, pattern: str) -> bool:
    return fnmatch.fnmatch(layer.name, pattern) or fnmatch.fnmatch(layer.key, pattern)


def to_factors(layer: Layer, *values: Tensor) -> None:
    """Give a layer, full or factored, two trained factors, or three of which only the middle one is trained."""
    like = layer.parameters[0]
    trains = (True, True) if len(values) == 2 else (False, True, False)
    new = [factored.new_parameter(value, like, trains=t) for value, t in zip(values, trains, strict=True)]
    factored.factor_weight(layer.module, layer.parameter, new)


def to_full(layer: Layer, factors: Sequence[Tensor] | None = None) -> None:
    """Multiply a factored layer out; `factors` are its own, where it has only parts of them."""
    rebuilt = factored.rebuilt(layer.module, layer.parameter, factors)
    factored.unfactor_weight(layer.module, layer.parameter, factored.new_parameter(rebuilt, layer.factors[0]))


def _matrices(model: nn.Module) -> Iterable[Layer]:
    for name, module in model.named_modules():
        for parameter, weight in module.named_parameters(recurse=False):
            if weight.dim() >= 2:
                yield Layer(name, module, parameter, view_of(weight))


def _in_order_of_use(candidates: list[Layer], order: Sequence[str]) -> list[Layer]:
    place = {name: i for i, name in enumerate(order)}
    # A module used only through its parent (MultiheadAttention's out_proj) takes its parent's position.
    last = -1
    keys = []
    for layer in candidates:
        last = place.get(layer.name, last)
        keys.append(last)
    return [layer for _, layer in sorted(zip(keys, candidates, strict=True), key=lambda pair: pair[0])]


class _Reasons:
    """Why a weight must stay full."""

    def __init__(self, model: nn.Module, trained: Iterable[nn.Parameter], keep: Sequence[str]) -> None:
        self.trained = {id(p) for p in trained}
        self.keep = keep
        self.homes = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        self.paths = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))

    def why_full(self, layer: Layer) -> str | None:
        return self._by_user(layer) or self._by_sharing(layer) or self._by_kind(layer)

    def _by_user(self, layer: Layer) -> str | None:
        for pattern in self.keep:
            if _matches(layer, pattern):
                return f"kept by pattern {pattern!r}"
        if not layer.weight.requires_grad:
            return "frozen"
        if layer.weight._backward_hooks:
            return "has a gradient hook"
        return None if id(layer.weight) in self.trained else "not in the optimizer"

    def _by_sharing(self, layer: Layer) -> str | None:
        if self.paths[id(layer.module)] > 1:
            return "shared module"
        return "tied weight" if self.homes[id(layer.weight)] > 1 else None

    def _by_kind(self, layer: Layer) -> str | None:
        module = layer.module
        if isinstance(module, torch.jit.ScriptModule):
            return "script module"
        if isinstance(module, TABLES):
            return "embedding"
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            return "recurrent layer"
        if hasattr(module, "parametrizations") or isinstance(module, ParametrizationList):
            return "already parametrized"
        if why := _why_hooked(module, layer.parameter):
            return why
        if any(hasattr(module, name) for name in factored.names_of_factors(layer.parameter)):
            return "its module already uses the factors' names"
        if getattr(module, "groups", 1) != 1:
            return "grouped convolution"
        if "weight" not in layer.parameter:
            return _NO_LAYER
        if not layer.weight.is_floating_point():
            return f"dtype {layer.weight.dtype}"
        return None if layer.view.is_smaller(1) else "too thin to factor"


def _why_hooked(module: nn.Module, parameter: str) -> str | None:
    """What computes a weight from this parameter, or None."""
    for hook in module._forward_pre_hooks.values():
        for kind, (attribute, why) in _HOOKS.items():
            if isinstance(hook, kind) and parameter.startswith(f"{getattr(hook, attribute)}_"):
                return why
    return None


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy; tensors computed by hooks are copied as plain values, since deepcopy refuses non-leaf tensors."""
    tensors = (t for module in model.modules() for t in vars(module).values() if isinstance(t, Tensor))
    return copy.deepcopy(model, {id(t): t.detach().clone() for t in tensors if not t.is_leaf})


class OrderOfUse:
    """Names of the modules with weight matrices, in the order of a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.order: list[str] = []
        self._hooks: list[RemovableHandle] = []

    @property
    def is_watching(self) -> bool:
        return bool(self._hooks)

    def watch(self) -> None:
        """Record every module that is called from now on."""
        for name, module in self.model.named_modules():
            if any(p.dim() >= 2 for p in module.parameters(recurse=False)):
                self._hooks.append(module.register_forward_pre_hook(self._recorder(name)))

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _recorder(self, name: str) -> Any:
        def record(module: nn.Module, inputs: Any) -> None:
            if name not in self.order:
                self.order.append(name)

        record.is_watch = True  # type: ignore[attr-defined]
        return record


def forget_watch(model: nn.Module) -> None:
    """Remove the hooks from a copy of a watched model."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if getattr(hook, "is_watch", False):
                del module._forward_pre_hooks[key]
