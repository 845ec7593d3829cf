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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from thinwire.base.errors import ConfigError, DivergedError
from thinwire.codecs import aggregator
from thinwire.codecs.aggregate import Aggregator
from thinwire.comm.buckets import all_finite, reals
from thinwire.comm.fsdp import local
from thinwire.comm.wire import Wire
from thinwire.exchange.merging import average, average_moments
from thinwire.exchange.parts import Feature, MethodContext, Run, UpdateRule, joins_not
from thinwire.factor.matrix import wide
from thinwire.factor.moments import LINEAR
from thinwire.factor.optimizers import State

SECOND = ("exp_avg_sq", "max_exp_avg_sq")
"""Second moments, as Adam's state has them."""
_AT_ONCE = 1 << 24
"""Elements whose updates are corrected at once: enough to keep a GPU busy, few enough to need little memory."""
_WITHOUT = ("SGD", "Muon")
"""Optimizers that do not divide by second moments, and need no correction."""


class Moments(NamedTuple):
    """Parameters' state without Adam's bias, and what is known about it, by parameter."""

    first: list[Tensor]
    second: list[Tensor]
    steps: list[Any]
    """Updates so far; a number, or a tensor where they are counted on a device."""
    bias: list[Any]
    """What `second` was divided by; likewise."""


class CorrectedUpdates(ABC):
    """Adds what each of Adam's updates lacks, right after it; the state stays Adam's."""

    def __init__(self, context: MethodContext, asked: str = "", otherwise: str = "") -> None:
        """`asked` is the setting that wants it, `otherwise` what happens without; if nobody asked, nothing is done."""
        self.optimizers = context.optimizers
        self._rates: list[Any] = []
        if asked:
            self._refuse_others(asked, otherwise)
            context.before_update.append(self.before_update)
            context.after_update.append(self.after_update)

    def _refuse_others(self, asked: str, otherwise: str) -> None:
        kinds = [type(optimizer).__name__ for optimizer in self.optimizers if not isinstance(optimizer, Adam | AdamW)]
        unknown = [name for name in kinds if name not in _WITHOUT]
        if unknown or len(kinds) == len(self.optimizers):
            raise ConfigError(
                f"{asked} is for torch's Adam and AdamW, not for {(unknown or kinds)[0]}; leave it out, then "
                f"{otherwise}"
            )

    @property
    @abstractmethod
    def is_due(self) -> bool:
        """Whether updates lack anything now."""

    @abstractmethod
    def wanted(self, parameters: Sequence[nn.Parameter], now: Moments, group: State) -> list[Tensor]:
        """By the root of what these updates should have divided, without bias. May not change `now`."""

    def before_update(self, optimizer: Optimizer) -> None:
        """Note the rates that this update has; a scheduler may change them."""
        self._rates = [group["lr"] for group in optimizer.param_groups]

    @torch.no_grad()
    def after_update(self, optimizer: Optimizer) -> None:
        """Correct it."""
        if not self.is_due or not isinstance(optimizer, Adam | AdamW):
            return
        # A fused update that a scaler skipped has changed nothing.
        skipped = getattr(optimizer, "found_inf", None)
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            used = [p for p in group["params"] if p.grad is not None and "exp_avg" in optimizer.state.get(p, ())]
            for some in _few_at_once(used):
                missing = self._missing(some, self.moments_of([optimizer.state[p] for p in some], group), group)
                torch._foreach_mul_(missing, [rate] * len(missing))
                if skipped is not None:
                    torch._foreach_mul_(missing, [1 - skipped.to(lack.device) for lack in missing])
                values = [reals(local(p.detach())) for p in some]
                if all(value.dtype == lack.dtype for value, lack in zip(values, missing, strict=True)):
                    torch._foreach_add_(values, missing)
                else:
                    torch._foreach_copy_(values, torch._foreach_add(missing, values))

    def _missing(self, parameters: Sequence[nn.Parameter], now: Moments, group: State) -> list[Tensor]:
        """What updates at a learning rate of 1 lack: m̂ (1 / (√v̂ + ε) − 1 / (√d + ε)). Leaves nothing in `now`."""
        wanted = self.wanted(parameters, now, group)
        for roots in (now.second, wanted):
            torch._foreach_sqrt_(roots)
            torch._foreach_add_(roots, group["eps"])
            torch._foreach_reciprocal_(roots)
        torch._foreach_sub_(now.second, wanted)
        torch._foreach_mul_(now.first, now.second)
        return now.first

    def moments_of(self, states: Sequence[State], group: State) -> Moments:
        """In fp32 at least."""
        beta, beta_square = group["betas"]
        steps = [_number(state["step"]) for state in states]
        bias, bias_square = [1 - beta**step for step in steps], [1 - beta_square**step for step in steps]
        name = second_of(group)
        first = torch._foreach_div([wide(reals(local(state["exp_avg"]))) for state in states], bias)
        second = torch._foreach_div([wide(reals(local(state[name]))) for state in states], bias_square)
        return Moments(list(first), list(second), steps, bias_square)

    def adams(self) -> Iterator[tuple[nn.Parameter, State]]:
        """Parameters that have moments, with their groups."""
        for optimizer, group in self.optimizers.groups:
            if isinstance(optimizer, Adam | AdamW):
                yield from ((p, group) for p in group["params"] if "exp_avg" in optimizer.state.get(p, ()))


def second_of(group: State) -> str:
    """What Adam divides by the root of, in its state."""
    return "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"


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


def _number(step: Any) -> Any:
    """A step counter that is not on a device as a number, which costs nothing to compute with."""
    return step if isinstance(step, Tensor) and step.device.type != "cpu" else float(step)


class SecondMoment(CorrectedUpdates):
    """Corrects the updates of groups while they train apart."""

    def __init__(
        self, context: MethodContext, kind: str, share: float, is_apart: Callable[[], bool], code: str = "fp32"
    ) -> None:
        """`share` is this group's of all workers, `code` the one for moments that are shared."""
        own = "each group divides by its own"
        super().__init__(context, f"`second_moment`={kind!r}" if kind != "group" else "", own)
        self.wire = context.wire
        self.kind, self.share, self.is_apart = kind, share, is_apart
        self.updates = 0
        """Since all groups had the same first moments."""
        self.coded = CodedMoments(self.wire, code)

    # Updates.

    @property
    def is_due(self) -> bool:
        return self.is_apart()

    def after_update(self, optimizer: Optimizer) -> None:
        """Also count it."""
        if optimizer is self.optimizers[0]:
            self.updates += 1
        super().after_update(optimizer)

    def wanted(self, parameters: Sequence[nn.Parameter], now: Moments, group: State) -> list[Tensor]:
        """What all-reduce would divide by."""
        return self._whole(now, group, self.share)

    def _whole(self, now: Moments, group: State, share: float) -> list[Tensor]:
        """d, for this share of the world."""
        wanted = torch._foreach_addcmul(now.second, now.first, now.first, value=-1)  # (1 − c) σ²
        # c is 1 in Adam's very first update, where it says nothing about noise.
        noises = [_at_most(self._noise(group["betas"][0], step), 0.95) for step in now.steps]
        torch._foreach_mul_(wanted, [-(1 - share) / (1 - noise) for noise in noises])
        torch._foreach_add_(wanted, now.second)
        torch._foreach_maximum_(wanted, torch._foreach_mul(now.second, share**2))
        torch._foreach_minimum_(wanted, now.second)
        return list(wanted)

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
        for p, group in self.adams():
            state = self.optimizers.state_of(p)
            (first,), (second,), (step,), (bias,) = self.moments_of([state], group)
            noise = _at_most(self._noise(group["betas"][0], step) / self.share, 0.95)  # here all of it is shared
            excess = torch.addcmul(second, first, first, value=-1).clamp_(min=0)  # (1 − c) s σ²
            more = excess.mul_((1 / self.share - 1) / (1 - noise)).mul_(bias)
            for name in SECOND:
                if name in state:
                    values = reals(local(state[name]))
                    values.copy_(values + more)

    @torch.no_grad()
    def together(self) -> None:
        """The world trains together from now on: make second moments what all-reduce's would be."""
        if self.kind != "group":
            for p, group in self.adams():
                state = self.optimizers.state_of(p)
                now = self.moments_of([state], group)
                wanted = self._whole(now, group, self.share)[0].mul_(now.bias[0])
                reals(local(state[second_of(group)])).copy_(wanted)

    @torch.no_grad()
    def exchange(self, parts: Mapping[int, Sequence[nn.Parameter]]) -> dict[int, Tensor]:
        """Give all groups the mean first moments of parts of the model, and second moments of one size; collective.

        By what each parameter's change is to be multiplied, by id.
        """
        if self.kind != "shared":
            return {}
        parameters = [p for part in parts.values() for p in part]
        adams = {id(p): group for p, group in self.adams()}
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
        named = [(state, group, reals(local(state[n]))) for state, group in states for n in SECOND if n in state]
        held = [each for each in named if each[2].numel()]  # no row of no elements has a mean
        if not held or len(self.wire.topology.groups) == 1:
            return
        rows = [_by_row(wide(values)) for _, _, values in held]
        own = torch.cat([row.mean(1) for row in rows])
        mean = own.clone()
        average(self.wire, [mean], weight, "moments")
        sizes = [len(row) for row in rows]
        for (state, group, values), row, was, now in zip(held, rows, own.split(sizes), mean.split(sizes), strict=True):
            # A row without any is filled. An element has at least the square of its first moment, which others may
            # have contributed: Adam would divide by next to nothing.
            scaled = torch.where(was > 0, now / was, 0)[:, None] * row + torch.where(was > 0, 0, now)[:, None]
            (first,), _, _, (bias,) = self.moments_of([state], group)
            least = _by_row(first.square_().mul_(bias))
            values.copy_(torch.maximum(scaled, least).view_as(values))

    def _divided_by(self, p: nn.Parameter, group: State, share: float) -> Tensor:
        (wanted,) = self._whole(self.moments_of([self.optimizers.state_of(p)], group), group, share)
        return wanted.sqrt_().add_(max(group["eps"], math.sqrt(torch.finfo(wanted.dtype).tiny)))

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]


def _by_row(values: Tensor) -> Tensor:
    """Everything behind the first dimension in one; what has but one dimension has rows of one element."""
    return values.reshape(len(values), -1) if values.dim() else values.reshape(1, 1)


def _at_least(value: Any, limit: float) -> Any:
    return value.clamp(min=limit) if isinstance(value, Tensor) else max(value, limit)


def _at_most(value: Any, limit: float) -> Any:
    return value.clamp(max=limit) if isinstance(value, Tensor) else min(value, limit)


class CodedMoments:
    """Averages the first moments of parts of a model again and again, in a code; other state stays each group's own.

    What a code leaves out is added to what is sent the next time. By then moments have forgotten most of what they
    were, and of the error as much is left: β to the power of the updates since.
    """

    def __init__(self, wire: Wire, code: str) -> None:
        self.wire, self.code = wire, code
        self._made: dict[int, tuple[list[list[int]], Aggregator]] = {}
        self._loaded: dict[str, Any] = {}

    @property
    def aggregators(self) -> list[Aggregator]:
        """Those that hold what codes left out."""
        return [made for _, made in self._made.values()]

    @torch.no_grad()
    def average(self, part: int, states: Sequence[State], kept: float) -> None:
        """Replace first moments by their means; `kept` is what is left of them since the last time.

        All of a part's parameters are in `states`, each time.
        """
        moments = [reals(local(state[name].detach())) for state in states for name in sorted(LINEAR & state.keys())]
        if not moments or len(self.wire.topology.groups) == 1:
            return
        means = [wide(moment).clone() for moment in moments]
        made = self._aggregator(part, means)
        for left_out in made.residuals():
            left_out.mul_(kept)
        if not made.run(means, healthy=all_finite(means)):
            raise DivergedError("moments that groups share are not finite; lower the learning rate")
        made.commit()
        for moment, mean in zip(moments, means, strict=True):
            moment.copy_(mean)

    def _aggregator(self, part: int, like: Sequence[Tensor]) -> Aggregator:
        """The one of that part; it starts without errors when shapes have changed."""
        shapes = [list(t.shape) for t in like]
        if part not in self._made or self._made[part][0] != shapes:
            made = aggregator(self.code, self.wire, like, "moments")
            loaded = self._loaded.pop(str(part), None)
            if loaded is not None and loaded["shapes"] == shapes:
                made.load({}, loaded["errors"])
            self._made[part] = shapes, made
        return self._made[part][1]

    def state_dict(self) -> dict[str, Any]:
        """What codes left out; this worker's own."""
        made = {str(part): {"shapes": shapes, "errors": made.local()} for part, (shapes, made) in self._made.items()}
        return self._loaded | made

    def load_state_dict(self, local: dict[str, Any]) -> None:
        """Taken up when moments are next averaged."""
        self._made, self._loaded = {}, dict(local)


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
                    local(state[name]).div_(bias)

    @torch.no_grad()
    def before_update(self, optimizer: Optimizer) -> None:
        """Also keep a copy."""
        super().before_update(optimizer)
        if self.is_due:
            found = {id(p): self.optimizers.state_of(p) for p, _ in self.adams()}
            kept = {key: self.kept.get(key) or _copies(state) for key, state in found.items()}
            for key, copies in kept.items():
                for name, copy in copies.items():
                    copy.copy_(local(found[key][name]))
            self.kept = kept

    @torch.no_grad()
    def after_update(self, optimizer: Optimizer) -> None:
        """Also put the copy back."""
        super().after_update(optimizer)
        if self.is_due:
            for p, _ in self.adams():
                for name, copy in self.kept.get(id(p), {}).items():
                    local(self.optimizers.state_of(p)[name]).copy_(copy)

    def wanted(self, parameters: Sequence[nn.Parameter], now: Moments, group: State) -> list[Tensor]:
        """The frozen ones."""
        found = []
        for p, first, second in zip(parameters, now.first, now.second, strict=True):
            frozen = self.kept.get(id(p))
            found.append(second.clone() if frozen is None else _at_least_squared(frozen[second_of(group)], first))
        return found


def _copies(state: State) -> State:
    return {name: torch.empty_like(local(state[name])) for name in SECOND if name in state}


def _at_least_squared(second: Tensor, first: Tensor) -> Tensor:
    return torch.maximum(wide(reals(second)), first.square())
