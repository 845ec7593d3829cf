"""Factored models as plain torch.nn layers, and back to full weights.

Linear and convolutions become two layers in an `nn.Sequential`. Where other code reads `.weight` itself
(MultiheadAttention, TransformerEncoderLayer, unknown classes), the weight is parametrized by an `nn.Linear`: stored
as factors, multiplied out when read. `to_dense` multiplies both out, so that they can be truncated again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from thinwire.factor.convert import Layer, to_full
from thinwire.factor.layers import (
    dense_class,
    factored_names,
    factors_of,
    forget_reading,
    is_conv1d_of_transformers,
    unfactor_weight,
    weight_was_read,
)
from thinwire.factor.matrix import MatrixView, product, view_of

Plain = Callable[..., nn.Module]
_READS_WEIGHTS_OF_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SETTINGS = ("stride", "padding", "dilation", "padding_mode")
"""Of a convolution, besides its sizes."""


def to_plain(model: nn.Module, plain: Plain | None = None) -> nn.Module:
    """Replace every factored layer in `model`; the root may be a different module afterwards.

    `plain` makes a plain layer of a factored one, where that takes more than `plain_layer`.
    """
    plain = plain or plain_layer
    for module in list(model.modules()):
        parent_reads = isinstance(module, _READS_WEIGHTS_OF_CHILDREN)
        for name, child in list(module.named_children()):
            if factored_names(child):
                setattr(module, name, plain(child, in_place=parent_reads))
    found = plain(model, in_place=False) if factored_names(model) else model
    for module in found.modules():
        forget_reading(module)
    return found


def plain_layer(module: nn.Module, *, in_place: bool) -> nn.Module:
    """A factored layer in plain ones; `in_place` it is the same module, and computes its weight when it is read."""
    dense = dense_class(module)
    has_thin_layers = dense in (nn.Linear, *_CONVOLUTIONS) or is_conv1d_of_transformers(dense)
    is_read = in_place or weight_was_read(module)
    if has_thin_layers and not is_read and tuple(factored_names(module)) == ("weight",):
        return _two_layers(module, dense)
    # Restore all weights before parametrizing any: both change the module's class.
    found = {name: (*_sides(module, name), view.shape) for name, view in factored_names(module).items()}
    for name, (left, _, _) in found.items():
        unfactor_weight(module, name, nn.Parameter(left.clone(memory_format=torch.contiguous_format)))
    for name, (_, right, shape) in found.items():
        _parametrize(module, name, right, shape)
    return module


def _sides(module: nn.Module, name: str = "weight") -> tuple[Tensor, Tensor]:
    """(rows, k) and (k, columns) of the flattened weight."""
    first, *rest = (p.detach() for p in factors_of(module, name))
    left, right = factored_names(module)[name].sides(first, product(rest))
    return left, right


def _two_layers(module: Any, dense: Any) -> nn.Sequential:
    left, right = _sides(module)  # (out, k), (k, in) but for transformers' Conv1D
    has_bias = module.bias is not None
    if dense in _CONVOLUTIONS:
        rank, settings = left.shape[1], {key: getattr(module, key) for key in SETTINGS}
        first = dense(module.in_channels, rank, module.kernel_size, bias=False, **settings)
        second = dense(rank, module.out_channels, 1, bias=has_bias)
    else:
        if dense is not nn.Linear:
            left, right = right.t(), left.t()
        first = nn.Linear(right.shape[1], right.shape[0], bias=False)
        second = nn.Linear(left.shape[1], left.shape[0], bias=has_bias)
    _fill(first, right)
    _fill(second, left, module.bias)
    return _marked(nn.Sequential(first, second).train(module.training))


def _fill(layer: Any, weight: Tensor, bias: Tensor | None = None) -> None:
    layer.weight = nn.Parameter(weight.reshape(layer.weight.shape).clone(memory_format=torch.contiguous_format))
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)


def _parametrize(module: nn.Module, name: str, right: Tensor, shape: tuple[int, ...]) -> None:
    """The weight as Linear(left): left (rows, k) times the Linear's weight (columns, k) transposed."""
    spread: nn.Module = nn.Linear(right.shape[0], right.shape[1], bias=False)
    _fill(spread, right.t())
    if len(shape) > 2:
        spread = nn.Sequential(spread, nn.Unflatten(1, shape[1:]))
    parametrize.register_parametrization(module, name, _marked(spread), unsafe=True)


def _marked(module: Any) -> Any:
    """Mark it, to distinguish it from the user's own Sequentials and parametrizations."""
    module.low_rank = True
    return module


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
        if is_pair(module):
            dense, had[_key(name, "weight")] = _one_layer(module)
            if name:
                model.set_submodule(name, dense)
            else:
                model = dense
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


def is_pair(module: Any) -> bool:
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
        settings = {key: getattr(first, key) for key in SETTINGS}
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
