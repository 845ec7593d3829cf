"""What is trained and how it is judged: a `Task` and the `Recipe` around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.train.data import Source


@dataclass(frozen=True, kw_only=True)
class Task:
    """One kind of problem. Its metric follows from sums over examples, so workers can share the work."""

    metric: str
    """The figure a run is judged by, and its name in every record."""
    judge: Callable[[float, float], float]
    """The metric from the mean loss and the share of hits."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over every target."""
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(3,) in fp64: summed loss, hits and number of targets."""
        flat, wanted = outputs.flatten(0, -2).float(), targets.flatten()
        loss = F.cross_entropy(flat, wanted, reduction="sum")
        hits = (flat.argmax(-1) == wanted).sum()
        return torch.stack([loss.double(), hits.double(), hits.new_tensor(len(wanted)).double()])

    def figures(self, totals: Tensor) -> dict[str, float]:
        """The metric and the mean loss."""
        loss, hits, count = totals.tolist()
        mean = loss / count
        return {self.metric: self.judge(mean, hits / count), "loss": mean}


CLASSIFY = Task(metric="accuracy", judge=lambda loss, hits: hits)
PREDICT = Task(metric="perplexity", judge=lambda loss, hits: math.exp(min(loss, 700.0)))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole experiment but for the method, its settings and the seed."""

    name: str
    """The name on the command line."""
    summary: str
    """One line for `thinwire list`."""
    task: Task
    """The kind of problem."""
    source: Callable[[Path | None], Source]
    """Loads the data, from a folder or from the package."""
    model: Callable[[Source], nn.Module]
    """Builds the model, from the global random state."""
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    """Builds the optimizer."""
    steps: int
    """Optimizer steps of a run."""
    batch: int
    """Examples in a step, over all workers."""
    warmup: float = 0.05
    """Share of the steps over which the learning rate rises."""
    clip: float | None = None
    """Largest gradient norm; None leaves gradients as they are."""
    eval_every: int = 50
    """Steps between evaluations."""

    def __post_init__(self) -> None:
        for field in ("steps", "batch", "eval_every"):
            if getattr(self, field) < 1:
                raise ConfigError(f"`{field}` must be at least 1, got {getattr(self, field)}")
