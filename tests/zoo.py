"""Models of many shapes, none written with Thinwire in mind, each with a batch and a loss: what they share."""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from device import here

Model = Callable[..., Any]

ADAMW = functools.partial(torch.optim.AdamW, lr=3e-3)
SGD = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)

WIDE = 24
"""Wide enough that factors are smaller, narrow enough that a step takes a millisecond."""


def pull(output: Any) -> Tensor:
    """A loss for any output: every floating tensor in it, pulled towards one."""
    found = [t for t in tensors_of(output) if t.is_floating_point() or t.is_complex()]
    return torch.stack([(t.to(torch.float64 if not t.is_complex() else t.dtype) - 1).abs().mean() for t in found]).sum()


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors in whatever a model returned."""
    if isinstance(output, Tensor):
        return [output]
    if dataclasses.is_dataclass(output) or hasattr(output, "to_tuple"):
        return [t for value in vars(output).values() for t in tensors_of(value)]
    if isinstance(output, dict):
        return [t for value in output.values() for t in tensors_of(value)]
    return [t for value in output for t in tensors_of(value)] if isinstance(output, list | tuple) else []


def images(rng: Generator, channels: int = 3, size: int = 8, batch: int = 4) -> Tensor:
    """A batch of noise."""
    return torch.randn(batch, channels, size, size, generator=rng)


def rows(rng: Generator, width: int = WIDE, batch: int = 6) -> Tensor:
    """A batch of vectors."""
    return torch.randn(batch, width, generator=rng)


def words(rng: Generator, length: int = 7, batch: int = 3, vocabulary: int = 40) -> Tensor:
    """A batch of token ids."""
    return torch.randint(vocabulary, (batch, length), generator=rng)


def plain_loss(model: Model, batch: Any, rank: int, step: int) -> Tensor:
    """One call of the model."""
    return pull(model(**batch) if isinstance(batch, dict) else model(batch))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, what it is fed, and what is known of it."""

    build: Callable[[], nn.Module]
    batch: Callable[[Generator], Any] = rows
    loss: Callable[[Model, Any, int, int], Tensor] = plain_loss
    optimizer: Callable[[list[nn.Parameter]], Optimizer] = ADAMW
    ddp: dict[str, Any] = field(default_factory=dict)
    zoo: str = ""
    """The file that it is in."""
    refused: dict[str, str] = field(default_factory=dict)
    """Methods that must refuse it, and what they must say."""


SHAPES: dict[str, Shape] = {}


def shape(name: str, **about: Any) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Add a model to the zoo."""
    zoo = sys._getframe(1).f_globals["__name__"]

    def add(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        made = Shape(build=build, zoo=zoo, **about)
        there = {"build": lambda: here(made.build()), "batch": lambda rng: here(made.batch(rng))}
        SHAPES[name] = dataclasses.replace(made, **there)
        return build

    return add


def mlp(width: int = WIDE, **kind: Any) -> nn.Sequential:
    """Four Linears, of which the middle ones get factored."""
    sizes = (width, width, 2 * width, width, 5)
    layers = [part for m, n in itertools.pairwise(sizes) for part in (nn.Linear(m, n, **kind), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


AB = ("ab", "ab split", "ab both", "ab shared")
_PAPER = ("ab-paper", "ab-paper carry", "ab-paper average", "ab-paper estimate")
NOTHING = dict.fromkeys((*AB, *_PAPER, "oialr"), "nothing to factor")
"""What methods that factor must say of models without a weight for it."""
