"""Search an architecture: a small residual network on digits, in the space of the dissertation's Table 6.1.

    thinwire tune examples/architecture.py:residual --method ab --space examples/architecture.toml --engine optuna

The dissertation searched a ResNet-50 for satellite images. What it searched is here: the filters of the first block,
the activation function, the order of activation, normalisation and addition, and the optimizer.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.recipes import Recipe, digits

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": F.elu,
    "hardsigmoid": F.hardsigmoid,
    "linear": lambda x: x,
    "relu": F.relu,
    "selu": F.selu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "softsign": F.softsign,
    "swish": F.silu,
    "tanh": torch.tanh,
}
ORDERS = ("original", "norm_after", "activation_before", "activation_only", "full")
"""Figure 6.2: what comes before, between and after the convolutions of a block, and what after the addition."""


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, filters: int, activation: str, order: str) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(filters, filters, 3, padding=1, bias=False) for _ in range(2))
        self.norm_first, self.norm_second = nn.BatchNorm2d(filters), nn.BatchNorm2d(filters)
        self.activation, self.order = ACTIVATIONS[activation], order

    def forward(self, x: Tensor) -> Tensor:
        act = self.activation
        if self.order == "full":
            inner = self.second(act(self.norm_second(self.first(act(self.norm_first(x))))))
            return x + inner
        if self.order == "activation_only":
            return x + self.norm_second(self.second(act(self.norm_first(self.first(act(x))))))
        inner = self.second(act(self.norm_first(self.first(x))))
        if self.order == "norm_after":
            return act(self.norm_second(x + inner))
        if self.order == "activation_before":
            return x + act(self.norm_second(inner))
        return act(x + self.norm_second(inner))


def residual(filters: int = 32, blocks: int = 2, activation: str = "relu", order: str = "original") -> Recipe:
    """The recipe digits with a residual network; each argument is a parameter `with.NAME` of a space."""
    if activation not in ACTIVATIONS or order not in ORDERS:
        known = f"{', '.join(ACTIVATIONS)}; {', '.join(ORDERS)}"
        raise ValueError(f"activation={activation!r}, order={order!r} are not among {known}")

    def model(source: object) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, filters, 3, padding=1),
            *(Block(filters, activation, order) for _ in range(blocks)),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * filters, 10),
        )

    return digits().replace(name="digits-residual", summary="a residual network on 8×8 digits", model=model)
