"""Layers of a sharded model, gathered inside a group to be decomposed: as many at a time as share the work."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from thinwire.comm.wire import Wire
from thinwire.factor.convert import Layer
from thinwire.factor.optimizers import State
from thinwire.methods.agree import Factors, agreed_factors, decomposers, owners_of, refuse_diverged_layer


@dataclass(frozen=True)
class GatheredLayer(Layer):
    """A layer of which this worker holds a part, with the whole of it for a while."""

    whole: tuple[nn.Parameter, ...] = ()

    @property
    def weight(self) -> nn.Parameter:
        return self.whole[0]

    @property
    def factors(self) -> tuple[nn.Parameter, ...]:
        return self.whole


def gathered_layer(layer: Layer, wire: Wire) -> Layer:
    """A layer as one worker would hold it; collective inside a group."""
    if not wire.is_sharded:
        return layer
    whole = tuple(nn.Parameter(gathered(p, wire), requires_grad=False) for p in layer.parameters)
    return GatheredLayer(layer.name, layer.module, layer.parameter, layer.view, whole)


def gathered(t: Tensor, wire: Wire) -> Tensor:
    """All of a tensor of which this worker holds a part; any other as it is."""
    return wire.gathered(t.detach(), "decomposition")


def gathered_state(state: State, wire: Wire) -> State:
    """All of a parameter's state."""
    return {name: gathered(value, wire) if isinstance(value, Tensor) else value for name, value in state.items()}


def agreed_in_turn(
    layers: Sequence[Layer], wire: Wire, find: Callable[[Layer], Factors | None]
) -> Iterator[tuple[Layer, Factors]]:
    """As `agreed_factors`, where a worker never holds more than one whole weight, or the factors of a few.

    The caller shards the factors of a layer before it asks for the next one.
    """
    at_once = decomposers(wire.topology)
    for start in range(0, len(layers), at_once):
        some = {layer.key: layer for layer in layers[start : start + at_once]}
        shown = [_if_own(layer, owner, wire) for layer, owner in owners_of([*some.values()], wire)]
        found = [
            (some[layer.key], factors)
            for layer, factors in agreed_factors(shown, wire, find, place=(start, len(layers)))
        ]
        shown.clear()  # so that whole weights are freed before the state of optimizers is gathered
        for i, (layer, factors) in enumerate(found):
            found[i] = layer, ()
            yield layer, factors


def _if_own(layer: Layer, owner: int | None, wire: Wire) -> Layer:
    """The whole layer if this member decomposes it; all members gather it, and see if it is finite."""
    whole = gathered_layer(layer, wire)
    refuse_diverged_layer(whole)
    return whole if owner in (None, wire.member) else layer
