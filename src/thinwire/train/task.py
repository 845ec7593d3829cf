"""What is trained and how it is evaluated: a `Task` and the `Recipe` around it."""

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

from thinwire.base.errors import ConfigError, unknown
from thinwire.train.data import Source, for_validation
from thinwire.train.schedule import Cosine, Rate, with_fields
from thinwire.train.step_rng import StepRNG


class Transform(Protocol):
    """Turns stored examples into what the model takes."""

    def train(self, x: Tensor, rng: StepRNG) -> Tensor:
        """For a training step; all random numbers come from `rng`."""
        ...

    def heldout(self, x: Tensor) -> Tensor:
        """For evaluation."""
        ...


@dataclass(frozen=True)
class AsIs:
    """Leaves examples as they are."""

    def train(self, x: Tensor, rng: StepRNG) -> Tensor:
        return x

    def heldout(self, x: Tensor) -> Tensor:
        return x


MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class Task(Protocol):
    """One kind of problem. Its figures are computed from sums over examples, so workers can share the work."""

    metric: ClassVar[str]
    """The name of the main figure, in every record."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The training loss."""
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
    """Settings that suit one method on a recipe."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Defaults for fields of its config; names that the config does not have are ignored."""
    optimizer: MakeOptimizer | None = None
    """Builds an optimizer to use instead of the recipe's."""
    clip: float | None = None
    """Largest gradient norm instead of the recipe's."""
    rate: Rate | None = None
    """Learning rate schedule instead of the recipe's."""
    schedules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Named sets of fields for the method's phases; the first is the default."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole experiment, except for the method, its settings and the seed."""

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
    """Learning rate schedule."""
    transform: Transform = field(default_factory=AsIs)
    """What happens to examples before the model takes them."""
    autocast: bool = False
    """Whether a GPU uses bf16 autocast. A CPU computes in fp32, because many CPUs emulate bf16, hundreds of times
    slower. A run that is resumed on another device continues in that device's precision."""
    clip: float | None = None
    """Largest gradient norm; None for no clipping."""
    eval_every: int = 50
    """Steps between evaluations."""
    epochs: int = 30
    """Epochs of a run. A run of fewer steps has as many epochs, and shorter ones."""
    epochs_are_passes: bool = False
    """Whether an epoch is one pass over the data; a run warns if its steps do not match."""
    patience: int | None = None
    """Stop after this many epochs without a lower validation loss; None for never."""
    split: str = "test"
    """The data that figures are of: "test" or "validation"."""
    suited: Mapping[str, MethodOverrides] = field(default_factory=dict)
    """Settings for single methods, by name."""
    usual_optimizer: MakeOptimizer | None = None
    """The recipe's own optimizer, where `suited_to` replaced it."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "eval_every", "epochs"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` must be at least 1, got {getattr(self, name)}")

    @property
    def steps_per_epoch(self) -> float:
        """Steps per epoch; may be a fraction."""
        return self.steps / self.epochs

    def ends_epoch(self, step: int) -> bool:
        """Whether an epoch ends with this step."""
        return step * self.epochs // self.steps > (step - 1) * self.epochs // self.steps

    def precision(self, device: torch.device) -> torch.autocast:
        """The autocast context for a device."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self._in_bf16(device))

    def precision_name(self, device: torch.device) -> str:
        """The precision for a device, in words."""
        return "bf16 autocast" if self._in_bf16(device) else "fp32"

    def _in_bf16(self, device: torch.device) -> bool:
        return self.autocast and device.type == "cuda"

    @property
    def transform_name(self) -> str | None:
        """A description of the transform; None if there is none."""
        if isinstance(self.transform, AsIs):
            return None
        return repr(self.transform) if is_dataclass(self.transform) else type(self.transform).__name__

    def replace(self, **fields: Any) -> Recipe:
        """The recipe with other fields."""
        return replace(self, **fields)

    def over(self, epochs: int) -> Recipe:
        """The recipe over more or fewer epochs of the same length; all phases scale with the run."""
        if epochs < 1:
            raise ConfigError(f"`epochs` must be at least 1, got {epochs}")
        return replace(self, epochs=epochs, steps=max(1, round(epochs * self.steps_per_epoch)))

    def with_batch(self, batch: int) -> Recipe:
        """The recipe with another batch size. If epochs are passes over the data, steps change with the batch."""
        share = self.batch / max(1, batch) if self.epochs_are_passes else 1
        steps, eval_every = (max(1, round(share * steps)) for steps in (self.steps, self.eval_every))
        return replace(self, batch=batch, steps=steps, eval_every=eval_every)

    def with_optimizer(self, **values: float | None) -> Recipe:
        """The recipe with another `lr` or `weight_decay`, also in the optimizers of single methods."""
        given = {name: value for name, value in values.items() if value is not None}
        if not given:
            return self
        suited = {
            method: replace(own, optimizer=with_values(own.optimizer, given)) if own.optimizer else own
            for method, own in self.suited.items()
        }
        return replace(self, optimizer=with_values(self.optimizer, given), suited=suited)

    def with_rate(self, texts: Mapping[str, str]) -> Recipe:
        """The recipe with other fields of its learning rate schedule, for all methods."""
        if not texts:
            return self
        suited = {
            method: replace(own, rate=with_fields(own.rate, texts)) if own.rate else own
            for method, own in self.suited.items()
        }
        return replace(self, rate=with_fields(self.rate, texts), suited=suited)

    def on_validation(self) -> Recipe:
        """The recipe, evaluated on validation data instead of test data."""
        return replace(self, source=lambda folder: for_validation(self.source(folder)), split="validation")

    @property
    def scheduled(self) -> set[str]:
        """Methods that have a choice of schedules."""
        return {method for method, own in self.suited.items() if own.schedules}

    def suited_to(self, method: str) -> Recipe:
        """The recipe with the optimizer, learning rates and clipping that suit one method."""
        own = self.suited.get(method, MethodOverrides())
        other = {"clip": own.clip, "rate": own.rate, "optimizer": own.optimizer}
        changed: dict[str, Any] = {name: value for name, value in other.items() if value is not None}
        if own.optimizer is not None:
            changed["usual_optimizer"] = self.usual_optimizer or self.optimizer
        return replace(self, **changed)

    def defaults(self, method: str, schedule: str | None = None) -> dict[str, Any]:
        """Defaults for the fields of a method's config, with one of its schedules."""
        own = self.suited.get(method, MethodOverrides())
        timed = self._schedule(method, own, schedule)
        # A period as long as a run would leave nothing of the method; its own default is shorter, or "auto".
        settings = {k: v for k, v in own.settings.items() if not (k == "every" and v >= self.steps)}
        return {"clip": self.suited_to(method).clip, **settings, **timed, "total_steps": self.steps}

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
    # There may be no model yet. Some factories treat matrices and vectors differently, so give them one of each.
    optimizer = make([nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3))])
    found: dict[str, Any] = {"optimizer": type(optimizer).__name__}
    for name in optimizer.defaults:
        values = [_plain(group.get(name)) for group in optimizer.param_groups]
        found[f"optimizer.{name}"] = values[0] if all(value == values[0] for value in values) else values
    return found


def _plain(value: Any) -> Any:
    """A value that survives JSON; for anything else, such as a function, the name of its type."""
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return value if isinstance(value, int | float | str | None) else type(value).__name__
