"""What is measured on beside the package's models: shapes of weights, and spectra as of a trained model."""

import torch
from torch import Tensor, nn

from thinwire.experiments.models import VGG16BN

Shape = tuple[int, ...]

VGG16_CLASSIFIER: list[Shape] = [(4096, 25088), (4096, 4096)]
"""The wide layers of the VGG16 for 224×224 images."""


def vgg16_shapes() -> list[Shape]:
    """Every weight matrix of VGG16-BN for 32×32 images."""
    with torch.device("meta"):
        return [tuple(p.shape) for p in VGG16BN().parameters() if p.dim() > 1]


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
