"""Learning rate schedules, as multiples of the optimizer's own rate."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from thinwire.base.errors import ConfigError
from thinwire.config.settings import from_strings


class Rate(Protocol):
    """A schedule; all of it scales with the run's length."""

    def factor(self, step: int, steps: int, epochs: float) -> float:
        """The multiple of the optimizer's rate at `step`, counted from 0, of `steps` in `epochs`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Linear warm-up, then half a cosine."""

    warmup: float = 0.05
    """Fraction of the steps that warm up."""
    floor: float = 0.01
    """The last rate, as a multiple of the optimizer's; may be above 1."""
    start: float | None = None
    """The first rate, as a multiple; near zero if None."""
    k_decay: float = 1.0
    """timm's k-decay: below 1 the cosine changes faster at the start, above 1 at the end."""
    from_zero: bool = False
    """Whether the cosine counts from the first step, as timm's does, and so has fallen a little after the warm-up."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"`warmup`={self.warmup} must be a fraction of the steps, from 0 to below 1")
        if self.k_decay <= 0:
            raise ConfigError(f"`k_decay`={self.k_decay} must be above 0")

    def factor(self, step: int, steps: int, epochs: float) -> float:
        rising = round(self.warmup * steps)
        if step < rising:
            return (step + 1) / (rising + 1) if self.start is None else self.start + (1 - self.start) * step / rising
        begin = 0 if self.from_zero else rising
        done = min(1.0, (step - begin) / max(1, steps - begin))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done**self.k_decay)) / 2


def with_fields(rate: Any, texts: Mapping[str, str]) -> Any:
    """The schedule with other fields, as FIELD and VALUE."""
    if not dataclasses.is_dataclass(rate) or isinstance(rate, type):
        raise ConfigError(
            f"`--rate {'='.join(next(iter(texts.items())))}` changes a field of the learning rate schedule, and the "
            f"recipe's, {type(rate).__name__}, has none; set it in a recipe of your own"
        )
    own = {field.name: getattr(rate, field.name) for field in dataclasses.fields(rate)}
    return from_strings(type(rate), texts, **own)


def scheduled(optimizer: Optimizer, rate: Rate, *, steps: int, epochs: float) -> LambdaLR:
    """A PyTorch scheduler for `rate`."""
    return LambdaLR(optimizer, lambda step: rate.factor(step, steps, epochs))


def bring_to(scheduler: LambdaLR, step: int) -> None:
    """Set the rates of a step, also if this worker did not take the one before: it was skipped, or others took it."""
    if scheduler.last_epoch == step:
        return
    if scheduler.last_epoch == step - 1:
        scheduler.step()
        return
    scheduler.last_epoch = step - 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        scheduler.step()
