"""The published cycle of AB: half of the groups train factors A, half B, and merge."""

import math
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from thinwire.base.errors import ConfigError
from thinwire.comm.fsdp import whole_of, with_modules
from thinwire.comm.topology import Topology
from thinwire.exchange.averaged import AveragedTensors, all_restored, not_finite
from thinwire.exchange.diverged import refuse_diverged
from thinwire.exchange.merging import average_buffers, average_moments
from thinwire.exchange.parts import (
    Exchange,
    Feature,
    PartState,
    Run,
    Schedule,
    UpdateRule,
    needs_every_group,
)
from thinwire.exchange.second_moment import SecondMoment
from thinwire.factor import moments
from thinwire.factor.convert import Layer
from thinwire.shape.agree import empty_factors, gathered, gathered_state
from thinwire.shape.factoring import Factoring
from thinwire.shape.factors import Sides


class Weights(NamedTuple):
    """This group's weight in a merge, for factors A, factors B and everything else."""

    a: float
    b: float
    rest: float


def trained_factor(topology: Topology) -> str:
    """The factor that a group trains: the first half of the groups A, the others B, a lone group B."""
    count = len(topology.groups)
    return "a" if count > 1 and topology.group_index < math.ceil(count / 2) else "b"


class Halves(Factoring):
    """Factors of which a group trains one, in the phase of that name; full in all others."""

    def __init__(self, config: Any, phase: str) -> None:
        super().__init__(config)
        self.phase = phase
        self.changed_at: int | None = None
        """The step after which shapes last changed."""
        self._fixed: dict[str, Tensor] = {}
        """By layer, the factor that this group did not train, as it was before a merge."""
        self.share = 1.0
        """This group's weight in the merge, for what was not factored."""

    @property
    def trains(self) -> str:
        """The factor this worker's group trains."""
        return trained_factor(self.run.topology)

    def begin(self, *, again: bool) -> None:
        """Decompose, and freeze what this group does not train."""
        super().begin(again=again)
        if self.run.phase == self.phase:
            self.find_layers()
            self.free_memory()
            for layer, factors in self._agreed_factors(self.config.cutoff):
                self._to_factors(layer, *factors)
            if self.decompositions == 1:
                self.warn_if_nothing_factored(self.config.cutoff)
            self._freeze()

    def before_merge(self) -> None:
        """Keep what it takes to make the state of a full weight of that of the factor that this group trained."""
        self.free_memory()
        with_modules(self.run.model)
        if self.config.moments == "carry":
            fixed = 1 if self.trains == "a" else 0
            self._fixed = {layer.key: layer.factors[fixed].detach().clone() for layer in self.factored}

    def end(self, *, again: bool) -> None:
        """Full again, with the optimizer in the same state everywhere; copies have been averaged."""
        run = self.run
        if run.phase == self.phase:
            for layer in self.factored:
                self._to_full(layer, self._state_of_full(layer))
            held = [whole_of(p) for p in run.model.parameters()]
            if self.config.moments == "reset":
                run.optimizers.reset(held)
            else:
                average_moments(run.wire, run.optimizers, held, self.share)

    def finish(self, cutoff: float | None) -> None:
        """Cut every layer at the cutoff."""
        self.agree_on_order()
        self.find_layers()
        self._cut(self.config.cutoff if cutoff is None else cutoff)

    def _to_factors(self, layer: Layer, a: Tensor, b: Tensor) -> None:
        weight, carries = layer.weight, self.config.moments == "carry"
        state = gathered_state(self.run.optimizers.state_of(weight), self.run.wire) if carries else {}
        self._give_factors(layer, a, b)
        new_a, new_b = layer.factors
        self.run.optimizers.exchange([weight], [new_a, new_b], ("a", "b"))
        if state:
            state_a, state_b = moments.factors_from_full(state, layer.view, a, b)
            self._set_state(*((new_a, state_a) if self.trains == "a" else (new_b, state_b)))
        self.changed_at = self.run.step

    def _state_of_full(self, layer: Layer) -> dict[str, Any]:
        """The state that the full weight takes over from the factor this group trained."""
        a, b = layer.factors
        state = self.run.optimizers.state_of(a if self.trains == "a" else b)
        fixed = self._fixed.pop(layer.key, None)
        if fixed is None or not state:
            return {}
        name = "b" if self.trains == "a" else "a"
        state = gathered_state(state, self.run.wire)
        return moments.full_from_factor(state, layer.view, **{name: gathered(fixed, self.run.wire)})

    def _to_full(self, layer: Layer, state: dict[str, Any]) -> None:
        factors = layer.factors
        self._give_weight(layer)
        self.run.optimizers.exchange(factors, [layer.weight])
        if state:
            self._set_state(layer.weight, state)
        self.changed_at = self.run.step

    def _freeze(self) -> None:
        for layer in self.factored:
            a, b = layer.factors
            a.requires_grad_(self.trains == "a")
            b.requires_grad_(self.trains == "b")

    def to_full(self, layer: Layer) -> None:
        self._to_full(layer, {})

    def to_rank(self, layer: Layer, rank: int) -> None:
        self._to_factors(layer, *empty_factors(layer, rank))

    def state_dict(self) -> PartState:
        """With the beginning of the learning rate's rebound."""
        return PartState(super().state_dict().shared | {"changed_at": self.changed_at})

    def load_state_dict(self, state: PartState, *, stays: bool) -> None:
        super().load_state_dict(state, stays=stays)
        self.changed_at = state.shared["changed_at"]
        self._freeze()


class Rebound(UpdateRule):
    """The learning rate climbs from near zero to one after each change of shape."""

    def __init__(self, shape: Halves, length: int) -> None:
        self.shape, self.length = shape, length

    def attach(self, run: Run) -> None:
        super().attach(run)
        run.context.lr_factor = self._factor

    def _factor(self) -> float:
        start, step = self.shape.changed_at, self.run.step
        return 1.0 if start is None or step - start >= self.length else (step - start + 1) / self.length


class Merge(Exchange):
    """One average of all copies, at the end of the phase."""

    leaves_moments = False  # `Halves` carries them to the new shape

    def __init__(self, config: Any, shape: Halves) -> None:
        self.config, self.shape = config, shape
        self.average: AveragedTensors | None = None
        """The tensors that a merge averages."""
        self.averages_moments = config.moments != "reset"

    def attach(self, run: Run) -> None:
        super().attach(run)
        self.schedule = Once(self)
        kind = self.config.second_moment
        self.second_moment = SecondMoment(run.context, kind, run.weight, lambda: not run.in_sync)

    def refuses(self, feature: Feature, config: Any) -> str | None:
        """A merge counts all groups by their workers, whatever they have trained."""
        return needs_every_group(feature, config, "merges count groups")

    def role(self, topology: Topology) -> Hashable:
        """The factor that the group trains."""
        return trained_factor(topology)

    def begin(self, *, again: bool) -> None:
        self.run.observed.zero_()
        self._make_average()
        if not self.run.in_sync:
            self.second_moment.separate()

    def end(self, *, again: bool) -> None:
        """Read what optimizers know of the factors, then average these."""
        weights = self._weigh()
        self.second_moment.together()
        self.shape.before_merge()
        self._average(weights)
        self.shape.share, self.average = weights.rest, None

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Average copies of everything, and restore the group's own at the end."""
        assert self.average is not None, "groups are not apart"
        with all_restored(self.run.model, [self.average]):
            self._average(self._weigh())
            yield

    def _weigh(self) -> Weights:
        """This group's weights in a merge; a group that diverged stops the run here, by name."""
        run, groups = self.run, self.run.topology.groups
        reports = refuse_diverged(run.wire, run.model, run.observed, run.step)
        losses = None
        if self.config.merge == "weighted":
            sums = [[sum(reports[rank][i] for rank in group) for i in (0, 1)] for group in groups]
            if not all(count for _, count in sums):
                raise ConfigError("merge='weighted' needs losses: call replica.observe(loss) after each backward pass")
            losses = [loss / count for loss, count in sums]
        sides = Sides("split" if self.config.merge == "trained" and len(groups) > 1 else "both", groups)
        return Weights(*(sides.weights(kind, 0, losses)[run.topology.group_index] for kind in ("a", "b", "")))

    def _average(self, weights: Weights) -> None:
        assert self.average is not None, "groups are not apart"
        chosen = [getattr(weights, kind) for _, kind in self._merged_parameters()]
        self.average.send(self.run.step, 0, weights=chosen)
        if not self.average.receive():
            raise not_finite(self.run.step)
        self.average.agree()
        self.average.move(1.0, self.run.step)
        average_buffers(self.run.wire, self.run.model.buffers(), weights.rest)

    def _merged_parameters(self) -> list[tuple[nn.Parameter, str]]:
        """What a merge averages and by which weight; parameters the user froze are the same everywhere."""
        kinds = {id(p): kind for x in self.shape.factored for p, kind in zip(x.factors, "ab", strict=True)}
        named = [(p, kinds.get(id(whole_of(p)))) for p in self.run.model.parameters()]
        return [(p, kind or "rest") for p, kind in named if kind or p.requires_grad]

    def _make_average(self) -> None:
        parameters = [p for p, _ in self._merged_parameters()]
        self.average = AveragedTensors(self.run.wire, lambda: parameters, self.config.wire, self.run.step)

    def state_dict(self) -> PartState:
        """What groups started from."""
        average = self.average.state_dict() if self.average is not None else {"shared": None, "local": {}}
        shared = {"average": average["shared"], "second_moment": self.second_moment.state_dict()}
        return PartState(shared, {"average": average["local"]})

    def forget(self, how: Literal["drop", "abandon", "restart"]) -> None:
        """After a restart groups have all started from what they hold."""
        if how == "restart":
            self._make_average()

    def load_state_dict(self, state: PartState, *, stays: bool) -> None:
        """A lone group may become several, which start without residuals."""
        self.second_moment.load_state_dict(state.shared["second_moment"])
        self.second_moment.share = self.run.weight
        self._make_average()
        assert self.average is not None, "groups are not apart"
        self.average.load_state_dict(state.shared["average"], state.local["average"] if state.local else {}, stays)


class Once(Schedule):
    """A merge is due when the phase ends."""

    of: Merge

    @property
    def holds_one_model(self) -> bool:
        """Right after groups were split."""
        return self.of.average is not None and self.of.average.level == self.run.step
