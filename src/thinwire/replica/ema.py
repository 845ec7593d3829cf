"""An exponential moving average of a model whose layers change shape during training.

torch's `AveragedModel` does the averaging, over full weights (A·B where a layer is factored), so that the average
continues through decompositions, merges and changes of rank.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from thinwire.base.checks import is_number
from thinwire.base.errors import ConfigError, ThinwireError
from thinwire.exchange.merging import average, average_buffers
from thinwire.factor.convert import copy_of, forget_watch, layer_of, to_factors, to_full
from thinwire.factor.layers import factored_names, mark_as_read, rebuilt
from thinwire.factor.matrix import decompose
from thinwire.factor.plain import to_plain
from thinwire.replica.preflight import broadcast_initial_values
from thinwire.replica.replica import Replica


class EMA(AveragedModel):
    """An exponential moving average of a replica's weights, in the model's full shape.

    Call `update_parameters()` after each step, and `ema(x)` to evaluate. While groups train separately, each averages
    its own model. `replica.save` and `replica.load` include it if it was made before; `finish()` ends it.
    """

    module: nn.Module

    def __init__(
        self, replica: Replica, decay: float = 0.999, *, device: torch.device | None = None, use_buffers: bool = False
    ) -> None:
        if not isinstance(replica, Replica):
            raise ConfigError(f"EMA takes a replica, not {type(replica).__name__}; make it after attach()")
        if not (is_number(decay) and 0 <= decay < 1):
            raise ConfigError(f"`decay`={decay!r} must be from 0 to below 1; try 0.999")
        if replica.wire.is_sharded:
            raise ConfigError("EMA is not for sharded models: keep an average of each shard, as FSDP's examples do")
        super().__init__(_full_copy(replica.module), device, None, get_ema_multi_avg_fn(decay), use_buffers)
        self.module.requires_grad_(False)
        self._replica = [replica]  # in a list, so that it is not registered as a submodule
        replica._state.add_average(self)

    def update_parameters(self, model: nn.Module | None = None) -> None:
        """Add the replica's current weights to the average."""
        super().update_parameters(_FullWeights(self._replica[0].module, self.module))  # type: ignore[arg-type]

    def finish(self) -> nn.Module:
        """The average as a plain model, as small as the finished replica; collective, after `replica.finish()`.

        If groups trained separately, it is the mean over groups.
        """
        replica = self._replica[0]
        if replica.phase != "finished":
            raise ThinwireError("call EMA.finish() after replica.finish(): it uses the ranks of the finished replica")
        replica.wire.barrier("EMA.finish()")
        with replica.traffic.booked_under("ema"), torch.no_grad():
            self._average_over_groups(replica)
            model = copy_of(self.module).requires_grad_(True)
            for name in replica.read_layers:
                mark_as_read(model.get_submodule(name))
            for key, rank in replica.finished_ranks.items():
                layer = layer_of(model, key)
                a, b, _ = decompose(layer.matrix(), 0.0, rank=rank)
                to_factors(layer, a, b)
            model = to_plain(model)
            broadcast_initial_values(model, replica.wire)
        return model

    def _average_over_groups(self, replica: Replica) -> None:
        wire, parameters = replica.wire, list(self.module.parameters())
        if len(wire.topology.groups) == 1 or wire.agree([*parameters, *self.module.buffers()], "checksums"):
            return
        weight = len(wire.topology.group) / wire.topology.world_size
        average(wire, parameters, weight, "merge")
        average_buffers(wire, self.module.buffers(), weight)


class _FullWeights:
    """Parameters and buffers of a model as if every layer were full."""

    def __init__(self, model: nn.Module, full: nn.Module) -> None:
        self.model = model
        self.names = [name for name, _ in full.named_parameters()]

    def parameters(self) -> Iterator[Tensor]:
        now = dict(self.model.named_parameters())
        for name in self.names:
            yield now[name] if name in now else _multiplied_out(self.model, name)

    def buffers(self) -> Iterator[Tensor]:
        return self.model.buffers()


def _multiplied_out(model: nn.Module, key: str) -> Tensor:
    path, _, name = key.rpartition(".")
    return rebuilt(model.get_submodule(path), name)


def _full_copy(model: nn.Module) -> nn.Module:
    copied = copy_of(model)
    copied.__dict__.pop("_compiled_call_impl", None)
    forget_watch(copied)
    for path, module in copied.named_modules():
        for name in list(factored_names(module)):
            to_full(layer_of(copied, f"{path}.{name}" if path else name))
    return copied
