"""An exponential moving average of a model whose layers change shape during training.

torch's `AveragedModel` does the averaging, over full weights (A·B where a layer is factored), so that the average
continues through decompositions, merges and changes of rank.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from thinwire.base.checks import is_number
from thinwire.base.errors import ConfigError, ThinwireError
from thinwire.comm.fsdp import (
    ShardedModel,
    cut_like,
    hollow_copy,
    local,
    shard_again,
    shard_like,
    to_plain_shards,
    with_modules,
)
from thinwire.comm.wire import Wire
from thinwire.exchange.merging import average, average_buffers
from thinwire.factor.convert import copy_of, forget_watch, layer_of, to_factors, to_full
from thinwire.factor.layers import factored_names, mark_as_read, rebuilt
from thinwire.factor.matrix import decompose
from thinwire.factor.plain import to_plain
from thinwire.replica.compiling import undo_compile
from thinwire.replica.preflight import broadcast_initial_values
from thinwire.replica.replica import Replica
from thinwire.shape.agree import gathered_layer


class EMA(AveragedModel):
    """An exponential moving average of a replica's weights, in the model's full shape.

    Call `update_parameters()` after each step, and `ema(x)` to evaluate; where groups shard the model, it is sharded
    too, and all workers of a group call both. While groups train separately, each averages its own model.
    `replica.save` and `replica.load` include it if it was made before; `finish()` ends it.
    """

    module: nn.Module

    def __init__(
        self, replica: Replica, decay: float = 0.999, *, device: torch.device | None = None, use_buffers: bool = False
    ) -> None:
        if not isinstance(replica, Replica):
            raise ConfigError(f"EMA takes a replica, not {type(replica).__name__}; make it after attach()")
        if not (is_number(decay) and 0 <= decay < 1):
            raise ConfigError(f"`decay`={decay!r} must be from 0 to below 1; try 0.999")
        if replica.wire.is_sharded and device is not None:
            raise ConfigError(f"`device`={device!s} is not for sharded models, whose average is sharded: leave it out")
        super().__init__(nn.Identity(), device, None, _of_parts(get_ema_multi_avg_fn(decay)), use_buffers)
        self.module = _full_copy(replica.module, replica.wire)
        if device is not None:
            self.module.to(device)
        self.module.requires_grad_(False)
        self._replica = [replica]  # in a list, so that it is not registered as a submodule
        # Neither is what a wire sees of a sharded one.
        self._seen = [ShardedModel(self) if replica.wire.is_sharded else self]
        replica._state.add_average(self._seen[0])

    def update_parameters(self, model: nn.Module | None = None) -> None:
        """Add the replica's current weights to the average; factors of a sharded model are gathered for it."""
        replica = self._replica[0]
        with_modules(replica._method.model)
        now = _FullWeights(replica.module, self.module, replica.wire)
        with replica.traffic.booked_under("ema"):
            super().update_parameters(now)  # type: ignore[arg-type]

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
            model = _full_copy(self.module, replica.wire).requires_grad_(True)
            seen = ShardedModel(model) if replica.wire.is_sharded else model
            for name in replica.read_layers:
                mark_as_read(model.get_submodule(name))
            for key, rank in replica.finished_ranks.items():
                layer = layer_of(model, key)
                a, b, _ = decompose(gathered_layer(layer, replica.wire).matrix(), 0.0, rank=rank)
                if replica.wire.is_sharded:  # members have parts of the same factors
                    replica.wire.broadcast_in_group([a, b], 0, "decomposition")
                old = layer.parameters
                to_factors(layer, a, b)
                shard_again(seen, layer, old)
            broadcast_initial_values(seen, replica.wire)
            if isinstance(seen, ShardedModel):
                seen.fresh.remove()
                return to_plain_shards(seen, replica.wire)
            return to_plain(model)

    def _average_over_groups(self, replica: Replica) -> None:
        wire, parameters = replica.wire, list(self._seen[0].parameters())
        if len(wire.topology.groups) == 1 or wire.agree([*parameters, *self.module.buffers()], "checksums"):
            return
        weight = len(wire.topology.group) / wire.topology.world_size
        average(wire, parameters, weight, "merge")
        average_buffers(wire, self.module.buffers(), weight)


class _FullWeights:
    """Parameters and buffers of a model as if every layer were full."""

    def __init__(self, model: nn.Module, full: nn.Module, wire: Wire) -> None:
        self.model, self.full, self.wire = model, full, wire

    def parameters(self) -> Iterator[Tensor]:
        now = dict(self.model.named_parameters())
        for name, like in self.full.named_parameters():
            yield now[name] if name in now else self._multiplied_out(name, like)

    def buffers(self) -> Iterator[Tensor]:
        return self.model.buffers()

    def _multiplied_out(self, key: str, like: Tensor) -> Tensor:
        layer = gathered_layer(layer_of(self.model, key), self.wire)
        return cut_like(rebuilt(layer.module, layer.parameter, layer.factors), like)


def _of_parts(average: Callable[..., None]) -> Callable[..., None]:
    """Average what this worker has of each tensor."""

    def averaged(own: Sequence[Tensor], now: Sequence[Tensor], count: Tensor | int) -> None:
        average([local(t) for t in own], [local(t) for t in now], count)

    return averaged


@torch.no_grad()
def _full_copy(model: nn.Module, wire: Wire) -> nn.Module:
    copied = hollow_copy(model) if wire.is_sharded else copy_of(model)
    undo_compile(copied)
    forget_watch(copied)
    for path, module in copied.named_modules():
        for name in list(factored_names(module)):
            to_full(layer_of(copied, f"{path}.{name}" if path else name))
    if wire.is_sharded:
        shard_like(copied, model)
        for own, p in zip(copied.parameters(), _FullWeights(model, copied, wire).parameters(), strict=True):
            own.copy_(p)
    return copied
