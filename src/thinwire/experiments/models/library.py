"""The library's own model if it can be imported, else ours.

Names, shapes and arithmetic agree, so checkpoints work in both. Initial values are ours in either case, and use as
many random numbers. Our model is used for settings that the library does not have, such as a narrow model. It is also
used, with a warning, if a version of the library has other names or cannot be imported. Any other failure is an error.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from thinwire.experiments.models.resnet import ResNet50
from thinwire.experiments.models.vgg import VGG16
from thinwire.experiments.models.vit import ViT

Make = Callable[[ModuleType], nn.Module | None]

log = logging.getLogger("thinwire")


def vgg16(**sizes: Any) -> nn.Module:
    """`VGG16` with these arguments; timm's at full width."""
    return _library(VGG16(**sizes), "timm", lambda timm: _timm_vgg16(timm, **sizes))


def resnet50(**sizes: Any) -> nn.Module:
    """`ResNet50` with these arguments; torchvision's at full width without dropout."""
    return _library(ResNet50(**sizes), "torchvision.models", lambda models: _torchvision_resnet50(models, **sizes))


def vit(**sizes: Any) -> nn.Module:
    """`ViT` with these arguments; timm's where it knows them all."""
    return _library(ViT(**sizes), "timm.models.vision_transformer", lambda module: _timm_vit(module, **sizes))


def _library(ours: nn.Module, module: str, make: Make) -> nn.Module:
    """What `make` builds with that module of a library, with our values; or ours."""
    with torch.random.fork_rng(devices=[]):
        library = _imported(module)
        theirs = make(library) if library else None
    if library is None or theirs is None:
        return ours
    state = ours.state_dict()
    if differing := _differing(state, theirs.state_dict()):
        log.warning(
            "%s of %s has a different %s: our own model is used", type(theirs).__name__, _version(library), differing
        )
        return ours
    theirs.load_state_dict(state)
    return theirs


def _imported(module: str) -> ModuleType | None:
    """The module; None if the library is not installed or, with a warning, cannot be imported."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # one that was built for another torch raises anything, a RuntimeError often
        name = module.partition(".")[0]
        if not (isinstance(error, ModuleNotFoundError) and error.name == name):
            log.warning("%s cannot be imported (%s: %s): our own model is used", name, type(error).__name__, error)
        return None


def _differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> str | None:
    """The first name that only one state has, or whose shapes differ."""
    for name in [*ours, *theirs]:
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape:
            return name
    return None


def _version(library: ModuleType) -> str:
    name = library.__name__.partition(".")[0]
    return f"{name} {getattr(importlib.import_module(name), '__version__', '')}".strip()


def _timm_vgg16(timm: ModuleType, *, classes: int = 10, width: float = 1.0) -> nn.Module | None:
    return timm.create_model("vgg16", num_classes=classes) if width == 1.0 else None


def _torchvision_resnet50(
    models: ModuleType, *, classes: int = 1000, width: float = 1.0, dropout: float = 0.0
) -> nn.Module | None:
    return models.resnet50(num_classes=classes) if width == 1.0 and dropout == 0.0 else None


_TIMM = {
    "classes": "num_classes",
    "image": "img_size",
    "patch": "patch_size",
    "width": "embed_dim",
    "depth": "depth",
    "heads": "num_heads",
    "qkv_bias": "qkv_bias",
    "drop_path": "drop_path_rate",
}


def _timm_vit(module: ModuleType, *, dropout: float = 0.0, **sizes: Any) -> nn.Module:
    dropouts = {"pos_drop_rate": dropout, "proj_drop_rate": dropout} if dropout else {}
    return module.VisionTransformer(**{_TIMM[name]: size for name, size in sizes.items()}, **dropouts)
