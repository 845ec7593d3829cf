"""PyTorch's DistributedDataParallel on a given group, with all its bytes counted, and cheap to wrap again.

DDP keeps what it does well: buckets and their overlap with the backward pass. In fp32 its own reducer runs
untouched and a hook on one parameter sees each backward pass; a communication hook would cost one more pass
over all gradients, and is used only where gradients are rounded or may be unused. The first member broadcasts
buffers *after* a step and not before the next forward pass, with the same result, so that workers agree on them
between steps. Nothing is broadcast at wrapping: workers hold the same values.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from thinwire.base.errors import ConfigError
from thinwire.comm import process_groups
from thinwire.comm.buckets import WIRES, size_of
from thinwire.comm.topology import Ranks, Sent, Topology
from thinwire.comm.wire import Wire

# Newer versions of torch call it by another name.
_parameters = inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _parameters else "broadcast_buffers": False
}
_OWN = {"process_group", "init_sync", "broadcast_buffers", "device_mesh", "mixed_precision", "forward_sync_buffers"}


class Replicated:
    """A model whose gradients are averaged inside one group of workers, which may change."""

    def __init__(self, model: nn.Module, wire: Wire, options: dict[str, Any] | None = None) -> None:
        self.model = model
        self.wire = wire
        self.rounding = "fp32"
        """What gradients are rounded to while they travel; set before `wrap`."""
        self.options = dict(options or {})
        self.members: Ranks = ()
        self._ddp: DistributedDataParallel | None = None
        self._watches: list[RemovableHandle] = []
        self._norms: list[nn.SyncBatchNorm] = []
        self._trained = 0
        self.after_backward: Callable[[], None] | None = None
        """Called at the end of each backward pass that averages, when the group's gradients are there; set before
        `wrap`. In a group of one, too."""
        self.before_backward: Callable[[torch.Tensor | None], None] | None = None
        """Called at the beginning of every pass, averaging or not, before any gradient has come but that of the
        parameter it is given, if any."""
        self.on_gradient: Callable[[torch.Tensor], None] | None = None
        """Called with each parameter whose gradient arrives in a pass that averages."""
        self.buffers_from: int | None = None
        """The rank whose buffers all take; None is the first member."""
        self.norm_members: Ranks = ()
        """Ranks over which SyncBatchNorm takes its statistics, if not those that average gradients."""
        self._is_due = False
        self._averages = True
        self._buckets: list[Sent] = []
        self.backwards = 0
        """Passes that averaged gradients since the model was wrapped."""
        self._awaits_backward = False
        self._accumulating = False
        self._named: dict[str, nn.Parameter] = {}
        self._flags: list[tuple[Any, ...]] = []
        self._containers: list[dict[str, nn.Module | None]] = []
        self._registered = 0, 0
        if taken := sorted(_OWN & self.options.keys()):
            raise ConfigError(f"`ddp` options {', '.join(taken)} are set by Thinwire itself; leave them out")

    def wrap(self, members: Ranks) -> None:
        """Average gradients over `members` from now on, instead of the members before."""
        self.unwrap()
        self.members, self._buckets, self.backwards = members, [], 0
        # Looked up once: a walk through all modules at every step takes milliseconds.
        self._norms = [module for module in self.model.modules() if isinstance(module, nn.SyncBatchNorm)]
        self._trained = sum(p.requires_grad for p in self.model.parameters())
        if self.wire.topology.world_size > 1:
            self._follow_model(members)

    def _follow_model(self, members: Ranks) -> None:
        """Put hooks on the model, or DDP around it."""
        self._named = dict(self.model.named_parameters())
        self._flags = [_flags(p) for p in self._named.values()]
        may_grow = (nn.Sequential, nn.ModuleList)
        self._containers = [m._modules for m in self.model.modules() if m._modules or isinstance(m, may_grow)]
        self._registered = self._count_parts()
        group = self.wire.process_group(members)
        process_groups.register_holder(self)
        for module in self._norms:
            # By itself it is the world, even while groups train apart.
            module.process_group = self.wire.process_group(self.norm_members or members)
        if self.after_backward is not None:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self._watches += [p.register_post_accumulate_grad_hook(self._see_gradient) for p in trained]
        if len(members) == 1 or self.wire.is_sharded:  # FSDP averages inside the group
            return
        self._ddp = DistributedDataParallel(
            self.model, process_group=group, init_sync=False, **_NO_BUFFERS, **self.options
        )
        if self.rounding != "fp32" or self.options.get("find_unused_parameters") or self.options.get("static_graph"):
            self._ddp.register_comm_hook(group, self._average)
        else:
            watched = next(p for p in self.model.parameters() if p.requires_grad)
            self._watches.append(watched.register_post_accumulate_grad_hook(self._see_backward))

    def unwrap(self) -> None:
        """Let go of the model: no hook of the old wrapper may fire under the next one."""
        if self._ddp is not None:
            # Reducer and logger share ownership of the autograd hooks; both must go.
            self._ddp.__dict__.update(reducer=None, logger=None)
            self._ddp = None
        for watch in self._watches:
            watch.remove()
        self._watches, self._named, self._flags, self._containers = [], {}, [], []

    def release_groups(self) -> None:
        """Release all process groups; the process ends."""
        self.unwrap()
        for module in self._norms:
            module.process_group = None

    def refuse_other_flags(self, step: int) -> None:
        """The same parameters must be trained as when the model was wrapped, and be where and what they were.

        DDP's hooks are on objects that a change of type or device replaces. A single worker may change any.
        """
        self._refuse_new(step)
        now = [_flags(p) for p in self._named.values()]
        if now == self._flags:
            return
        before = dict(zip(self._named, self._flags, strict=True))
        changed = [name for name, p in self._named.items() if before[name] != _flags(p)]
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        p, was = self._named[changed[0]], before[changed[0]]
        if p.requires_grad == was[0]:
            raise ConfigError(
                f"parameter {changed[0]!r}{more} became {p.dtype} on {p.device} after step {step}, it was {was[1]} on "
                f"{was[2]}, and its gradients are averaged no more; undo it, or while all layers are full detach(), "
                "change it, build the optimizer again, and attach() again"
            )
        what = "unfrozen" if p.requires_grad else "frozen"
        raise ConfigError(
            f"parameter {changed[0]!r}{more} was {what} after step {step}, but workers exchange what they trained when "
            "they were attached; undo it, or while all layers are full detach(), freeze or unfreeze, and attach() again"
        )

    def _refuse_new(self, step: int) -> None:
        """A parameter that was added since is averaged by nobody."""
        if not self._named or self._registered == (now := self._count_parts()):
            return
        known = {id(p) for p in self._named.values()}
        if new := [name for name, p in self.model.named_parameters() if id(p) not in known]:
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            raise ConfigError(
                f"parameter {new[0]!r}{more} was added to the model or replaced there by step {step}, but workers "
                "exchange what they trained when they were attached; add it before attach(), or while all layers are "
                "full detach(), add it to the model and its optimizer, and attach() again"
            )
        self._registered = now

    def _count_parts(self) -> tuple[int, int]:
        """Registrations so far, and parts of the model: `insert` of a Sequential or ModuleList registers nothing."""
        return _registered(), sum(map(len, self._containers))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass, prepared for a backward pass that averages gradients."""
        self._averages, self._is_due = self.syncs, False
        if self._ddp is None:
            if self._over_norms > 1:
                self._count_norms()
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

    def pass_without_data(self) -> None:
        """A forward and a backward pass of a worker that has no batch: its gradients are zero, and are averaged."""
        trained = [p for p in self.model.parameters() if p.requires_grad]

        def nothing(*_: Any, **__: Any) -> torch.Tensor:
            parts = [torch.view_as_real(p) if p.is_complex() else p for p in trained]
            return torch.stack([part.sum().float() for part in parts]).sum() * 0.0

        self._averages, self._is_due = True, False
        if self._ddp is None:
            loss = nothing()
        else:
            self._awaits_backward = True
            self._ddp.__dict__["_run_ddp_forward"] = nothing  # in place of the model's own
            try:
                loss = self._ddp()
            finally:
                del self._ddp.__dict__["_run_ddp_forward"]
        self.watch(loss)
        loss.backward()

    def broadcast_buffers(self, members: Ranks = ()) -> None:
        """Overwrite buffers by the first member's, as DDP does before a forward pass."""
        members = members or self.members
        if len(members) > 1:  # else to look for them takes a third of a millisecond
            self.wire.broadcast(list(self.model.buffers()), "buffers", members, self.buffers_from)

    def watch(self, outputs: Any) -> None:
        """Detect a backward pass by the gradients of outputs, the first thing that it computes.

        A parameter's gradient may come in a pass within the pass, as checkpoints have them, which ends too early.
        """
        if self.after_backward is not None:
            see = self._see_output if self._averages else self._see_local_output
            for t in tree_leaves(outputs):
                if isinstance(t, torch.Tensor) and t.requires_grad:
                    t.register_hook(see)

    def _see_output(self, gradient: torch.Tensor) -> None:
        self._see_beginning()
        self._ask_for_end()

    def _see_local_output(self, gradient: torch.Tensor) -> None:
        self._see_beginning()

    def _see_gradient(self, parameter: torch.Tensor) -> None:
        """For a backward pass that does not start at an output."""
        self._see_beginning(parameter)
        if self._averages:
            self._ask_for_end()
            if self.on_gradient is not None:
                self.on_gradient(parameter)

    def _see_beginning(self, parameter: torch.Tensor | None = None) -> None:
        if not self._is_due and self.before_backward is not None:
            self.before_backward(parameter)

    def _ask_for_end(self) -> None:
        """Queue a callback behind DDP's, which is queued later, and behind the end of the wait for it.

        Each is queued by the one before, so this one goes through the queue three times.
        """
        if not self._is_due:
            self._is_due = True
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(lambda: queue(self._end_backward)))

    def _end_backward(self) -> None:
        self._is_due = False
        if self.after_backward is not None:
            self.after_backward()

    def _see_backward(self, parameter: torch.Tensor) -> None:
        """One backward pass that averages: DDP decides by the forward pass before it."""
        if self._awaits_backward:
            self._awaits_backward = False
            self._count_backward()
            self._time_the_wait()

    def _average(self, group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        gradients = bucket.buffer()
        # The reducer multiplies by 1/W too; dividing would round differently.
        gradients.mul_(1.0 / len(self.members))
        travelling = gradients if self.rounding == "fp32" else gradients.to(WIRES[self.rounding])
        if bucket.index() == 0:
            self._time_the_wait()
        if bucket.is_last():
            self._count_backward()
        done = dist.all_reduce(travelling, group=group, async_op=True).get_future()
        if travelling is gradients:
            return done.then(lambda future: future.value()[0])
        return done.then(lambda future: gradients.copy_(future.value()[0]))

    def _time_the_wait(self) -> None:
        """Measure how long DDP waits for pending buckets after the backward pass itself.

        Callbacks at the end of a backward pass run in the order they were asked for. This one is asked for before
        DDP's, which waits; what it asks for in turn runs after DDP's.
        """
        ledger, queue = self.wire.ledger, torch.autograd.Variable._execution_engine.queue_callback
        if not ledger.clock.is_timing:
            return
        sent = self._exchange()[0]

        def computed() -> None:
            start = ledger.clock.mark()
            queue(lambda: ledger.waited("gradients", sent, start, ledger.clock.mark()))

        queue(computed)

    def _exchange(self) -> list[Sent]:
        """What each bucket of gradients sends; DDP fills them from the last parameter on."""
        if not self._buckets:
            trained = [p.detach() for p in self.model.parameters() if p.requires_grad][::-1]
            limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, int(1024**2 * (self.options.get("bucket_cap_mb") or 25))]
            for places in dist._compute_bucket_assignment_by_size(trained, limits)[0]:
                size = sum(self._travelling_size(trained[place]) for place in places)
                self._buckets.append(self.wire.topology.all_reduce(self.members, size))
        return self._buckets

    def _travelling_size(self, parameter: torch.Tensor) -> int:
        reals = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        return size_of(parameter) if self.rounding == "fp32" else reals.numel() * WIRES[self.rounding].itemsize

    @property
    def _over_norms(self) -> int:
        return len(self.norm_members or self.members)

    def _count_norms(self) -> None:
        """SyncBatchNorm gathers mean, deviation and count going forward, and sums two gradients coming back."""
        topology, members = self.wire.topology, self.norm_members or self.members
        for norm in self._norms:
            sent = topology.gather_ring(members, 4 * (2 * norm.num_features + 1))
            sent += topology.all_reduce(members, 4 * 2 * norm.num_features)
            self.wire.count("batch statistics", sent, calls=2)

    def _count_backward(self) -> None:
        """Gradients, and what DDP itself sends: the order of buckets, once, before the second pass; used flags."""
        self.backwards += 1
        if self.members == self.wire.topology.world:
            self.wire.ledger.times.average_gradients()
        self.wire.count_overlapped("gradients", self._exchange())
        if self.options.get("find_unused_parameters") and not self.options.get("static_graph"):
            self.wire.count("control", self.wire.topology.all_reduce(self.members, 4 * self._trained))
        elif self.backwards == 2:
            order = bucket_order(self.wire.topology, self.members, self._trained, len(self._exchange()))
            self.wire.count("control", order, calls=2)


_registrations = 0


def _note_registration(*_: Any) -> None:
    global _registrations
    _registrations += 1


@functools.cache
def _watch_registrations() -> None:
    register_module_parameter_registration_hook(_note_registration)
    register_module_module_registration_hook(_note_registration)


def _registered() -> int:
    """How often modules of this process were given parameters or parts, so that a walk through them may be spared."""
    _watch_registrations()
    return _registrations


def _flags(parameter: nn.Parameter) -> tuple[Any, ...]:
    return parameter.requires_grad, parameter.dtype, parameter.device


def bucket_order(topology: Topology, members: Ranks, trained: int, buckets: int) -> Sent:
    """DDP's broadcast of its bucket order: one int32 per parameter plus one, then one per bucket."""
    order = topology.broadcast(members, 4 * (trained + 1), members[0])
    return order + topology.broadcast(members, 4 * buckets, members[0])
