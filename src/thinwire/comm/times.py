"""Where a worker's time went, by phase: computing, waiting for the wire, decomposing, everything else.

A step's own time is from its first forward pass to the optimizer's update; what is left of it without the
waiting is computing. On a GPU the marks are events on its stream, because the host runs ahead of it. They are
read when they have passed, so that taking the time never waits for the device. Events cost the host a few microseconds
each, so after the first steps only one step in sixteen is timed, and counts for all of them.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import torch

Mark = float | torch.cuda.Event | None
"""None is not timed."""
_PENDING = 16
_ALL_TIMED, _ONE_IN = 32, 16


class Account(Protocol):
    """Anything with seconds to add to."""

    seconds: float


class Clock:
    """Marks in time, and the accounts that the time between them is added to."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._on_gpu = device is not None and device.type == "cuda"
        self._pending: deque[tuple[tuple[Account, ...], int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._counts_for = 1
        self._spare: list[torch.cuda.Event] = []  # making one costs more than recording it

    def begin_step(self, number: int) -> None:
        """Until `time_all` marks count for as many steps as this one stands for."""
        if self._on_gpu and number > _ALL_TIMED:
            self._counts_for = 0 if number % _ONE_IN else _ONE_IN

    @property
    def is_timing(self) -> bool:
        """Whether marks count now."""
        return self._counts_for > 0

    def time_all(self) -> None:
        """What follows does not happen at every step, and is timed whenever it does."""
        self._counts_for = 1

    def mark(self) -> Mark:
        """Now; on a GPU, an event on its stream."""
        if not self._on_gpu:
            return time.perf_counter()
        if not self._counts_for:
            return None
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def host_mark(self) -> float | None:
        """Now on the host; None where a GPU works at its own pace."""
        return None if self._on_gpu else time.perf_counter()

    def charge(self, start: Mark, end: Mark, *accounts: Account) -> None:
        """Add the time between two marks, not used again, to each account."""
        if isinstance(start, float) and isinstance(end, float):
            for account in accounts:
                account.seconds += end - start
        elif start is not None and end is not None:
            self._pending.append((accounts, self._counts_for, start, end))  # type: ignore[arg-type]
            while len(self._pending) > _PENDING and self._pending[0][3].query():
                self._settle_first()

    def settle(self) -> None:
        """Wait for the GPU, and add all pending times."""
        while self._pending:
            self._pending[0][3].synchronize()
            self._settle_first()

    def _settle_first(self) -> None:
        accounts, times, start, end = self._pending.popleft()
        seconds = times * start.elapsed_time(end) / 1000
        for account in accounts:
            account.seconds += seconds
        self._spare += [start, end]


@dataclass
class Spent:
    """Seconds that add up."""

    seconds: float = 0.0


@dataclass
class _Phase:
    """Totals of one phase."""

    steps: int
    whole: Spent
    in_steps: Spent
    waiting_in_steps: Spent
    decomposing: Spent
    after_steps: Spent = field(default_factory=Spent)


class Stage(IntEnum):
    """How far a step is. Forward passes count less than what follows: one worker may have taken one for itself."""

    BEGUN = 1
    AVERAGES = 3
    """The world averages its gradients."""
    TAKEN = 5


class Times:
    """The sums of one worker."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._phases: dict[str, _Phase] = defaultdict(lambda: _Phase(0, Spent(), Spent(), Spent(), Spent()))
        self._phase = ""
        self._entered = time.perf_counter()
        self._began: Mark = None
        self._in_step = False
        self._booked = Spent()  # all waiting and decomposing
        self.on_step: Callable[[int, Stage], None] | None = None
        """Called with the number of a step, and how far it is."""
        self.on_work: Callable[[str, int, int], None] | None = None
        """Called during work that may take long: with what it is, how many parts are done, and of how many."""

    @property
    def steps(self) -> int:
        """Steps taken, in all phases."""
        return sum(mine.steps for mine in self._phases.values())

    @property
    def begun(self) -> int:
        """Steps taken, including one in progress."""
        return self.steps + self._in_step

    @property
    def after_steps(self) -> float:
        """Seconds of the method's own work after steps, without waiting and decomposing; of a CPU only."""
        return sum(mine.after_steps.seconds for mine in self._phases.values())

    @property
    def elapsed(self) -> float:
        """Seconds so far, in all phases."""
        so_far = sum(mine.whole.seconds for name, mine in self._phases.items() if name)
        return so_far + time.perf_counter() - self._entered

    def enter(self, phase: str) -> None:
        """Charge the time since the last change to the phase that ends."""
        now = time.perf_counter()
        self._phases[self._phase].whole.seconds += now - self._entered
        self._phase, self._entered = phase, now

    def begin_step(self) -> None:
        """A training forward pass; only the first since the last step counts."""
        if not self._in_step:
            self._in_step = True
            self.clock.begin_step(self.begun)
            self._began = self.clock.mark()
            self._note(Stage.BEGUN)

    def average_gradients(self) -> None:
        """The world averages this step's gradients."""
        if self._in_step:
            self._note(Stage.AVERAGES)

    def _note(self, stage: Stage) -> None:
        if self.on_step is not None:
            self.on_step(self.begun, stage)

    def end_step(self) -> None:
        """The optimizer's update is done."""
        mine = self._phases[self._phase]
        mine.steps += 1
        if self._in_step:
            self.clock.charge(self._began, self.clock.mark(), mine.in_steps)
            self._in_step = False
        self._note(Stage.TAKEN)

    def waited(self, start: Mark, end: Mark, account: Account) -> None:
        """Add time spent waiting for the wire to an account; inside a step it does not count as compute."""
        inside = (self._phases[self._phase].waiting_in_steps,) if self._in_step else ()
        self.clock.charge(start, end, account, self._booked, *inside)

    @contextmanager
    def decomposing(self) -> Iterator[None]:
        """Charge what is inside to decomposition."""
        start, mine = self.clock.mark(), self._phases[self._phase].decomposing
        yield
        self.clock.charge(start, self.clock.mark(), mine, self._booked)

    @contextmanager
    def after_step(self) -> Iterator[None]:
        """Charge what is inside to the method's work after steps.

        Not on a GPU: at every step its events would cost more than they tell, and the host's clock does not see it.
        """
        start, before = self.clock.host_mark(), self._booked.seconds
        yield
        if start is not None:
            elapsed = time.perf_counter() - start
            self._phases[self._phase].after_steps.seconds += max(0.0, elapsed - (self._booked.seconds - before))

    def report_work(self, what: str, done: int, of: int) -> None:
        """Tell whoever follows this worker how far it is."""
        if self.on_work is not None:
            self.on_work(what, done, of)

    def split(self, waiting: dict[str, float]) -> dict[str, dict[str, float]]:
        """Seconds of each phase by kind; `waiting` is what collectives of each phase took."""
        table = {}
        for name, mine in self._settled().items():
            computing = max(0.0, mine.in_steps.seconds - mine.waiting_in_steps.seconds)
            known = {
                "compute": computing,
                "wire": waiting.get(name, 0.0),
                "decomposition": mine.decomposing.seconds,
            }
            rest = max(0.0, mine.whole.seconds - sum(known.values()))
            table[name] = {"steps": mine.steps, "seconds": mine.whole.seconds, **known, "other": rest}
        return table

    def state(self) -> dict[str, Any]:
        """The sums as plain values."""
        return {name: asdict(mine) for name, mine in self._settled().items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        self._phases.clear()
        self._entered = time.perf_counter()
        for name, mine in state.items():
            spent = {key: Spent(**value) for key, value in mine.items() if key != "steps"}
            self._phases[name] = _Phase(mine["steps"], **spent)

    def _settled(self) -> dict[str, _Phase]:
        self.enter(self._phase)
        self.clock.settle()
        return {name: mine for name, mine in self._phases.items() if name}


def mean_times(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of several workers' states; all take the same steps."""
    mean: dict[str, Any] = {}
    for name in dict.fromkeys(name for state in states for name in state):
        rows = [state[name] for state in states if name in state]
        mean[name] = {"steps": rows[0]["steps"]}
        for key in rows[0].keys() - {"steps"}:
            mean[name][key] = {"seconds": sum(row[key]["seconds"] for row in rows) / len(rows)}
    return mean
