"""A longer run of a larger model: a GPT of 29 M on pieces of WikiText-2 (see pieces.py), 10,000 steps."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from thinwire.experiments import data, text
from thinwire.recipes import Recipe
from thinwire.train.data import Text
from thinwire.train.schedule import Cosine
from thinwire.train.task import PREDICT

BLOCK = 128


def gpt(steps: int = 10_000, dropout: float = 0.3, compiled: bool = False) -> Recipe:
    """8 layers of width 512; dropout 0.3, since it reads the text 32 times.

    With `compiled`, layers are compiled and AdamW is fused: the same but for rounding and for dropout's random numbers.
    """
    return Recipe(
        name="gpt-pieces" if dropout == 0.3 else f"gpt-pieces-dropout-{dropout}",
        summary="a GPT of 29 M parameters on pieces of WikiText-2 (perplexity per piece)",
        task=PREDICT,
        source=partial(data.words, block=BLOCK),
        model=lambda source: model(cast(Text, source).vocabulary, dropout, compiled=compiled),
        optimizer=partial(AdamW, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=compiled or None),
        steps=steps,
        batch=64,
        rate=Cosine(warmup=0.05),
        autocast=True,
        clip=1.0,
        eval_every=max(1, steps // 10),
    )


def dropout_2(steps: int = 10_000) -> Recipe:
    return gpt(steps, 0.2, compiled=True)


def dropout_3(steps: int = 10_000) -> Recipe:
    return gpt(steps, 0.3, compiled=True)


def dropout_4(steps: int = 10_000) -> Recipe:
    return gpt(steps, 0.4, compiled=True)


def dropout_5(steps: int = 10_000) -> Recipe:
    return gpt(steps, 0.5, compiled=True)


def model(vocabulary: int, dropout: float, *, compiled: bool = False) -> text.GPT:
    made = text.GPT(vocabulary=vocabulary, block=BLOCK, width=512, depth=8, heads=8, dropout=dropout)
    if compiled:
        compile_layers(made.layers)
    return made


def compile_layers(layers: nn.ModuleList) -> None:
    """Compile what all layers do in training, once; evaluation has batches of other sizes and stays as it is."""
    kind = type(layers[0])
    plain = cast(Callable[[nn.Module, Tensor], Tensor], kind.forward)
    fast = torch.compile(plain, dynamic=False)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return cast(Tensor, (fast if self.training else plain)(self, x))

    compiled = type(kind.__name__, (kind,), {"forward": forward})
    for layer in layers:
        layer.__class__ = compiled
