"""Models that groups shard with FSDP2's `fully_shard`.

Inside a group FSDP gathers parameters and averages gradients, as it does without Thinwire. Between groups a method
averages shards: worker i of a group with worker i of all others. A method sees this worker's shards as the parameters
of a model, and needs to know nothing of FSDP.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.sharded import like_whole
from thinwire.config import AllReduce, LocalSGD, Radial
from thinwire.config.codes import parse_code
from thinwire.errors import ConfigError
from thinwire.factor.optimizers import Optimizers


def is_sharded(model: nn.Module) -> bool:
    """Whether a parameter is part of a larger one."""
    return any(hasattr(p, "device_mesh") for p in model.parameters())


class Shard(nn.Parameter):
    """This worker's part of a parameter: the same memory, and the same gradient."""

    whole: Any

    def __new__(cls, whole: Any) -> "Shard":
        shard = torch.Tensor._make_subclass(cls, local(whole.detach()), whole.requires_grad)
        shard.whole = whole
        return shard

    @property
    def grad(self) -> Tensor | None:
        found = self.whole.grad
        return None if found is None else local(found)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.whole.grad = None if value is None else like_whole(value, self.whole)


def local(value: Tensor) -> Tensor:
    """This worker's part of a tensor, which shares its memory; any other tensor as it is."""
    part: Any = value
    return part.to_local() if hasattr(value, "device_mesh") else value


def whole_of(p: Any) -> Any:
    """The parameter or the model that this is a worker's part of; itself if it is whole."""
    return getattr(p, "whole", p)


class ShardedModel(nn.Module):
    """What a method sees of a sharded model."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.__dict__["whole"] = whole  # no submodule
        self.shards = {name: Shard(p) for name, p in whole.named_parameters()}
        # A forward pass without a backward pass leaves parameters gathered. They may have been averaged since.
        self.fresh = whole.register_forward_pre_hook(lambda module, inputs: reshard(whole), prepend=True)

    whole: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.whole(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.shards.items()

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        yield from self.whole.named_buffers()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from self.whole.named_modules()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This worker's part of it."""
        return {name: local(t) for name, t in self.whole.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Into the memory of this worker's part."""
        with torch.no_grad():
            for name, t in self.state_dict().items():
                t.copy_(state_dict[name])

    @property
    def share(self) -> float:
        """Of all values, those that this worker holds."""
        return sum(p.numel() for p in self.shards.values()) / sum(p.whole.numel() for p in self.shards.values())


def reshard(model: nn.Module) -> None:
    """Free what was gathered of all shards."""
    for module in model.modules():
        if (free := getattr(module, "reshard", None)) is not None:
            free()


def refuse_on_shards(config: Any, optimizers: Optimizers, **given: Any) -> None:
    """What needs whole weights, or what other workers of the group have, in one sentence."""
    kind = type(config).__name__
    if not isinstance(config, AllReduce | LocalSGD):
        raise ConfigError(
            f"{kind} needs whole weights on a worker, and the model is sharded: use AllReduce, LocalSGD or DiLoCo, or "
            "a model that is not sharded"
        )
    used = [name for name, value in given.items() if value is not None]
    if used:
        raise ConfigError(f"`{used[0]}` is not for sharded models: leave it out")
    for name in ("wire", "warmup_wire"):
        code = getattr(config, name, "fp32")
        if parse_code(code).kind in ("lowrank", "topk"):
            raise ConfigError(
                f"`{name}`={code!r} looks at whole weights, and the model is sharded: use 'int8' or 'int2'"
            )
    usual = {"moments": "keep", "second_moment": "group", "rows": "mean", "diverged": "stop", "outliers": "keep"}
    for name, value in usual.items():
        if getattr(config, name, value) != value:
            raise ConfigError(
                f"`{name}`={getattr(config, name)!r} is not for sharded models: leave it out, it is {value!r} then"
            )
    if isinstance(getattr(config, "outer", None), Radial):
        raise ConfigError("`outer`=Radial(…) measures whole weights, and the model is sharded: use Nesterov(…) or None")
    for optimizer in optimizers:
        if type(optimizer).__name__ == "Muon":
            raise ConfigError("Muon orthogonalises whole weights, and the model is sharded: use AdamW")
