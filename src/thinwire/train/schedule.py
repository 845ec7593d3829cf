"""Learning rates over a run."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def cosine(optimizer: Optimizer, *, steps: int, warmup: int, floor: float = 0.01) -> LambdaLR:
    """Linear from near zero over `warmup` steps, then a half cosine to `floor` of the peak at `steps`."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, factor)
