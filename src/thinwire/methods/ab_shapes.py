"""AB's layers as factors A B: at which ranks, with which optimizer state, and how far an update moves them."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator

from torch import Tensor, nn

from thinwire.base.errors import ConfigError
from thinwire.comm.fsdp import cut_like, refuse_reshaping, whole_of
from thinwire.config import AB
from thinwire.factor import moments
from thinwire.factor.convert import Layer
from thinwire.factor.matrix import decompose
from thinwire.factor.ranks import smallest_size
from thinwire.methods.agree import agreed_in_turn, gathered, gathered_state
from thinwire.methods.context import MethodContext
from thinwire.methods.factoring import Factoring
from thinwire.methods.rates import RateMatching

Factors = tuple[Tensor, ...]


class ABShapes(Factoring):
    """Layers that become factors and are decomposed again; each group transforms its own optimizer state."""

    config: AB

    def __init__(self, config: AB, context: MethodContext) -> None:
        super().__init__(config, context)
        self.must_factor = config.factor_at is not None
        if self.must_factor and self.wire.is_sharded:
            refuse_reshaping(context.model)
        self.full_size = sum(p.numel() for p in whole_of(context.model).parameters())
        self.rates = RateMatching(context, self._scales)

    def _check_target(self) -> None:
        """Refuse a target that the layers, as they are known now, do not allow."""
        least = smallest_size(self.full_size, self.layers)
        if self.config.target is not None and self.full_size / least < self.config.target:
            raise ConfigError(
                f"`target`={self.config.target!r} cannot be reached: with rank 1 in every layer that can be "
                f"factored the model is {math.floor(100 * self.full_size / least) / 100:g} times smaller; use at "
                "most that, or keep fewer layers full"
            )

    def _find_factors(self) -> Iterable[tuple[Layer, Factors]]:
        """Factors of every layer that they make smaller: at the cutoff, or at the cutoff that reaches the target."""
        if self.config.target is None:
            return self.agreed_factors(self.config.cutoff)
        if self.wire.is_sharded:
            return self._found_twice(self.config.target)
        found = list(self.agreed_factors(None))
        own = self.context.choose_ranks([(layer, a, b) for layer, (a, b) in found], self.full_size, self.config.target)
        ranks = self.wire.all_gather_object(own)[0]
        self.found_ranks = {layer.label: rank for (layer, _), rank in zip(found, ranks, strict=True) if rank}
        return [
            (layer, (a[:, :rank].contiguous(), b[:rank].contiguous()))
            for (layer, (a, b)), rank in zip(found, ranks, strict=True)
            if rank
        ]

    def _found_twice(self, target: float) -> Iterator[tuple[Layer, Factors]]:
        """Of a sharded model, whose factors nobody can hold all at once: singular values first, then factors."""
        found = self.agreed_factors(None)
        values = [(layer, a.double().norm(dim=0, keepdim=True), b[:0]) for layer, (a, b) in found]  # (1, k)
        own = self.context.choose_ranks(values, self.full_size, target)
        ranks = self.wire.all_gather_object(own)[0]
        chosen = {layer.key: rank for (layer, _, _), rank in zip(values, ranks, strict=True) if rank}
        layers = [layer for layer in self.layers if layer.key in chosen]
        self.found_ranks = {layer.label: chosen[layer.key] for layer in layers}
        return agreed_in_turn(
            layers, self.wire, lambda layer: decompose(layer.matrix(), 0.0, rank=chosen[layer.key])[:2]
        )

    def _to_factors(self, layer: Layer, a: Tensor, b: Tensor) -> None:
        """Give a layer these factors; their optimizer state is this group's own, transformed."""
        states = [gathered_state(self.optimizers.state_of(p), self.wire) for p in layer.parameters]
        if layer.is_factored:
            carried = moments.recut_factors(states, [gathered(p, self.wire) for p in layer.parameters], (a, b))
        else:
            carried = moments.factors_from_full(states[0], layer.view, a, b)
        self._reshape_layer(layer, a, b)
        for factor, state in zip(layer.factors, carried, strict=True):
            if state:
                self.optimizers.set_state(factor, {name: cut_like(value, factor) for name, value in state.items()})

    def _reshape_layer(self, layer: Layer, a: Tensor, b: Tensor) -> None:
        old = layer.parameters
        self.give_factors(layer, a, b)
        self.optimizers.exchange(old, layer.factors, ("a", "b"))

    def _to_full(self, layer: Layer) -> None:
        factors = layer.factors
        self.give_weight(layer)
        self.optimizers.exchange(factors, [layer.weight])

    def _scales(self) -> list[tuple[nn.Parameter, Callable[[], Tensor | None]]]:
        """By how much updates of factors are multiplied: ΔA B has the size of ΔA times that of a column of B."""
        if not self.config.match_rate:
            return []
        found: list[tuple[nn.Parameter, Callable[[], Tensor | None]]] = []
        for layer in self.factored:
            a, b = layer.factors
            found += [(p, functools.partial(self._scale, p, other)) for p, other in ((a, b), (b, a)) if p.requires_grad]
        return found

    def _scale(self, p: nn.Parameter, other: nn.Parameter) -> Tensor | None:
        if not self.rates.is_normalised(p):
            return None
        return (math.sqrt(max(other.shape)) / other.detach().norm()).nan_to_num(posinf=1.0)
