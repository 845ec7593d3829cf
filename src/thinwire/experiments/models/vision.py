"""VGG16 and ViT as timm builds them, ResNet-50 as torchvision does, and smaller ones for images of 32×32.

`vgg16`, `resnet50` and `vit` return the library's own model if it can be imported, else ours. Names, shapes and
arithmetic agree, so checkpoints work in both. Initial values are ours in either case, and use as many random numbers.
Our model is used for settings that the library does not have, such as a narrow model. It is also used, with a warning,
if a version of the library has other names or cannot be imported. Any other failure is an error.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_STAGES = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))
"""Channels of each convolution in multiples of the first one's; a pooling after each stage."""
_FIRST = 64
_KERNEL = 7
_EXPANSION = 4
_EPS = 1e-6
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
"""Names of ViT's sizes there."""

Make = Callable[[ModuleType], nn.Module | None]

log = logging.getLogger("thinwire")


class VGG16(nn.Module):
    """timm's `vgg16`: no BatchNorm, two 4096-wide layers as convolutions. 134.3 M parameters at 10 classes.

    `width` scales all channels, those of the two wide layers too.
    """

    def __init__(self, *, classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        first = round(_FIRST * width)
        self.features = nn.Sequential(*_features(first, norm=False))
        self.pre_logits = _Wide(8 * first, 64 * first)
        self.head = _Head(64 * first, classes)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 4:
                nn.init.kaiming_normal_(parameter, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.head.fc.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pre_logits(self.features(x)))


class VGG16BN(nn.Module):
    """VGG16 with BatchNorm and a 512-wide classifier, for images of 32×32: 15.25 M parameters at 10 classes."""

    def __init__(self, *, classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        first = round(_FIRST * width)
        wide = 8 * first
        self.features = nn.Sequential(*_features(first, norm=True))
        self.classifier = nn.Sequential(
            nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def _features(first: int, *, norm: bool) -> list[nn.Module]:
    modules: list[nn.Module] = []
    inputs = 3
    for stage in _STAGES:
        for outputs in (times * first for times in stage):
            modules.append(nn.Conv2d(inputs, outputs, 3, padding=1, bias=not norm))
            modules += [nn.BatchNorm2d(outputs)] if norm else []
            modules.append(nn.ReLU(inplace=True))
            inputs = outputs
        modules.append(nn.MaxPool2d(2))
    return modules


class _Wide(nn.Module):
    """The two wide layers. Features smaller than the first one's kernel are enlarged to it: 32×32 images have 1×1."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(inputs, outputs, _KERNEL)
        self.fc2 = nn.Conv2d(outputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[-2:]
        if min(rows, columns) < _KERNEL:
            x = F.adaptive_avg_pool2d(x, (max(rows, _KERNEL), max(columns, _KERNEL)))
        return F.relu(self.fc2(F.relu(self.fc1(x))))


class _Head(nn.Module):
    """The mean over positions, then the classifier; a module of its own for timm's names."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))


class ResNet50(nn.Module):
    """torchvision's `resnet50`, with the stride in the 3×3 (v1.5): 25.6 M parameters at 1000 classes.

    `width` scales all channels; `dropout` is before the classifier.
    """

    def __init__(self, *, classes: int = 1000, width: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        first = round(64 * width)
        self.conv1 = nn.Conv2d(3, first, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        outputs = [first * _EXPANSION * 2**i for i in range(4)]
        self.layer1 = _stage(_Bottleneck, first, outputs[0], 3, stride=1)
        self.layer2 = _stage(_Bottleneck, outputs[0], outputs[1], 4, stride=2)
        self.layer3 = _stage(_Bottleneck, outputs[1], outputs[2], 6, stride=2)
        self.layer4 = _stage(_Bottleneck, outputs[2], outputs[3], 3, stride=2)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(outputs[3], classes)
        _initialise_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.dropout(x.mean((2, 3))))


class ResNet18(nn.Module):
    """ResNet-18 for images of 32×32: a 3×3 stem and no pooling after it. 11.17 M parameters at 10 classes.

    `width` scales all channels.
    """

    def __init__(self, *, classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        first = round(64 * width)
        self.conv1 = nn.Conv2d(3, first, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(first)
        self.layer1 = _stage(_BasicBlock, first, first, 2, stride=1)
        self.layer2 = _stage(_BasicBlock, first, 2 * first, 2, stride=2)
        self.layer3 = _stage(_BasicBlock, 2 * first, 4 * first, 2, stride=2)
        self.layer4 = _stage(_BasicBlock, 4 * first, 8 * first, 2, stride=2)
        self.fc = nn.Linear(8 * first, classes)
        _initialise_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def _initialise_convolutions(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _stage(block: type[nn.Module], inputs: int, outputs: int, depth: int, *, stride: int) -> nn.Sequential:
    return nn.Sequential(block(inputs, outputs, stride), *(block(outputs, outputs) for _ in range(depth - 1)))


class _Bottleneck(nn.Module):
    """1×1 down, 3×3, 1×1 up, plus an identity, or a projection if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        inner = outputs // _EXPANSION
        self.conv1 = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = _projection(inputs, outputs, stride) if (inputs, stride) != (outputs, 1) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + self.downsample(x))


class _BasicBlock(nn.Module):
    """Two 3×3, plus an identity, or a projection if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = _projection(inputs, outputs, stride) if (inputs, stride) != (outputs, 1) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


def _projection(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))


class ViT(nn.Module):
    """timm's `VisionTransformer`. The defaults are ViT-B/16 of 86.6 M parameters at 1000 classes.

    The mini ViT for images of 32×32 is `ViT(classes=10, image=32, patch=8, depth=6, heads=6, qkv_bias=False,
    drop_path=0.2)`, of 42.7 M. In training each block's two branches are left out for a share of the images that
    rises linearly with the depth, to `drop_path` in the last. `dropout` is behind the places and behind every Linear
    but those of queries, keys and values.
    """

    def __init__(
        self,
        *,
        classes: int = 1000,
        image: int = 224,
        patch: int = 16,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        qkv_bias: bool = True,
        drop_path: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.patch_embed = _Patches(patch, width)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + (image // patch) ** 2, width))
        self.pos_drop = nn.Dropout(dropout)
        rates = [drop_path * i / max(1, depth - 1) for i in range(depth)]
        self.blocks = nn.Sequential(*(_Block(width, heads, qkv_bias, rate, dropout) for rate in rates))
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.head = nn.Linear(width, classes)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.cls_token, std=1e-6)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed  # (n, 1 + patches, width)
        return self.head(self.norm(self.blocks(self.pos_drop(x)))[:, 0])


class DropPath(nn.Module):
    """Stochastic depth: in training a whole example's branch is zero with probability `rate`, else scaled up."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and self.rate):
            return x
        keep = 1 - self.rate
        kept = x.new_empty(x.shape[0], *(1,) * (x.dim() - 1)).bernoulli_(keep)
        return x * (kept / keep)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


class _Patches(nn.Module):
    """A Linear over each patch, as a convolution; a module of its own for timm's names."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)  # (n, patches, width)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, qkv_bias: bool, drop_path: float, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=_EPS)
        self.attn = _Attention(width, heads, qkv_bias, dropout)
        self.norm2 = nn.LayerNorm(width, eps=_EPS)
        self.mlp = _Perceptron(width, dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, qkv_bias: bool, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (n, heads, tokens, width each)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.dropout(self.proj(mixed.transpose(1, 2).flatten(2)))


class _Perceptron(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.fc2(self.dropout(F.gelu(self.fc1(x)))))


def vgg16(*, classes: int = 10, width: float = 1.0) -> nn.Module:
    """`VGG16` with these arguments; timm's at full width."""
    ours = VGG16(classes=classes, width=width)
    return _library(
        ours, "timm", lambda timm: timm.create_model("vgg16", num_classes=classes) if width == 1.0 else None
    )


def resnet50(*, classes: int = 1000, width: float = 1.0, dropout: float = 0.0) -> nn.Module:
    """`ResNet50` with these arguments; torchvision's at full width without dropout."""
    ours, known = ResNet50(classes=classes, width=width, dropout=dropout), width == 1.0 and dropout == 0.0
    return _library(ours, "torchvision.models", lambda them: them.resnet50(num_classes=classes) if known else None)


def vit(*, dropout: float = 0.0, **sizes: Any) -> nn.Module:
    """`ViT` with these arguments; timm's where it knows them all."""
    ours = ViT(dropout=dropout, **sizes)
    theirs = {_TIMM[name]: size for name, size in sizes.items()}
    theirs |= {"pos_drop_rate": dropout, "proj_drop_rate": dropout} if dropout else {}
    return _library(ours, "timm.models.vision_transformer", lambda module: module.VisionTransformer(**theirs))


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
