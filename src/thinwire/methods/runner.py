"""The one runner: it walks the timetable of a method, and asks the parts of the present phase for all that it does.

A transition has one order: workers compare their counters, parts end in reverse order, the phase changes, parts begin.
An exchange averages once more when it ends; only then a shape changes, and optimizers with it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.comm import process_groups
from thinwire.comm.topology import Topology
from thinwire.exchange.agreement import Agreement
from thinwire.exchange.averaged import AveragedTensors
from thinwire.exchange.gradients import GradientAveraging
from thinwire.exchange.masters import Masters
from thinwire.exchange.meetings import Counters, Waits
from thinwire.exchange.merging import average_moments
from thinwire.exchange.parts import Cycle, Exchange, MethodContext, Part, PartState, Saved
from thinwire.methods.timetable import Phase, parts_of
from thinwire.shape.shape import Shape


def untraced(method: Callable[..., Any]) -> Any:
    """The method as `torch.compile` leaves it alone; what it calls may be compiled."""
    try:
        return torch.compiler.disable(method, recursive=False)
    except AttributeError:  # torch 2.6 marks functions only, not methods

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        return torch.compiler.disable(call, recursive=False)


class Runner:
    """A method in a run; parts see it as their `Run`."""

    def __init__(self, config: Any, context: MethodContext) -> None:
        self.config = config
        self.context = context
        self.model, self.optimizers, self.wire = context.model, context.optimizers, context.wire
        self.masters = Masters(context.optimizers)
        self.counters = Counters(context.wire, context.optimizers, context.has_scaler)
        self.gradients = GradientAveraging(context)
        self.step = 0
        self.forwards = 0
        self.waits = Waits()
        self.absent: frozenset[int] = frozenset()
        self.observed = torch.zeros(2, dtype=torch.float64)  # sum of losses, how many
        self.events: list[dict[str, Any]] = []
        # Counters must not be traced: every step would look like another program to torch.compile.
        self.forward = untraced(self.forward)  # type: ignore[method-assign]
        self.watch = torch.compiler.disable(self.gradients.replicated.watch)
        self.timetable: Sequence[Phase] = config.timetable(self.topology)
        self._go_to(0)
        for part in parts_of(self.timetable):
            part.attach(self)

    # The timetable.

    @property
    def phases(self) -> tuple[str, ...]:
        """Every name that `phase` may have, the first one first."""
        return names_of(self.timetable)

    @property
    def parts(self) -> list[Part]:
        """Those of this phase, in the order in which they began."""
        return self._now.parts

    @property
    def exchanges(self) -> Sequence[Exchange]:
        """Those of this phase."""
        return self._now.exchanges

    @property
    def shape(self) -> Shape:
        """The model's, in this phase."""
        return self._now.shape

    @property
    def phase_end(self) -> int:
        """The step at which this phase ends, if that is known."""
        return self._now.until if isinstance(self._now.until, int) else sys.maxsize

    def attach(self) -> None:
        """Take over the model; phases of no steps are over at once."""
        self._begin(())
        self._follow()

    def _go_to(self, index: int) -> None:
        """The ledger has bytes and seconds by phase."""
        self.index, self._now = index, self.timetable[index]
        self.phase = self.wire.ledger.phase = self._now.name

    def _follow(self) -> None:
        while self.index + 1 < len(self.timetable) and self._is_over(self._now.until):
            before, after = self._now, self.timetable[self.index + 1]
            if not callable(before.until):
                self.check_counters()
            self._end(after.parts)
            if _come_together(before, after):
                self._agree_on_moments(before)
            self._go_to(self.index + 1)
            self._begin(before.parts)

    def _agree_on_moments(self, before: Phase) -> None:
        """The world trains on from one model, so optimizers and the scale of losses must be the same everywhere too."""
        if len(self.topology.groups) > 1 and any(each.leaves_moments for each in before.exchanges):
            average_moments(self.wire, self.optimizers, self.optimizers.parameters, self.weight)
        self.context.after_merge()

    def _is_over(self, until: int | Callable[[], bool] | None) -> bool:
        return until() if callable(until) else until is not None and self.step >= until

    def _begin(self, before: Sequence[Part]) -> None:
        for part in (self.shape, *self._now.rules):
            part.begin(again=part in before)
        if self._now.trains_apart and not any(each in before for each in self.exchanges):
            self.gradients.apart()
        for exchange in self.exchanges:
            exchange.begin(again=exchange in before)

    def _end(self, after: Sequence[Part]) -> None:
        for part in reversed(self.parts):
            part.end(again=part in after)

    # What parts see, and others ask.

    @property
    def topology(self) -> Topology:
        """The layout, as it is now."""
        return self.wire.topology

    @property
    def weight(self) -> float:
        """This group's share in a mean over workers; none if it is `absent`."""
        sizes = [0 if group in self.absent else len(ranks) for group, ranks in enumerate(self.topology.groups)]
        return sizes[self.topology.group_index] / (sum(sizes) or 1)

    @property
    def in_sync(self) -> bool:
        """Whether all workers hold the same model between steps."""
        return not self._now.trains_apart or len(self.topology.groups) == 1

    @property
    def holds_one_model(self) -> bool:
        """Whether all workers hold the same parameters now, perhaps only until the next step."""
        apart = [each for each in self.exchanges if each.trains_apart]
        return self.in_sync or (bool(apart) and all(each.schedule.holds_one_model for each in apart))

    @property
    def trains_apart(self) -> bool:
        """Whether groups train apart in some phase."""
        return any(phase.trains_apart for phase in self.timetable)

    @property
    def only_gradients(self) -> bool:
        """Whether the optimizer alone changes parameters: they are never averaged, and keep their shapes."""
        return not self.trains_apart and not any(phase.shape.changes for phase in self.timetable)

    @property
    def leaves_out_diverged(self) -> bool:
        """Whether a group whose values are not finite is left out of averages; else the run stops."""
        return any(each.leaves_out_diverged for each in self._every_exchange)

    @property
    def averages_moments(self) -> bool:
        """Whether groups average their optimizers' state."""
        leaves = (before.exchanges for before, after in pairwise(self.timetable) if _come_together(before, after))
        comes = any(each.leaves_moments for exchanges in leaves for each in exchanges)
        return comes or any(each.averages_moments for each in self._every_exchange)

    @property
    def agreement(self) -> Agreement | None:
        """How far groups agreed at averages, where that is measured."""
        return next((each.agreement for each in self._every_exchange if each.agreement is not None), None)

    @property
    def _every_exchange(self) -> list[Exchange]:
        return [each for phase in self.timetable for each in phase.exchanges]

    @property
    def next_event(self) -> int:
        """The next step that may be unlike the one before it; a plan simulates those before it by one of them."""
        return min(self.phase_end, *(part.schedule.next_event for part in self.parts))

    @property
    def meets_next(self) -> bool:
        """Whether the end of the next step is more than agreeing on buffers; where groups may be lost, all do it."""
        return self.phase_end <= self.step + 1 or any(part.schedule.meets_next for part in self.parts)

    @property
    def last_average(self) -> int | None:
        """The step of the last average of what the end of the next step averages; None is when groups last met."""
        meets = (each.schedule for each in self.exchanges if each.schedule.meets_next)
        return min((last for each in meets if (last := each.last_average) is not None), default=None)

    @property
    def averaged_tensors(self) -> list[AveragedTensors]:
        """What is averaged between groups, for the memory it takes."""
        return [tensors for each in self.exchanges for tensors in each.schedule.averaged]

    @property
    def assumes(self) -> str:
        """What has to be true for a run to send what a plan says, in words."""
        return " and ".join(dict.fromkeys(filter(None, (each.schedule.assumes for each in self._every_exchange))))

    @property
    def missed(self) -> str:
        """What the method has not done by the end of a run, for the log."""
        if self.index == 0 < len(self.timetable) - 1:
            return f"never left its {self.phase!r} phase"
        return next(filter(None, (each.schedule.missed for each in self.exchanges)), "")

    @property
    def cycle(self) -> Cycle | None:
        """The place in a cycle of steps that repeats, if there is one."""
        found = [cycle for each in self.exchanges if (cycle := each.schedule.cycle) is not None]
        if not found or len(found) < len(self.exchanges):
            return None
        return Cycle(tuple(each.place for each in found), min(each.end for each in found))

    def shift(self, steps: int) -> None:
        """Be as if everything so far had happened so many steps later; for plans."""
        for part in self.parts:
            part.schedule.shift(steps)

    def check_counters(self) -> None:
        """Refuse workers at different steps or learning rates; called before every change of phase, collective."""
        rows = self.counters.check(self.step, self.forwards, self.waits.own)
        self.waits.meet(rows, self.topology.groups, self.topology.rank)

    # What the replica calls.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A training batch through the model."""
        replicated = self.gradients.replicated
        self.forwards += replicated.syncs
        outputs = replicated.forward(*args, **kwargs)
        self.watch(outputs)
        return outputs

    def end_step(self) -> None:
        """All optimizers have stepped."""
        self.step += 1
        self.waits.arrive()
        self.settle()

    def settle(self) -> None:
        """What is to be done after a step; where nothing is due, it may be done again."""
        with self.wire.ledger.times.after_step():
            self.gradients.end_step()
            self.wire.ledger.clock.time_all()
            for part in self.parts:
                part.after_step()
            self._follow()
            if self.masters.names:  # or an optimizer would undo what the method made of its parameters
                self.masters.follow()

    def factor_now(self) -> None:
        """Make factors of the weights at the next average; collective."""
        if self.shape.on_request is None:
            raise ThinwireError(f"factor_now() is for thinwire.AB, not for {type(self.config).__name__}")
        self.shape.on_request()

    def observe(self, loss: float | Tensor) -> None:
        """Note a training loss; never waits for the device."""
        value = loss.detach().to(torch.float64).mean() if isinstance(loss, Tensor) else float(loss)
        self.observed = self.observed.to(value.device) if isinstance(value, Tensor) else self.observed
        self.observed[0] += value
        self.observed[1] += 1

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Give every worker, for a while, the model that an average would give now."""
        with ExitStack() as stack:
            for exchange in self.exchanges:
                stack.enter_context(exchange.merged())
            yield

    def finish(self, cutoff: float | None) -> None:
        """Leave one model on all workers; cut it where a cutoff is given."""
        if self._now.trains_apart:
            self.check_counters()
        self._end(())
        self.shape.finish(cutoff)

    def release(self) -> None:
        """Release the model, in its present shape."""
        self.gradients.replicated.unwrap()
        process_groups.rest()
        for callback in self.context.on_release:
            callback()

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: what is the same on all workers of a group, and what is this worker's; collective.

        Plain values under "shared" are the same on all workers.
        """
        parts, gradients = {name: part.state_dict() for name, part in self._named}, self.gradients.state_dict()
        return {
            "shared": {
                "step": self.step,
                "phase": self.phase,
                "index": self.index,
                "events": [dict(event) for event in self.events],
                "shape": self.shape.state_dict().shared,
                "parts": {name: part.shared for name, part in parts.items()},
                "gradients": gradients["shared"],
            },
            "local": {
                "forwards": self.forwards,
                "idle": self.counters.idle,
                "observed": self.observed.tolist(),
                "parts": {name: part.local for name, part in parts.items()},
                "gradients": gradients["local"],
            },
        }

    def load_state_dict(self, saved: Saved) -> None:
        """Continue from what all workers' `state_dict` gave; values are loaded when the model has its shape."""
        if not saved.stays:  # where a group was lost, nothing more arrives
            self.drop_pending()
        shared, own = saved.shared, saved.local
        self.step = shared["step"]
        self._go_to(shared["index"])
        self.events[:] = shared["events"]
        local = own or saved.everyone[0]
        self.forwards, self.counters.idle = local["forwards"], local.get("idle", 0)
        self.observed = torch.tensor(local["observed"], dtype=torch.float64)
        self.shape.load_state_dict(PartState(shared["shape"]), stays=saved.stays)
        self._load(self._now.rules, saved)
        saved.load_values()
        self.gradients.load_state_dict(saved, self._now.make)
        self._load(self.exchanges, saved)

    @property
    def _named(self) -> list[tuple[str, Part]]:
        """Rules and exchanges of all phases, by what a save calls them."""
        parts = dict.fromkeys(part for phase in self.timetable for part in (*phase.rules, *phase.exchanges))
        return [(f"{number} {type(part).__name__}", part) for number, part in enumerate(parts)]

    def _load(self, parts: Sequence[Part], saved: Saved) -> None:
        for name, part in self._named:
            if part in parts:
                local = None if saved.local is None else saved.local["parts"][name]
                part.load_state_dict(PartState(saved.shared["parts"][name], local), stays=saved.stays)

    def drop_pending(self) -> None:
        """Forget what was sent and has not arrived: something is loaded, perhaps because it is what diverged."""
        for exchange in self.exchanges:
            exchange.forget("drop")

    def abandon_pending(self) -> None:
        """Forget the same without waiting: groups are not as they were when it was sent."""
        for exchange in self.exchanges:
            exchange.forget("abandon")

    def begin_again(self) -> None:
        """Other values were loaded into the model, the same on all workers: forget what belongs to those before them.

        Collective.
        """
        self.masters.follow()
        self.gradients.forget()
        self.observed.zero_()
        for exchange in self.exchanges:
            exchange.forget("restart")


def _come_together(before: Phase, after: Phase) -> bool:
    return before.trains_apart and not after.trains_apart


def names_of(timetable: Sequence[Phase]) -> tuple[str, ...]:
    """The names of phases, each once."""
    return tuple(dict.fromkeys(phase.name for phase in timetable))
