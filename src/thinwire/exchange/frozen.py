"""Second moments that stay as a warm-up left them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.comm.buckets import reals
from thinwire.exchange.context import MethodContext
from thinwire.exchange.corrected import SECOND, CorrectedUpdates, Moments, second_of
from thinwire.exchange.parts import Feature, Run, UpdateRule, joins_not
from thinwire.factor.matrix import wide
from thinwire.factor.optimizers import State


class FreezeSecondMoment(UpdateRule):
    """From the first phase that has it, where there are several groups."""

    def attach(self, run: Run) -> None:
        super().attach(run)
        self.frozen = FrozenSecondMoment(run.context, len(run.topology.groups) > 1, lambda: self._is_due)

    @property
    def _is_due(self) -> bool:
        return self in self.run.parts

    def begin(self, *, again: bool) -> None:
        if not again:
            self.frozen.freeze()

    def refuses(self, feature: Feature, config: Any) -> str | None:
        """A worker without batches does not know when moments were frozen."""
        return joins_not("freeze_second_moment=True") if feature is Feature.JOIN else None


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
