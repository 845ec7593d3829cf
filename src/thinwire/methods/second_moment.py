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
all-reduce's; elsewhere it is near 1. The mean of v itself, element by element, would cost far more;
single elements are noisy too, and where one was large lately its change would be stretched.
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
from thinwire.factor.optimizers import State
from thinwire.methods.coded_moments import CodedMoments
from thinwire.methods.context import MethodContext
from thinwire.methods.merging import average, average_moments

_AT_ONCE = 1 << 24
"""Elements whose updates are corrected at once: enough to keep a GPU busy, few enough to need little memory."""
_SECOND = ("exp_avg_sq", "max_exp_avg_sq")
_WITHOUT = ("SGD", "Muon")
"""Optimizers that do not divide by second moments, and need no correction."""


class Moments(NamedTuple):
    """Parameters' state without Adam's bias, and what is known about it, by parameter."""

    first: list[Tensor]
    second: list[Tensor]
    noise: list[Any]
    """c, the share of a gradient's variance that is left in `first`; a number, or a tensor where steps are counted on a
    device."""
    bias: list[Any]
    """What `second` was divided by; likewise."""


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
            used = [p for p in group["params"] if p.grad is not None and "exp_avg" in optimizer.state.get(p, ())]
            for some in _few_at_once(used):
                missing = self._missing(self._moments([optimizer.state[p] for p in some], group), group["eps"])
                torch._foreach_mul_(missing, [rate] * len(missing))
                if skipped is not None:
                    torch._foreach_mul_(missing, [1 - skipped.to(lack.device) for lack in missing])
                values = [reals(p.detach()) for p in some]
                if all(value.dtype == lack.dtype for value, lack in zip(values, missing, strict=True)):
                    torch._foreach_add_(values, missing)
                else:
                    torch._foreach_copy_(values, torch._foreach_add(missing, values))

    def _missing(self, now: Moments, eps: float) -> list[Tensor]:
        """What updates at a learning rate of 1 lack: m̂ (1 / (√v̂ + ε) − 1 / (√d + ε)). Leaves nothing in `now`."""
        wanted = self._wanted(now, self.share)
        for roots in (now.second, wanted):
            torch._foreach_sqrt_(roots)
            torch._foreach_add_(roots, eps)
            torch._foreach_reciprocal_(roots)
        torch._foreach_sub_(now.second, wanted)
        torch._foreach_mul_(now.first, now.second)
        return now.first

    def _wanted(self, now: Moments, share: float) -> list[Tensor]:
        """d, what all-reduce would divide by the root of."""
        wanted = torch._foreach_addcmul(now.second, now.first, now.first, value=-1)  # (1 − c) σ²
        # c is 1 in Adam's very first update, where it says nothing about noise.
        torch._foreach_mul_(wanted, [-(1 - share) / (1 - _at_most(noise, 0.95)) for noise in now.noise])
        torch._foreach_add_(wanted, now.second)
        torch._foreach_maximum_(wanted, torch._foreach_mul(now.second, share**2))
        torch._foreach_minimum_(wanted, now.second)
        return list(wanted)

    def _moments(self, states: Sequence[State], group: State) -> Moments:
        beta, beta_square = group["betas"]
        steps = [_number(state["step"]) for state in states]
        bias, bias_square = [1 - beta**step for step in steps], [1 - beta_square**step for step in steps]
        name = "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
        first = torch._foreach_div([wide(reals(state["exp_avg"])) for state in states], bias)
        second = torch._foreach_div([wide(reals(state[name])) for state in states], bias_square)
        noise = [self._noise(beta, step) for step in steps]
        return Moments(list(first), list(second), noise, bias_square)

    def _noise(self, beta: float, step: Any) -> Any:
        """The variance of a mean that weighs step i by βⁱ, relative to that of one gradient.

        What the mean still holds of the time when all had the same first moments has the world's variance.
        """
        noise = (1 - beta) * (1 + beta**step) / ((1 + beta) * (1 - beta**step))
        common = (beta ** (2 * self.updates) - beta ** (2 * step)) / (1 - beta ** (2 * step))
        return noise * (1 - (1 - self.share) * _at_least(common, 0.0))

    # Changes of phase, and averages.

    @torch.no_grad()
    def separate(self) -> None:
        """The world has trained together until now: make its second moments what a group's would be."""
        self.updates = 0
        if self.kind == "group":
            return
        for p, group in self._adams():
            state = self.optimizers.state_of(p)
            (first,), (second,), (noise,), (bias,) = self._moments([state], group)
            noise = _at_most(noise / self.share, 0.95)  # here all of it is shared
            excess = torch.addcmul(second, first, first, value=-1).clamp_(min=0)  # (1 − c) s σ²
            more = excess.mul_((1 / self.share - 1) / (1 - noise)).mul_(bias)
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
                now = self._moments([state], group)
                wanted = self._wanted(now, self.share)[0].mul_(now.bias[0])
                reals(state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]).copy_(wanted)

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

    def _scale_rows(self, states: Sequence[tuple[State, State]], weight: float) -> None:
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
            (first,), _, _, (bias,) = self._moments([state], group)
            least = _by_row(first.square_().mul_(bias))
            reals(state[name]).copy_(torch.maximum(scaled, least).view_as(reals(state[name])))

    def _divided_by(self, p: nn.Parameter, group: State, share: float) -> Tensor:
        (wanted,) = self._wanted(self._moments([self.optimizers.state_of(p)], group), share)
        return wanted.sqrt_().add_(max(group["eps"], math.sqrt(torch.finfo(wanted.dtype).tiny)))

    def _adams(self) -> Iterator[tuple[nn.Parameter, State]]:
        """Parameters that have moments, with their groups."""
        for optimizer, group in self.optimizers.groups:
            if isinstance(optimizer, Adam | AdamW):
                yield from ((p, group) for p in group["params"] if "exp_avg" in optimizer.state.get(p, ()))

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]


def _few_at_once(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """All of them, some at a time."""
    some, size = list[nn.Parameter](), 0
    for p in parameters:
        if some and size + p.numel() > _AT_ONCE:
            yield some
            some, size = [], 0
        some.append(p)
        size += p.numel()
    if some:
        yield some


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
