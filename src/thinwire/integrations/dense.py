"""A model's state as its own class has it, whatever shape its layers have now: what other libraries' files hold."""

from collections.abc import Sequence

from torch import Tensor, nn

from thinwire.factor.convert import copy_of
from thinwire.factor.layers import dense_class, is_conv1d_of_transformers
from thinwire.factor.plain import to_dense


def transposed_layers(model: nn.Module) -> list[str]:
    """Layers whose weight is (in, out); ask before `finish`, which makes them Linear."""
    return [name for name, module in model.named_modules() if is_conv1d_of_transformers(dense_class(module))]


def dense_state_of(model: nn.Module, transposed: Sequence[str]) -> dict[str, Tensor]:
    """Every weight in its full shape, those of `transposed_layers` as they were."""
    dense = to_dense(copy_of(model))[0]
    for name in transposed:
        layer = dense.get_submodule(name)
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.detach().T.contiguous())
    return dense.state_dict()
