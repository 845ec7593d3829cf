"""Running statistics of normalisation layers that follow an outer step.

An outer step moves weights further than any group did. Statistics that are only averaged belong to weights that nobody
has any more, and a model evaluated in the next ten steps or so fails. So they take the same outer step: means as they
are, variances by their logarithms, which keeps them positive.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from thinwire.config.common import Nesterov, Radial

_LEAST = 1e-12


class OuterStatistics:
    """The outer step of all running means and variances of a model; the first average only sets where they start."""

    def __init__(self, model: nn.Module, outer: Nesterov | Radial | None) -> None:
        self.model = model
        self.outer = outer
        self.restart()

    def restart(self) -> None:
        """Begin again, without momentum."""
        self.agreed: list[Tensor] = []
        self.momentum: list[Tensor] = []

    @torch.no_grad()
    def step(self) -> None:
        """Move statistics that were just averaged, and so are the same on all workers."""
        norms = [m for m in self.model.modules() if isinstance(m, _NormBase) and m.running_var is not None]
        if not isinstance(self.outer, Nesterov) or not norms:
            return
        means = [_values(norm) for norm in norms]
        if len(self.agreed) != len(means):
            self.agreed, self.momentum = means, [torch.zeros_like(mean) for mean in means]
            return
        mu = self.outer.momentum or 0.0
        for i, (norm, mean) in enumerate(zip(norms, means, strict=True)):
            change = mean - self.agreed[i]
            self.momentum[i] = mu * self.momentum[i] + change
            self.agreed[i] = self.agreed[i] + self.outer.lr * (change + mu * self.momentum[i])
            norm.running_mean.copy_(self.agreed[i][0])  # type: ignore[union-attr]
            norm.running_var.copy_(self.agreed[i][1].exp())  # type: ignore[union-attr]

    def tensors(self) -> list[Tensor]:
        """What it holds, the same on all workers."""
        return [*self.agreed, *self.momentum]

    def state_dict(self) -> dict[str, Any]:
        return {"agreed": self.agreed, "momentum": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.agreed, self.momentum = list(state["agreed"]), list(state["momentum"])


def _values(norm: _NormBase) -> Tensor:
    """Means, and logarithms of variances, (2, channels)."""
    assert norm.running_mean is not None and norm.running_var is not None
    return torch.stack([norm.running_mean, norm.running_var.clamp_min(_LEAST).log()]).float()
