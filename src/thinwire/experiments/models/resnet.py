"""ResNet-50 as torchvision builds it, and the usual ResNet-18 for 32×32 images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

_DEPTHS = (3, 4, 6, 3)
_EXPANSION = 4


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
        inner = [first * 2**i for i in range(4)]
        self.layer1 = _stage(first, inner[0], _DEPTHS[0], stride=1)
        self.layer2 = _stage(inner[0] * _EXPANSION, inner[1], _DEPTHS[1], stride=2)
        self.layer3 = _stage(inner[1] * _EXPANSION, inner[2], _DEPTHS[2], stride=2)
        self.layer4 = _stage(inner[2] * _EXPANSION, inner[3], _DEPTHS[3], stride=2)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(inner[3] * _EXPANSION, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

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
        self.layer1 = _basic_stage(first, first, stride=1)
        self.layer2 = _basic_stage(first, 2 * first, stride=2)
        self.layer3 = _basic_stage(2 * first, 4 * first, stride=2)
        self.layer4 = _basic_stage(4 * first, 8 * first, stride=2)
        self.fc = nn.Linear(8 * first, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def _stage(inputs: int, inner: int, depth: int, *, stride: int) -> nn.Sequential:
    rest = (_Bottleneck(inner * _EXPANSION, inner) for _ in range(depth - 1))
    return nn.Sequential(_Bottleneck(inputs, inner, stride), *rest)


class _Bottleneck(nn.Module):
    """1×1 down, 3×3, 1×1 up, plus an identity, or a projection if the shape changes."""

    def __init__(self, inputs: int, inner: int, stride: int = 1) -> None:
        super().__init__()
        outputs = inner * _EXPANSION
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


def _basic_stage(inputs: int, outputs: int, *, stride: int) -> nn.Sequential:
    return nn.Sequential(_BasicBlock(inputs, outputs, stride), _BasicBlock(outputs, outputs))


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
