"""The models of the recipes that come with the library."""

from __future__ import annotations

import torch
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


class Decoder(nn.Module):
    """Token and position embeddings, pre-norm layers, a linear head; weights normal with standard deviation 0.02.

    Returns logits of shape (batch, time, vocabulary).
    """

    def __init__(
        self, *, vocabulary: int, block: int, width: int, depth: int, heads: int, dropout: float, gelu: str
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(block, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(_Layer(width, heads, dropout, gelu) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.places(places))  # (batch, time, width)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class CharGPT(Decoder):
    """A small GPT over characters, with a head of its own and the exact GELU: 0.82 M parameters at 65 characters."""

    def __init__(self, *, vocabulary: int, block: int = 64, width: int = 128, depth: int = 4, heads: int = 4) -> None:
        sizes = {"vocabulary": vocabulary, "block": block, "width": width, "depth": depth, "heads": heads}
        super().__init__(**sizes, dropout=0.0, gelu="none")


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, gelu: str) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = _Attention(width, heads, dropout)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(gelu), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        dropped = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, time, width)))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
