"""Experiments that run on a laptop with nothing downloaded."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from torch.optim import AdamW

from thinwire.config import Nesterov
from thinwire.recipes.sizes import checked, for_images
from thinwire.train import data, models
from thinwire.train.task import CLASSIFY, PREDICT, MethodOverrides, Recipe


def digits(**sizes: Any) -> Recipe:
    """A small CNN with BatchNorm on 8×8 digits; a run takes seconds.

    Learning rate and weight decay are the best of plain training on 300 digits of the training part
    (`benchmarks/README.md`); weight decays from 0.01 to 5 are equal within the noise. Settings for single methods
    were found on the same digits (`benchmarks/rivals`).
    """
    checked(models.DigitNet, sizes)
    return Recipe(
        name="digits",
        summary="a small CNN on 8×8 handwritten digits (accuracy on 540 held out)",
        task=CLASSIFY,
        source=data.digits,
        model=lambda source: models.DigitNet(**for_images(models.DigitNet, sizes, source)),
        optimizer=partial(AdamW, lr=3e-3, weight_decay=3.0),
        steps=600,
        batch=64,
        clip=1.0,
        eval_every=25,
        suited={
            "oialr": MethodOverrides({"factor_at": 0.1, "cutoff": 0.2}),
            "daso": MethodOverrides(
                {
                    "every": 32,
                    "warmup": 1 / 30,
                    "cooldown": 1 / 30,
                    "compensate": True,
                    "plateau_patience": None,
                }
            ),
            "powersgd": MethodOverrides({"rank": 1}),
            "localsgd": MethodOverrides({"every": 48}),
            "diloco": MethodOverrides({"every": 24, "outer": Nesterov(0.4, 0.9), "warmup": 0.05}),
            "topk": MethodOverrides({"density": 0.001, "ramp": 0.05}),
        },
    )


def shakespeare(**sizes: Any) -> Recipe:
    """A character GPT of 0.8 million parameters on Tiny Shakespeare; a run takes minutes.

    Learning rate and weight decay are the best of plain training on 32,768 characters of the training part
    (`benchmarks/README.md`, one seed), and so are the settings for single methods (`benchmarks/rivals`).
    """
    checked(models.CharGPT, sizes, "vocabulary")
    return Recipe(
        name="shakespeare",
        summary="a character GPT on Tiny Shakespeare (perplexity per character, 32,768 held out)",
        task=PREDICT,
        source=partial(data.shakespeare, block=sizes.get("block", 64)),
        model=lambda source: models.CharGPT(vocabulary=cast(data.Text, source).vocabulary, **sizes),
        optimizer=partial(AdamW, lr=6e-3, betas=(0.9, 0.95), weight_decay=0.03),
        steps=800,
        batch=32,
        clip=1.0,
        eval_every=100,
        suited={
            "ab-paper": MethodOverrides({"merge": "trained"}),
            "oialr": MethodOverrides({"factor_at": 0.8, "layer_fraction": 0.25}),
            "daso": MethodOverrides({"warmup": 4 / 30, "cooldown": 4 / 30, "compensate": True}),
            "powersgd": MethodOverrides({"rank": 16, "warmup": 0.05}),
            "localsgd": MethodOverrides({"every": 4, "warmup": 0.05}),
            "diloco": MethodOverrides({"every": 12, "outer": Nesterov(0.7, 0.5), "warmup": 0.05}),
            "topk": MethodOverrides({"density": 0.05, "ramp": 0.05}),
            "onebit": MethodOverrides({"warmup": 0.05}),
        },
    )
