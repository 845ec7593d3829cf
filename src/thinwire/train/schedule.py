"""Learning rates over a run, as shares of the optimizer's own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from thinwire.errors import ConfigError


class Rate(Protocol):
    """How the learning rate changes; all of it scales with the run's length."""

    def factor(self, step: int, steps: int, epochs: float) -> float:
        """The share of the highest rate at `step`, counted from 0, of a run of so many steps and epochs."""
        ...


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Up in a line, then down in half a cosine."""

    warmup: float = 0.05
    """Share of the steps over which it rises."""
    floor: float = 0.01
    """The last rate, as a share of the optimizer's; above 1 it ends higher than it began."""
    start: float | None = None
    """The first rate, as a share; near zero if None."""
    k_decay: float = 1.0
    """Below 1 the cosine hurries at first, above 1 at last."""
    from_zero: bool = False
    """Whether the cosine counts from the first step, as timm's does, and so begins some way down after the rise."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1:
            raise ConfigError(f"`warmup`={self.warmup} must be a share of the steps, from 0 to below 1")
        if self.k_decay <= 0:
            raise ConfigError(f"`k_decay`={self.k_decay} must be above 0")

    def factor(self, step: int, steps: int, epochs: float) -> float:
        rising = round(self.warmup * steps)
        if step < rising:
            return self._rise(step, rising)
        begin = 0 if self.from_zero else rising
        done = min(1.0, (step - begin) / max(1, steps - begin))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done**self.k_decay)) / 2

    def _rise(self, step: int, rising: int) -> float:
        if self.start is None:
            return (step + 1) / (rising + 1)
        return self.start + (1 - self.start) * step / rising


def scheduled(optimizer: Optimizer, rate: Rate, *, steps: int, epochs: float) -> LambdaLR:
    """A scheduler that follows `rate`."""
    return LambdaLR(optimizer, lambda step: rate.factor(step, steps, epochs))
