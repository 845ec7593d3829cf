"""The vision transformer as timm builds it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_EPS = 1e-6


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
