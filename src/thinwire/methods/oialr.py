"""OIALR, orthogonality-informed adaptive low-rank training (dissertation of D. Coquelin, section 4.3, Algorithm 1).

    1. warm-up: full rank until `factor_at`, when the bases of the weights are stable
    2. every weight becomes U S Vᵀ: U and V are frozen, the square S is trained
    3. every `redecompose` steps S of the last layers is decomposed, its vectors are folded into U and V, and small
       singular values are dropped; each time more layers are among the last ones

Only S and what is not factored have gradients, so only they cross the wire.
"""

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from thinwire.config import OIALR
from thinwire.factor import moments
from thinwire.factor.convert import Kept, Layer, to_factors, to_full
from thinwire.factor.matrix import product, wide
from thinwire.methods.agree import agreed_factors, empty_factors
from thinwire.methods.context import MethodContext, Saved
from thinwire.methods.factoring import Factoring
from thinwire.methods.features import Feature, needs_whole_weights
from thinwire.methods.rates import RateMatching
from thinwire.methods.registry import register

_FORM = 3  # U, S, Vᵀ


def _example(**more: Any) -> OIALR:
    fields = {"total_steps": 20, "factor_at": 4, "redecompose": 3, "cutoff": 0.3, "layer_fraction": 0.5}
    return OIALR(**{**fields, **more})


@register("oialr", OIALR, example=_example)
class OIALRMethod(Factoring):
    """Bases frozen once stable, the small matrix between them trained (OIALR)."""

    phases = ("warmup", "lowrank")
    config: OIALR

    def __init__(self, config: OIALR, context: MethodContext) -> None:
        super().__init__(config, context)
        self.updates = 0
        self.rates = RateMatching(context, self._scales)

    @classmethod
    def refuses(cls, config: OIALR, feature: Feature) -> str | None:
        return needs_whole_weights(config) if feature is Feature.SHARDS else super().refuses(config, feature)

    @property
    def trains_apart(self) -> bool:
        return False

    def attach(self) -> None:
        """Begin at full rank, or at low rank at once."""
        super().attach()
        if self.config.warmup_length == 0:
            self._begin()

    def after_step(self) -> None:
        """Enter low rank, or update the bases, where it is time."""
        super().after_step()
        if self.phase == "warmup" and self.step >= self.config.warmup_length:
            self._begin()
        elif self.phase == "lowrank" and self._is_due:
            self._update()

    def _scales(self) -> list[tuple[nn.Parameter, Callable[[], float | None]]]:
        """By how much the updates of every S are multiplied."""
        if self.config.match_rate is False:
            return []
        return [(layer.factors[1], functools.partial(self._scale, layer)) for layer in self.factored]

    def _scale(self, layer: Layer) -> float | None:
        s = layer.factors[1]
        if not (self.config.match_rate or self.rates.is_normalised(s)):
            return None
        return math.sqrt(math.prod(layer.view.tall)) / len(s)

    @property
    def next_event(self) -> int:
        """The next update, or the end of the full-rank steps."""
        start, every = self.config.updates_start, self.config.update_length
        if self.phase == "warmup":
            return self.config.warmup_length
        if self.step < start:
            return start + every
        following = start + ((self.step - start) // every + 1) * every
        return following if following < self.config.total_steps else sys.maxsize

    def finish(self, cutoff: float | None) -> None:
        """Two factors where they are smaller, the full weight elsewhere.

        Without a cutoff, the layers that updates have reached are cut once more as by an update, and no others: what
        was never cut in training has not adapted to it. A cutoff is for all layers.
        """
        self.agree_on_order()
        if self.phase == "warmup":
            self.find_layers()
            if cutoff is not None:
                self.cut(cutoff)
        else:
            if cutoff is None:
                self._recut(self._reached, self.config.cutoff)
            else:
                self._recut(self.layers, cutoff, max_shrink=1.0)
            self._fold()

    @property
    def _reached(self) -> list[Layer]:
        """The last layers, as many as updates have reached."""
        count = math.ceil(len(self.layers) * self.config.layer_fraction * self.updates - 1e-9)
        return self.layers[-count:] if count else []

    @property
    def _is_due(self) -> bool:
        # No update at the very end: nothing would be trained after the cut, and `finish` cuts anyway.
        since = self.step - self.config.updates_start
        return since > 0 and since % self.config.update_length == 0 and self.step < self.config.total_steps

    def _begin(self) -> None:
        """Every weight becomes U S Vᵀ, at its full rank: nothing that the model computes changes."""
        self.check_counters()
        self.find_layers()
        self._recut(self.layers, 0.0)
        self.set_phase("lowrank")

    def _update(self) -> None:
        """New bases for the last layers, of which there are more each time."""
        self.check_counters()
        self.updates += 1
        self._recut(self._reached, self.config.cutoff)

    def _recut(self, layers: list[Layer], cutoff: float, max_shrink: float | None = None) -> None:
        if not layers:
            return
        shrink = self.config.max_shrink if max_shrink is None else max_shrink
        self.free_memory()
        found = agreed_factors(layers, self.wire, lambda layer: self.context.find_basis(layer, cutoff, shrink), _FORM)
        for layer, factors in found:
            self._to_basis(layer, factors)
        self.decompositions += 1
        self.found_ranks = {layer.label: layer.rank for layer in self.factored if layer.rank}
        self.gradients.together(self.config.wire)

    def _to_basis(self, layer: Layer, factors: tuple[Any, ...]) -> None:
        """Give a layer these U, S and Vᵀ; the optimizer has S in place of what it trained of the layer before."""
        before = layer.factors if layer.is_factored else None
        trained = before[1] if before else layer.weight
        state = self.optimizers.state_of(trained)
        to_factors(layer, *factors)
        u, middle, vt = layer.factors
        self.optimizers.exchange([trained], [middle], ("s",))
        if self.config.moments == "carry" and state:
            if before:
                carried = moments.recut_middle(state, [p.detach() for p in before], [u.detach(), vt.detach()])
            else:
                carried = moments.middle_from_full(state, layer.view, u.detach(), vt.detach())
            self.optimizers.set_state(middle, carried)

    def _fold(self) -> None:
        """Two factors with equal shares of the singular values, or the full weight where they would not be smaller."""
        for layer in self.factored:
            u, s, vt = (wide(p.detach()) for p in layer.factors)
            if layer.view.is_smaller(s.shape[0]):
                root = s.diagonal().clamp_min(1e-30).sqrt()
                root = torch.maximum(root, 1e-4 * root.max())
                to_factors(layer, product((u, s)) / root, root[:, None] * vt)
            else:
                to_full(layer)
                self.kept = [*self.kept, Kept(layer.key, "rank too high for factors to be smaller")]

    # Checkpoints.

    def _to_full(self, layer: Layer) -> None:
        middle = layer.factors[1]
        to_full(layer)
        self.optimizers.exchange([middle], [layer.weight])

    def state_dict(self) -> dict[str, Any]:
        """With the number of updates so far."""
        state = super().state_dict()
        state["shared"]["updates"] = self.updates
        return state

    def load_state_dict(self, saved: Saved) -> None:
        """Give the model the shape it had."""
        shared = saved.shared

        def reshape_and_load() -> None:
            self.reshape(
                shared,
                self._to_full,
                lambda layer, rank: self._to_basis(layer, empty_factors(layer, rank, _FORM)),
                stays=saved.stays,
            )
            self.updates = shared["updates"]
            saved.load_values()

        super().load_state_dict(replace(saved, load_values=reshape_and_load))
