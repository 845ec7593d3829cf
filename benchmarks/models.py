"""What is measured on: VGG16-BN and a mini ViT for 32×32 images, ViT-B/16's weights, spectra as of a trained model."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]

_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))

VGG16_CLASSIFIER: list[Shape] = [(4096, 25088), (4096, 4096)]
"""The wide layers of the VGG16 for 224×224 images."""


class VGG16(nn.Module):
    """VGG16 with BatchNorm and a 512-wide classifier: 15.25 M parameters."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(*_features())
        self.classifier = nn.Sequential(
            nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def _features() -> list[nn.Module]:
    modules: list[nn.Module] = []
    inputs = 3
    for stage in _STAGES:
        for width in stage:
            conv = nn.Conv2d(inputs, width, 3, padding=1, bias=False)
            modules += [conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            inputs = width
        modules.append(nn.MaxPool2d(2))
    return modules


class MiniViT(nn.Module):
    """ViT-B with patches of 8, six blocks and six heads, as timm builds it for 32×32 images: 42.7 M parameters."""

    def __init__(self, classes: int = 10, width: int = 768, depth: int = 6, heads: int = 6, drop: float = 0.2) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, stride=8)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 1e-6)
        self.pos_embed = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 17, width), std=0.02))
        drops = torch.linspace(0, drop, depth, device="cpu").tolist()
        self.blocks = nn.Sequential(*(Block(width, heads, rate) for rate in drops))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)  # (n, 16, width)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class Block(nn.Module):
    """Attention and a perceptron, normed before, each left out for a `drop` of the images in training."""

    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.heads, self.drop = heads, drop
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._dropped(self._attention(self.norm1(x)))
        return x + self._dropped(self.fc2(F.gelu(self.fc1(self.norm2(x)))))

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (n, heads, tokens, width each)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def _dropped(self, x: Tensor) -> Tensor:
        if not (self.training and self.drop):
            return x
        keep = 1 - self.drop
        return x * x.new_empty(x.shape[0], 1, 1).bernoulli_(keep) / keep


def vgg16_shapes() -> list[Shape]:
    """Every weight matrix of VGG16 for 32×32 images."""
    with torch.device("meta"):
        return [tuple(p.shape) for p in VGG16().parameters() if p.dim() > 1]


def vit_b16_shapes(blocks: int = 12) -> list[Shape]:
    """Every weight matrix of ViT-B/16 but the classifier: the patch convolution, then four a block."""
    block: list[Shape] = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
    return [(768, 3, 16, 16), *block * blocks]


def random_weight(shape: Shape, spectrum: str) -> Tensor:
    """A weight with a "flat" spectrum, as at initialisation, or a "decaying" one, as in a trained model."""
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    flat = torch.randn(rows, columns) / columns**0.5
    return (flat if spectrum == "flat" else _with_decay(flat)).reshape(shape)


def _with_decay(matrix: Tensor) -> Tensor:
    """Singular values σᵢ ∝ 1/(1 + 20 i/n): 28 % of them exceed 0.15 of the largest."""
    if matrix.shape[0] < matrix.shape[1]:
        return _with_decay(matrix.t()).t().contiguous()
    n = matrix.shape[1]
    left = torch.linalg.qr(matrix).Q  # (m, n)
    right = torch.linalg.qr(torch.randn(n, n)).Q
    return (left / (1 + 20 * torch.arange(n) / n)) @ right


def give_decaying_spectra(model: nn.Module) -> None:
    """Scale-preserving decaying spectra for every weight matrix; a flat one would stay full in AB."""
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                weight = random_weight(tuple(p.shape), "decaying")
                p.copy_(weight * (p.norm() / weight.norm()))
