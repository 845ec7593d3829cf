"""Singular values of a model's weights, few enough of each to be written down during training."""

import torch
from torch import nn

from thinwire.factor.forms import Chain, label_of, read, shape_of, tall

POINTS = 33
"""Singular values kept of each layer, evenly spaced from the largest to the smallest."""
_DIGITS = 4


@torch.no_grad()
def spectra(model: nn.Module) -> dict[str, list[float]]:
    """Of each weight of two dimensions or more its singular values as shares of the largest, by the layer's name.

    A factored layer's values behind its rank are 0. A layer with values that are not finite is left out, and so are
    embeddings. Nothing is sent, and training is not affected.
    """
    layers = read(model)
    found = {key: _values(chain) for key, chain in layers.chains().items() if key not in layers.left_out}
    return {label_of(key): values for key, values in found.items() if values}


def _values(chain: Chain) -> list[float]:
    chain = tall(chain)
    first, *rest = (factor.detach().double() for factor in chain)
    if not all(torch.isfinite(factor).all() for factor in (first, *rest)):
        return []
    core = torch.linalg.qr(first, mode="r").R  # (k, k)
    for factor in rest:
        core = core @ factor  # (k, n)
    sigma = torch.linalg.svdvals(core.cpu())
    values = torch.zeros(shape_of(chain)[1], dtype=sigma.dtype)
    values[: len(sigma)] = sigma / sigma[0].clamp(min=torch.finfo(sigma.dtype).tiny)
    places = torch.linspace(0, len(values) - 1, min(POINTS, len(values))).round().long()
    return [float(f"{value:.{_DIGITS}g}") for value in values[places].tolist()]
