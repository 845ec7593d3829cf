"""A model cut into fragments that are sent at different times."""

from torch import nn

from thinwire.base.errors import ConfigError
from thinwire.comm.fsdp import whole_of


def fragments_of(model: nn.Module, count: int) -> list[list[nn.Parameter]]:
    """Trained parameters in `count` fragments of nearly the same size, whole layers each.

    The largest layer goes to the fragment that has least so far. Layers of one size thus take turns, and each fragment
    has some from the whole depth of the model.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for layer_of in (_block, lambda name: name.rpartition(".")[0]):
        layers: dict[str, list[nn.Parameter]] = {}
        for name, p in trained:
            layers.setdefault(layer_of(name), []).append(p)
        if len(layers) >= count:
            break
    else:
        raise ConfigError(
            f"`fragments`={count} is more than the {len(layers)} layers of this model that are trained; "
            f"use at most {len(layers)}"
        )
    sizes = [0] * count
    home: dict[int, int] = {}
    for layer in sorted(layers.values(), key=lambda layer: -_size(layer)):
        least = sizes.index(min(sizes))
        sizes[least] += _size(layer)
        home.update({id(p): least for p in layer})
    return [[p for _, p in trained if home[id(p)] == i] for i in range(count)]


def _size(layer: list[nn.Parameter]) -> int:
    """Of whole weights: members of a group that shards them must cut alike."""
    return sum(whole_of(p).numel() for p in layer)


def _block(name: str) -> str:
    """The entry of a list of modules that a parameter is in, as "h.3" for "h.3.mlp.weight"; else its module."""
    modules = name.split(".")[:-1]
    number = next((i for i, module in enumerate(modules) if module.isdigit()), len(modules))
    return ".".join(modules[: number + 1])
