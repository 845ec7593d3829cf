"""Follow the user's steps: hooks on the optimizers, and on the GradScaler if there is one.

A step is over when every optimizer has stepped, in any order. Changes made by anything else are
detected through torch's global optimizer hook or the parameters' version counters.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.base.errors import ThinwireError
from thinwire.comm.wire import Wire
from thinwire.factor.optimizers import Optimizers

Release = Callable[[], None]
_UNSEEN = 16
"""Consecutive batches that may change parameters without a step; sharpness-aware loops do so once or twice per step."""


_following: "weakref.WeakSet[Stepping]" = weakref.WeakSet()


@functools.cache
def _hook_all_optimizers() -> None:
    """Once per process, never removed: garbage collection must not remove a hook while torch iterates over them."""
    register_optimizer_step_pre_hook(_before_any)


def _before_any(optimizer: Optimizer, *_: Any) -> None:
    for stepping in list(_following):
        stepping.refuse_others(optimizer)


class Stepping:
    """Follows the optimizers of one replica."""

    def __init__(
        self,
        optimizers: Optimizers,
        *,
        lr_factor: Callable[[], float],
        before_update: Callable[[Optimizer], None],
        after_update: Callable[[Optimizer], None],
        end_step: Callable[[], None],
    ) -> None:
        self.optimizers = optimizers
        self.lr_factor = lr_factor
        self.before_update, self.after_update, self.end_step = before_update, after_update, end_step
        self._rates: dict[int, list[Any]] = {}
        self._stepped: list[Optimizer] = []
        self._updating: Optimizer | None = None
        self._scaling: Optimizer | None = None
        self._version: int | None = None
        self._changes = 0

    def follow(self, scaler: Any = None, after_scale: Callable[[], None] = lambda: None) -> list[Release]:
        """Hook into every optimizer; with a scaler, a step is a call of `scaler.step`, skipped or not."""
        releases: list[Release] = [self._watch_others()]
        for optimizer in self.optimizers:
            before, after = self._hooks(counts=scaler is None)
            releases.append(optimizer.register_step_pre_hook(before).remove)
            releases.append(optimizer.register_step_post_hook(after).remove)
        return releases if scaler is None else [*releases, self._follow_scaler(scaler, after_scale)]

    def batch(self) -> None:
        """Call at the start of a training batch; raises if parameters keep changing without a step."""
        version = sum(p._version for p in self.optimizers.parameters)
        self._changes += self._version is not None and version != self._version
        self._version = version
        if self._changes >= _UNSEEN:
            kinds = ", ".join(type(o).__name__ for o in self.optimizers)
            raise ThinwireError(
                f"parameters changed in {self._changes} batches in a row without a step of the attached optimizer "
                f"({kinds}): something else trains them and workers drift apart; give attach() the optimizer "
                "that steps"
            )

    def expect_changes(self) -> None:
        """Call after changing parameters on purpose, by a load or for an evaluation."""
        self._version = None

    def _watch_others(self) -> Release:
        """Watch the steps of every optimizer, without keeping the replica alive."""
        _hook_all_optimizers()
        _following.add(self)
        return lambda: _following.discard(self)

    # Called by the optimizers.

    def _hooks(self, *, counts: bool) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(optimizer: Optimizer, *_: Any) -> None:
            self._restore(optimizer)  # after a closure that raised
            if counts:
                self._begin(optimizer)
            elif self._scaling is not optimizer:
                raise ThinwireError(
                    f"{self.optimizers.name(optimizer)} stepped by itself, but a scaler was given to attach(), so "
                    "its gradients may be scaled: call scaler.step(optimizer)"
                )
            self._updating = optimizer
            self._scale_rates(optimizer)
            self.before_update(optimizer)

        def after(optimizer: Optimizer, *_: Any) -> None:
            # Before a phase change, so that schedulers never see the scaled learning rate.
            self._restore(optimizer)
            self._updating = None
            self.after_update(optimizer)
            if counts:
                self._end(optimizer)

        return before, after

    def _follow_scaler(self, scaler: Any, after_scale: Callable[[], None]) -> Release:
        step, update = scaler.step, scaler.update

        def counted_step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            ours = next((o for o in self.optimizers if o is optimizer), None)
            if ours is None:
                return step(optimizer, *args, **kwargs)
            self._begin(ours)
            self._scaling = ours
            try:
                result = step(optimizer, *args, **kwargs)
            finally:
                self._scaling = None
            self._end(ours)
            return result

        def agreeing_update(*args: Any, **kwargs: Any) -> None:
            update(*args, **kwargs)
            after_scale()

        scaler.step, scaler.update = counted_step, agreeing_update

        def release() -> None:
            del scaler.step, scaler.update

        return release

    def _begin(self, optimizer: Optimizer) -> None:
        if any(optimizer is stepped for stepped in self._stepped):
            late = [self.optimizers.name(o) for o in self.optimizers if not any(o is s for s in self._stepped)]
            raise ThinwireError(
                f"{self.optimizers.name(optimizer)} stepped twice before {' and '.join(late)} did: a step is over when "
                "all optimizers of the replica have stepped; call all of them, or attach parts of the model that step "
                "at different times as separate replicas"
            )

    def _end(self, optimizer: Optimizer) -> None:
        self._stepped.append(optimizer)
        if len(self._stepped) == len(self.optimizers):
            self._stepped, self._changes = [], 0
            self.expect_changes()
            self.end_step()

    def _scale_rates(self, optimizer: Optimizer) -> None:
        factor = self.lr_factor()
        if factor != 1.0:
            self._rates[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = None if group["lr"] is None else group["lr"] * factor  # it finds its own

    def _restore(self, optimizer: Optimizer) -> None:
        for group, lr in zip(optimizer.param_groups, self._rates.pop(id(optimizer), ()), strict=False):
            group["lr"] = lr

    def refuse_others(self, optimizer: Optimizer) -> None:
        """Another optimizer must not step our parameters, unless it wraps one of ours, or one of ours wraps it."""
        known = (optimizer, getattr(optimizer, "base_optimizer", None))  # SAM's step takes a closure, and calls ours
        if self._updating is not None or any(each is ours for each in known for ours in self.optimizers):
            return
        ours = {id(p) for p in self.optimizers.parameters}
        if any(id(p) in ours for p in Optimizers(optimizer).parameters):
            raise ThinwireError(
                f"{type(optimizer).__name__} steps parameters of a replica, but was not given to attach(): workers "
                "would drift apart. Was the optimizer rebuilt after attach()? Attach with the one that steps, or "
                "detach() first"
            )


class SharedScale:
    """A scaler whose state is agreed on after each merge; None does nothing."""

    def __init__(self, scaler: Any, wire: Wire) -> None:
        self.scaler = scaler
        self.wire = wire
        self._is_due = False

    def expect(self) -> None:
        """Agree at the next call: a merge happens inside scaler.step, before the scaler's own update."""
        self._is_due = self.scaler is not None

    def agree(self) -> None:
        """The smallest scale and growth tracker of all workers, or each would unscale by its own factor."""
        if not self._is_due:
            return
        self._is_due = False
        state = self.scaler.state_dict()
        if state:
            mine = torch.tensor([-state["scale"], -float(state["_growth_tracker"])], dtype=torch.float64)
            scale, growth = (-self.wire.all_reduce_max(mine, "control")).tolist()
            self.scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": int(growth)})
