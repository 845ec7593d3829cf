"""Layers with a factored weight. A module changes its class and keeps its identity.

`factor_weight(module, "weight", [a, b])` takes the parameter `weight` out of the module, puts `weight_a` and
`weight_b` in, and swaps the module's class for a subclass in which `weight` is a read-only property
(A·B on demand); three factors are `weight_u`, `weight_s` and `weight_vt`. Hooks, names and references
survive. Linear, Conv1d/2d/3d and transformers' Conv1D apply the factors one after the other, folded or multiplied out,
whichever costs the fewest operations; every other class, MultiheadAttention included, reads the property and so
multiplies out.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.factor.matrix import MatrixView, product, view_of, wide

_CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}


FORMS = {2: ("a", "b"), 3: ("u", "s", "vt")}
"""Suffixes of the factors' names, by the number of factors."""


def names_of_factors(name: str) -> list[str]:
    """Every name that a factor of the weight `name` can have."""
    return [f"{name}_{suffix}" for form in FORMS.values() for suffix in form]


def factor_weight(module: nn.Module, name: str, factors: Sequence[nn.Parameter]) -> None:
    """Replace the parameter `name` of `module`, or the factors that it has become, by factors."""
    names = factored_names(module)
    new = {f"{name}_{suffix}": p for suffix, p in zip(FORMS[len(factors)], factors, strict=True)}
    if name in names:
        _exchange(module, _factor_names(module, name), new)
        return
    view = view_of(module._parameters[name])  # type: ignore[arg-type]
    _exchange(module, [name], new)
    _set_factored(module, {**names, name: view})


def unfactor_weight(module: nn.Module, name: str, weight: nn.Parameter) -> None:
    """Restore a full parameter; once no factor is left, the module has its original class again."""
    names = factored_names(module)
    del names[name]
    _set_factored(module, names)
    _exchange(module, _factor_names(module, name), {name: weight})


def _factor_names(module: nn.Module, name: str) -> list[str]:
    suffixes = next(form for form in FORMS.values() if f"{name}_{form[0]}" in module._parameters)
    return [f"{name}_{suffix}" for suffix in suffixes]


def _exchange(module: nn.Module, old: list[str], new: dict[str, nn.Parameter]) -> None:
    """Replace `old` by `new` in place: others rely on the order of a model's parameters."""
    place = list(module._parameters).index(old[0])
    kept = [(name, p) for name, p in module._parameters.items() if name not in old]
    module._parameters.clear()
    module._parameters.update([*kept[:place], *new.items(), *kept[place:]])


class Shape:
    """The parameters of a model's modules as they are now, to put them back after weights were factored or cut."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, dict(module._parameters), factored_names(module)) for module in model.modules()]

    def restore(self) -> None:
        """Give each module the very parameters that it had."""
        for module, parameters, names in self._modules:
            if factored_names(module).keys() != names.keys():
                _set_factored(module, names)
            module._parameters.clear()
            module._parameters.update(parameters)


def factored_names(module: nn.Module) -> dict[str, MatrixView]:
    """The factored weights of this module, with their views."""
    return dict(getattr(module, "_factored", {}))


def factors_of(module: nn.Module, name: str) -> tuple[nn.Parameter, ...]:
    """A and B of a factored weight, or U, S and Vᵀ."""
    return tuple(module._parameters[factor] for factor in _factor_names(module, name))  # type: ignore[misc]


def mark_as_read(module: nn.Module) -> None:
    """Record that code outside the module reads its weight, and so needs one in the finished model too."""
    if not weight_was_read(module):
        module.__dict__["_weight_was_read"] = True


def weight_was_read(module: nn.Module) -> bool:
    """Whether code outside the module has read a factored weight of it."""
    return "_weight_was_read" in module.__dict__


def forget_reading(module: nn.Module) -> None:
    """Remove that record from a finished model."""
    module.__dict__.pop("_weight_was_read", None)


def dense_class(module: nn.Module) -> type[nn.Module]:
    """The module's original class."""
    return getattr(type(module), "_dense_class", type(module))


def is_conv1d_of_transformers(cls: type) -> bool:
    """Whether this is transformers' Conv1D, a Linear with a transposed weight; does not import transformers."""
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def _set_factored(module: nn.Module, names: dict[str, MatrixView]) -> None:
    dense: Any = dense_class(module)
    module.__class__ = _factored_class(dense, tuple(names)) if names else dense
    if names:
        module._factored = names  # type: ignore[assignment]
    else:
        del module._factored


def like_factored(module: nn.Module, dense: type[nn.Module]) -> nn.Module:
    """A factored module without parameters that is otherwise as this one is, of another dense class; no hooks."""
    other = _rebuild_empty(dense, tuple(factored_names(module)))
    nn.Module.__init__(other)
    own = {name: value for name, value in module.__dict__.items() if name not in other.__dict__}
    other.__dict__.update(own, _modules=dict(module._modules), training=module.training)
    return other


# Cached per dense class and set of names: torch.compile guards on the class, so it must not change every cycle.
@functools.cache
def _factored_class(dense: Any, names: tuple[str, ...]) -> type[nn.Module]:
    body: dict[str, Any] = {name: _product(name) for name in names}
    body["_dense_class"] = dense
    body["extra_repr"] = _extra_repr
    body["__reduce__"] = _reduce
    forward = _thin_forward(dense)
    if forward is not None and names == ("weight",):
        body["forward"] = forward
    return type(f"Factored{dense.__name__}", (dense,), body)


def _product(name: str) -> property:
    def weight(self: nn.Module) -> Tensor:
        mark_as_read(self)
        return self._factored[name].rebuild(*factors_of(self, name))  # type: ignore[index,union-attr]

    weight.__doc__ = f"The product of the factors of `{name}`, computed at every access."
    return property(weight)


def _extra_repr(self: nn.Module) -> str:
    ranks = ", ".join(f"{name}: rank {factors_of(self, name)[0].shape[1]}" for name in factored_names(self))
    return ", ".join(part for part in (dense_class(self).extra_repr(self), ranks) if part)


def _reduce(self: nn.Module) -> tuple[Any, ...]:
    # The class is made at run time, so pickle and deepcopy rebuild it from the dense one.
    return _rebuild_empty, (dense_class(self), tuple(factored_names(self))), self.__dict__


def _rebuild_empty(dense: Any, names: tuple[str, ...]) -> nn.Module:
    cls = _factored_class(dense, names)
    return cls.__new__(cls)


def _thin_forward(dense: Any) -> Callable[..., Tensor] | None:
    """The forward pass through thin factors; None for classes that use their weight differently."""
    known: dict[Any, Callable[..., Tensor]] = {
        nn.Linear: _linear_forward,
        **dict.fromkeys(_CONVOLUTIONS, _conv_forward),
    }
    for cls, forward in known.items():
        if issubclass(dense, cls) and dense.forward is cls.forward:
            return forward
    return _conv1d_forward if is_conv1d_of_transformers(dense) else None


def thin_is_cheaper(view: MatrixView, rank: int, uses: int) -> bool:
    """Whether two thin products cost less than one full one, for a weight applied `uses` times."""
    thin = uses * rank * (view.rows + view.columns)
    full = (uses + rank) * view.rows * view.columns
    return thin < full


def cheapest_of_three(view: MatrixView, rank: int, uses: int, *, trains: bool) -> int:
    """The cheapest number of products to apply U S Vᵀ: 3 in sequence, 2 with S Vᵀ folded, or 1 multiplied out.

    In training the backward pass counts too. Only S has a gradient, which costs uses·k² through three factors, else
    that of the whole folded or multiplied-out matrix.
    """
    m, n = view.tall
    thin, fold, whole = rank * (m + n), rank * rank * n, rank * rank * n + rank * m * n
    if trains:
        costs = {
            3: uses * (2 * thin + 3 * rank * rank),
            2: uses * (2 * thin + rank * n) + 2 * fold,
            1: uses * 3 * m * n + 2 * whole,
        }
    else:
        costs = {3: uses * (thin + rank * rank), 2: uses * thin + fold, 1: uses * m * n + whole}
    return min(costs, key=lambda count: costs[count])


def _chain(self: Any, uses: int) -> tuple[Tensor, ...]:
    """The cheapest chain for the flattened weight, from (rows, k) to (k, columns)."""
    view: MatrixView = self._factored["weight"]
    factors: tuple[Tensor, ...] = factors_of(self, "weight")
    rank = factors[0].shape[1]
    if len(factors) == 2:
        count = 2 if thin_is_cheaper(view, rank, uses) else 1
    else:
        count = cheapest_of_three(view, rank, uses, trains=torch.is_grad_enabled())
    return view.sides(*factors[: count - 1], product(factors[count - 1 :]))


def _linear_forward(self: Any, input: Tensor) -> Tensor:
    left, *rest = _chain(self, input.numel() // max(1, input.shape[-1]))
    for right in reversed(rest):
        input = F.linear(input, right)
    return F.linear(input, left, self.bias)


def _conv1d_forward(self: Any, input: Tensor) -> Tensor:
    for matrix in _chain(self, input.numel() // max(1, input.shape[-1])):  # (in, k), …, (k, out)
        input = input @ matrix
    return input + self.bias


def _conv_forward(self: Any, input: Tensor) -> Tensor:
    shape = self._factored["weight"].shape
    positions = input.numel() // max(1, self.in_channels) // math.prod(self.stride)
    convolution = next(f for cls, f in _CONVOLUTIONS.items() if isinstance(self, cls))
    *points, right = _chain(self, positions)  # (out, k), …, (k, in·kernel)
    hidden = self._conv_forward(input, right.reshape(-1, *shape[1:]), None if points else self.bias)
    for i in reversed(range(len(points))):
        point = points[i].reshape(*points[i].shape, *(1 for _ in shape[2:]))  # (out, k, 1, …)
        hidden = convolution(hidden, point, None if i else self.bias)
    return hidden


def new_parameter(values: Tensor, like: nn.Parameter, *, trains: bool = True) -> nn.Parameter:
    """A new parameter with the device and dtype of `like`; copies the values."""
    return nn.Parameter(values.detach().to(device=like.device, dtype=like.dtype).clone(), requires_grad=trains)


def rebuilt(module: nn.Module, name: str, factors: Sequence[Tensor] | None = None) -> Tensor:
    """The full weight of a factored layer, detached; from these factors if they are given."""
    with torch.no_grad():
        factors = factors_of(module, name) if factors is None else factors
        return factored_names(module)[name].rebuild(*map(wide, factors)).to(factors[0].dtype).contiguous()
