"""What is measured on: VGG16-BN for 32×32 images, ViT-B/16's weights, and spectra like a trained model's."""

import torch
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
