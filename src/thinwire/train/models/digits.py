"""DigitNet: a convolutional net for 8×8 digits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class DigitNet(nn.Module):
    """Three convolutions with BatchNorm and two linear layers, for images of 8×8 pixels."""

    def __init__(self, *, classes: int = 10, dropout: float = 0.1) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_block(1, 32),
            nn.MaxPool2d(2),
            *_block(32, 64),
            *_block(64, 128),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.hidden = nn.Linear(128 * 2 * 2, 256)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(F.relu(self.hidden(self.features(x)))))


def _block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return conv, nn.BatchNorm2d(outputs), nn.ReLU()
