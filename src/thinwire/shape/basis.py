"""OIALR's layers as U S Vᵀ, with frozen bases U and V, of which S alone is trained."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from thinwire.exchange.parts import PartState, Run
from thinwire.factor import moments
from thinwire.factor.convert import Kept, Layer
from thinwire.factor.matrix import product, wide
from thinwire.shape.agree import empty_factors, gathered, gathered_layer, gathered_state
from thinwire.shape.factoring import Factoring, RateMatching, Watching

_FORM = 3  # U, S, Vᵀ


class Basis(Factoring):
    """Full in the first phase that names it, U S Vᵀ from the second one on, with new bases every few steps."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.updates = 0

    def attach(self, run: Run) -> None:
        super().attach(run)
        self.schedule = Updates(self)
        self.rates = RateMatching(run.context, self._scales)

    def begin(self, *, again: bool) -> None:
        """Every weight becomes U S Vᵀ, at its full rank: nothing that the model computes changes."""
        super().begin(again=again)
        if again:
            self.find_layers()
            self._recut(self.layers, 0.0)

    def after_step(self) -> None:
        """New bases for the last layers, of which there are more each time."""
        super().after_step()
        if self.is_low and self._is_due:
            self.run.check_counters()
            self.updates += 1
            self._recut(self._reached, self.config.cutoff)
            self.run.gradients.wrap_again()

    @property
    def is_low(self) -> bool:
        """Whether layers are U S Vᵀ."""
        return bool(self.factored)

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

    def finish(self, cutoff: float | None) -> None:
        """Two factors where they are smaller, the full weight elsewhere.

        Without a cutoff, the layers that updates have reached are cut once more as by an update, and no others: what
        was never cut in training has not adapted to it. A cutoff is for all layers.
        """
        self.agree_on_order()
        if not self.is_low:
            self.find_layers()
            if cutoff is not None:
                self._cut(cutoff)
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
        since = self.run.step - self.config.updates_start
        return since > 0 and since % self.config.update_length == 0 and self.run.step < self.config.total_steps

    def _recut(self, layers: list[Layer], cutoff: float, max_shrink: float | None = None) -> None:
        if not layers:
            return
        shrink = self.config.max_shrink if max_shrink is None else max_shrink
        self.free_memory()
        found = self._agreed(layers, lambda layer: self.run.context.find_basis(layer, cutoff, shrink), _FORM)
        for layer, factors in found:
            self._to_basis(layer, factors)
        self.decompositions += 1
        self.found_ranks = {layer.label: layer.rank for layer in self.factored if layer.rank}

    def _to_basis(self, layer: Layer, factors: tuple[Any, ...]) -> None:
        """Give a layer these U, S and Vᵀ; the optimizer has S in place of what it trained of the layer before."""
        run, carries = self.run, self.config.moments == "carry"
        trained = layer.factors[1] if layer.is_factored else layer.weight
        state = gathered_state(run.optimizers.state_of(trained), run.wire) if carries else {}
        before = [gathered(p, run.wire) for p in layer.factors] if state and layer.is_factored else []
        self._give_factors(layer, *factors)
        middle = layer.factors[1]
        run.optimizers.exchange([trained], [middle], ("s",))
        if state:
            u, _, vt = factors
            carried = (
                moments.recut_middle(state, before, [u, vt])
                if before
                else moments.middle_from_full(state, layer.view, u, vt)
            )
            self._set_state(middle, carried)

    def _fold(self) -> None:
        """Two factors with equal shares of the singular values, or the full weight where they would not be smaller."""
        for layer in self.factored:
            u, s, vt = (wide(p.detach()) for p in gathered_layer(layer, self.run.wire).factors)
            if layer.view.is_smaller(s.shape[0]):
                root = s.diagonal().clamp_min(1e-30).sqrt()
                root = torch.maximum(root, 1e-4 * root.max())
                self._give_factors(layer, product((u, s)) / root, root[:, None] * vt)
            else:
                self._give_weight(layer)
                self.kept = [*self.kept, Kept(layer.key, "rank too high for factors to be smaller")]

    def to_full(self, layer: Layer) -> None:
        middle = layer.factors[1]
        self._give_weight(layer)
        self.run.optimizers.exchange([middle], [layer.weight])

    def to_rank(self, layer: Layer, rank: int) -> None:
        self._to_basis(layer, empty_factors(layer, rank, _FORM))

    def state_dict(self) -> PartState:
        """With the number of updates so far."""
        return PartState(super().state_dict().shared | {"updates": self.updates})

    def load_state_dict(self, state: PartState, *, stays: bool) -> None:
        super().load_state_dict(state, stays=stays)
        self.updates = state.shared["updates"]


class Updates(Watching):
    """When bases are updated."""

    of: Basis

    @property
    def next_event(self) -> int:
        config, step = self.of.config, self.run.step
        start, every = config.updates_start, config.update_length
        if not self.of.is_low:
            return super().next_event
        following = start + every if step < start else start + ((step - start) // every + 1) * every
        return following if following < config.total_steps else super().next_event
