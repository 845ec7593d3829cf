"""AB training: groups that train alone, at full rank and then low-rank factors, and average in few bits.

    1. warm-up: the whole world averages gradients at every step, in `warmup_wire`
    2. local: each group trains the full model alone; every `every` steps groups average, in `wire`, and make an outer
       step of the mean change
    3. at the first average from `factor_at` on every weight W becomes A B, without its small singular values
    4. factored: groups train A between two averages, then B, and so on; every `redecompose` averages A B is decomposed
       again, and ranks fall

While all groups train A, B is the same everywhere: the mean of A B is A's mean times B, so an average is exact, and
only half of the factors travel. Each group keeps its own optimizer state, and takes it along when shapes change. What a
code has left out by then is sent in int8 with the last average before the change.
"""

import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from thinwire.base.errors import ConfigError
from thinwire.comm.fsdp import part_of
from thinwire.comm.topology import Topology
from thinwire.config import AB
from thinwire.factor.convert import Kept
from thinwire.methods.ab_shapes import ABShapes
from thinwire.methods.agree import empty_factors
from thinwire.methods.averaged import AveragedTensors
from thinwire.methods.averaging import LocalTraining
from thinwire.methods.base import Cycle
from thinwire.methods.context import MethodContext, Saved
from thinwire.methods.diverged import find_faults, refuse_diverged
from thinwire.methods.features import Feature, joins_not
from thinwire.methods.merging import average_moments
from thinwire.methods.registry import register


def _example(**more: Any) -> AB:
    # The cutoff is high because random weights have flat spectra.
    fields = {"total_steps": 20, "warmup": 2, "every": 3, "factor_at": 5, "redecompose": 2, "cutoff": 0.6}
    return AB(**{**fields, "warmup_wire": "lowrank:2", **more})


@register("ab", AB, example=_example)
class ABMethod(ABShapes, LocalTraining):
    """Groups train alone and average in few bits, at full rank and then low-rank factors (AB training)."""

    phases: ClassVar[tuple[str, ...]] = ("warmup", "local", "factored")
    config: AB  # type: ignore[assignment]

    def __init__(self, config: AB, context: MethodContext) -> None:
        super().__init__(config, context)
        self.requested = False
        """Whether the user asked for factors."""
        self.tried = False
        """Whether weights were decomposed; those whose ranks are too high stay full, and are tried again later."""
        self.rounds = 0
        """Averages since then."""
        self.sides = Sides(config.train, self.topology)
        self._losses: list[float] | None = None
        context.on_release.append(self._unfreeze)

    @classmethod
    def refuses(cls, config: AB, feature: Feature) -> str | None:
        if feature is Feature.FAULTS and config.overlap:
            return (
                f"`overlap`={config.overlap} of AB with faults=… is not supported: if a group is lost while the "
                "average of a factor is under way, groups would go on with different ones; use overlap=0"
            )
        if feature is Feature.SHARDS and config.match_rate:
            return "`match_rate`=True measures whole factors, and the model is sharded: leave it out"
        if feature is Feature.JOIN and config.merge == "weighted":
            return joins_not("merge='weighted'")
        if feature is Feature.JOIN and config.train == "split":
            return joins_not("train='split'")
        return super().refuses(config, feature)

    @classmethod
    def role(cls, config: AB, topology: Topology) -> Hashable:
        """All groups do the same, unless they train different factors: then some send and others do not."""
        return (Sides("split", topology).is_first, len(topology.groups)) if config.train == "split" else None

    def attach(self) -> None:
        """Begin with the warm-up; one of no steps is over at once."""
        super().attach()
        if self.must_factor:
            self._check_target()
        self._separate_if_due()

    def after_step(self) -> None:
        """Exchange what is due, and change shapes where that is due too."""
        if self.usage.is_watching and self.phase != "factored":
            self.agree_on_order()
            self.find_layers()
            if self.must_factor:
                self._check_target()  # now, not when most of the run is over
        super().after_step()
        LocalTraining.after_step(self)

    def factor_now(self) -> None:
        """Make factors of the weights at the next average; collective."""
        self.wire.barrier("factor_now()")
        self.check_counters()
        self.refuse_nothing_to_factor()
        self._check_target()
        self.requested = True

    def finish(self, cutoff: float | None) -> None:
        """One model again; cut it once more if it has factors, or where a cutoff is given."""
        if self.phase != "warmup":
            self.check_counters()
            self._merge(last=True)
        if self.phase != "factored":
            self.agree_on_order()
            self.find_layers()
        if cutoff is not None:
            self.cut(cutoff)
        elif self.tried:
            for layer, factors in self._find_factors():
                self.give_factors(layer, *factors)
            self.kept = [*self.kept, *(Kept(x.key, "rank too high") for x in self.layers if not x.is_factored)]

    # Rounds.

    def _separate_if_due(self) -> None:
        super()._separate_if_due()
        if self.phase == "local" and self._is_time_to_factor:
            self._factor()

    @property
    def _is_time_to_factor(self) -> bool:
        at = self.config.factor_step
        return self.requested or (at is not None and self.step >= at)

    @property
    def _changes_shape(self) -> bool:
        """Whether weights are decomposed after the average at this step; not at the very end, where `finish` does."""
        if self.config.total_steps is not None and self.step >= self.config.total_steps:
            return False
        if not self.tried:
            return self._is_time_to_factor
        return (self.rounds + 1) % self.config.redecompose == 0

    @property
    def _next_change(self) -> int | None:
        return self.config.total_steps if self.tried else self.config.factor_step

    def _turns(self) -> list[list[AveragedTensors]]:
        """Everything that groups trained, at the end of each round; a lone group has rounds too."""
        return [[fragment for fragment in self.fragments if self._was_trained(fragment)]]

    def _send(self, fragments: Sequence[AveragedTensors], overlap: int, *, last: bool = False) -> None:
        """Before shapes change all of it is waited for, and nothing is left unsent."""
        if self._changes_shape:
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
        return self.config.moments == "average" and self._changes_shape

    def _end_round(self) -> None:
        if self._changes_shape:
            self._factor()
        elif self.tried:
            self.rounds += 1
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
        split = self.config.train == "split" and not self.in_sync
        return split or self._kind(fragment) in self.sides.trained(self.rounds)

    def _trains(self, fragment: AveragedTensors) -> bool:
        return self._kind(fragment) in self.sides.trained(self.rounds)

    def _is_apart(self, fragment: AveragedTensors) -> bool:
        return super()._is_apart(fragment) and self._was_trained(fragment)

    def _make_fragments(self) -> None:
        """One for everything, or one for the factors A, one for B and one for the rest; none for a lone group."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        factors = [[part_of(self.model, p) for p in layer.factors] for layer in self.factored]
        inside = {id(p) for pair in factors for p in pair}
        parts = {
            "a": [a for a, _ in factors],
            "b": [b for _, b in factors],
            "": [p for p in trained if id(p) not in inside],
        }
        parts = {} if len(self.topology.groups) == 1 else {kind: part for kind, part in parts.items() if part}
        self._kinds = list(parts)
        self.fragments = [self._averaged(part, is_whole=bool(kind)) for kind, part in parts.items()]
        # Steps of A and B at once would be taken twice.
        outer = None if self.phase == "factored" and self.config.train != "alternate" else self.outer
        self.statistics.outer = outer
        for fragment in self.fragments:
            fragment.outer = outer

    def _freeze(self) -> None:
        """Freeze the factors that this group does not train in this round."""
        trained = self.sides.trained(self.rounds)
        for layer in self.factored:
            for factor, kind in zip(layer.factors, "ab", strict=True):
                factor.requires_grad_(kind in trained)
                factor.grad = None

    def _unfreeze(self) -> None:
        for layer in self.factored:
            for factor in layer.factors:
                factor.requires_grad_(True)

    def _change_sides(self) -> None:
        """Train other factors from now on, and average their gradients inside the group."""
        self._freeze()
        self.gradients.replicated.unwrap()
        self.gradients.replicated.members = ()
        self.gradients.apart()

    # Weights of groups.

    def _observed_losses(self, *, out_of_turn: bool = False) -> list[float] | None:
        """Each group's mean loss, where groups are weighted by it; there may be none yet since the last average."""
        if self.config.merge != "weighted" or self.in_sync:
            return None
        if self.config.is_screened:  # groups that diverged are found when it is known what they send
            reports, _ = find_faults(self.wire, self.model, self.observed)
        else:
            reports = refuse_diverged(self.wire, self.model, self.observed, self.step)
        sums = [[sum(reports[rank][i] for rank in group) for i in (0, 1)] for group in self.topology.groups]
        if out_of_turn and not any(count for _, count in sums):
            return None
        if not all(count for _, count in sums):
            raise ConfigError("merge='weighted' needs losses: call replica.observe(loss) after each backward pass")
        return [loss / count for loss, count in sums]

    def _senders(self, fragment: AveragedTensors) -> Sequence[int] | None:
        return self.sides.senders(self._kind(fragment), self.rounds)

    def _group_weights(self, fragment: AveragedTensors) -> Sequence[float] | None:
        return self.sides.weights(self._kind(fragment), self.rounds, self._losses)

    # Shapes.

    def _factor(self) -> None:
        """All groups hold one model: decompose it, on all workers alike, and go on with the factors."""
        first, self.tried = not self.tried, True
        if first:
            self.find_layers()
        self.free_memory()
        for layer, factors in self._find_factors():
            if self.wire.read(functools.partial(_has_gradients, factors), True):
                self._to_factors(layer, *factors)
        if first and self.config.target is None:
            self.warn_if_nothing_factored(self.config.cutoff)
        if self.config.moments == "average":
            average_moments(self.wire, self.optimizers, self.optimizers.parameters, self.contributions.share, "bf16")
        if self.factored:
            self.set_phase("factored")
        self.rounds = 0 if first else self.rounds + 1
        self.fragments = []
        self._make_fragments()
        self.statistics.restart()
        self._change_sides()

    # Checkpoints and plans.

    def state_dict(self) -> dict[str, Any]:
        """With the number of averages since weights became factors."""
        state = super().state_dict()
        state["shared"] |= {"rounds": self.rounds, "requested": self.requested, "tried": self.tried}
        return state

    def load_state_dict(self, saved: Saved) -> None:
        """Give the model the shape it had; which factor a group trains depends on the groups that there are."""
        shared, self.sides = saved.shared, Sides(self.config.train, self.topology)

        def reshape_and_load() -> None:
            self.reshape(
                shared,
                self._to_full,
                lambda layer, rank: self._reshape_layer(layer, *empty_factors(layer, rank)),
                stays=saved.stays,
            )
            self.rounds, self.requested, self.tried = shared["rounds"], shared["requested"], shared["tried"]
            self._freeze()
            saved.load_values()

        super().load_state_dict(replace(saved, load_values=reshape_and_load))

    @property
    def cycle(self) -> Cycle | None:
        """A round; the factor that is trained and the rounds to the next decomposition belong to its place.

        From `total_steps` on weights are not decomposed any more.
        """
        found = LocalTraining.cycle.fget(self)  # type: ignore[attr-defined]
        if found is None:
            return None
        if self.tried:
            total = self.config.total_steps
            is_over = total is not None and self.step >= total
            place = *found.place, self.rounds % 2, self.rounds % self.config.redecompose, is_over
            return Cycle(place, found.end if total is None or is_over else total)
        at = self.config.factor_step
        return Cycle(found.place, found.end if at is None else at)


def _has_gradients(factors: Sequence[Tensor]) -> bool:
    """Factors of zeros have none."""
    return bool(factors[0].any())


class Sides:
    """The factors of one group; rounds are counted from when weights became factors."""

    def __init__(self, train: str, topology: Topology) -> None:
        self.train = train
        self.sizes = [float(len(group)) for group in topology.groups]
        self.own = topology.group_index
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

    def weights(self, kind: str, rounds: int, losses: Sequence[float] | None) -> list[float] | None:
        """Of all groups: by workers, by loss too if losses are given, among those that trained it; None by workers."""
        senders, sizes = self.senders(kind, rounds), self.sizes
        if losses is None and senders is None:
            return None
        if losses is not None:
            sizes = [size / max(loss, 1e-8) for size, loss in zip(sizes, losses, strict=True)]
        if senders is not None:
            sizes = [size if i in senders else 0.0 for i, size in enumerate(sizes)]
        return [size / sum(sizes) for size in sizes]
