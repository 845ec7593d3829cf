"""What is trained and how it is judged: a `Task` and the `Recipe` around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.errors import ConfigError, unknown
from thinwire.train.data import Source, for_validation
from thinwire.train.schedule import Cosine, Rate
from thinwire.train.transform import AsIs, Transform

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Task(Protocol):
    """One kind of problem. Its figures follow from sums over examples, so workers can share the work."""

    metric: ClassVar[str]
    """The figure a run is judged by, and its name in every record."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What is trained on."""
        ...

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Sums over the examples, in fp64."""
        ...

    def figures(self, totals: Tensor) -> dict[str, float]:
        """The metric and the mean loss, from sums."""
        ...


@dataclass(frozen=True, kw_only=True)
class Classify:
    """A class for every example."""

    metric: ClassVar[str] = "accuracy"
    smoothing: float = 0.0
    """Share of each target that is spread over all classes, in training."""

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise ConfigError(f"`smoothing`={self.smoothing} must be from 0 to below 1")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy over every target."""
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), label_smoothing=self.smoothing)

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(3,): summed loss without smoothing, hits and number of targets."""
        flat, wanted = outputs.flatten(0, -2).float(), targets.flatten()
        loss = F.cross_entropy(flat, wanted, reduction="sum")
        hits = (flat.argmax(-1) == wanted).sum()
        return torch.stack([loss.double(), hits.double(), loss.new_full((), len(wanted), dtype=torch.float64)])

    def figures(self, totals: Tensor) -> dict[str, float]:
        loss, hits, count = totals.tolist()
        return {self.metric: hits / count, "loss": loss / count}


@dataclass(frozen=True, kw_only=True)
class Predict(Classify):
    """The next token at every place of a text."""

    metric: ClassVar[str] = "perplexity"

    def figures(self, totals: Tensor) -> dict[str, float]:
        loss, _, count = totals.tolist()
        return {self.metric: math.exp(min(loss / count, 700.0)), "loss": loss / count}


CLASSIFY = Classify()
PREDICT = Predict()


@dataclass(frozen=True)
class MethodOverrides:
    """What was found good for one method on a recipe."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its config, which hold unless a user sets them; those that it does not have are left out."""
    optimizer: MakeOptimizer | None = None
    """Builds another optimizer than the recipe's."""
    clip: float | None = None
    """Another largest gradient norm than the recipe's."""
    rate: Rate | None = None
    """Another course of the learning rate."""
    schedules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Sets of fields that say when the method does what, by name; the first holds unless another is asked for."""


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
    rate: Rate = field(default_factory=Cosine)
    """The course of the learning rate."""
    transform: Transform = field(default_factory=AsIs)
    """What happens to examples before the model takes them."""
    autocast: bool = False
    """Whether a GPU computes in bf16 where that is safe. A CPU computes in fp32: many emulate bf16, hundreds of times
    slower. A run that is resumed on another device goes on in the precision of that one."""
    clip: float | None = None
    """Largest gradient norm; None leaves gradients as they are."""
    eval_every: int = 50
    """Steps between evaluations."""
    epochs: int = 30
    """Epochs of a run, for methods that go by them; one of fewer steps has as many, and shorter ones."""
    epochs_are_passes: bool = False
    """Whether an epoch is meant as one pass over the data, so that a run says where its steps are not."""
    patience: int | None = None
    """Epochs without a lower loss on the validation part after which a run ends; None for never."""
    split: str = "test"
    """The part of the data that figures are of."""
    suited: Mapping[str, MethodOverrides] = field(default_factory=dict)
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

    def precision(self, device: torch.device) -> torch.autocast:
        """As it computes there."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self._in_bf16(device))

    def precision_name(self, device: torch.device) -> str:
        """The same in words."""
        return "bf16 autocast" if self._in_bf16(device) else "fp32"

    def _in_bf16(self, device: torch.device) -> bool:
        return self.autocast and device.type == "cuda"

    @property
    def transform_name(self) -> str | None:
        """What stands between examples and the model, in words; None where that is nothing."""
        if isinstance(self.transform, AsIs):
            return None
        return repr(self.transform) if is_dataclass(self.transform) else type(self.transform).__name__

    def replace(self, **fields: Any) -> Recipe:
        """The recipe with other fields."""
        return replace(self, **fields)

    def over(self, epochs: int) -> Recipe:
        """The recipe over more or fewer epochs of the same length; all that has a length scales with it."""
        if epochs < 1:
            raise ConfigError(f"`epochs` must be at least 1, got {epochs}")
        return replace(self, epochs=epochs, steps=max(1, round(epochs * self.steps_per_epoch)))

    def with_batch(self, batch: int) -> Recipe:
        """The recipe with another batch size. Where its epochs are passes over the data they stay so: steps change."""
        share = self.batch / max(1, batch) if self.epochs_are_passes else 1
        steps, eval_every = (max(1, round(share * steps)) for steps in (self.steps, self.eval_every))
        return replace(self, batch=batch, steps=steps, eval_every=eval_every)

    def with_optimizer(self, **values: float | None) -> Recipe:
        """The recipe with another `lr` or `weight_decay`, also where a method has an optimizer of its own."""
        given = {name: value for name, value in values.items() if value is not None}
        if not given:
            return self
        suited = {
            method: replace(own, optimizer=with_values(own.optimizer, given)) if own.optimizer else own
            for method, own in self.suited.items()
        }
        return replace(self, optimizer=with_values(self.optimizer, given), suited=suited)

    def on_validation(self) -> Recipe:
        """The recipe judged on validation data instead of test data."""
        return replace(self, source=lambda folder: for_validation(self.source(folder)), split="validation")

    @property
    def scheduled(self) -> set[str]:
        """Methods that can be asked to follow one schedule or another."""
        return {method for method, own in self.suited.items() if own.schedules}

    def suited_to(self, method: str) -> Recipe:
        """The recipe as it is good for one method: with the optimizer, its rates and the clipping found for it."""
        own = self.suited.get(method, MethodOverrides())
        other = {"clip": own.clip, "rate": own.rate, "optimizer": own.optimizer}
        changed: dict[str, Any] = {name: value for name, value in other.items() if value is not None}
        if own.optimizer is not None:
            changed["usual_optimizer"] = self.usual_optimizer or self.optimizer
        return replace(self, **changed)

    def defaults(self, method: str, schedule: str | None = None) -> dict[str, Any]:
        """Fields of a method's config that hold unless a user sets them, by one of its schedules."""
        own = self.suited.get(method, MethodOverrides())
        length = {"total_steps": self.steps, "steps_per_epoch": self.steps_per_epoch}
        phase = min(4, self.epochs / 4)  # a run of few epochs still has room for what lies between
        phases = {"warmup_epochs": phase, "cooldown_epochs": phase}
        timed = self._schedule(method, own, schedule)
        return {"clip": self.suited_to(method).clip, **phases, **own.settings, **timed, **length}

    def _schedule(self, method: str, own: MethodOverrides, name: str | None) -> Mapping[str, Any]:
        if name is None:
            return next(iter(own.schedules.values()), {})
        if not own.schedules:
            raise ConfigError(
                f"the recipe {self.name} has no schedules for {method} to choose from; "
                f"leave out `schedule`={name!r}, or set the method's own fields"
            )
        if name not in own.schedules:
            raise unknown(f"schedule of {method} on {self.name}", name, list(own.schedules))
        return own.schedules[name]


def with_values(make: MakeOptimizer, values: Mapping[str, float]) -> MakeOptimizer:
    """A factory of the same optimizer with other values of `lr` or `weight_decay`."""
    known = describe_optimizer(make)
    for name, value in values.items():
        if not value >= 0 or (name == "lr" and value == 0):
            raise ConfigError(f"`{name}`={value} must be a number above 0{' or 0' if name != 'lr' else ''}")
        if f"optimizer.{name}" not in known:
            raise ConfigError(f"`{name}`={value} has no meaning for {known['optimizer']}, which has no `{name}`")
        if isinstance(own := known[f"optimizer.{name}"], list):
            raise ConfigError(
                f"`{name}`={value} cannot replace {own}: the optimizer's parameter groups differ in `{name}`; "
                "set it in a recipe of your own"
            )

    def changed(parameters: Iterable[nn.Parameter]) -> Optimizer:
        optimizer = make(parameters)
        for group in (optimizer.defaults, *optimizer.param_groups):
            group.update(values)
        return optimizer

    return changed


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
