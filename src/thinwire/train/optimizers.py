"""Optimizers by name, for `--optimizer`; those that torch does not have are from the package pytorch-optimizer."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from thinwire.base.errors import ConfigError, unknown
from thinwire.train.schedule import Cosine
from thinwire.train.task import MakeOptimizer, Recipe

_ELSEWHERE = "pytorch_optimizer"


@dataclass(frozen=True)
class _Known:
    """A class, and settings that are a fair start on small models; `--lr` and `--weight-decay` replace them."""

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    package: str = _ELSEWHERE
    is_scheduled: bool = True
    """Whether the recipe's learning rate schedule is used; else the rate stays after its warm-up."""


OPTIMIZERS = {
    "sgd": _Known("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}, "torch.optim"),
    "adamw": _Known("AdamW", {"lr": 3e-3}, "torch.optim"),
    "lars": _Known("LARS", {"lr": 1.0, "weight_decay": 5e-4, "trust_coefficient": 0.02}),
    "lamb": _Known("Lamb", {"lr": 1e-2, "weight_decay": 0.01}),
    "lion": _Known("Lion", {"lr": 3e-4, "weight_decay": 0.1}),
    "soap": _Known("SOAP", {"lr": 3e-3}),
    "shampoo": _Known("Shampoo", {"lr": 0.03}),
    "schedulefree": _Known("ScheduleFreeAdamW", {"lr": 3e-3}, is_scheduled=False),
    "adamw8bit": _Known("FlashAdamW", {"lr": 3e-3}),
}


def with_optimizer_named(recipe: Recipe, name: str) -> Recipe:
    """The recipe with another optimizer, for all methods."""
    known = OPTIMIZERS.get(name)
    if known is None:
        raise unknown("optimizer", name, list(OPTIMIZERS))
    suited = {method: replace(own, optimizer=None) for method, own in recipe.suited.items()}
    rate = recipe.rate if known.is_scheduled else Cosine(floor=1.0)
    return recipe.replace(optimizer=_maker(name, known), suited=suited, rate=rate)


def _maker(name: str, known: _Known) -> MakeOptimizer:
    try:
        package = importlib.import_module(known.package)
    except ImportError as error:
        raise ConfigError(
            f"`--optimizer {name}` needs the package pytorch-optimizer: pip install 'thinwire[optimizers]'; "
            "sgd and adamw need nothing"
        ) from error
    return partial(getattr(package, known.kind), **known.settings)
