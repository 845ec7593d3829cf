"""What is trained and how it is judged: a `Task` and the `Recipe` around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.train.data import Source

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


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


@dataclass(frozen=True)
class Suited:
    """What was found good for one method on a recipe."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its config, which hold unless a user sets them; those that it does not have are left out."""
    optimizer: MakeOptimizer | None = None
    """Builds another optimizer than the recipe's."""
    clip: float | None = None
    """Another largest gradient norm than the recipe's."""


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
    optimizer: MakeOptimizer
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
    epochs: int = 30
    """Epochs of a run, for methods that go by them; one of fewer steps has as many, and shorter ones."""
    suited: Mapping[str, Suited] = field(default_factory=dict)
    """What is good for single methods, by their names."""
    usual_optimizer: MakeOptimizer | None = None
    """The optimizer that `suited_to` put another in place of."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "eval_every", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` must be at least 1, got {getattr(self, name)}")

    @property
    def steps_per_epoch(self) -> float:
        """Steps of an epoch; need not be whole."""
        return self.steps / self.epochs

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch is over after so many steps."""
        return step * self.epochs // self.steps > (step - 1) * self.epochs // self.steps

    def suited_to(self, method: str) -> Recipe:
        """The recipe as it is good for one method: with the optimizer and the clipping found for it."""
        own = self.suited.get(method, Suited())
        clip = self.clip if own.clip is None else own.clip
        if own.optimizer is None:
            return replace(self, clip=clip)
        return replace(self, clip=clip, optimizer=own.optimizer, usual_optimizer=self.usual_optimizer or self.optimizer)

    def defaults(self, method: str) -> dict[str, Any]:
        """Fields of a method's config that hold unless a user sets them."""
        own = self.suited.get(method, Suited())
        length = {"total_steps": self.steps, "steps_per_epoch": self.steps_per_epoch}
        phase = min(4, self.epochs / 4)  # a run of few epochs still has room for what lies between
        phases = {"warmup_epochs": phase, "cooldown_epochs": phase}
        return {"clip": self.suited_to(method).clip, **phases, **own.settings, **length}


def describe_optimizer(make: MakeOptimizer) -> dict[str, Any]:
    """The class as `optimizer` and its settings as `optimizer.NAME`, plain values; a list where groups differ."""
    # No model is at hand where a run is checked; a matrix and a vector serve factories that tell them apart.
    optimizer = make([nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))])
    told: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for name in optimizer.defaults:
        values = [_plain(group.get(name)) for group in optimizer.param_groups]
        told[f"optimizer.{name}"] = values[0] if all(value == values[0] for value in values) else values
    return told


def _plain(value: Any) -> Any:
    """As JSON gives it back; of what it cannot hold, such as a function, only that it is there."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value if isinstance(value, int | float | str | None) else type(value).__name__
