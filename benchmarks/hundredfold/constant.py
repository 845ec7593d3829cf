"""Recipes at a constant learning rate, where nothing anneals what a change of shape did."""

from functools import partial

from torch.optim import AdamW

from thinwire import experiments
from thinwire.recipes import Recipe
from thinwire.train.schedule import Cosine


def vgg16_bn() -> Recipe:
    """`vgg16bn-cifar10` at a third of its highest rate, which is about where the cosine is when AB factors."""
    base = experiments.vgg16_bn()
    return base.replace(
        name="vgg16bn-constant",
        optimizer=partial(AdamW, lr=1e-3, weight_decay=0.1),
        rate=Cosine(warmup=10 / 150, floor=1.0, from_zero=True),
    )
