"""Narrow versions of the papers' recipes, to see that run.py runs, and to look into what came out."""

from functools import partial

from thinwire import recipes
from thinwire.recipes import Recipe
from thinwire.train import data


def vgg16() -> Recipe:
    return recipes.vgg16(width=1 / 16).but(name="narrow-vgg16", batch=128)


def vgg16_bn() -> Recipe:
    return recipes.vgg16_bn(width=1 / 16).but(name="narrow-vgg16bn", batch=128)


def gpt() -> Recipe:
    return recipes.gpt(width=32, depth=2, heads=2, block=8).but(name="narrow-gpt", batch=256, steps=40)


def autoformer() -> Recipe:
    return recipes.autoformer(96, width=16, heads=2, hidden=32).but(name="narrow-autoformer", batch=128, steps=40)


def gpt_words() -> Recipe:
    """Large enough to show what methods cost a model of many words: docs/results.md."""
    base = recipes.gpt(width=64, depth=2, heads=4, block=32)
    return base.but(name="narrow-gpt-words", batch=64, steps=600, eval_every=600)


def gpt_bytes() -> Recipe:
    """The same by byte, of any text: `--data FILE`."""
    return gpt_words().but(name="narrow-gpt-bytes", source=partial(data.text.by_bytes, block=32))
