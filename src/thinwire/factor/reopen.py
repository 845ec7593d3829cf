"""Multiply low-rank layers out, so that they can be truncated again."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from thinwire.factor.convert import Layer, to_full
from thinwire.factor.layers import factored_names
from thinwire.factor.matrix import MatrixView, product, view_of


class Pair(NamedTuple):
    """The factors a weight had."""

    a: Tensor
    b: Tensor
    numbers: int
    """Their number of elements, a third factor included."""

    @property
    def rank(self) -> int:
        return self.a.shape[1]


def to_dense(model: nn.Module) -> tuple[nn.Module, dict[str, Pair]]:
    """Give every layer that Thinwire made low-rank its full weight back; returns A and B by the weight's key.

    The root may be a different module afterwards. Low-rank layers not made by Thinwire are left as they are.
    """
    had: dict[str, Pair] = {}
    for name, module in list(model.named_modules()):
        if _is_pair(module):
            dense, had[_key(name, "weight")] = _one_layer(module)
            model = _replaced(model, name, dense)
        if _is_parametrized(module):
            pairs = _without_parametrizations(module)
            had.update({_key(name, parameter): pair for parameter, pair in pairs.items()})
        for parameter, view in factored_names(module).items():
            layer = Layer(name, module, parameter, view)
            first, *rest = (p.detach() for p in layer.factors)
            had[layer.key] = Pair(first, product(rest), sum(p.numel() for p in layer.factors))
            to_full(layer)
    return model, had


def _key(name: str, parameter: str) -> str:
    return f"{name}.{parameter}" if name else parameter


def _is_pair(module: Any) -> bool:
    """Whether it is a low-rank layer; one that ends in Unflatten is a weight's parametrization."""
    low_rank = isinstance(module, nn.Sequential) and getattr(module, "low_rank", False)
    return low_rank and not isinstance(module[-1], nn.Unflatten)


def _one_layer(pair: Any) -> tuple[nn.Module, Pair]:
    """One Linear or convolution from a pair of thin ones."""
    first: Any
    second: Any
    first, second = pair
    left, right = second.weight.detach().flatten(1), first.weight.detach().flatten(1)  # (out, k), (k, in·kernel)
    if isinstance(first, nn.Linear):
        dense: Any = nn.Linear(first.in_features, second.out_features, bias=False, device="meta")
    else:
        settings = {key: getattr(first, key) for key in ("stride", "padding", "dilation", "padding_mode")}
        sizes = (first.in_channels, second.out_channels, first.kernel_size)
        dense = type(first)(*sizes, bias=False, device="meta", **settings)
    trained = second.weight.requires_grad
    dense.weight = nn.Parameter((left @ right).reshape(dense.weight.shape), requires_grad=trained)
    dense.bias = second.bias
    return dense.train(pair.training), _tall(left, right, view_of(dense.weight))


def _tall(left: Tensor, right: Tensor, view: MatrixView) -> Pair:
    """A (m, k) and B (k, n) of the tall matrix."""
    a, b = view.sides(left, right)
    return Pair(a, b, a.numel() + b.numel())


def _is_parametrized(module: nn.Module) -> bool:
    """Whether all parametrizations of this module are Thinwire's."""
    lists: Any = module.parametrizations.values() if parametrize.is_parametrized(module) else []  # type: ignore[operator]
    return bool(lists) and all(len(found) == 1 and getattr(found[0], "low_rank", False) for found in lists)


def _without_parametrizations(module: Any) -> dict[str, Pair]:
    """Give a module plain weights again. Its class is not changed: the original of this copy shares it."""
    had, weights = {}, {}
    for name, found in module.parametrizations.items():
        spread: Any = found[0][0] if isinstance(found[0], nn.Sequential) else found[0]
        left, right = found.original.detach(), spread.weight.detach().t()  # (rows, k), (k, columns)
        with torch.no_grad():
            weights[name] = nn.Parameter(found().clone(), requires_grad=found.original.requires_grad)
        had[name] = _tall(left, right, view_of(weights[name]))
    module.__class__ = parametrize.type_before_parametrizations(module)
    del module.parametrizations
    for name, weight in weights.items():
        module.register_parameter(name, weight)
    return had


def _replaced(model: nn.Module, name: str, new: nn.Module) -> nn.Module:
    if not name:
        return new
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
    return model
