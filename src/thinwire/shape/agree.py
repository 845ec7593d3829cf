"""One decomposition on all workers: divided inside a node, compared between groups, overwritten where it differs."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from thinwire.base.errors import DivergedError
from thinwire.comm.buckets import all_finite
from thinwire.comm.fsdp import local
from thinwire.comm.topology import Topology
from thinwire.comm.wire import Wire
from thinwire.factor.convert import Layer
from thinwire.factor.optimizers import State

Factors = tuple[Tensor, ...]


def agreed_factors(
    layers: list[Layer],
    wire: Wire,
    find: Callable[[Layer], Factors | None],
    count: int = 2,
    place: tuple[int, int] | None = None,
) -> list[tuple[Layer, Factors]]:
    """The `count` factors that `find` gives of every layer, bit for bit the same on all workers; collective.

    Layers of which it gives None are left out. `place` is where these layers begin among how many, if there are more.

    1. Members of a group inside one node decompose a share of the layers each and broadcast the factors.
    2. All workers compare one checksum per layer.
    3. Layers that differ are overwritten by rank 0's.
    """
    for layer in layers:  # every worker checks all of them, not only its share: all stop, and none waits for another
        refuse_diverged_layer(layer)
    owners = owners_of(layers, wire)
    first, of = place or (0, len(layers))
    found: list[Factors | None] = []
    with wire.ledger.times.decomposing():
        for done, (layer, owner) in enumerate(owners, start=first):
            wire.ledger.times.report_work("decomposing", done, of)
            found.append(find(layer) if owner is None or wire.stands_for(owner) else None)
    for member in sorted({owner for _, owner in owners if owner is not None}):
        its = [i for i, (_, owner) in enumerate(owners) if owner == member]
        _broadcast_factors(layers, found, its, wire, member, count)
    different = wire.differing([f or () for f in found], "checksums")
    if different:
        _broadcast_factors(layers, found, different, wire, None, count)
    return [(layer, factors) for layer, factors in zip(layers, found, strict=True) if factors is not None]


def refuse_diverged_layer(layer: Layer) -> None:
    """Raise if a layer has values that are not finite, and so no decomposition."""
    if not all_finite(local(p) for p in layer.parameters):
        raise DivergedError(
            f"layer {layer.name!r} has values that are not finite: training diverged before it was decomposed; "
            "lower the learning rate or go back to a checkpoint"
        )


def owners_of(layers: list[Layer], wire: Wire) -> list[tuple[Layer, int | None]]:
    """Which member decomposes which layer; None is every member, where the group is not inside one node."""
    sharers = decomposers(wire.topology)
    if sharers == 1:
        return [(layer, None) for layer in layers]
    load = [0] * sharers
    owner: dict[str, int] = {}
    for layer in sorted(layers, key=_cost, reverse=True):
        owner[layer.key] = load.index(min(load))
        load[owner[layer.key]] += _cost(layer)
    return [(layer, owner[layer.key]) for layer in layers]


def decomposers(topology: Topology) -> int:
    """How many workers divide the layers among them: a group inside one node; else each decomposes all."""
    group = set(topology.group)
    return len(group) if any(group <= set(node) for node in topology.nodes) else 1


def _cost(layer: Layer) -> int:
    m, n = layer.view.tall
    return m * (layer.rank or n) ** 2


def _broadcast_factors(
    layers: list[Layer], found: list[Factors | None], which: list[int], wire: Wire, member: int | None, count: int
) -> None:
    """Overwrite `found[which]` by those of a member of the group, or of rank 0 of the world."""
    device, own = layers[0].parameters[0].device, [_rank(found[i]) for i in which]
    for i, rank in zip(which, wire.broadcast_integers(own, device, "decomposition", member), strict=True):
        if rank != _rank(found[i]):
            found[i] = empty_factors(layers[i], rank, count) if rank else None
    tensors = [t for i in which for t in found[i] or ()]
    if not tensors:
        return
    if member is None:
        wire.broadcast(tensors, "decomposition")
    else:
        wire.broadcast_in_group(tensors, member, "decomposition")


def _rank(factors: Factors | None) -> int:
    return factors[0].shape[1] if factors else 0


def empty_factors(layer: Layer, rank: int, count: int = 2) -> Factors:
    """Factors without values, where the layer's own weight is."""
    m, n = layer.view.tall
    sizes = [m, *[rank] * (count - 1), n]
    like = local(layer.parameters[0])
    return tuple(like.new_empty(rows, columns) for rows, columns in itertools.pairwise(sizes))


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
    layers: Sequence[Layer], wire: Wire, find: Callable[[Layer], Factors | None], count: int = 2
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
            for layer, factors in agreed_factors(shown, wire, find, count, place=(start, len(layers)))
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
