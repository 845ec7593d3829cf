"""CIFAR: VGG16 as in AB's paper and as usual, ResNet-18, and small vision transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import AdamW

from thinwire.config import Nesterov
from thinwire.experiments import data, models, tables
from thinwire.experiments.augmentation import CIFAR10, CIFAR100, Pictures
from thinwire.recipes.sizes import checked, for_images
from thinwire.train import initial
from thinwire.train.schedule import Cosine
from thinwire.train.task import Classify, MethodOverrides, Recipe

_IMAGES = 50_000
_BATCH = 1024


def _steps(epochs: int) -> int:
    return round(epochs * _IMAGES / _BATCH)


def vgg16(**sizes: Any) -> Recipe:
    """timm's VGG16 without BatchNorm, 134 M parameters, 89 % of them in two layers; Tables A.6 and A.9.

    A batch of 1,024 is 49 iterations per epoch, as in Table A.9. The augmentation is the usual one for CIFAR, a shift
    by up to 4 pixels and a flip; the text mentions random resizing and cropping without details.
    """
    checked(models.VGG16, sizes)
    return Recipe(
        name="vgg16-cifar10",
        summary="VGG16 without BatchNorm, 134 M parameters, on CIFAR-10 (dissertation, Tables A.6 and A.9)",
        task=Classify(smoothing=0.1),
        source=data.cifar10,
        model=lambda source: _orthogonal(models.vision.vgg16, for_images(models.VGG16, sizes, source)),
        optimizer=partial(AdamW, lr=3e-3, weight_decay=0.1),
        steps=_steps(150),
        epochs=150,
        epochs_are_passes=True,
        batch=_BATCH,
        rate=Cosine(warmup=10 / 150, floor=0.0, from_zero=True),
        transform=Pictures(statistics=CIFAR10, pad=4),
        autocast=True,
        clip=1.0,
        eval_every=_steps(2),
        suited={
            "ab-paper": tables.ab(tables.VGG16),
            "daso": MethodOverrides({"warmup": 4 / 30, "cooldown": 4 / 30, "compensate": True}),
            "localsgd": MethodOverrides({"every": 24, "warmup": 0.05}),
            "diloco": MethodOverrides({"every": 24, "outer": Nesterov(0.7, 0.5), "warmup": 0.05}),
            "powersgd": MethodOverrides({"rank": 16, "warmup": 0.05}),
            "topk": MethodOverrides({"ramp": 0.05}),
            "onebit": MethodOverrides({"warmup": 0.05}),
        },
    )


def vgg16_bn(**sizes: Any) -> Recipe:
    """The usual VGG16 for CIFAR, with BatchNorm and a narrow classifier, 15 M parameters, as `vgg16` otherwise."""
    checked(models.VGG16BN, sizes)
    return vgg16().replace(
        name="vgg16bn-cifar10",
        summary="VGG16 with BatchNorm, 15 M parameters, on CIFAR-10 (settings of Tables A.6 and A.9)",
        model=lambda source: _orthogonal(models.VGG16BN, for_images(models.VGG16BN, sizes, source)),
    )


def resnet18(**sizes: Any) -> Recipe:
    """The usual ResNet-18 for CIFAR at half its width, 2.8 M parameters, over 30 epochs, as `vgg16_bn` otherwise."""
    whole = checked(models.ResNet18, {"width": 0.5, **sizes})
    base = vgg16_bn().over(30)
    return base.replace(
        name="resnet18-cifar10",
        summary="ResNet-18 at half its width, 2.8 M parameters, on CIFAR-10",
        model=lambda source: _orthogonal(models.ResNet18, for_images(models.ResNet18, whole, source)),
        suited={method: own for method, own in base.suited.items() if method != "ab-paper"},  # its counts are VGG16's
    )


def _orthogonal(make: Callable[..., nn.Module], sizes: dict[str, Any]) -> nn.Module:
    return initial.build(lambda: make(**sizes), orthogonal=True)


_MINI = {"classes": 10, "image": 32, "patch": 8, "width": 768, "depth": 6, "heads": 6, "qkv_bias": False}
_AUGMENTED = Pictures(statistics=CIFAR10, scale=(0.8, 1.0), rand_augment=9, erase=0.25)


def mini_vit(**sizes: Any) -> Recipe:
    """OIALR's mini-ViT, 43 M parameters; the baseline of Table A.2.

    The text does not give the epochs. Its search tried delays of up to 10,000 steps, which are 205 epochs, so there
    were more; timm's default is 300.
    """
    epochs = 300
    steps = _steps(epochs)
    whole = checked(models.ViT, {**_MINI, "drop_path": 0.2, **sizes})
    return Recipe(
        name="minivit-cifar10",
        summary="a ViT of depth 6 on CIFAR-10 (dissertation, Table A.2)",
        task=Classify(smoothing=0.1),
        source=data.cifar10,
        model=lambda source: models.vision.vit(**for_images(models.ViT, whole, source)),
        optimizer=partial(AdamW, lr=1e-4),
        steps=steps,
        epochs=epochs,
        epochs_are_passes=True,
        batch=_BATCH,
        rate=Cosine(warmup=10 / epochs, floor=0.1, start=0.1, from_zero=True),
        transform=_AUGMENTED,
        autocast=True,
        eval_every=_steps(5),
        suited={
            "ab-paper": MethodOverrides({"merge": "trained"}),
            "oialr": MethodOverrides({"factor_at": 4000 / steps, "redecompose": 1000 / steps, "cutoff": 0.2}),
            "localsgd": MethodOverrides({"every": 24, "warmup": 0.05}),
            "diloco": MethodOverrides({"every": 24, "warmup": 0.05}),
            "powersgd": MethodOverrides({"rank": 16, "warmup": 0.05}),
        },
    )


def mini_vit_tuned(**sizes: Any) -> Recipe:
    """The same with the learning rates that the dissertation's search found for OIALR: they rise to the end."""
    base = mini_vit(**sizes)
    return base.replace(
        name="minivit-cifar10-tuned",
        summary="the same ViT with the rates found for OIALR (dissertation, Table A.2, tuned)",
        optimizer=partial(AdamW, lr=2e-4),
        rate=Cosine(warmup=17 / base.epochs, floor=4.0, start=0.4, k_decay=0.4, from_zero=True),
    )


def small_vit(**sizes: Any) -> Recipe:
    """A ViT of 2.7 M parameters on CIFAR-100; AB's guideline was found there with one that is not described further."""
    small = {"classes": 100, "width": 192, "drop_path": 0.1, **sizes}
    return mini_vit(**small).replace(
        name="minivit-cifar100",
        summary="a small ViT, 2.7 M parameters, on CIFAR-100",
        source=data.cifar100,
        optimizer=partial(AdamW, lr=1e-3, weight_decay=0.05),
        steps=_steps(125),
        epochs=125,
        rate=Cosine(warmup=10 / 125, floor=0.01),
        transform=Pictures(statistics=CIFAR100, scale=(0.8, 1.0), rand_augment=9, erase=0.25),
    )
