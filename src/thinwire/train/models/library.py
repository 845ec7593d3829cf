"""The library's own model where it imports, ours where it does not; nobody else notices.

Names, shapes and arithmetic agree, so checkpoints go both ways. First values are ours in either case, and as much
chance is taken. A setting that the library cannot express, a narrow model say, is ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from thinwire.train.models.resnet import ResNet50
from thinwire.train.models.vgg import VGG16
from thinwire.train.models.vit import ViT


def vgg16(**sizes: Any) -> nn.Module:
    """`VGG16` with these arguments; timm's at full width."""
    return _library(VGG16(**sizes), lambda: _timm_vgg16(**sizes))


def resnet50(**sizes: Any) -> nn.Module:
    """`ResNet50` with these arguments; torchvision's at full width without dropout."""
    return _library(ResNet50(**sizes), lambda: _torchvision_resnet50(**sizes))


def vit(**sizes: Any) -> nn.Module:
    """`ViT` with these arguments; timm's where it knows them all."""
    return _library(ViT(**sizes), lambda: _timm_vit(**sizes))


def _library(ours: nn.Module, make: Callable[[], nn.Module | None]) -> nn.Module:
    """The library's model with our values. Whatever goes wrong there, other names in other versions too: ours."""
    try:
        with torch.random.fork_rng(devices=[]):
            theirs = make()
        if theirs is None:
            return ours
        theirs.load_state_dict(ours.state_dict())
    except Exception:
        return ours
    return theirs


def _timm_vgg16(*, classes: int = 10, width: float = 1.0) -> nn.Module | None:
    import timm

    return timm.create_model("vgg16", num_classes=classes) if width == 1.0 else None


def _torchvision_resnet50(*, classes: int = 1000, width: float = 1.0, dropout: float = 0.0) -> nn.Module | None:
    from torchvision.models import resnet50 as library

    return library(num_classes=classes) if width == 1.0 and dropout == 0.0 else None


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


def _timm_vit(*, dropout: float = 0.0, **sizes: Any) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    dropouts = {"pos_drop_rate": dropout, "proj_drop_rate": dropout} if dropout else {}
    return VisionTransformer(**{_TIMM[name]: size for name, size in sizes.items()}, **dropouts)
