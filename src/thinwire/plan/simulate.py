"""A run without workers, data or values: the method itself, on a simulated wire and a model on the meta device.

Every step that differs from the one before it is simulated; one step stands for all equal steps that follow, and one
cycle for all cycles that a method repeats.
"""

import copy
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from thinwire.comm.ledger import Ledger
from thinwire.comm.topology import Topology
from thinwire.exchange.parts import Cycle
from thinwire.methods.runner import Runner
from thinwire.plan.memory import Memory, memory_of, model_and_optimizer
from thinwire.plan.ranks import RankPredictor
from thinwire.plan.shapes_only import ShapesOnly
from thinwire.plan.simulated_method import Asked, Ranks, SimulatedReplica, assumed, grows, make_method, set_rate
from thinwire.plan.simulated_wire import Booked, Call, Exchange, SimulatedWire
from thinwire.plan.workload import Workload, state_like
from thinwire.replica.preflight import check_same_data
from thinwire.replica.replica import Replica
from thinwire.shape.agree import decomposers

# DDP sends the order of its buckets in the second backward pass after wrapping, so the first two steps differ.
_UNEQUAL_STEPS = 2
# Up to this many epochs each simulated loss is half the last, which is better by any threshold.
_FALLING = 1000


@dataclass
class Simulation:
    """What one node's first worker would send and hold."""

    ledger: Ledger
    calls: Counter[Call]
    exchanges: Counter[Exchange]
    steps: Counter[str] = field(default_factory=Counter)
    """Steps of each phase."""
    shapes: dict[str, nn.Module] = field(default_factory=dict)
    """The model on the meta device in each phase; for a phase that repeats, from about the middle."""
    times: Counter[str] = field(default_factory=Counter)
    """How often each phase began."""
    decomposed: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Shapes of the weights this worker decomposed; if there are any, traffic depends on ranks."""
    sharers: int = 1
    """Workers that divide the decompositions among them."""
    assumes: str = ""
    """What the simulation assumes about the run."""
    memory: dict[str, Memory] = field(default_factory=dict)
    """What the worker holds in each phase, at most."""

    @property
    def state_bytes(self) -> int:
        """Peak bytes of parameters, gradients, their buckets, buffers, and the optimizer's and the method's state."""
        return max((memory.held for memory in self.memory.values()), default=0)

    def note_phase(self, phase: str, model: nn.Module | None) -> None:
        """Keep the model's shape the 1st, 2nd, 4th, 8th … time: the last of these is near the middle."""
        self.times[phase] += 1
        if model is not None and _keeps_shape(self.times[phase]):
            self.shapes[phase] = copy.deepcopy(model)


def _keeps_shape(time: int) -> bool:
    """Whether the model's shape is kept this time."""
    return time.bit_count() == 1


def simulate(workload: Workload, config: Any, topology: Topology, predict: RankPredictor) -> Simulation:
    """Simulate a whole run as one worker of `topology`."""
    return simulate_together(workload, config, [topology], predict)[0]


def simulate_together(
    workload: Workload, config: Any, views: Sequence[Topology], predict: RankPredictor, *, shapes: bool = True
) -> list[Simulation]:
    """Simulate a whole run once for several workers that do the same; with `shapes`, keep the model's."""
    wire = SimulatedWire(views)
    found = Simulation(Ledger(), Counter(), Counter(), sharers=decomposers(wire.topology))
    with workload.borrowed() as model:
        ranks = Ranks(predict)
        method = make_method(workload, config, model, wire, ranks, found.decomposed)
        found.assumes = " and ".join(assumed(workload, method, predict))
        # No update takes place, as when a scaler skips it.
        method.context.before_update, method.context.after_update = [], []
        with ShapesOnly():
            replica = SimulatedReplica(method)
        _Simulator(workload, method, replica, wire, ranks, found, shapes).run()
    counts = (wire.booked.seen_from(view) for view in range(len(views)))
    return [replace(found, ledger=ledger, calls=calls, exchanges=exchanges) for ledger, calls, exchanges in counts]


class _Place(NamedTuple):
    """Where a method is: equal turns from equal places do the same, as long as layers keep their ranks."""

    in_cycle: Hashable
    taken: int
    """Steps since the phase began or weights were decomposed, as far as they are unequal."""
    backwards: int
    """Passes simulated since the model was wrapped, as far as they are unequal: factors that change sides wrap it."""


class _Turn(NamedTuple):
    """A step that stands for several, and what follows it."""

    place: _Place | None
    steps: int
    ends_epoch: bool
    evaluates: bool


class _Taken(NamedTuple):
    """The result of a turn."""

    booked: Booked
    place: _Place
    """The place after it."""
    asked: Sequence[Asked]
    """The ranks that it depends on."""
    decomposed: Counter[tuple[int, int]]


@dataclass
class _Simulator:
    workload: Workload
    method: Runner
    replica: Replica
    wire: SimulatedWire
    ranks: Ranks
    found: Simulation
    shapes: bool
    taken: int = 0
    """Steps since the phase began or weights were last decomposed."""
    shape: tuple[str, list[int | None]] = ("", [])
    """The phase, and the ranks of layers."""
    known: dict[_Turn, _Taken] = field(default_factory=dict)
    """Turns that were simulated once, in this shape."""
    quiet: dict[_Place, int] = field(default_factory=dict)
    """Steps from each place to the next event."""
    held: tuple[Any, Memory] = (None, Memory())
    """When memory was last counted, and what there was."""

    def run(self) -> None:
        """Simulate every step, every evaluation and `finish`."""
        # After the method's own hooks: an update by gradients it left is slow without values, and counts nothing.
        self.method.optimizers[0].register_step_pre_hook(lambda optimizer, *_: optimizer.zero_grad())
        if self.workload.recipe:
            check_same_data((), self.wire)  # workers send a digest, whose length does not depend on the data
        while self.replica.step < self.workload.steps:
            if self.taken == 0:
                self._begin()
            self._leap()
            self._take()
        with ShapesOnly():
            self.replica.finish()
        self._count_evaluation()

    def _begin(self) -> None:
        """A new phase or new layers; turns are still known if a decomposition found the ranks that there were."""
        shape = self.replica.phase, [layer.rank for layer in self.method.shape.layers]
        if self.shape != shape:
            self.shape, self.known, self.quiet = shape, {}, {}
        self._show_model()
        self.found.note_phase(self.replica.phase, self.replica.module if self.shapes else None)

    def _take(self) -> None:
        """Simulate one turn; its result is kept if the method may come to the same place again."""
        step, place, began = self.replica.step, self._place, self._began
        # What the second pass sends is sent once: a step that has it stands for no other.
        is_quiet = self.taken >= _UNEQUAL_STEPS and self.method.gradients.replicated.backwards != 1
        until = self.method.next_event if is_quiet else step + 1
        turn = self._turn(step, place, until)
        self.ranks.asked, decomposed = [], self.found.decomposed.copy()
        with self.wire.booking() as booked:
            self._step(turn.steps)
            if turn.ends_epoch:
                # A plan assumes that losses keep falling: when they stop is not known in advance.
                self.replica.epoch_end(-(2.0 ** (1000 * self.replica.step / self.workload.steps)))
            if turn.evaluates:
                with ShapesOnly(), nullcontext() if self.replica.in_sync else self.replica.merged():
                    self._count_evaluation()
        self.taken = self.taken + 1 if self._began == began else 0
        after = self._place
        if place and after and not (turn.ends_epoch and self.workload.epochs > _FALLING):
            self.known[turn] = _Taken(booked, after, self.ranks.asked, self.found.decomposed - decomposed)
            self.quiet[place] = until - step

    def _leap(self) -> None:
        """Count turns that were simulated before, as long as they lead back to the method's current place."""
        here, cycle = self._place, self._cycle
        if here is None or cycle is None:
            return
        step, place, passed, back = self.replica.step, here, [], 0
        end, times = min(cycle.end, self.workload.steps), self.found.times[self.replica.phase]
        while place in self.quiet:
            turn = self._turn(step, place, step + self.quiet[place])
            taken, step = self.known.get(turn), step + turn.steps
            if taken is None or step >= end or not self.ranks.still_are(taken.asked, step / self.workload.steps):
                break
            times += taken.place.taken == 0
            if self.shapes and taken.place.taken == 0 and _keeps_shape(times):
                break  # it has to be there
            passed.append(turn)
            place = taken.place
            if place == here:
                back = len(passed)
        for turn, count in Counter(passed[:back]).items():
            self._count(self.known[turn], count)
        steps = sum(turn.steps for turn in passed[:back])
        self.found.steps[self.replica.phase] += steps
        self._skip(steps)
        if steps:
            self.method.shift(steps)

    def _count(self, taken: _Taken, times: int) -> None:
        """Count a turn's results once more, so many times."""
        self.wire.booked.add(taken.booked, times)
        for tall, count in taken.decomposed.items():
            self.found.decomposed[tall] += count * times
        if taken.place.taken == 0:
            self.found.times[self.replica.phase] += times

    @property
    def _cycle(self) -> Cycle | None:
        """The method's place in the cycle that it repeats, if it has one; rounds that grow repeat nothing."""
        changes = self.workload.rate is not None and grows(self.method.config)
        return None if changes else self.method.cycle

    @property
    def _place(self) -> _Place | None:
        cycle = self._cycle
        if cycle is None:
            return None
        backwards = self.method.gradients.replicated.backwards
        return _Place(cycle.place, min(self.taken, _UNEQUAL_STEPS), min(backwards, _UNEQUAL_STEPS))

    @property
    def _began(self) -> tuple[str, int]:
        """Changes with the phase and with every decomposition."""
        return self.replica.phase, self.replica.decompositions

    def _skip(self, steps: int) -> None:
        self.method.step += steps
        self.method.forwards += steps

    def _turn(self, step: int, place: _Place | None, next_event: int) -> _Turn:
        """The next turn; the step before an event is taken alone, because the event happens at its end."""
        steps, every = self.workload.steps, self.workload.eval_every
        next_evaluation = (step // every + 1) * every if every else steps
        epoch = self._next_epoch(step)
        taken = max(1, min(next_event, next_evaluation, epoch, steps) - step - 1)
        after = step + taken
        evaluates = every is not None and (after % every == 0 or after == steps)
        return _Turn(place, taken, after == epoch, evaluates)

    def _next_epoch(self, step: int) -> int:
        """The next step that ends an epoch; the last step if the method does not use epochs."""
        steps, epochs = self.workload.steps, self.workload.epochs
        if not self.method.context.on_epoch_end:
            return steps
        over = step * epochs // steps
        return -(-(over + 1) * steps // epochs)

    def _show_model(self) -> None:
        """One forward pass in each shape, for the order of layers and the weights read; later ones only count."""
        model = self.replica.module
        model.__dict__.pop("forward", None)
        if self.workload.has_inputs:
            self.workload.show(model, self.method.shape.usage)
        model.forward = lambda *args, **kwargs: None

    def _step(self, times: int) -> None:
        """One step that stands for several."""
        self.wire.repeat = times
        phase = self.replica.phase
        with ShapesOnly():
            self.replica()
        self.replica.observe(1.0)
        self._make_state()
        self._skip(times - 1)
        set_rate(self.method.optimizers[0], self.workload, self.method.step)
        with ShapesOnly():
            self.method.optimizers[0].step()  # no gradients: only its hooks run
        self.wire.repeat = 1
        self.found.steps[phase] += times
        if self.replica.phase == phase:
            memory = max(self._memory(), self.found.memory.get(phase, Memory()), key=lambda m: m.held)
            self.found.memory[phase] = memory

    def _make_state(self) -> None:
        """Create the optimizer state that an update would; a real update without values is slow."""
        optimizer = self.method.optimizers[0]
        for p in self.method.optimizers.parameters:
            if p.requires_grad and not optimizer.state.get(p):
                optimizer.state[p] = {name: state_like(value, p) for name, value in self.workload.state.items()}

    def _count_evaluation(self) -> None:
        if self.workload.eval_every:
            self.wire.all_reduce_sum(torch.empty(3, dtype=torch.float64), "evaluate")

    def _memory(self) -> Memory:
        # It changes with the phase, when optimizer state is made or dropped, and with what steps are not alike in.
        place = *self._began, len(self.method.optimizers[0].state), self.method.next_event
        if self.held[0] != place:
            self.held = place, memory_of(self.method, model_and_optimizer(self.method))
        return self.held[1]
