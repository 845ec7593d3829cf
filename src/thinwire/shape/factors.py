"""AB's layers as factors A B, which groups train in turns, and the averages of what they trained.

While all groups train A, B is the same everywhere: the mean of A B is A's mean times B, so an average is exact, and
only half of the factors travel. Each group keeps its own optimizer state, and takes it along when shapes change. What a
code has left out by then is sent in int8 with the last average before the change.
"""

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from thinwire.base.errors import ConfigError
from thinwire.comm.fsdp import local, part_of, whole_of
from thinwire.comm.topology import Topology
from thinwire.exchange.averaged import AveragedTensors
from thinwire.exchange.diverged import find_faults, refuse_diverged
from thinwire.exchange.merging import average_moments
from thinwire.exchange.parameters import Parameters, Rounds
from thinwire.exchange.parts import Cycle, Feature, PartState, Run, joins_not
from thinwire.factor import moments
from thinwire.factor.convert import Kept, Layer
from thinwire.factor.matrix import decompose
from thinwire.factor.ranks import smallest_size
from thinwire.shape.agree import agreed_in_turn, empty_factors, gathered, gathered_state
from thinwire.shape.factoring import Factoring, RateMatching

Found = tuple[Tensor, ...]


class Sides:
    """Which groups train which factors; rounds are counted from when weights became factors."""

    def __init__(self, train: str, groups: Sequence[Sequence[int]], own: int = 0) -> None:
        """The ranks of each group, and which of the groups asks."""
        self.train = train
        self.sizes = [float(len(group)) for group in groups]
        self.own = own
        self.half = math.ceil(len(self.sizes) / 2)
        """Of groups that train different factors, how many train the first one."""

    @property
    def is_first(self) -> bool:
        """Whether this group is in the first half."""
        return self.own < self.half

    def trained(self, rounds: int) -> str:
        """The factors that this group trains: "a", "b" or "ab"."""
        if self.train == "both":
            return "ab"
        second = self.train == "split" and not self.is_first
        return "ab"[(rounds + second) % 2]

    def senders(self, kind: str, rounds: int) -> Sequence[int] | None:
        """The groups that trained this factor, where groups train different ones; None for all groups."""
        if self.train != "split" or not kind:
            return None
        first = "ab"[rounds % 2] == kind
        return [i for i in range(len(self.sizes)) if (i < self.half) == first]

    def weights(self, kind: str, rounds: int, losses: Sequence[float] | None) -> list[float]:
        """Of all groups in a mean: by workers, by loss too if losses are given, among those that trained it."""
        senders, sizes = self.senders(kind, rounds), self.sizes
        if losses is not None:
            sizes = [size / max(loss, 1e-8) for size, loss in zip(sizes, losses, strict=True)]
        if senders is not None:
            sizes = [size if i in senders else 0.0 for i, size in enumerate(sizes)]
        return [size / sum(sizes) for size in sizes]


class Factors(Factoring):
    """Layers that become factors at an average, and are decomposed again; ranks only fall."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.must_factor = config.factor_at is not None
        self.requested = False
        """Whether the user asked for factors."""
        self.tried = False
        """Whether weights were decomposed; those whose ranks are too high stay full, and are tried again later."""
        self.rounds = 0
        """Averages since then."""

    def attach(self, run: Run) -> None:
        super().attach(run)
        self.sides = Sides(self.config.train, run.topology.groups, run.topology.group_index)
        self.full_size = sum(p.numel() for p in whole_of(run.model).parameters())
        self.rates = RateMatching(run.context, self._scales)
        run.context.on_release.append(self._unfreeze)

    def begin(self, *, again: bool) -> None:
        super().begin(again=again)
        if not again and self.must_factor:
            self._check_target()

    def after_step(self) -> None:
        """The order of use may show other layers."""
        if self.usage.is_watching:
            self.agree_on_order()
            if not self.factored:
                self.find_layers()
                if self.must_factor:
                    self._check_target()  # now, not when most of the run is over

    def on_request(self) -> None:
        """Make factors of the weights at the next average; collective."""
        self.run.wire.barrier("factor_now()")
        self.run.check_counters()
        self.refuse_nothing_to_factor()
        self._check_target()
        self.requested = True

    def finish(self, cutoff: float | None) -> None:
        """Cut once more if there are factors, or where a cutoff is given."""
        if not self.factored:
            self.agree_on_order()
            self.find_layers()
        if cutoff is not None:
            self._cut(cutoff)
        elif self.tried:
            for layer, factors in self._find_factors():
                self._give_factors(layer, *factors)
            self.kept = [*self.kept, *(Kept(x.key, "rank too high") for x in self.layers if not x.is_factored)]

    # When.

    @property
    def is_time(self) -> bool:
        """Whether weights may become factors."""
        at = self.config.factor_step
        return self.requested or (at is not None and self.run.step >= at)

    @property
    def is_due(self) -> bool:
        """Whether weights are decomposed after the average at this step; not at the very end, where `finish` does."""
        if self.config.total_steps is not None and self.run.step >= self.config.total_steps:
            return False
        return (self.rounds + 1) % self.config.redecompose == 0 if self.tried else self.is_time

    @property
    def trained(self) -> str:
        """The factors that this group trains now: "a", "b" or "ab"."""
        return self.sides.trained(self.rounds)

    def factor(self) -> None:
        """All groups hold one model: decompose it, on all workers alike, and go on with the factors."""
        first, self.tried = not self.tried, True
        if first:
            self.find_layers()
        self.free_memory()
        for layer, factors in self._find_factors():
            if self.run.wire.read(functools.partial(_has_gradients, factors), True):
                self._to_factors(layer, *factors)
        if first and self.config.target is None:
            self.warn_if_nothing_factored(self.config.cutoff)
        self.rounds = 0 if first else self.rounds + 1

    def freeze(self) -> None:
        """Freeze the factors that this group does not train now."""
        for layer in self.factored:
            for factor, kind in zip(layer.factors, "ab", strict=True):
                factor.requires_grad_(kind in self.trained)
                factor.grad = None

    def _unfreeze(self) -> None:
        for layer in self.factored:
            for factor in layer.factors:
                factor.requires_grad_(True)

    # How.

    def _check_target(self) -> None:
        """Refuse a target that the layers, as they are known now, do not allow."""
        least = smallest_size(self.full_size, self.layers)
        if self.config.target is not None and self.full_size / least < self.config.target:
            raise ConfigError(
                f"`target`={self.config.target!r} cannot be reached: with rank 1 in every layer that can be "
                f"factored the model is {math.floor(100 * self.full_size / least) / 100:g} times smaller; use at "
                "most that, or keep fewer layers full"
            )

    def _find_factors(self) -> Iterable[tuple[Layer, Found]]:
        """Factors of every layer that they make smaller: at the cutoff, or at the cutoff that reaches the target."""
        if self.config.target is None:
            return self._agreed_factors(self.config.cutoff)
        if self.run.wire.is_sharded:
            return self._found_twice(self.config.target)
        found = list(self._agreed_factors(None))
        own = self.run.context.choose_ranks(
            [(layer, a, b) for layer, (a, b) in found], self.full_size, self.config.target
        )
        ranks = self.run.wire.all_gather_object(own)[0]
        self.found_ranks = {layer.label: rank for (layer, _), rank in zip(found, ranks, strict=True) if rank}
        return [
            (layer, (a[:, :rank].contiguous(), b[:rank].contiguous()))
            for (layer, (a, b)), rank in zip(found, ranks, strict=True)
            if rank
        ]

    def _found_twice(self, target: float) -> Iterator[tuple[Layer, Found]]:
        """Of a sharded model, whose factors nobody can hold all at once: singular values first, then factors."""
        found = self._agreed_factors(None)
        values = [(layer, a.double().norm(dim=0, keepdim=True), b[:0]) for layer, (a, b) in found]  # (1, k)
        own = self.run.context.choose_ranks(values, self.full_size, target)
        ranks = self.run.wire.all_gather_object(own)[0]
        chosen = {layer.key: rank for (layer, _, _), rank in zip(values, ranks, strict=True) if rank}
        layers = [layer for layer in self.layers if layer.key in chosen]
        self.found_ranks = {layer.label: chosen[layer.key] for layer in layers}
        return agreed_in_turn(
            layers, self.run.wire, lambda layer: decompose(layer.matrix(), 0.0, rank=chosen[layer.key])[:2]
        )

    def _to_factors(self, layer: Layer, a: Tensor, b: Tensor) -> None:
        """Give a layer these factors; their optimizer state is this group's own, transformed."""
        states = [gathered_state(self.run.optimizers.state_of(p), self.run.wire) for p in layer.parameters]
        if layer.is_factored:
            carried = moments.recut_factors(states, [gathered(p, self.run.wire) for p in layer.parameters], (a, b))
        else:
            carried = moments.factors_from_full(states[0], layer.view, a, b)
        self._reshape_layer(layer, a, b)
        for factor, state in zip(layer.factors, carried, strict=True):
            if state:
                self._set_state(factor, state)

    def _reshape_layer(self, layer: Layer, a: Tensor, b: Tensor) -> None:
        old = layer.parameters
        self._give_factors(layer, a, b)
        self.run.optimizers.exchange(old, layer.factors, ("a", "b"))

    def to_rank(self, layer: Layer, rank: int) -> None:
        self._reshape_layer(layer, *empty_factors(layer, rank))

    def to_full(self, layer: Layer) -> None:
        factors = layer.factors
        self._give_weight(layer)
        self.run.optimizers.exchange(factors, [layer.weight])

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
        norm = self.run.wire.norms_of_group(local(other.detach()).norm())
        return (math.sqrt(max(other.shape)) / norm).nan_to_num(posinf=1.0)

    def state_dict(self) -> PartState:
        """With the number of averages since weights became factors."""
        own = {"rounds": self.rounds, "requested": self.requested, "tried": self.tried}
        return PartState(super().state_dict().shared | own)

    def load_state_dict(self, state: PartState, *, stays: bool) -> None:
        """Which factor a group trains depends on the groups that there are."""
        self.sides = Sides(self.config.train, self.run.topology.groups, self.run.topology.group_index)
        super().load_state_dict(state, stays=stays)
        self.rounds, self.requested, self.tried = (state.shared[name] for name in ("rounds", "requested", "tried"))
        self.freeze()


def _has_gradients(factors: Sequence[Tensor]) -> bool:
    """Factors of zeros have none."""
    return bool(factors[0].any())


class FactorAverages(Parameters):
    """Everything that groups trained, averaged at the end of each round; there weights become factors."""

    def __init__(self, config: Any, shape: Factors) -> None:
        super().__init__(config)
        self.shape = shape
        self._losses: list[float] | None = None

    def attach(self, run: Run) -> None:
        super().attach(run)
        self.schedule: FactorRounds = FactorRounds(self)

    def begin(self, *, again: bool) -> None:
        super().begin(again=again)
        if not again and self.shape.is_time:
            self._factor()

    def refuses(self, feature: Feature, config: Any) -> str | None:
        c = self.config
        if feature is Feature.FAULTS and c.overlap:
            return (
                f"`overlap`={c.overlap} of AB with faults=… is not supported: if a group is lost while the "
                "average of a factor is under way, groups would go on with different ones; use overlap=0"
            )
        if feature is Feature.JOIN and c.merge == "weighted":
            return joins_not("merge='weighted'")
        if feature is Feature.JOIN and c.train == "split":
            return joins_not("train='split'")
        return super().refuses(feature, config)

    def role(self, topology: Topology) -> Hashable:
        """All groups do the same, unless they train different factors: then some send and others do not."""
        first = Sides("split", topology.groups, topology.group_index).is_first
        return (first, len(topology.groups)) if self.config.train == "split" else None

    @property
    def _next_change(self) -> int | None:
        return self.config.total_steps if self.shape.tried else self.config.factor_step

    def turns(self) -> list[list[AveragedTensors]]:
        """Everything that groups trained, at the end of each round; a lone group has rounds too."""
        return [[fragment for fragment in self.fragments if self._was_trained(fragment)]]

    def _send(self, fragments: Sequence[AveragedTensors], overlap: int, *, last: bool = False) -> None:
        """Before shapes change all of it is waited for, and nothing is left unsent."""
        if self.shape.is_due:
            fragments, overlap, last = self.fragments, 0, True
        self._losses = self._observed_losses() if fragments else None
        super()._send(fragments, overlap, last=last)

    def _arrive(self, fragments: Sequence[AveragedTensors]) -> None:
        if fragments:
            super()._arrive(fragments)

    def _ends_round(self, fragments: Sequence[AveragedTensors]) -> bool:
        return True

    def _average_moments(self) -> None:
        """Each group keeps its own."""

    @property
    def _averages_moments(self) -> bool:
        return self.config.moments == "average" and self.shape.is_due

    def _end_round(self) -> None:
        if self.shape.is_due:
            self._factor()
        elif self.shape.tried:
            self.shape.rounds += 1
            self._change_sides()
        super()._end_round()

    def _merge(self, *, last: bool = False) -> None:
        self._losses = self._observed_losses(out_of_turn=True)
        super()._merge(last=last)

    # Which factor is trained.

    def _kind(self, fragment: AveragedTensors) -> str:
        """ "a", "b", or "" for what is always trained."""
        return self._kinds[self.fragments.index(fragment)]

    def _was_trained(self, fragment: AveragedTensors) -> bool:
        """Whether any group trains it in this round."""
        split = self.config.train == "split" and not self.run.in_sync
        return split or self._kind(fragment) in self.shape.trained

    def _trains(self, fragment: AveragedTensors) -> bool:
        return self._kind(fragment) in self.shape.trained

    def is_apart(self, fragment: AveragedTensors) -> bool:
        return super().is_apart(fragment) and self._was_trained(fragment)

    def _make_fragments(self) -> None:
        """One for everything, or one for the factors A, one for B and one for the rest; none for a lone group."""
        trained = [p for p in self.run.model.parameters() if p.requires_grad]
        factors = [[part_of(self.run.model, p) for p in layer.factors] for layer in self.shape.factored]
        inside = {id(p) for pair in factors for p in pair}
        parts = {
            "a": [a for a, _ in factors],
            "b": [b for _, b in factors],
            "": [p for p in trained if id(p) not in inside],
        }
        parts = {} if len(self.run.topology.groups) == 1 else {kind: part for kind, part in parts.items() if part}
        self._kinds = list(parts)
        self.fragments = [self._averaged(part, is_whole=bool(kind)) for kind, part in parts.items()]
        # Steps of A and B at once would be taken twice.
        outer = None if self.shape.factored and self.config.train != "alternate" else self.outer
        self.statistics.outer = outer
        for fragment in self.fragments:
            fragment.outer = outer

    # Weights of groups.

    def _observed_losses(self, *, out_of_turn: bool = False) -> list[float] | None:
        """Each group's mean loss, where groups are weighted by it; there may be none yet since the last average."""
        if self.config.merge != "weighted" or self.run.in_sync:
            return None
        if self.config.is_screened:  # groups that diverged are found when it is known what they send
            reports, _ = find_faults(self.run.wire, self.run.model, self.run.observed)
        else:
            reports = refuse_diverged(self.run.wire, self.run.model, self.run.observed, self.run.step)
        sums = [[sum(reports[rank][i] for rank in group) for i in (0, 1)] for group in self.run.topology.groups]
        if out_of_turn and not any(count for _, count in sums):
            return None
        if not all(count for _, count in sums):
            raise ConfigError("merge='weighted' needs losses: call replica.observe(loss) after each backward pass")
        return [loss / count for loss, count in sums]

    def _senders(self, fragment: AveragedTensors) -> Sequence[int] | None:
        return self.shape.sides.senders(self._kind(fragment), self.shape.rounds)

    def _group_weights(self, fragment: AveragedTensors) -> Sequence[float] | None:
        if self._losses is None and self._senders(fragment) is None:
            return None
        return self.shape.sides.weights(self._kind(fragment), self.shape.rounds, self._losses)

    # Shapes.

    def _factor(self) -> None:
        run = self.run
        self.shape.factor()
        if self.config.moments == "average":
            average_moments(run.wire, run.optimizers, run.optimizers.parameters, self.contributions.share, "bf16")
        self.fragments = []  # before others are made, for their memory
        self._make_fragments()
        self.statistics.restart()
        self._change_sides()

    def _change_sides(self) -> None:
        """Train other factors from now on, and average their gradients inside the group."""
        self.shape.freeze()
        self.run.gradients.wrap_again()


class FactorRounds(Rounds):
    """Rounds in which one factor is trained, then the other."""

    of: FactorAverages

    @property
    def cycle(self) -> Cycle:
        """The factor that is trained and the rounds to the next decomposition belong to its place.

        From `total_steps` on weights are not decomposed any more.
        """
        found = super().cycle
        shape, config = self.of.shape, self.of.config
        if shape.tried:
            total = config.total_steps
            is_over = total is not None and self.run.step >= total
            place = found.place, shape.rounds % 2, shape.rounds % config.redecompose, is_over
            return Cycle(place, found.end if total is None or is_over else total)
        at = config.factor_step
        return Cycle(found.place, found.end if at is None else at)
