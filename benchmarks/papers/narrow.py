"""Narrow versions of the papers' recipes, to see that run.py runs, and to look into what came out."""

from functools import partial

from thinwire import experiments
from thinwire.experiments import data
from thinwire.recipes import Recipe


def vgg16() -> Recipe:
    return experiments.vgg16(width=1 / 16).replace(name="narrow-vgg16", batch=128)


def vgg16_bn() -> Recipe:
    return experiments.vgg16_bn(width=1 / 16).replace(name="narrow-vgg16bn", batch=128)


def gpt() -> Recipe:
    return experiments.gpt(width=32, depth=2, heads=2, block=8).replace(name="narrow-gpt", batch=256, steps=40)


def autoformer() -> Recipe:
    return experiments.autoformer(96, width=16, heads=2, hidden=32).replace(
        name="narrow-autoformer", batch=128, steps=40
    )


def mini_vit() -> Recipe:
    return experiments.mini_vit(width=48).replace(name="narrow-minivit", batch=32, steps=40, eval_every=40)


def gpt_words() -> Recipe:
    """Large enough to show what methods cost a model of many words: docs/results.md."""
    base = experiments.gpt(width=64, depth=2, heads=4, block=32)
    return base.replace(name="narrow-gpt-words", batch=64, steps=600, eval_every=600)


def gpt_bytes() -> Recipe:
    """The same by byte, of any text: `--data FILE`."""
    return gpt_words().replace(name="narrow-gpt-bytes", source=partial(data.by_bytes, block=32))
