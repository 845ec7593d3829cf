"""Methods that code every gradient after a warm-up: engine 1 alone."""

import sys
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.codecs import aggregator
from thinwire.codecs.aggregate import Aggregator
from thinwire.comm.buckets import reals
from thinwire.comm.topology import Topology
from thinwire.comm.wire import Wire
from thinwire.factor.matrix import wide
from thinwire.factor.optimizers import State
from thinwire.methods.base import Method
from thinwire.methods.context import MethodContext
from thinwire.methods.corrected import SECOND, CorrectedUpdates, Moments, second_of
from thinwire.methods.features import Feature, joins_not, needs_whole_weights


class CodedGradients(Method):
    """A warm-up in one code, then another one to the end."""

    phases: ClassVar[tuple[str, ...]] = ("warmup", "train")
    only_gradients: ClassVar[bool] = True

    @classmethod
    def role(cls, config: Any, topology: Topology) -> Hashable:
        """All workers do the same."""
        return None

    @classmethod
    def refuses(cls, config: Any, feature: Feature) -> str | None:
        """Codes here are of whole weights; a worker without batches does not know when moments were frozen."""
        if feature is Feature.SHARDS:
            return needs_whole_weights(config)
        if feature is Feature.JOIN and getattr(config, "freeze_second_moment", False):
            return joins_not("freeze_second_moment=True")
        return super().refuses(config, feature)

    @staticmethod
    @abstractmethod
    def code_of(config: Any) -> str:
        """What gradients travel in after the warm-up."""

    @abstractmethod
    def aggregator(self, wire: Wire, like: Sequence[Tensor]) -> Aggregator:
        """What averages them after the warm-up."""

    def __init__(self, config: Any, context: MethodContext) -> None:
        super().__init__(config, context)
        self.gradients.makers[self.code_of(config)] = self._make
        is_wanted = getattr(config, "freeze_second_moment", False) and len(self.topology.groups) > 1
        self.frozen = FrozenSecondMoment(context, is_wanted, lambda: is_wanted and self.phase != "warmup")

    def _make(self, wire: Wire, like: Sequence[Tensor]) -> Aggregator:
        """The method's own; a warm-up in the code of that name has the plain one."""
        if self.phase == "warmup":
            return aggregator(self.config.warmup_wire, wire, like, "gradients")
        return self.aggregator(wire, like)

    def attach(self) -> None:
        """Begin with the warm-up; one of no steps is over at once."""
        self.gradients.check(self.code_of(self.config))
        if self.config.warmup_length:
            self.gradients.together(self.config.warmup_wire)
        else:
            self._begin()

    def after_step(self) -> None:
        """The residual of the warm-up is dropped at its end: it is in another code's terms."""
        if self.step == self.config.warmup_length:
            self.check_counters()
            self._begin()

    @property
    def next_event(self) -> int:
        """The end of the warm-up; then every step is like every other."""
        return self.config.warmup_length if self.phase == "warmup" else sys.maxsize

    def _begin(self) -> None:
        self.frozen.freeze()
        self.set_phase("train")
        self.gradients.together(self.code_of(self.config))


class FrozenSecondMoment(CorrectedUpdates):
    """Second moments that stay as the warm-up left them: 1-bit Adam (Tang et al., ICML 2021; arXiv 2102.02888).

    Adam divides by the root of squared gradients. A coded gradient is the true one plus an error that later steps make
    up for. Its first moment averages that error out; its square does not, and where gradients are small it is mostly
    error. With v frozen, Adam is SGD with momentum and one rate per element, which errors do no harm.

    1-bit Adam codes the first moment, here gradients are coded. m is linear in g, so both send the same in the end.
    Errors reach m as (1 − β₁) of what a gradient's code leaves out, instead of all of what a moment's code does.

    Where a frozen v is below m̂², as for a word that the warm-up never showed, m̂² takes its place: an element then moves
    by the learning rate at most. What updates make of second moments, and of parameters because of it, is undone.
    """

    def __init__(self, context: MethodContext, is_wanted: bool, is_frozen: Callable[[], bool]) -> None:
        asked = "`freeze_second_moment`" if is_wanted else ""
        super().__init__(context, asked, "second moments follow the coded gradients")
        self.is_wanted, self.is_frozen = is_wanted, is_frozen
        self.kept: dict[int, State] = {}
        """Copies during an update, by id; held for the next one."""

    @property
    def is_due(self) -> bool:
        return self.is_frozen()

    @torch.no_grad()
    def freeze(self) -> None:
        """From now on they have no bias to correct."""
        if self.is_wanted:
            for p, group in self.adams():
                state = self.optimizers.state_of(p)
                (bias,) = self.moments_of([state], group).bias
                self.kept[id(p)] = _copies(state)
                for name in self.kept[id(p)]:
                    state[name].div_(bias)

    @torch.no_grad()
    def before_update(self, optimizer: Optimizer) -> None:
        """Also keep a copy."""
        super().before_update(optimizer)
        if self.is_due:
            found = {id(p): self.optimizers.state_of(p) for p, _ in self.adams()}
            kept = {key: self.kept.get(key) or _copies(state) for key, state in found.items()}
            for key, copies in kept.items():
                for name, copy in copies.items():
                    copy.copy_(found[key][name])
            self.kept = kept

    @torch.no_grad()
    def after_update(self, optimizer: Optimizer) -> None:
        """Also put the copy back."""
        super().after_update(optimizer)
        if self.is_due:
            for p, _ in self.adams():
                for name, copy in self.kept.get(id(p), {}).items():
                    self.optimizers.state_of(p)[name].copy_(copy)

    def wanted(self, parameters: Sequence[nn.Parameter], now: Moments, group: State) -> list[Tensor]:
        """The frozen ones."""
        found = []
        for p, first, second in zip(parameters, now.first, now.second, strict=True):
            frozen = self.kept.get(id(p))
            found.append(second.clone() if frozen is None else _at_least_squared(frozen[second_of(group)], first))
        return found


def _copies(state: State) -> State:
    return {name: torch.empty_like(state[name]) for name in SECOND if name in state}


def _at_least_squared(second: Tensor, first: Tensor) -> Tensor:
    return torch.maximum(wide(reals(second)), first.square())
