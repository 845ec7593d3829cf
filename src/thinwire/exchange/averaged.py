"""Tensors that groups average from time to time: in a code, with an outer step, while training continues.

In fp32 and without an outer step the values themselves are averaged. Otherwise a group sends its change since the last
agreed values, because codes would lose small changes of large values; the mean change is applied, or is a gradient for
the outer step.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.base.errors import ConfigError, DivergedError
from thinwire.codecs import aggregator
from thinwire.codecs.aggregate import Aggregator, Exact, Rotating
from thinwire.comm.buckets import all_finite, pack_wide, reals
from thinwire.comm.wire import Wire
from thinwire.config.common import Nesterov, Radial
from thinwire.exchange.merging import restored

Tensors = Callable[[], Sequence[Tensor]]


@dataclass
class PendingAverage:
    """What was sent and is not applied yet."""

    sent: int
    """The step at which it was sent."""
    overlap: int
    """Steps after which it is due."""
    received: bool = False
    """Whether it was waited for before it is due; it is in `scratch` then."""
    own: Tensor | None = None
    """The values that this group sent, where it is to keep what it trained since."""


class AveragedTensors:
    """Tensors that travel together, one after the other in a flat vector."""

    def __init__(
        self,
        wire: Wire,
        tensors: Tensors,
        code: str,
        step: int,
        *,
        outer: Nesterov | Radial | None = None,
        rotating: bool = False,
        offload: bool = False,
        measured: bool = False,
        scaled: bool = False,
        is_fixed: Callable[[Tensor], bool] = lambda t: False,
        copies_of: Callable[[Tensor], Sequence[Tensor]] = lambda t: (),
    ) -> None:
        """`tensors` gives them as they are now; with `rotating` one member of a group carries all of them.

        Those that are fixed are sent with the others and never moved. With `offload` the CPU holds everything between
        two averages. Where an optimizer trains a copy of a tensor, the first of its `copies_of`, that is averaged,
        and the tensor and other copies follow. If `measured`, groups say with each average how far they came, unless
        values are averaged. With `scaled` changes are sent in any code.
        """
        self.wire = wire
        self.tensors = tensors
        self.is_fixed = is_fixed
        self.copies_of = copies_of
        self.outer = outer
        self.level = step
        """The last step after which all groups held the same tensors."""
        self.pending: PendingAverage | None = None
        self.momentum: Tensor | None = None
        """None before the first outer step."""
        flat = pack_wide(self._masters)
        self.scratch = torch.empty_like(flat)  # allocating it each time costs more than filling it
        self.agreed = None if code == "fp32" and outer is None and not scaled else flat
        """What groups last agreed on; None where values are averaged."""
        self._shapes = [reals(t).shape for t in tensors()]
        self._is_flat = True
        made = self._aggregators(code, rotating)
        self._is_flat = isinstance(made.turns[0] if isinstance(made, Rotating) else made, Exact)
        self.aggregator: Aggregator = made
        self.notes = ChangeNotes(wire) if measured and self.agreed is not None else None
        """How far groups came; None if it is not measured."""
        self._offload = offload
        self.to_cpu()

    def _aggregators(self, code: str, rotating: bool) -> Aggregator:
        like = _views(self.scratch, self._shapes)

        def make() -> Aggregator:
            return aggregator(code, self.wire, like, "merge")

        return Rotating(self.wire, make) if rotating and len(self.wire.topology.groups) > 1 else make()

    # An average.

    def send(
        self,
        step: int,
        overlap: int,
        *,
        keep_own: bool = False,
        weights: Sequence[float] | None = None,
        senders: Sequence[int] | None = None,
        scales: Sequence[Tensor | None] = (),
        gain: float = 1.0,
        last: bool = False,
    ) -> None:
        """Send this group's values or change; the mean is due `overlap` steps later.

        `weights` are this group's for each tensor and add up to 1 over groups; by default by its number of workers.
        Groups that are not among `senders` have changed nothing, and have no weight. `scales` multiply this group's
        change of each tensor, element by element, and `gain` all of it; at a gain of 0 this group sends nothing, and
        forgets what it has left unsent. The `last` time a finer code takes along what is still unsent.
        """
        self._check_size()
        self._to_device()
        flat = self._packed()
        self.pending = PendingAverage(step, overlap, own=flat.clone() if keep_own else None)
        if self.agreed is not None:
            flat.sub_(self.agreed)
        if gain == 0.0:
            flat.zero_()  # whatever it holds
            self.aggregator.forget()
        elif gain != 1.0:
            flat.mul_(gain)
        if self.agreed is not None:
            if self.notes is not None:
                self.notes.send(self._cut(flat), weights, overlap)
            for part, scale in zip(self._cut(flat), scales, strict=False):
                if scale is not None:
                    part.mul_(scale)
        weighted = weights is not None and len(self.wire.topology.groups) > 1
        if isinstance(self.aggregator, Exact):
            self.aggregator.weighted = weighted
        if weights is not None and weighted:
            self._weigh(flat, weights)
        self.aggregator.choose_senders(senders)
        if last:
            self.aggregator.refine()
        healthy = self._is_flat or self.wire.all_of_group(all_finite([flat]))
        self.aggregator.begin(self._parts, healthy=healthy, steps=overlap)

    def _weigh(self, flat: Tensor, weights: Sequence[float]) -> None:
        if not isinstance(self.aggregator, Exact):  # it weighs by the number of workers
            topology = self.wire.topology
            weights = [weight * topology.world_size / len(topology.group) for weight in weights]
        torch._foreach_mul_(self._cut(flat), list(weights))

    @property
    def turn(self) -> int | None:
        """The step at which the pending average needs `middle`."""
        pending = self.pending
        if pending is None or pending.received:
            return None
        turn = self.aggregator.turn(pending.overlap)
        return None if turn is None else pending.sent + turn

    @property
    def due(self) -> int | None:
        """The step at which the pending average is applied."""
        return None if self.pending is None else self.pending.sent + self.pending.overlap

    def receive(self) -> bool:
        """Wait for the mean, even before it is due; False if it is not finite, and then it is dropped."""
        assert self.pending is not None, "no average is pending"
        if not self.pending.received:
            if self.notes is not None:
                self.notes.receive()
            sound = self.aggregator.end(self._parts) and all_finite([self.scratch])
            if not self.wire.all_of_group(sound):
                self.pending = None
                return False
            self.aggregator.commit()
            self.pending.received = True
        return True

    def distance(self) -> float:
        """How far this group's values are from the agreed ones; none where values are averaged."""
        if self.agreed is None:
            return 0.0
        self._check_size()
        self._to_device()
        change = self._packed().sub_(self.agreed)
        return self.wire.read(lambda: float(torch.linalg.vector_norm(change, dtype=torch.float64)), 0.0)

    def outer_state(self) -> Iterator[tuple[str, int, Tensor]]:
        """What all workers hold alike beside the tensors: its name, for which of them, and the values."""
        for name, flat in (("agreed values", self.agreed), ("outer momentum", self.momentum)):
            for i, part in enumerate(self._cut(flat) if flat is not None else ()):
                yield name, i, part

    def mean_lengths(self) -> Tensor:
        """How far the mean of the groups has come in each tensor; after `receive`."""
        return self.wire.norms_of_group(torch.stack(torch._foreach_norm(self._cut(self.scratch))))

    def agree(self, *, outer: bool = True, gains: Tensor | None = None) -> PendingAverage:
        """Make the mean what groups agree on, by an outer step unless `outer` is False; the tensors stay.

        `gains` are what a radial step multiplies each tensor's mean change by.
        """
        assert self.pending is not None and self.pending.received, "nothing was received"
        pending, self.pending = self.pending, None
        if self.agreed is None:
            return pending
        change, agreed = self.scratch, self.agreed
        if gains is not None and outer:
            torch._foreach_mul_(self._cut(change), list(gains))
        if not (isinstance(self.outer, Nesterov) and outer):
            torch.add(agreed, change, out=change)
        else:
            # As torch.optim.SGD with Nesterov momentum does, for the gradient that is minus the change.
            if mu := self.outer.momentum:
                self.momentum = change.clone() if self.momentum is None else self.momentum.mul_(mu).add_(change)
                change.add_(self.momentum, alpha=mu)
            torch.add(agreed, change, alpha=self.outer.lr, out=change)
        self.agreed, self.scratch = change, agreed
        return pending

    def move(self, weight: float, step: int) -> None:
        """Move the tensors by the fraction `weight` towards the agreed values."""
        self.wire.compute(lambda: self._move_tensors(weight))
        if weight >= 1:
            self.level = step
        if self.pending is None:
            self.to_cpu()

    def _move_tensors(self, weight: float) -> None:
        with self._widened() as (wide, target):
            if weight < 1:
                torch._foreach_lerp_(wide, target, weight)
            else:
                torch._foreach_copy_(wide, target)

    def _packed(self) -> Tensor:
        """What is averaged, as it is now, in `scratch`."""
        self.wire.compute(lambda: pack_wide(self._masters, out=self.scratch))
        return self.scratch

    def shift_from(self, own: Tensor) -> None:
        """Add the difference between the agreed values and `own`, which is overwritten."""
        target = self.scratch if self.agreed is None else self.agreed
        difference = torch.sub(target, own, out=own)
        self.wire.compute(lambda: self._add_to_tensors(difference))

    def _add_to_tensors(self, difference: Tensor) -> None:
        with self._widened(difference) as (wide, change):
            torch._foreach_add_(wide, change)

    @contextmanager
    def _widened(self, flat: Tensor | None = None) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """The tensors in the flat vector's dtype, written back at the end; and the part of the vector for each."""
        flat = flat if flat is not None else self.scratch if self.agreed is None else self.agreed
        parts = self._cut(flat)
        pairs = [(t, part) for t, part in zip(self.tensors(), parts, strict=True) if not self.is_fixed(t)]
        held = [reals(self._master_of(t)) for t, _ in pairs]
        wide = [t.detach().to(flat.dtype) for t in held]
        yield wide, [part for _, part in pairs]
        for (t, _), own, changed in zip(pairs, held, wide, strict=True):
            if own.dtype != changed.dtype:
                own.detach().copy_(changed)
            for other in (t, *self.copies_of(t)):
                if own is not reals(other):
                    reals(other).detach().copy_(own)

    @property
    def _masters(self) -> list[Tensor]:
        return [self._master_of(t) for t in self.tensors()]

    def _master_of(self, tensor: Tensor) -> Tensor:
        """What is averaged for it."""
        return next(iter(self.copies_of(tensor)), tensor)

    @property
    def _parts(self) -> list[Tensor]:
        return [self.scratch] if self._is_flat else self._cut(self.scratch)

    def _cut(self, flat: Tensor) -> list[Tensor]:
        """A flat vector in the shapes of the tensors."""
        return self.wire.read(lambda: _views(flat, self._shapes), self.aggregator.like)

    def _check_size(self) -> None:
        """Refuse tensors that are not those that were attached any more."""
        now = sum(reals(t).numel() for t in self.tensors())
        if now != len(self.scratch):
            raise ConfigError(
                f"what groups average had {len(self.scratch)} values when it was attached and has {now}; "
                "detach() before parameters or running statistics change their size, and attach() again"
            )

    # Where it is held.

    def to_cpu(self) -> None:
        """Let the CPU hold everything until the next average, if that was asked for."""
        if self._offload:
            self.wire.compute(lambda: self._move("cpu"))

    def _to_device(self) -> None:
        if self._offload:
            self.wire.compute(lambda: self._move(reals(self.tensors()[0]).device))

    def _move(self, device: torch.device | str) -> None:
        for name in ("agreed", "momentum", "scratch"):
            if (held := getattr(self, name)) is not None:
                setattr(self, name, held.to(device))
        self.aggregator.move(torch.device(device))

    # Checkpoints.

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore everything at the end, except the tensors themselves."""
        names = ("pending", "momentum", "agreed", "scratch", "level")
        before = {name: getattr(self, name) for name in names}
        copies = {name: t.clone() for name, t in before.items() if isinstance(t, Tensor)}
        kept = [{n: t.clone() for n, t in s.items()} for s in (self.aggregator.shared(), self.aggregator.local())]
        noted = self.notes.values if self.notes is not None else None
        try:
            vars(self).update(copies)
            yield
        finally:
            vars(self).update(before)
            self.aggregator.load(kept[0], kept[1])
            if self.notes is not None:
                self.notes.values = noted

    def shift(self, steps: int) -> None:
        """As if everything so far had happened `steps` steps later; for plans."""
        self.level += steps
        if self.pending is not None:
            self.pending.sent += steps

    def drop(self) -> None:
        """Wait for a pending average and discard it: it may be what diverged."""
        if self.pending is not None and not self.pending.received:
            if self.notes is not None:
                self.notes.receive()
            self.aggregator.end(self._parts)
        self.pending = None

    def abandon(self) -> None:
        """Forget a pending average without waiting: a group was lost, so that it may arrive at some and not at others.

        What its code left out goes too, since only those at whom it arrived know what that is.
        """
        if self.pending is not None:
            self.pending = None
            for left_out in self.aggregator.residuals():
                left_out.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The agreed values, and what arrived but is not due yet."""
        pending = self.pending
        shared = {
            "level": self.level,
            "pending": None if pending is None else [pending.sent, pending.overlap],
            "agreed": self.agreed,
            "momentum": self.momentum,
            "received": self.scratch if pending is not None else None,
            "own": pending.own if pending is not None else None,
            "notes": self.notes.values if pending is not None and self.notes is not None else None,
            "aggregator": self.aggregator.shared(),
        }
        return {"shared": shared, "local": self.aggregator.local()}

    def load_state_dict(self, shared: dict[str, Any], local: dict[str, Tensor], stays: bool = False) -> None:
        """Continue from a state; `stays` if it is this worker's own, beside other groups than before."""
        agreed = shared["agreed"]
        if agreed is not None and agreed.shape != self.scratch.shape:
            raise ConfigError(
                f"the save holds {len(agreed)} values that groups average, here are {len(self.scratch)}; "
                "build the same model, with the same parameters frozen"
            )
        self.level, self.agreed, self.momentum = shared["level"], agreed, shared["momentum"]
        self.pending = None
        if shared["pending"] is not None:
            sent, overlap = shared["pending"]
            self.pending = PendingAverage(sent, overlap, received=True, own=shared["own"])
            self.scratch = shared["received"]
            if self.notes is not None:
                self.notes.values = shared["notes"]
        (self.aggregator.keep if stays else self.aggregator.load)(shared["aggregator"], local)


@contextmanager
def all_restored(model: nn.Module, averaged: Sequence[AveragedTensors]) -> Iterator[None]:
    """Restore the model and these averages at the end."""
    copies = [copy for each in averaged for t in each.tensors() for copy in each.copies_of(t)]
    with restored(model, *copies), ExitStack() as stack:
        for each in averaged:
            stack.enter_context(each.restored())
        yield


def not_finite(step: int) -> DivergedError:
    """The error for a mean that is not finite although every group's values are."""
    return DivergedError(
        f"what groups sent does not add up to finite numbers at step {step}, so nothing was merged; lower the learning "
        "rate or go back to a checkpoint"
    )


def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """A flat vector in the shapes of the tensors that it holds one after the other."""
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class ChangeNotes:
    """Means over groups, small enough to arrive before the average itself does."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.values: Tensor | None = None
        """After `receive`, for each tensor the mean length of its changes and the mean of their sketches, (1 + 64,
        tensors)."""
        self._sum = Exact(wire, [], "control")
        self._sum.weighted = True

    def send(self, changes: Sequence[Tensor], weights: Sequence[float] | None, overlap: int) -> None:
        """This group's, times its weight in the mean of each tensor."""
        topology, first = self.wire.topology, changes[0]
        if len(topology.groups) == 1:
            self.values = None  # those of a pending average, which others have sent
            return
        self.values = self.wire.read(lambda: self._own(changes, weights), first.new_empty(1 + SIZE, len(changes)))
        self._sum.begin([self.values], steps=overlap)

    def _own(self, changes: Sequence[Tensor], weights: Sequence[float] | None) -> Tensor:
        topology, first = self.wire.topology, changes[0]
        sketches = torch.stack([sketch(change) for change in changes], dim=1)  # (sketch, tensors)
        lengths = self.wire.norms_of_group(torch.stack(torch._foreach_norm(list(changes))))
        values = torch.cat([lengths[None], sketches])
        share = len(topology.group) / topology.world_size
        return values.mul_(share if weights is None else first.new_tensor(weights))

    def receive(self) -> None:
        """Wait for those of all groups."""
        if self.values is not None:
            self._sum.end([self.values])


SIZE = 64
_COLUMNS = 4096


def sketch(tensor: Tensor) -> Tensor:
    """64 sums of elements with random signs, the same for all tensors of this size; small tensors are kept as they are.

    The mean of the squared length is that of the tensor; it varies by 18 %, and by up to 35 % for those of
    regular values, such as rank one.
    """
    flat = tensor.reshape(-1)
    if len(flat) <= SIZE:
        return torch.nn.functional.pad(flat, (0, SIZE - len(flat)))
    # Every element of a block has a sign of its own: with one per row, changes of low rank would add up or cancel.
    signs = _signs(flat.device, flat.dtype)
    count, rest = divmod(len(flat), len(signs))
    tail = torch.nn.functional.pad(flat[len(flat) - rest :] * signs[:rest], (0, -rest % SIZE))
    found = tail.view(-1, SIZE).sum(0)
    if not count:
        return found
    blocks = flat[: len(flat) - rest].view(count, SIZE, _COLUMNS).transpose(0, 1)
    sums = torch.bmm(blocks, signs.view(SIZE, _COLUMNS, 1))[..., 0]  # (64, count, columns) @ (64, columns, 1)
    more = _signs(flat.device, flat.dtype, seed=1).repeat(-(-sums.numel() // len(signs)))[: sums.numel()]
    return found + (sums * more.view_as(sums)).sum(1)


@functools.cache
def _signs(device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (SIZE * _COLUMNS,), generator=generator).mul_(2).sub_(1).to(device, dtype)
