"""The model as it is, and what shapes share that change it: which layers there are, and factors that all agree on."""

from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

from torch import Tensor, nn

from thinwire.comm.fsdp import cut_like, shard_again, with_modules
from thinwire.exchange.parts import Part, PartState
from thinwire.factor.convert import Kept, Layer, OrderOfUse, find_layers, to_factors, to_full
from thinwire.factor.optimizers import State
from thinwire.shape.agree import Factors, agreed_factors, agreed_in_turn, gathered_layer


class Shape(Part):
    """What the model looks like; by itself it stays full, and `finish` may cut it."""

    changes: ClassVar[bool] = False
    """Whether parameters become others in training."""
    must_factor = False
    """Whether a model without layers to factor is refused."""
    on_request: Callable[[], None] | None = None
    """What `replica.factor_now()` does, where it does anything; collective."""
    usage: OrderOfUse | None = None
    """Watches the order in which layers are used, where the first and the last stay full."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.kept: list[Kept] = []
        """Layers that stay full, and why."""
        self.decompositions = 0
        self.found_ranks: dict[str, int] = {}

    def finish(self, cutoff: float | None) -> None:
        """Leave the model as small as this shape makes it; cut it where a cutoff is given. All hold the same one."""
        if cutoff is not None:
            run = self.run
            self.layers, self.kept = find_layers(with_modules(run.model), trained=run.optimizers.parameters)
            self._cut(cutoff)

    def state_dict(self) -> PartState:
        return PartState({"decompositions": self.decompositions, "found_ranks": self.found_ranks})

    def load_state_dict(self, state: PartState, *, stays: bool) -> None:
        """Give the model the shape that it had; values are loaded next."""
        self.decompositions, self.found_ranks = state.shared["decompositions"], state.shared["found_ranks"]

    # What shapes share.

    def _agreed_factors(self, cutoff: float | None) -> Iterable[tuple[Layer, tuple[Tensor, ...]]]:
        """Factors of every layer that they make smaller, the same on all workers; collective.

        Without a cutoff, at the highest rank at which they do. Those of a sharded model are found one after the other,
        while the caller takes them.
        """
        self.decompositions += 1
        found = self._agreed(self.layers, lambda layer: self.run.context.find_factors(layer, cutoff))
        if not isinstance(found, list):
            return self._noted(found)
        self.found_ranks = {layer.label: factors[0].shape[1] for layer, factors in found}
        return found

    def _noted(self, found: Iterable[tuple[Layer, Factors]]) -> Iterator[tuple[Layer, Factors]]:
        self.found_ranks = {}
        for layer, factors in found:
            self.found_ranks[layer.label] = factors[0].shape[1]
            yield layer, factors

    def _agreed(
        self, layers: list[Layer], find: Callable[[Layer], Factors | None], count: int = 2
    ) -> Iterable[tuple[Layer, Factors]]:
        """What `find` gives of these layers, in turn where the model is sharded; collective."""
        if self.run.wire.is_sharded:
            with_modules(self.run.model)
            return agreed_in_turn(layers, self.run.wire, find, count)
        return agreed_factors(layers, self.run.wire, find, count)

    def _give_factors(self, layer: Layer, *factors: Tensor) -> None:
        """Replace a weight, or its factors, by these; where the model is sharded, they are."""
        old = layer.parameters
        to_factors(layer, *factors)
        shard_again(self.run.model, layer, old)

    def _set_state(self, p: nn.Parameter, state: State) -> None:
        """Give a parameter the state of all of it."""
        self.run.optimizers.set_state(p, {name: cut_like(value, p) for name, value in state.items()})

    def _give_weight(self, layer: Layer) -> None:
        """Multiply a factored layer out; collective inside a group that shards it."""
        old = layer.parameters
        to_full(layer, gathered_layer(layer, self.run.wire).factors)
        shard_again(self.run.model, layer, old)

    def _cut(self, cutoff: float) -> None:
        """Cut every layer that becomes smaller by it, and note those that do not."""
        for layer, factors in self._agreed_factors(cutoff):
            self._give_factors(layer, *factors)
        why = f"rank too high at cutoff {cutoff}"
        self.kept = [*self.kept, *(Kept(layer.key, why) for layer in self.layers if not layer.is_factored)]
