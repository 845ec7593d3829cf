"""AB training (arXiv 2405.01067; dissertation of D. Coquelin, section 5.2), with the paper's cycle.

    1. warm-up: the whole world trains the full model
    2. decompose: every weight W becomes A B, small singular values are dropped
    3. groups: each group trains A or B alone, and everything that was not factored
    4. merge: all copies are averaged, W = A B is rebuilt
    5. rebound: the whole world trains the full model; then again from 2

A group phase begins only if all of it fits before `total_steps`; what is left is trained as in 5.
"""

import math
import sys
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from thinwire.base.errors import ConfigError
from thinwire.comm.topology import Topology
from thinwire.config import PaperAB
from thinwire.factor import moments
from thinwire.factor.convert import Layer, to_factors, to_full
from thinwire.methods.agree import empty_factors
from thinwire.methods.averaged import AveragedTensors, all_restored, not_finite
from thinwire.methods.context import MethodContext, Saved
from thinwire.methods.diverged import refuse_diverged
from thinwire.methods.factoring import Factoring
from thinwire.methods.features import Feature, joins_not, needs_whole_weights
from thinwire.methods.merging import average_buffers, average_moments
from thinwire.methods.registry import register
from thinwire.methods.second_moment import SecondMoment


class Weights(NamedTuple):
    """This group's weight in a merge, for factors A, factors B and everything else."""

    a: float
    b: float
    rest: float


def _example(**more: Any) -> PaperAB:
    # The cutoff is high because random weights have flat spectra.
    fields = {"total_steps": 20, "warmup": 3, "every": 4, "rebound": 2, "lr_rebound": 3, "cutoff": 0.6}
    return PaperAB(**{**fields, **more})


@register("ab-paper", PaperAB, example=_example)
class PaperABMethod(Factoring):
    """Groups train low-rank factors alone and merge (AB training)."""

    phases = ("warmup", "groups", "rebound", "final")
    cuts_at_end = True
    config: PaperAB

    def __init__(self, config: PaperAB, context: MethodContext) -> None:
        super().__init__(config, context)
        self.segments = timetable(config)
        self.index = 0
        self.lr_start: int | None = None
        self.average: AveragedTensors | None = None
        """The tensors that a merge averages, while groups train apart."""
        self.second_moment = SecondMoment(context, config.second_moment, self.weight, lambda: not self.in_sync)
        context.lr_factor = self._lr_factor

    @classmethod
    def refuses(cls, config: PaperAB, feature: Feature) -> str | None:
        """A merge counts all groups by their workers, whatever they have trained."""
        if feature is Feature.SHARDS:
            return needs_whole_weights(config)
        if feature is Feature.JOIN:
            return joins_not("PaperAB, whose merges count groups that have trained nothing")
        return super().refuses(config, feature)

    @classmethod
    def role(cls, config: PaperAB, topology: Topology) -> Hashable:
        """The factor that the group trains."""
        return _trained_factor(topology)

    def attach(self) -> None:
        """Begin with the first phase; a warm-up of no steps begins with the groups."""
        super().attach()
        self._follow_timetable()

    def after_step(self) -> None:
        """Change phase where the timetable says so."""
        super().after_step()
        self._follow_timetable()

    @property
    def in_sync(self) -> bool:
        """False while groups train apart."""
        return self.phase != "groups" or len(self.topology.groups) == 1

    @property
    def holds_one_model(self) -> bool:
        """Also right after groups were split."""
        return self.in_sync or (self.average is not None and self.average.level == self.step)

    @property
    def next_event(self) -> int:
        return self.segments[self.index].end if self.index + 1 < len(self.segments) else sys.maxsize

    @property
    def trains(self) -> str:
        """The factor this worker's group trains: the first half of the groups A, the others B, a lone group B."""
        return _trained_factor(self.topology)

    def _lr_factor(self) -> float:
        """The learning-rate rebound: linear from near zero to one after each change of shape."""
        length = self.config.lr_rebound_length
        if self.lr_start is None or self.step - self.lr_start >= length:
            return 1.0
        return (self.step - self.lr_start + 1) / length

    def finish(self, cutoff: float | None) -> None:
        """Merge if groups are apart, then cut every layer at the cutoff."""
        if self.phase == "groups":
            self.check_counters()
            self._merge()
        self.agree_on_order()
        self.find_layers()
        self.cut(self.config.cutoff if cutoff is None else cutoff)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Average copies of everything, and restore the group's own at the end."""
        if self.average is None:
            yield
            return
        with all_restored(self.model, [self.average]):
            self._average(self._weigh())
            yield

    # Phases.

    def _follow_timetable(self) -> None:
        while self.step >= self.segments[self.index].end and self.index + 1 < len(self.segments):
            self.check_counters()
            if self.phase == "groups":
                self._merge()
            self.index += 1
            self.set_phase(self.segments[self.index].phase)
            if self.phase == "groups":
                self._split()

    def _split(self) -> None:
        """Steps 2 and 3: decompose, freeze what this group does not train, average gradients inside the group."""
        self.find_layers()
        self.free_memory()
        for layer, factors in self.agreed_factors(self.config.cutoff):
            self._to_factors(layer, *factors)
        if self.decompositions == 1:
            self.warn_if_nothing_factored(self.config.cutoff)
        self._freeze()
        self.observed.zero_()
        self._make_average()
        if not self.in_sync:
            self.second_moment.separate()
        self.gradients.apart()

    def _merge(self) -> None:
        """Step 4: one model again, full-rank, with the optimizer in the same state everywhere."""
        weights = self._weigh()
        self.second_moment.together()
        self.free_memory()
        states = {layer.key: self._state_of_full(layer) for layer in self.factored}
        self._average(weights)
        for layer in self.factored:
            self._to_full(layer, states[layer.key])
        if self.config.moments == "reset":
            self.optimizers.reset(list(self.model.parameters()))
        else:
            average_moments(self.wire, self.optimizers, list(self.model.parameters()), weights.rest)
        self.average = None
        self.gradients.together(self.config.warmup_wire)
        self.context.after_merge()

    def _weigh(self) -> Weights:
        """This group's weights in a merge; a group that diverged stops the run here, by name."""
        reports = refuse_diverged(self.wire, self.model, self.observed, self.step)
        groups = self.topology.groups
        return self._weights(
            [sum(reports[r][0] for r in g) for g in groups], [sum(reports[r][1] for r in g) for g in groups]
        )

    def _weights(self, losses: list[float], counts: list[float]) -> Weights:
        sizes = [float(len(group)) for group in self.topology.groups]
        own = self.topology.group_index
        if self.config.merge == "weighted":
            if not all(counts):
                raise ConfigError("merge='weighted' needs losses: call replica.observe(loss) after each backward pass")
            sizes = [g / max(loss / n, 1e-8) for g, loss, n in zip(sizes, losses, counts, strict=True)]
        rest = sizes[own] / sum(sizes)
        if self.config.merge != "trained" or len(sizes) == 1:
            return Weights(rest, rest, rest)
        half = math.ceil(len(sizes) / 2)
        if self.trains == "a":
            return Weights(sizes[own] / sum(sizes[:half]), 0.0, rest)
        return Weights(0.0, sizes[own] / sum(sizes[half:]), rest)

    def _average(self, weights: Weights) -> None:
        assert self.average is not None, "groups are not apart"
        chosen = [getattr(weights, kind) for _, kind in self._merged_parameters()]
        self.average.send(self.step, 0, weights=chosen)
        if not self.average.receive():
            raise not_finite(self.step)
        self.average.agree()
        self.average.move(1.0, self.step)
        average_buffers(self.wire, self.model.buffers(), weights.rest)

    def _merged_parameters(self) -> list[tuple[nn.Parameter, str]]:
        """What a merge averages and by which weight; parameters the user froze are the same everywhere."""
        kinds = {id(p): kind for x in self.factored for p, kind in zip(x.factors, "ab", strict=True)}
        return [(p, kinds.get(id(p), "rest")) for p in self.model.parameters() if p.requires_grad or id(p) in kinds]

    def _make_average(self) -> None:
        parameters = [p for p, _ in self._merged_parameters()]
        self.average = AveragedTensors(self.wire, lambda: parameters, self.config.wire, self.step)

    @property
    def averages_moments(self) -> bool:
        """What is carried through a merge is averaged too."""
        return self.config.moments != "reset"

    # Layers.

    def _to_factors(self, layer: Layer, a: Tensor, b: Tensor) -> None:
        weight = layer.weight
        state = self.optimizers.state_of(weight)
        to_factors(layer, a, b)
        new_a, new_b = layer.factors
        self.optimizers.exchange([weight], [new_a, new_b], ("a", "b"))
        if self.config.moments == "carry" and state:
            state_a, state_b = moments.factors_from_full(state, layer.view, a, b)
            trained, carried = (new_a, state_a) if self.trains == "a" else (new_b, state_b)
            self.optimizers.set_state(trained, carried)
        self.lr_start = self.step

    def _state_of_full(self, layer: Layer) -> dict[str, Any]:
        """The state that the full weight takes over from the factor this group trained."""
        a, b = layer.factors
        state = self.optimizers.state_of(a if self.trains == "a" else b)
        if self.config.moments != "carry" or not state:
            return {}
        fixed = {"b": b.detach()} if self.trains == "a" else {"a": a.detach()}
        return moments.full_from_factor(state, layer.view, **fixed)

    def _to_full(self, layer: Layer, state: dict[str, Any]) -> None:
        factors = layer.factors
        to_full(layer)
        self.optimizers.exchange(factors, [layer.weight])
        if state:
            self.optimizers.set_state(layer.weight, state)
        self.lr_start = self.step

    def _freeze(self) -> None:
        for layer in self.factored:
            a, b = layer.factors
            a.requires_grad_(self.trains == "a")
            b.requires_grad_(self.trains == "b")

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Place in the timetable, the learning rate's rebound, and what groups started from."""
        state = super().state_dict()
        average = self.average.state_dict() if self.average is not None else {"shared": None, "local": {}}
        state["shared"] |= {"index": self.index, "lr_start": self.lr_start, "average": average["shared"]}
        state["shared"]["second_moment"] = self.second_moment.state_dict()
        state["local"]["average"] = average["local"]
        return state

    def begin_again(self) -> None:
        super().begin_again()
        if self.average is not None:
            self._make_average()

    def load_state_dict(self, saved: Saved) -> None:
        """Go to a place in the timetable and give the model the shape it had there."""
        shared = saved.shared

        def reshape_and_load() -> None:
            self.reshape(
                shared,
                lambda layer: self._to_full(layer, {}),
                lambda layer, rank: self._to_factors(layer, *empty_factors(layer, rank)),
                stays=saved.stays,
            )
            self.index, self.lr_start = shared["index"], shared["lr_start"]
            self._freeze()
            saved.load_values()

        super().load_state_dict(replace(saved, load_values=reshape_and_load))
        self.average = None
        self.second_moment.load_state_dict(shared["second_moment"])
        self.second_moment.share = self.weight
        if self.phase == "groups":
            self._make_average()
            assert self.average is not None, "groups are not apart"
            # A lone group may become several, which start without residuals.
            own = saved.local["average"] if saved.local else {}
            self.average.load_state_dict(shared["average"], own, saved.stays)


def _trained_factor(topology: Topology) -> str:
    count = len(topology.groups)
    return "a" if count > 1 and topology.group_index < math.ceil(count / 2) else "b"


class Segment(NamedTuple):
    """A phase and the step at which it ends."""

    phase: str
    end: int


def timetable(config: PaperAB) -> list[Segment]:
    """The phases of a run. The last one is full-rank and has no end of its own."""
    segments, step = [Segment("warmup", config.warmup_length)], config.warmup_length
    while step + config.group_length <= config.total_steps:
        segments.append(Segment("groups", step + config.group_length))
        step = min(step + config.group_length + config.rebound_length, config.total_steps)
        segments.append(Segment("rebound", step))
    return [*segments, Segment("final", config.total_steps)]
