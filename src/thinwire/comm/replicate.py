"""PyTorch's DistributedDataParallel on a given group, every byte of it counted, cheap to wrap again.

DDP keeps what it does well: buckets and their overlap with the backward pass. In fp32 its own reducer runs
untouched and a hook on one parameter sees each backward pass; a communication hook would cost one more pass
over all gradients, and is there only where gradients are rounded or may be unused. Buffers are handed on by
the first member *after* a step and not before the next forward pass, with the same result, so that workers
agree on them between steps. And nothing is broadcast at wrapping: workers hold the same values.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from thinwire.comm.codec import WIRES, by_dtype, size_of
from thinwire.comm.collectives import Wire
from thinwire.comm.topology import Ranks, Sent, Topology
from thinwire.errors import ConfigError

# Newer versions of torch call it by another name.
_parameters = inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _parameters else "broadcast_buffers": False
}
_OWN = {"process_group", "init_sync", "broadcast_buffers", "device_mesh", "mixed_precision", "forward_sync_buffers"}


class Replicated:
    """A model whose gradients are averaged inside one group of workers, which may change."""

    def __init__(self, model: nn.Module, wire: Wire, rounding: str, options: dict[str, Any] | None = None) -> None:
        self.model = model
        self.wire = wire
        self.rounding = rounding
        self.options = dict(options or {})
        self.members: Ranks = ()
        self._ddp: DistributedDataParallel | None = None
        self._watch: RemovableHandle | None = None
        self._backwards = 0
        self._awaits_backward = False
        self._accumulating = False
        self._refuse_own_options()

    def wrap(self, members: Ranks) -> None:
        """Average gradients over `members` from now on; whoever was there before is let go."""
        self.unwrap()
        self.members = members
        if self.wire.topology.world_size == 1:
            return
        group = self.wire.process_group(members)
        for module in self._synced_norms():
            module.process_group = group  # theirs is the world, even while groups train apart
        if len(members) == 1:
            return
        self._ddp = DistributedDataParallel(
            self.model, process_group=group, init_sync=False, **_NO_BUFFERS, **self.options
        )
        self._backwards = 0
        if self.rounding != "fp32" or self.options.get("find_unused_parameters") or self.options.get("static_graph"):
            self._ddp.register_comm_hook(group, self._average)
        else:
            watched = next(p for p in self.model.parameters() if p.requires_grad)
            self._watch = watched.register_post_accumulate_grad_hook(self._see_backward)

    def unwrap(self) -> None:
        """Let go of the model: no hook of the old wrapper may fire under the next one."""
        if self._ddp is not None:
            # Reducer and logger share ownership of the autograd hooks; both must go.
            self._ddp.__dict__.update(reducer=None, logger=None)
            self._ddp = None
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass, prepared for a backward pass that averages gradients."""
        if self._ddp is None:
            return self.model(*args, **kwargs)
        self._awaits_backward = self._awaits_backward or self.syncs
        self._count_norms()
        return self._ddp(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients here without averaging them."""
        before, self._accumulating = self._accumulating, True
        try:
            with nullcontext() if self._ddp is None else self._ddp.no_sync():
                yield
        finally:
            self._accumulating = before

    @property
    def syncs(self) -> bool:
        """Whether the next backward pass averages gradients, or would if the group had other members."""
        return not self._accumulating

    def hand_on_buffers(self) -> None:
        """Overwrite buffers by the first member's, as DDP does before a forward pass."""
        self.wire.broadcast(list(self.model.buffers()), "buffers", self.members)

    def _see_backward(self, parameter: torch.Tensor) -> None:
        """One backward pass that averages: DDP decides by the forward pass before it."""
        if not self._awaits_backward:
            return
        self._awaits_backward = False
        trained: list[torch.Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        size = sum(size_of(p) for p in trained)
        self._count("gradients", self.wire.topology.ring(self.members, size))
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, int(1024**2 * (self.options.get("bucket_cap_mb") or 25))]
        self._count_control(lambda: len(dist._compute_bucket_assignment_by_size(trained[::-1], limits)[0]))

    def _average(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        # The reducer multiplies by 1/W too; dividing would round differently.
        gradients.mul_(1.0 / len(self.members))
        travelling = gradients if self.rounding == "fp32" else gradients.to(WIRES[self.rounding])
        self._count("gradients", self.wire.topology.ring(self.members, size_of(travelling)))
        if bucket.is_last():
            self._count_control(lambda: bucket.index() + 1)
        done = dist.all_reduce(travelling, group=group, async_op=True).get_future()
        if travelling is gradients:
            return done.then(lambda future: future.value()[0])
        return done.then(lambda future: gradients.copy_(future.value()[0]))

    def _synced_norms(self) -> list[nn.SyncBatchNorm]:
        return [module for module in self.model.modules() if isinstance(module, nn.SyncBatchNorm)]

    def _count_norms(self) -> None:
        """SyncBatchNorm gathers mean, deviation and count going forward, and sums two gradients coming back."""
        ring = self.wire.topology
        for norm in self._synced_norms():
            sent = ring.gather_ring(self.members, 4 * (2 * norm.num_features + 1))
            self._count("batch statistics", sent + ring.ring(self.members, 4 * 2 * norm.num_features))

    def _count_control(self, buckets: Callable[[], int]) -> None:
        """What DDP itself sends: the order of buckets, once, before the second backward pass; used flags."""
        self._backwards += 1
        trained = sum(p.requires_grad for p in self.model.parameters())
        if self._finds_unused:
            self._count("control", self.wire.topology.ring(self.members, 4 * trained))
        elif self._backwards == 2:
            self._count("control", bucket_order(self.wire.topology, self.members, trained, buckets()))

    @property
    def _finds_unused(self) -> bool:
        return bool(self.options.get("find_unused_parameters")) and not self.options.get("static_graph")

    def _count(self, purpose: str, sent: Sent) -> None:
        self.wire.ledger.record(purpose, slow=sent.slow, fast=sent.fast)

    def _refuse_own_options(self) -> None:
        taken = sorted(_OWN & self.options.keys())
        if taken:
            raise ConfigError(f"`ddp` options {', '.join(taken)} are set by Thinwire itself; leave them out")


def bucket_order(topology: Topology, members: Ranks, trained: int, buckets: int) -> Sent:
    """DDP's broadcast of its bucket order: an int32 a parameter and one, then one a bucket."""
    order = topology.tree(members, 4 * (trained + 1), members[0])
    return order + topology.tree(members, 4 * buckets, members[0])


def step_of_allreduce(model: nn.Module, topology: Topology, trained: int) -> float:
    """Slow bytes of one step of fp32 data-parallel training, gradients and buffers, as the mean over nodes."""
    total = 0
    for node in topology.nodes:
        seen_from = replace(topology, rank=node[0])
        total += seen_from.ring(topology.world, 4 * trained).slow
        for bucket in by_dtype(model.buffers()):
            total += seen_from.tree(topology.world, sum(size_of(b) for b in bucket), 0).slow
    return total / len(topology.nodes)


def step_of_ideal(topology: Topology, trained: int) -> int:
    """What the best fp32 all-reduce between nodes sends for the same gradients, per node."""
    nodes = len(topology.nodes)
    return round(2 * (nodes - 1) / nodes * 4 * trained)
