"""A replica's part in the user's steps: hooks on the optimizers, and on the GradScaler if there is one.

A step is over when every optimizer has stepped, in whatever order. Whoever else changes the parameters is noticed: by
torch's hook on all optimizers, or by the parameters' version counters.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from thinwire.errors import ThinwireError
from thinwire.factor.optimizers import Optimizers

Release = Callable[[], None]
_UNSEEN = 16
"""Batches in a row that may change parameters without a step; sharpness-aware loops do so once or twice a step."""


_following: "weakref.WeakSet[Stepping]" = weakref.WeakSet()


@functools.cache
def _hear_of_all_optimizers() -> None:
    """Once per process and for good: garbage collection must not take a hook away while torch walks through them."""
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
        """A training batch begins; parameters that keep changing without a step are trained by somebody else."""
        version = sum(p._version for p in self.optimizers.parameters)
        self._changes += self._version is not None and version != self._version
        self._version = version
        if self._changes >= _UNSEEN:
            kinds = ", ".join(type(o).__name__ for o in self.optimizers)
            raise ThinwireError(
                f"parameters changed in {self._changes} batches in a row without a step of what was attached ({kinds})"
                ": something else trains them, and workers do not agree on it; give attach() the torch optimizer that "
                "steps"
            )

    def expect_changes(self) -> None:
        """Parameters were changed on purpose: by a load, or for an evaluation."""
        self._version = None

    def _watch_others(self) -> Release:
        """Hear of every optimizer's steps, without keeping a replica alive that nobody holds any more."""
        _hear_of_all_optimizers()
        _following.add(self)
        return lambda: _following.discard(self)

    # What optimizers call.

    def _hooks(self, *, counts: bool) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(optimizer: Optimizer, *_: Any) -> None:
            self._put_back(optimizer)  # a closure that raised ended the last step before its time
            if counts:
                self._begin(optimizer)
            elif self._scaling is not optimizer:
                raise ThinwireError(
                    f"{self.optimizers.name(optimizer)} stepped by itself, but a scaler was given to attach(), whose "
                    "scale its gradients may have: call scaler.step(optimizer)"
                )
            self._updating = optimizer
            self._scale_rates(optimizer)
            self.before_update(optimizer)

        def after(optimizer: Optimizer, *_: Any) -> None:
            # Before a phase may change, so that schedulers never see the scaled rate.
            self._put_back(optimizer)
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
                "at their own pace as replicas of their own"
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
                group["lr"] = group["lr"] * factor

    def _put_back(self, optimizer: Optimizer) -> None:
        for group, lr in zip(optimizer.param_groups, self._rates.pop(id(optimizer), ()), strict=False):
            group["lr"] = lr

    def refuse_others(self, optimizer: Optimizer) -> None:
        """Another optimizer must not step our parameters, but as a part of one of ours, which then wraps it."""
        if self._updating is not None or any(optimizer is ours for ours in self.optimizers):
            return
        ours = {id(p) for p in self.optimizers.parameters}
        if any(id(p) in ours for p in Optimizers(optimizer).parameters):
            raise ThinwireError(
                f"{type(optimizer).__name__} steps parameters of a replica, but was not given to attach(): workers "
                "would train on without ever agreeing. Was the optimizer built again after attach()? Attach with the "
                "one that steps, or detach() first"
            )
