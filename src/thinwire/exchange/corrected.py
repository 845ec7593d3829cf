"""Adam's updates made what they would have been with other second moments."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from thinwire.base.errors import ConfigError
from thinwire.comm.buckets import reals
from thinwire.exchange.context import MethodContext
from thinwire.factor.matrix import wide
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
                values = [reals(p.detach()) for p in some]
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
        first = torch._foreach_div([wide(reals(state["exp_avg"])) for state in states], bias)
        second = torch._foreach_div([wide(reals(state[name])) for state in states], bias_square)
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
