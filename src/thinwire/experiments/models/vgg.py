"""VGG16 as timm builds it, and the smaller one with BatchNorm for 32×32 images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

_STAGES = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))
"""Channels of each convolution in multiples of the first one's; a pooling after each stage."""

_FIRST = 64
_KERNEL = 7


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
