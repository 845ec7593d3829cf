"""Local SGD (arXiv 1805.09767; with a warm-up, post-local SGD, arXiv 1808.07217).

    1. warm-up: the whole world averages gradients at every step
    2. local: each group trains alone, its members averaging their gradients
    3. every so many steps all groups average their parameters and buffers; then again from 2

With one group there is nobody to average with: it is plain data-parallel training.
"""

import sys
from abc import abstractmethod
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from thinwire.comm.topology import Topology
from thinwire.config import DiLoCo, LocalSGD
from thinwire.methods.base import Cycle, Ground, Method
from thinwire.methods.merging import average_buffers, average_moments, average_parameters, put_back, refuse_diverged


class Apart(Method):
    """The frame: a warm-up by the whole world, then groups that train alone."""

    phases = ("warmup", "local")
    config: LocalSGD | DiLoCo

    @classmethod
    def role(cls, config: LocalSGD | DiLoCo, topology: Topology) -> Hashable:
        """Where sums are coded each group owns another part of them."""
        return super().role(config, topology) if config.wire == "int8" else None

    @abstractmethod
    def begin(self) -> None:
        """Groups are about to part; all workers hold the same model."""

    @abstractmethod
    def exchange(self) -> None:
        """A step of the groups alone is over; exchange what is due."""

    @abstractmethod
    def merge(self) -> None:
        """Leave one model on all workers, now."""

    def attach(self) -> None:
        """Begin with the warm-up; one of no steps is over at once."""
        self.replicated.wrap(self.topology.world)
        self._part_if_due()

    def after_step(self) -> None:
        """Count it, agree on the buffers inside the group, and exchange what is due between groups."""
        self.step += 1
        self.replicated.hand_on_buffers()
        if self.phase == "local":
            self.exchange()
        else:
            self._part_if_due()

    @property
    def spans_world(self) -> bool:
        """False while groups train apart."""
        return self.phase == "warmup" or len(self.topology.groups) == 1

    @property
    def local_step(self) -> int:
        """Steps since the warm-up."""
        return self.step - self.config.warmup_length

    @property
    def weight(self) -> float:
        """This group's share in a mean over workers."""
        return len(self.topology.group) / self.topology.world_size

    def check_health(self) -> None:
        """A group that diverged stops the run here, by name."""
        refuse_diverged(self.wire, self.model, self.observed, self.step)

    def finish(self, cutoff: float | None) -> None:
        """One model again; cut it where a cutoff is given."""
        if self.phase == "local":
            self.check_counters()
            self.merge()
        super().finish(cutoff)

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to where the save was made."""
        super().load_state(state)
        self.replicated.wrap(self.topology.group if self.phase == "local" else self.topology.world)

    def _part_if_due(self) -> None:
        if self.local_step < 0:
            return
        self.check_counters()
        self._set_phase("local")
        if self.replicated.members != self.topology.group:  # a lone group goes on with its wrapper as it is
            self.replicated.wrap(self.topology.group)
        self.begin()


class LocalSGDMethod(Apart):
    """Parameters averaged now and then."""

    config: LocalSGD

    def __init__(self, config: LocalSGD, ground: Ground) -> None:
        super().__init__(config, ground)
        self.base: list[Tensor] = []
        self.averaged_at = 0

    @property
    def quiet_until(self) -> int:
        """The end of the warm-up, then the next average."""
        if self.phase == "warmup":
            return self.config.warmup_length
        if self.spans_world:
            return sys.maxsize
        return self.step + self.config.every - self.local_step % self.config.every

    @property
    def cycle(self) -> Cycle | None:
        """From one average to the next."""
        if self.phase == "warmup":
            return None
        return Cycle((self.local_step % self.config.every, self.averaged_at == self.step), sys.maxsize)

    def shift(self, steps: int) -> None:
        """So much later was the last average."""
        super().shift(steps)
        self.averaged_at += steps

    def begin(self) -> None:
        """Note where all groups start from."""
        self._agreed()

    def exchange(self) -> None:
        """Average everything the config says, if it is time."""
        if self.local_step % self.config.every or self.spans_world:
            return
        self.check_counters()
        self.merge()
        if self.config.moments == "reset":
            self.optimizers.reset(self.parameters())
        elif self.config.moments == "average":
            average_moments(self.wire, self.optimizers, self.parameters(), self.weight)
        self._agreed()
        self.ground.after_merge()

    def merge(self) -> None:
        """Parameters and buffers by their mean; right after an average they are it already."""
        if self.spans_world or self.averaged_at == self.step:
            return
        self.check_health()
        trained = self._trained()
        average_parameters(self.wire, trained, [self.weight] * len(trained), self.config.wire, self.base)
        average_buffers(self.wire, self.model.buffers(), self.weight)

    @contextmanager
    def lend_merged(self) -> Iterator[None]:
        """Lend the average, and put the group's own back."""
        with put_back(self.model):
            self.merge()
            yield

    def state(self) -> dict[str, Any]:
        """With the step of the last average."""
        return {**super().state(), "averaged_at": self.averaged_at}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to where the save was made."""
        super().load_state(state)
        self.averaged_at = state["averaged_at"]

    def tensors(self) -> dict[str, Tensor]:
        """The last average, where the wire carries differences to it."""
        return {f"base.{i}": t for i, t in enumerate(self.base)}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take the last average back; in a save of one group it is the model."""
        self.base = [tensors[f"base.{i}"] for i in range(len(tensors))]
        if not tensors and self.phase == "local":
            self._copy_base()

    def _agreed(self) -> None:
        self.averaged_at = self.step
        self.observed.zero_()
        self._copy_base()

    def _copy_base(self) -> None:
        rounded = self.config.wire != "fp32" and not self.spans_world
        self.base = [p.detach().clone() for p in self._trained()] if rounded else []

    def _trained(self) -> list[nn.Parameter]:
        """Parameters the user froze are the same everywhere."""
        return [p for p in self.parameters() if p.requires_grad]
