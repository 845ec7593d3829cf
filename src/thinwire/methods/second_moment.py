"""What Adam divides by while groups train apart.

All-reduce divides the mean gradient by the root of its second moment. A group sees a smaller batch: its gradient is
g + noise of variance σ², where the mean over all workers has s σ² with s the group's share of the workers. Its Adam
divides by the root of v̂ = g² + σ², so where noise dominates its steps are too short by √s. With c for the share of a
gradient's variance that is left in m̂, on average m̂² = g² + c σ², and all-reduce would have divided by the root of

    d = g² + s σ² = v̂ − (1 − s)(v̂ − m̂²) / (1 − c),   from s² v̂ to v̂

`estimate` makes up the difference after each update, from the group's own state, which stays Adam's. `shared` does more
at each average, before it is sent: all groups get the mean m, and each row of a group's v is scaled to the mean of that
row over groups. What a group divided by is known then, and what it should have: its change is multiplied by
√(d before / d after). Where only one group has seen a row of an embedding, that makes the change as long as
all-reduce's; elsewhere it is near 1. The mean of v itself, element by element, costs far more and trains worse: single
elements are noisy, and where one was large lately its change would be stretched.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from thinwire.comm.buckets import reals
from thinwire.errors import ConfigError
from thinwire.factor.matrix import wide
from thinwire.methods.coded_moments import CodedMoments
from thinwire.methods.context import MethodContext
from thinwire.methods.merging import average, average_moments

_SECOND = ("exp_avg_sq", "max_exp_avg_sq")
_WITHOUT = ("SGD", "Muon")
"""Optimizers that do not divide by second moments, and need no correction."""


class Moments(NamedTuple):
    """A parameter's state without Adam's bias, and what is known about it."""

    first: Tensor
    second: Tensor
    noise: float | Tensor
    """c, the share of a gradient's variance that is left in `first`."""
    bias: float | Tensor
    """What `second` was divided by."""


class SecondMoment:
    """Corrects the updates of groups while they train apart."""

    def __init__(
        self, context: MethodContext, kind: str, share: float, is_apart: Callable[[], bool], code: str = "fp32"
    ) -> None:
        """`share` is this group's of all workers, `code` the one for moments that are shared."""
        self.wire, self.optimizers = context.wire, context.optimizers
        self.kind, self.share, self.is_apart = kind, share, is_apart
        self.updates = 0
        """Since all groups had the same first moments."""
        self.coded = CodedMoments(self.wire, code)
        self._rates: list[Any] = []
        if kind != "group":
            self._refuse_others()
            context.before_update.append(self._before_update)
            context.after_update.append(self._after_update)

    def _refuse_others(self) -> None:
        kinds = [type(optimizer).__name__ for optimizer in self.optimizers if not isinstance(optimizer, Adam | AdamW)]
        unknown = [name for name in kinds if name not in _WITHOUT]
        if unknown or len(kinds) == len(self.optimizers):
            raise ConfigError(
                f"`second_moment`={self.kind!r} is for torch's Adam and AdamW, not for {(unknown or kinds)[0]}; leave "
                "it out, then each group divides by its own"
            )

    # Updates.

    def _before_update(self, optimizer: Optimizer) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]  # as this update has them

    @torch.no_grad()
    def _after_update(self, optimizer: Optimizer) -> None:
        if optimizer is self.optimizers[0]:
            self.updates += 1
        if not self.is_apart() or not isinstance(optimizer, Adam | AdamW):
            return
        # A fused update that a scaler skipped has changed nothing.
        skipped = getattr(optimizer, "found_inf", None)
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            for p in group["params"]:
                if p.grad is None or "exp_avg" not in optimizer.state.get(p, ()):
                    continue
                now = self._moments(optimizer.state[p], group)
                denominator = now.second.sqrt().add_(group["eps"])
                wanted = self._wanted(now, self.share).sqrt_().add_(group["eps"])
                missing = now.first.mul_(denominator.reciprocal_().sub_(wanted.reciprocal_())).mul_(rate)
                if skipped is not None:
                    missing.mul_(1 - skipped.to(missing.device))
                values = reals(p.detach())
                values.copy_(values + missing) if values.dtype != missing.dtype else values.add_(missing)

    def _wanted(self, now: Moments, share: float) -> Tensor:
        """d, what all-reduce would divide by the root of."""
        least, second = now.second * share**2, now.second
        excess = torch.addcmul(second, now.first, now.first, value=-1)  # (1 − c) σ²
        noise = _at_most(now.noise, 0.95)  # 1 in Adam's very first update, where it says nothing about noise
        return second.sub(excess.mul_((1 - share) / (1 - noise))).clamp_(min=least, max=second)

    def _moments(self, state: dict[str, Any], group: dict[str, Any]) -> Moments:
        (beta, beta_square), step = group["betas"], _number(state["step"])
        bias, bias_square = 1 - beta**step, 1 - beta_square**step
        second = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
        # The variance of a mean that weighs step i by βⁱ. What it still holds of the time when all had the same first
        # moments has the variance of the world's gradients.
        noise = (1 - beta) * (1 + beta**step) / ((1 + beta) * bias)
        common = (beta ** (2 * self.updates) - beta ** (2 * step)) / (1 - beta ** (2 * step))
        noise = noise * (1 - (1 - self.share) * _at_least(common, 0.0))
        return Moments(wide(reals(state["exp_avg"])) / bias, wide(reals(second)) / bias_square, noise, bias_square)

    # Changes of phase, and averages.

    @torch.no_grad()
    def separate(self) -> None:
        """The world has trained together until now: make its second moments what a group's would be."""
        self.updates = 0
        if self.kind == "group":
            return
        for p, group in self._adams():
            state = self.optimizers.state_of(p)
            now = self._moments(state, group)
            noise = _at_most(now.noise / self.share, 0.95)  # here all of it is shared
            excess = torch.addcmul(now.second, now.first, now.first, value=-1).clamp_(min=0)  # (1 − c) s σ²
            more = excess.mul_((1 / self.share - 1) / (1 - noise)).mul_(now.bias)
            for name in _SECOND:
                if name in state:
                    values = reals(state[name])
                    values.copy_(values + more)

    @torch.no_grad()
    def together(self) -> None:
        """The world trains together from now on: make second moments what all-reduce's would be."""
        if self.kind != "group":
            for p, group in self._adams():
                state = self.optimizers.state_of(p)
                now = self._moments(state, group)
                state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].copy_(self._written(now, p))

    def _written(self, now: Moments, p: nn.Parameter) -> Tensor:
        wanted = self._wanted(now, self.share).mul_(now.bias)
        return torch.view_as_complex(wanted) if p.is_complex() else wanted

    @torch.no_grad()
    def exchange(self, parts: Mapping[int, Sequence[nn.Parameter]]) -> dict[int, Tensor]:
        """Give all groups the mean first moments of parts of the model, and second moments of one size; collective.

        By what each parameter's change is to be multiplied, by id.
        """
        if self.kind != "shared":
            return {}
        parameters = [p for part in parts.values() for p in part]
        adams = {id(p): group for p, group in self._adams()}
        before = {id(p): self._divided_by(p, adams[id(p)], self.share) for p in parameters if id(p) in adams}
        kept = min((group["betas"][0] for group in adams.values()), default=0.0) ** self.updates

        def average_first() -> None:
            for number, part in parts.items():
                self.coded.average(number, [s for p in part if (s := self.optimizers.state_of(p))], kept)

        weight = len(self.wire.topology.group) / self.wire.topology.world_size
        average_moments(self.wire, self.optimizers, parameters, weight, average_states=average_first)
        self._scale_rows([(self.optimizers.state_of(p), adams[id(p)]) for p in parameters if id(p) in adams], weight)
        self.updates = 0
        mean = 1 / len(self.wire.topology.groups)
        gains = {}
        for p in parameters:
            if id(p) in before and self.optimizers.state_of(p):
                gain = before[id(p)] / self._divided_by(p, adams[id(p)], mean)
                gains[id(p)] = gain.clamp_(max=1 / mean)
        return gains

    def _scale_rows(self, states: Sequence[tuple[dict[str, Any], dict[str, Any]]], weight: float) -> None:
        """Give each row of second moments the mean size it has over groups."""
        held = [(state, group, name) for state, group in states for name in _SECOND if name in state]
        if not held or len(self.wire.topology.groups) == 1:
            return
        rows = [_by_row(wide(reals(state[name]))) for state, _, name in held]
        own = torch.cat([row.mean(1) for row in rows])
        mean = own.clone()
        average(self.wire, [mean], weight, "moments")
        sizes = [len(row) for row in rows]
        for (state, group, name), row, was, now in zip(held, rows, own.split(sizes), mean.split(sizes), strict=True):
            # A row without any is filled. An element has at least the square of its first moment, which others may
            # have contributed: Adam would divide by next to nothing.
            scaled = torch.where(was > 0, now / was, 0)[:, None] * row + torch.where(was > 0, 0, now)[:, None]
            least = _by_row(self._least_second(state, group))
            reals(state[name]).copy_(torch.maximum(scaled, least).view_as(reals(state[name])))

    def _least_second(self, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        now = self._moments(state, group)
        return now.first.square_().mul_(now.bias)

    def _divided_by(self, p: nn.Parameter, group: dict[str, Any], share: float) -> Tensor:
        wanted = self._wanted(self._moments(self.optimizers.state_of(p), group), share)
        return wanted.sqrt_().add_(max(group["eps"], math.sqrt(torch.finfo(wanted.dtype).tiny)))

    def _adams(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """Parameters that have moments, with their groups."""
        for optimizer, group in self.optimizers.groups:
            if isinstance(optimizer, Adam | AdamW):
                yield from ((p, group) for p in group["params"] if "exp_avg" in optimizer.state.get(p, ()))

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]


def _by_row(values: Tensor) -> Tensor:
    """Everything behind the first dimension in one; what has but one dimension has rows of one element."""
    return values.reshape(len(values), -1) if values.dim() else values.reshape(1, 1)


def _number(step: Any) -> Any:
    """A step counter that is not on a device as a number, which costs nothing to compute with."""
    return step if isinstance(step, Tensor) and step.device.type != "cpu" else float(step)


def _at_least(value: Any, limit: float) -> Any:
    return value.clamp(min=limit) if isinstance(value, Tensor) else max(value, limit)


def _at_most(value: Any, limit: float) -> Any:
    return value.clamp(max=limit) if isinstance(value, Tensor) else min(value, limit)
