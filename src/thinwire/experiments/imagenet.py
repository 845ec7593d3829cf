"""ImageNet-2012: the scaling studies of AB's paper and OIALR's ViT; they need `thinwire[images]` and the images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.optim import AdamW

from thinwire.experiments import data, models, tables
from thinwire.experiments.augmentation import IMAGENET, Pictures
from thinwire.recipes.sizes import checked, for_images
from thinwire.train import initial
from thinwire.train.data import Source
from thinwire.train.schedule import Cosine
from thinwire.train.task import Classify, MethodOverrides, Recipe

_IMAGES = 1_281_167
_LOCAL = 256
"""Images per worker, where the local batch is constant."""
_GLOBAL = 4096
Make = Callable[[Source], nn.Module]
_WORKERS = 8


def resnet50_local(workers: int = _WORKERS, **sizes: Any) -> Recipe:
    """256 images per worker: more workers have larger batches and fewer steps; Tables A.6 and A.7."""
    return _resnet50("local", _LOCAL * workers, sizes)


def resnet50_global(**sizes: Any) -> Recipe:
    """4,096 images per step, for any number of workers."""
    return _resnet50("global", _GLOBAL, sizes)


def vit_b16_local(workers: int = _WORKERS, **sizes: Any) -> Recipe:
    """256 images per worker; Tables A.6 and A.8."""
    return _vit_b16("local", _LOCAL * workers, sizes)


def vit_b16_global(**sizes: Any) -> Recipe:
    """4,096 images per step, for any number of workers."""
    return _vit_b16("global", _GLOBAL, sizes)


def vit_b16_oialr(**sizes: Any) -> Recipe:
    """OIALR's ViT-B/16 with stronger augmentation on smaller crops; Table A.1. It is evaluated on crops of 160 too."""
    checked(models.ViT, sizes)
    size, epochs, batch = sizes.get("image", 160), 125, 1024
    steps = round(epochs * _IMAGES / batch)
    return Recipe(
        name="vitb16-imagenet-oialr",
        summary="ViT-B/16 on ImageNet, crops of 160 (dissertation, Table A.1)",
        task=Classify(smoothing=0.1),
        source=partial(data.image_folder, size=size, crop_pct=0.9),
        model=lambda source: _sized(models.vision.vit, models.ViT, {"image": size, "dropout": 0.1, **sizes}, source),
        optimizer=partial(AdamW, lr=1e-3),
        steps=steps,
        epochs=epochs,
        epochs_are_passes=True,
        batch=batch,
        rate=Cosine(warmup=10 / epochs, floor=0.01, start=0.01, from_zero=True),
        transform=Pictures(statistics=IMAGENET, rand_augment=15, erase=0.25),
        autocast=True,
        eval_every=round(steps / epochs),
        suited={
            "oialr": MethodOverrides({"factor_at": 25_000 / steps, "redecompose": 1000 / steps, "cutoff": 0.1}),
        },
    )


def _resnet50(kind: str, batch: int, sizes: Mapping[str, Any]) -> Recipe:
    checked(models.ResNet50, sizes)
    return _scaling(
        f"resnet50-imagenet-{kind}",
        "ResNet-50",
        lambda source: _sized(models.vision.resnet50, models.ResNet50, {"dropout": 0.1, **sizes}, source),
        tables.nearest(tables.RESNET50, batch),
        batch=batch,
        decay=0.01,
    )


def _vit_b16(kind: str, batch: int, sizes: Mapping[str, Any]) -> Recipe:
    checked(models.ViT, sizes)
    return _scaling(
        f"vitb16-imagenet-{kind}",
        "ViT-B/16",
        lambda source: _sized(models.vision.vit, models.ViT, {"drop_path": 0.1, **sizes}, source),
        tables.nearest(tables.VIT_B16, batch),
        batch=batch,
        decay=0.1,
        size=sizes.get("image", 224),
    )


def _scaling(
    name: str, title: str, make: Make, counts: tables.Counts, *, batch: int, decay: float, size: int = 224
) -> Recipe:
    epochs = 150
    steps = max(epochs, round(epochs * _IMAGES / batch))
    constant = f"{_LOCAL} images per worker" if name.endswith("local") else f"{_GLOBAL} images per step"
    return Recipe(
        name=name,
        summary=f"{title} on ImageNet, {constant} (dissertation, Tables A.6 to A.8)",
        task=Classify(smoothing=0.1),
        source=partial(data.image_folder, size=size, crop_pct=0.875),
        model=lambda source: initial.build(lambda: make(source), orthogonal=True),
        optimizer=partial(AdamW, lr=3.5e-3, weight_decay=decay),
        steps=steps,
        epochs=epochs,
        epochs_are_passes=True,
        batch=batch,
        rate=Cosine(warmup=10 / epochs, floor=0.0, from_zero=True),
        transform=Pictures(statistics=IMAGENET),
        autocast=True,
        clip=1.0,
        eval_every=round(steps / epochs),
        suited={"ab-paper": tables.ab(counts)},
    )


def _sized(make: Callable[..., nn.Module], kind: type[nn.Module], sizes: dict[str, Any], source: Source) -> nn.Module:
    """With the folder's number of classes; ImageNet's if there is no folder."""
    classes = {"classes": len(source.classes)} if isinstance(source, data.Folder) else {}
    return make(**for_images(kind, {**classes, **sizes}, source))
