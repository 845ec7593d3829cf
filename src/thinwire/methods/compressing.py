"""What methods have in common that compress gradients between groups.

Inside a group gradients are averaged as they are, by DistributedDataParallel over the fast link. At the end of the
backward pass, before anybody clips or steps, groups exchange them in a compressed form, and every worker's `.grad`
holds the same values. With one group nothing is compressed: it is plain data-parallel training.

What a code does not say is kept for the next step. It changes only when a step is taken: an exchange whose gradients
are thrown away by `zero_grad()`, or whose step a GradScaler skips, leaves no trace.

A gradient that is not finite is not compressed. Its worker says so with what it sends, so that all workers know at
once: without a GradScaler the run stops with the worker's and the layer's name; with one, all skip the step.
"""

import sys
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.comm.codec import unpack_into
from thinwire.comm.collectives import Wire
from thinwire.comm.compressed import CompressedSum
from thinwire.comm.quantize import Quantizer, Rows
from thinwire.comm.topology import Topology
from thinwire.errors import ConfigError, DivergedError
from thinwire.methods.base import Ground, Method


class Compressing(Method):
    """Exact inside a group, compressed between groups, at every step."""

    phases: ClassVar[tuple[str, ...]] = ("warmup", "train")

    def __init__(self, config: Any, ground: Ground) -> None:
        super().__init__(config, ground)
        self.trained: list[nn.Parameter] = []
        self.names: list[str] = []
        self._scale = 1.0
        self._staged = False  # gradients were exchanged for a step that is not taken yet
        self._updated = False

    @property
    @abstractmethod
    def plain_steps(self) -> int:
        """Steps of plain all-reduce before anything is compressed."""

    @abstractmethod
    def prepare(self) -> None:
        """Make room for what is kept from step to step."""

    @abstractmethod
    def exchange(self, healthy: bool, again: bool) -> bool:
        """Replace every `.grad` by the mean over groups, as far as it is sent; False if anyone was unhealthy.

        `again` is one more of the same step, whose gradients were accumulated on top of what the last one left. What is
        kept from step to step stays as it is until `commit`.
        """

    @abstractmethod
    def commit(self) -> None:
        """The step is taken: keep what the exchanges for it left."""

    @abstractmethod
    def carried(self) -> list[Tensor]:
        """Tensors in units of the gradient that are kept from step to step."""

    @classmethod
    def role(cls, config: Any, topology: Topology) -> Hashable:
        """All do the same."""
        return None

    def attach(self) -> None:
        """Begin plain or compressed."""
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.names, self.trained = [name for name, _ in named], [p for _, p in named]
        self.prepare()
        self._wrap()

    @property
    def quiet_until(self) -> int:
        """The first compressed step; then every step is like every other."""
        return self.plain_steps if self.step < self.plain_steps else sys.maxsize

    def before_backward(self, parameter: Tensor | None = None) -> None:
        """Whoever set gradients to zero without a step has thrown away what the last exchange put there."""
        if self._staged:
            others = (p.grad for p in self.trained if p.grad is not None and p is not parameter)
            self._staged = any(bool(gradient.any()) for gradient in others)

    def after_update(self, optimizer: Optimizer) -> None:
        """The step was not skipped."""
        self._updated = True

    def after_step(self) -> None:
        """Count it, agree on the buffers, and begin to compress when it is time."""
        if self._staged and self._updated:
            self.commit()
        self._staged = self._updated = False
        self.step += 1
        self.replicated.hand_on_buffers(self.topology.world)
        if self.step == self.plain_steps:
            self.check_counters()
            self._wrap()

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to where the save was made."""
        super().load_state(state)
        self._scale = state["scale"]
        self._wrap()

    def state(self) -> dict[str, Any]:
        """With the scale that kept tensors are in."""
        return {**super().state(), "scale": self._scale}

    @property
    def _compresses(self) -> bool:
        return len(self.topology.groups) > 1 and self.step >= self.plain_steps

    def _wrap(self) -> None:
        self._set_phase(self.phases[-1 if self.step >= self.plain_steps else 0])
        self.replicated.after_backward = self._exchange if self._compresses else None
        self.replicated.before_backward = self.before_backward if self._compresses else None
        self.replicated.norm_members = self.topology.world
        self.replicated.wrap(self.topology.group if self._compresses else self.topology.world)

    def _exchange(self) -> None:
        device = self.trained[0].device.type
        # The user's backward pass may stand in an autocast, which would round products here.
        with torch.no_grad(), torch.autocast("cpu" if device == "meta" else device, enabled=False):
            self._fill_gradients()
            self._follow_scale()
            bad = self._first_bad()
            self._staged = self.exchange(bad is None, self._staged)
            if not self._staged:
                self._refuse(bad)

    def _fill_gradients(self) -> None:
        """What was not used here counts as zero: others may have used it."""
        for name, p in zip(self.names, self.trained, strict=True):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.is_sparse:
                raise ConfigError(f"{name!r} has a sparse gradient, which cannot be compressed: give it sparse=False")

    @property
    def gradients(self) -> list[Tensor]:
        """Every trained parameter's."""
        return [p.grad for p in self.trained if p.grad is not None]

    def _first_bad(self) -> int | None:
        """The first parameter whose gradient is not finite."""
        if self.trained[0].is_meta:
            return None
        norms = torch.stack(torch._foreach_norm(self.gradients))
        suspects = torch.nonzero(~torch.isfinite(norms)).flatten().tolist()  # or finite, but too large to be squared
        return next((i for i in suspects if not bool(torch.isfinite(self.gradients[i]).all())), None)

    def _follow_scale(self) -> None:
        """What is kept is in units of the scaled gradient."""
        scale = self.ground.scale()
        if scale != self._scale:
            for t in self.carried():
                t.mul_(scale / self._scale)
            self._scale = scale

    def _refuse(self, bad: int | None) -> None:
        if self.ground.has_scaler:
            for g in self.gradients:
                g.fill_(float("inf"))  # the scaler of every worker skips this step
            return
        found = self.wire.everyone([-1 if bad is None else bad], "control")
        which = [(rank, self.names[int(row[0])]) for rank, row in enumerate(found) if row[0] >= 0]
        told = "; ".join(f"rank {rank} has one in {name!r}" for rank, name in which)
        raise DivergedError(
            f"a gradient is not finite at step {self.step + 1}, so nothing was compressed or applied: {told}; "
            "lower the learning rate or go back to a checkpoint; if a GradScaler is to skip such steps, pass it to "
            "attach(…, scaler=scaler)"
        )


class Coded(Compressing):
    """Gradients in a few bits an element where `is_coded` says so; the others travel as they are."""

    sum: CompressedSum | None = None

    @classmethod
    def role(cls, config: Any, topology: Topology) -> Hashable:
        """Each group owns another part of the sum."""
        return len(topology.groups), topology.group_index

    @abstractmethod
    def coder(self) -> Quantizer:
        """How they are written."""

    @abstractmethod
    def is_coded(self, p: nn.Parameter) -> bool:
        """Whether a parameter's gradient is coded."""

    @abstractmethod
    def rows(self, coded: list[nn.Parameter]) -> list[Rows]:
        """How the gradients of coded parameters, one after the other, are cut into rows with scales of their own."""

    def prepare(self) -> None:
        """A residual for every coded element of this worker's share."""
        self.coded = [i for i, p in enumerate(self.trained) if self.is_coded(p)]
        self.dense = [i for i, p in enumerate(self.trained) if not self.is_coded(p)]
        if len(self.topology.groups) > 1 and self.coded:
            coded = [self.trained[i] for i in self.coded]
            self.sum = CompressedSum(self.wire, self.rows(coded), self.coder(), coded[0].device, "gradients")
            self.pieces = pieces([p.numel() for p in coded], self.sum.span)

    def carried(self) -> list[Tensor]:
        """Both errors."""
        return [self.sum.residual, self.sum.owned] if self.sum else []

    def exchange(self, healthy: bool, again: bool) -> bool:
        """Add to what was left, send its code, take the sum's."""
        gradients = self.gradients
        dense = [gradients[i] for i in self.dense]
        if self.sum is None:
            return sum_plain(self.wire, dense, healthy)
        coded = [gradients[i] for i in self.coded]
        if healthy:
            self.sum.add([piece.of(coded) for piece in self.pieces], [p.slice for p in self.pieces], again)
        total = self.sum.run(healthy, again)
        if total is None:
            return False
        unpack_into(total[: sum(g.numel() for g in coded)], coded)
        return sum_plain(self.wire, dense)

    def commit(self) -> None:
        """Both errors."""
        if self.sum is not None:
            self.sum.commit()

    def workspace(self) -> list[Tensor]:
        """Both errors as they will be."""
        return self.sum.workspace() if self.sum else []

    def own_tensors(self) -> dict[str, Tensor]:
        """Both errors."""
        return self.sum.state() if self.sum else {}

    def load_own_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take both back."""
        if self.sum is not None and tensors:
            self.sum.load_state(tensors)

    def load_others_tensors(self, everyone: list[dict[str, Tensor]]) -> None:
        """All that the old world had not sent yet, shared by the new one."""
        if self.sum is not None and everyone[0]:
            self.sum.adopt(everyone)
        else:
            for t in self.carried():
                t.zero_()


class Piece(NamedTuple):
    """A part of one tensor, and where it lies in a worker's share."""

    tensor: int
    start: int
    end: int
    place: int

    @property
    def slice(self) -> slice:
        """Where it lies in the share."""
        return slice(self.place, self.place + self.end - self.start)

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The part itself, flat."""
        return tensors[self.tensor].reshape(-1)[self.start : self.end]


def pieces(sizes: Sequence[int], span: tuple[int, int]) -> list[Piece]:
    """What of tensors that lie one after the other falls into a span."""
    found, begin = [], 0
    for i, size in enumerate(sizes):
        start, end = max(begin, span[0]), min(begin + size, span[1])
        if start < end:
            found.append(Piece(i, start - begin, end - begin, start - span[0]))
        begin += size
    return found


def sum_plain(wire: Wire, gradients: Sequence[Tensor], healthy: bool | None = None) -> bool:
    """Replace gradients by their mean over groups as they are; with `healthy`, say so and hear whether all are."""
    weight = len(wire.topology.group) / wire.topology.world_size
    travelling = list(gradients)
    if healthy is not None and gradients:
        travelling.append(gradients[0].new_tensor([float(not healthy) / weight], dtype=torch.float32))
    if travelling:
        torch._foreach_mul_(travelling, weight)
        wire.sum_over_groups(travelling, "gradients")
    return healthy is None or not gradients or gradients[0].is_meta or not bool(travelling[-1])
