"""Updates of factors scaled so that the weight moves as far as it would at full rank.

Adam's updates have one size per element. What a weight makes of that depends on the factor's shape and on the factors
beside it, so a method says by how much the updates of each factor are multiplied.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from thinwire.exchange.context import MethodContext
from thinwire.factor import moments

Scale = Callable[[], float | Tensor | None]
"""By how much to multiply an update; None leaves it alone."""


_BY_NORM = ("lamb", "lars")
_BY_ELEMENT = ("adam", "lion")
"""Of whatever package, and whatever they call their state."""


class RateMatching:
    """Multiplies the updates of some parameters, without weight decay."""

    def __init__(self, context: MethodContext, scales: Callable[[], Iterable[tuple[nn.Parameter, Scale]]]) -> None:
        """`scales` gives the parameters that are trained now."""
        self.optimizers = context.optimizers
        self.scales = scales
        self._before: list[tuple[nn.Parameter, Tensor, float, Scale]] = []
        context.before_update.append(self._before_update)
        context.after_update.append(self._after_update)

    def _before_update(self, optimizer: Optimizer) -> None:
        """Keep copies; a closure may still have to compute gradients."""
        decay = decoupled_decay(optimizer)
        self._before = [(p, p.detach().clone(), decay[id(p)], scale) for p, scale in self.scales() if id(p) in decay]

    @torch.no_grad()
    def _after_update(self, optimizer: Optimizer) -> None:
        for p, before, decay, find in self._before:
            if (scale := find()) is not None:
                start = before * (1 - decay)
                larger = start + (p - start) * scale
                # What the optimizer left alone stays: without a gradient, or a fused update that a scaler skipped.
                p.copy_(torch.where((p != before).any(), larger, p))
        self._before = []

    def is_normalised(self, p: nn.Parameter) -> bool:
        """Whether an update has one size per element, as Adam's and Lion's: it follows neither from gradients, nor from
        the size of the parameter, as LAMB's and LARS's do."""
        kind = type(self.optimizers.of(p)).__name__.lower()
        if any(name in kind for name in _BY_NORM):
            return False
        by_name = any(name in kind for name in _BY_ELEMENT)
        return by_name or any(name in moments.QUADRATIC for name in self.optimizers.state_of(p))


_DECOUPLED = ("decoupled_weight_decay", "weight_decouple")
"""What torch and pytorch_optimizer call it."""


def decoupled_decay(optimizer: Optimizer) -> dict[int, float]:
    """The factor by which the next update shrinks each parameter by decoupled weight decay, as AdamW does; by id."""
    found = {}
    for group in optimizer.param_groups:
        decoupled = isinstance(optimizer, AdamW) or any(group.get(name) for name in _DECOUPLED)
        rate = 1.0 if group.get("fixed_decay") else group["lr"]
        share = float(rate * group.get("weight_decay", 0.0)) if decoupled else 0.0
        found.update({id(p): share for p in group["params"]})
    return found
