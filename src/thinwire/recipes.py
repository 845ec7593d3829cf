"""Whole experiments, each a function that returns a `Recipe`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

from torch.optim import AdamW

from thinwire.errors import unknown
from thinwire.train import data, models
from thinwire.train.task import CLASSIFY, PREDICT, Recipe

__all__ = ["RECIPES", "Recipe", "digits", "named", "shakespeare"]


def digits() -> Recipe:
    """A small CNN with BatchNorm on 8×8 digits; a run takes seconds.

    Learning rate and weight decay are the best of plain training on 300 digits of the training part
    (`benchmarks/tune_recipe.py`), where everything between 0.01 and 5 is equal within the noise.
    """
    return Recipe(
        name="digits",
        summary="a small CNN on 8×8 handwritten digits (accuracy on 540 held out)",
        task=CLASSIFY,
        source=data.digits,
        model=lambda source: models.DigitNet(),
        optimizer=partial(AdamW, lr=3e-3, weight_decay=3.0),
        steps=600,
        batch=64,
        clip=1.0,
        eval_every=25,
    )


def shakespeare() -> Recipe:
    """A character GPT of 0.8 million parameters on Tiny Shakespeare; a run takes minutes.

    Learning rate and weight decay are the best of plain training on 32,768 characters of the training part
    (`benchmarks/tune_recipe.py`, one seed).
    """
    return Recipe(
        name="shakespeare",
        summary="a character GPT on Tiny Shakespeare (perplexity a character, 32,768 held out)",
        task=PREDICT,
        source=data.shakespeare,
        model=lambda source: models.CharGPT(vocabulary=len(cast(data.Text, source).characters)),
        optimizer=partial(AdamW, lr=6e-3, betas=(0.9, 0.95), weight_decay=0.03),
        steps=800,
        batch=32,
        clip=1.0,
        eval_every=100,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {"digits": digits, "shakespeare": shakespeare}


def named(name: str, *, steps: int | None = None) -> Recipe:
    """The recipe called `name`, over `steps` steps if given."""
    if name not in RECIPES:
        raise unknown("recipe", name, list(RECIPES))
    recipe = RECIPES[name]()
    return recipe if steps is None else replace(recipe, steps=steps)
