"""Which ranks did not reach a barrier, and why: they went on training, have failed, or have ended.

Ranks sign in to a barrier in the job's store and wait until all have, before they enter torch's own barrier, which
cannot be left. A rank that waits looks at what the others note there, and ends the wait when it can only be in vain:

    another rank has failed, or its script has ended    at once
    it has gone on training                             after `GRACE_S`, from when that is known
    nothing is heard of it                              torch's barrier decides: it finds closed connections

Errors that end a process are noted too, so that ranks whose connections close because of it can say so.
"""

import contextlib
import functools
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from thinwire.base.errors import ConsequenceError, MissingRankError, ThinwireError, one_line
from thinwire.comm import process_groups
from thinwire.comm.process_groups import Note, Progress, Uncaught
from thinwire.comm.times import Times
from thinwire.comm.topology import Topology

log = logging.getLogger("thinwire")

GRACE_S, FORWARD_GRACE_S = 10.0, 120.0
"""How long a rank still waits for one that has gone on; longer where that has only begun a forward pass, which may
have been for itself."""
_LONG_S = 30.0
_SILENT_S = 10.0
_LOOK_S, _POLL_S = 1.0, 0.25
_STORE_S, _CAUSE_S = 5.0, 2.0
_ENTRANCES = ("finish()", "save()", "load()", "load_state_dict()", "merged()", "epoch_end()")
"""User calls that all ranks should make at about the same time; writing a save may take one rank longer."""
_CAUSE, _MISSING, _LOST = "cause", "missing", "lost"
REMEDY = (
    "put `with replica.join():` around the loop, end all ranks after the same step by `replica.stop()`, or give every "
    "rank equally many batches (a sampler with drop_last=True, equal shards)"
)

STORE_GONE = "the job's store is gone: rank 0 or the launcher, which keeps it, has ended; see what it printed"

# How gloo, nccl and torch's store say that another worker is gone; only to tell a cause from its consequences.
_GONE = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|remote process exited|timed? ?out|"
    r"pair closure|monitoredbarrier|socket|no route to host|network is unreachable",
    re.IGNORECASE,
)


def is_loss(error: BaseException) -> bool:
    """Whether an error says that another worker is gone or unreachable."""
    return bool(_GONE.search(str(error)))


# At a barrier.


@contextlib.contextmanager
def meeting(
    call: str, topology: Topology, steps: int, failed: str | None, timeout: timedelta
) -> Iterator[tuple[int, timedelta]]:
    """Wait until all ranks have come to a barrier; inside, enter it.

    Yields its number, and how long it may still take.
    """
    begun = time.monotonic()
    with _as_missing(call, topology, steps) as waiting:
        waiting.number = process_groups.sign_in(topology.rank, call, steps, failed)
        with _warned_if_slow(waiting):
            waiting.wait(timeout.total_seconds())
            left = timeout.total_seconds() - (time.monotonic() - begun)
            yield waiting.number, timedelta(seconds=max(1.0, left))
    process_groups.note_meeting(topology.rank)


@contextlib.contextmanager
def _as_missing(call: str, topology: Topology, steps: int) -> Iterator["Waiting"]:
    waiting = Waiting(call, topology, steps)
    try:
        yield waiting
    except RuntimeError as error:
        found = error if isinstance(error, MissingRankError) else waiting.error(f" ({_in_short(error)})")
        process_groups.sign_out(topology.rank, Note(waiting.number, call, steps))
        if found is error:
            raise
        raise found from error


@contextlib.contextmanager
def _warned_if_slow(waiting: "Waiting") -> Iterator[None]:
    """Warn if what is inside waits for long: the process group's own timeout may be half an hour."""
    if waiting.call not in _ENTRANCES:
        yield
        return
    timer = threading.Timer(_LONG_S, waiting.warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Waiting:
    """One rank's wait at a barrier for the others."""

    number = 0
    """Of the barrier; 0 before this rank has signed in."""

    def __init__(self, call: str, topology: Topology, steps: int) -> None:
        self.call, self.rank, self.world, self.steps = call, topology.rank, topology.world, steps
        self._ahead_since: dict[int, float] = {}
        self._heard: dict[int, tuple[Progress | None, float]] = {}

    def wait(self, timeout: float) -> None:
        """Return when all have come, or one is silent; raise if one cannot come any more."""
        begun = time.monotonic()
        due = begun + _LOOK_S
        while process_groups.came(self.number) < len(self.world):
            now = time.monotonic()
            if now - begun > timeout:
                raise self.error(f" (waited {timeout:.0f} s)")
            if now >= due:
                due = now + _LOOK_S
                if self._is_left_to_torch(now):
                    return
            time.sleep(min(_POLL_S, max(0.001, (now - begun) / 10)))  # a tenth more than it takes anyway

    def _is_left_to_torch(self, now: float) -> bool:
        """Whether nothing more can be learnt here; raises if waiting is in vain."""
        seen = {rank: process_groups.progress(rank) for rank in self._absent()}
        if process_groups.uncaught() or any(found is not None and found.ended for found in seen.values()):
            raise self.error()
        most = max(map(self._ahead, seen.values()), default=0)
        for enough, grace in ((2, GRACE_S), (1, FORWARD_GRACE_S)):
            if most < enough:
                self._ahead_since.pop(enough, None)
            elif now - self._ahead_since.setdefault(enough, now) >= grace:
                raise self.error()
        for rank, found in seen.items():
            if rank not in self._heard or self._heard[rank][0] != found:
                self._heard[rank] = found, now
        return most <= 0 and any(now - self._heard[rank][1] >= _SILENT_S for rank in seen)

    def _ahead(self, other: Progress | None) -> int:
        """How far another rank has gone on, by stages of steps; 0 or less if it has not, or that is not known."""
        return 0 if other is None or other.meetings != self.number - 1 else other.place - process_groups.place()

    def _absent(self) -> list[int]:
        """Ranks that never came to this barrier, or else those that left it: they waited in vain for the others.

        None if no rank left a note, not even this one.
        """
        notes = process_groups.notes(self.world)
        came = {rank: note for rank, note in notes.items() if note.number >= self.number}
        never = [rank for rank in self.world if rank not in came] if notes else []
        return never or [rank for rank, note in came.items() if note.gave_up]

    # What is said about it.

    def warn(self) -> None:
        """Say whom this rank has been waiting for."""
        if absent := self._absent():
            log.warning(
                "rank %d has waited %d s in %s for %s%s",
                *(self.rank, _LONG_S, self.call, _named(absent), self._gone_on(absent) or self._unknown(absent)),
            )

    def error(self, how: str = "") -> MissingRankError:
        """The error for a barrier that not all have reached."""
        try:
            first = first_uncaught(self.rank)
        except RuntimeError:
            return MissingRankError(f"{self.call} is collective, and {STORE_GONE}")
        absent = self._absent()
        who = f"{_named(absent)} did not" if absent else "another rank came too late, or left"
        why = self._gone_on(absent)
        if first is not None and (first.kind != _LOST or not why):
            why = f"; {_failed_first(first)}"
        elif absent:
            why = why or self._unknown(absent)
        return MissingRankError(f"{self.call} is collective: every rank must call it, and {who}{why}{how}")

    def _gone_on(self, absent: list[int]) -> str:
        """Which ranks have ended, or have gone on; empty if none is known to."""
        seen = _seen(absent)
        if ended := {rank: found.step for rank, found in seen.items() if found.ended}:
            what = REMEDY if {*ended.values()} != {self.steps} else f"call {self.call} on all ranks"
            return f"; {_ended(ended)}, rank {self.rank} is here after {self.steps}; {what}"
        if ahead := {rank: found for rank, found in seen.items() if self._ahead(found) > 0}:
            others = ", ".join(f"rank {rank} is in step {found.step} or later" for rank, found in ahead.items())
            here = f"rank {self.rank} is here after {self.steps} steps"
            return f"; ranks took different numbers of batches: {here}, {others}; {REMEDY}"
        return ""

    def _unknown(self, absent: list[int]) -> str:
        """Where ranks were last, which may be long ago; that says nothing about their batches."""
        places = "".join(
            f", rank {rank} last in step {found.step}" for rank, found in _seen(absent).items() if found.step
        )
        return f"{places}; see what was printed there, and whether it was killed"


def _seen(ranks: list[int]) -> dict[int, Progress]:
    """How far ranks are that have noted it."""
    return {rank: found for rank in ranks if (found := process_groups.progress(rank)) is not None}


def _in_short(error: BaseException) -> str:
    """What gloo says, without its advice."""
    return str(error).split(". This is typically")[0]


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _ended(steps: dict[int, int]) -> str:
    return ", ".join(f"the script of rank {rank} has ended after {step} steps" for rank, step in steps.items())


def _failed_first(found: Uncaught) -> str:
    return f"rank {found.rank} failed first: {found.line}"


# Errors that nobody catches.


class _Here(NamedTuple):
    rank: int
    world: tuple[int, ...]
    times: Times


_here: list[_Here] = []  # this worker, if it is one of several


def uneven_batches() -> str | None:
    """For a step that failed on this rank: which ranks wait at a barrier after fewer steps, if any are known."""
    if not _here:
        return None
    rank, world, times = _here[0]
    notes, steps = process_groups.notes(world), times.begun
    own = notes[rank].number if rank in notes else 0
    early = {r: n for r, n in notes.items() if n.number > own and n.steps < steps and n.call in _ENTRANCES}
    if not early:
        return None
    others = ", ".join(f"rank {r} came to {note.call} after {note.steps} steps" for r, note in early.items())
    return f"ranks took different numbers of batches: {others}, rank {rank} was in step {steps}; {REMEDY}"


def first_uncaught(rank: int) -> Uncaught | None:
    """The error of another rank that ended first, a cause if there is one; raises RuntimeError without a store."""
    others = [error for error in process_groups.uncaught() if error.rank != rank]
    return min(others, key=lambda error: (_CAUSE, _MISSING, _LOST).index(error.kind), default=None)


def note_uncaught(error: BaseException) -> None:
    """Leave a note for the other ranks of an error that ends this one; no longer than a few seconds."""
    if _here:
        lines = one_line(error).splitlines() or [""]
        found = Uncaught(_here[0].rank, _kind(error), lines[0])
        _within(_STORE_S, lambda: process_groups.note_uncaught(found))


def _kind(error: BaseException) -> str:
    if isinstance(error, ConsequenceError):
        return _MISSING
    return _LOST if _is_consequence(error) else _CAUSE


def _is_consequence(error: BaseException | None) -> bool:
    """Whether torch has lost another rank, or this error came of that."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RuntimeError) and is_loss(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _why_lost() -> str | None:
    """Why this rank has lost another one, as far as ranks have noted it; waits for a moment if they have not yet."""
    deadline = time.monotonic() + _CAUSE_S
    while True:
        try:
            first = first_uncaught(_here[0].rank)
        except RuntimeError:
            return STORE_GONE
        if first is not None and first.kind == _CAUSE:
            return f"{_failed_first(first)}; this error is a consequence of it"
        if found := uneven_batches():
            return found
        if first is not None and first.kind == _MISSING:
            return f"{_failed_first(first)}; this error is a consequence of it"
        if found := _ended_early():
            return found
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S / 5)


def _ended_early() -> str | None:
    rank, world, times = _here[0]
    seen = {other: process_groups.progress(other) for other in world if other != rank}
    ended = {other: found.step for other, found in seen.items() if found is not None and found.ended}
    if not ended:
        return None
    return f"{_ended(ended)}, rank {rank} was in step {times.begun}; this error is a consequence of it; {REMEDY}"


def explain_uncaught(topology: Topology, times: Times) -> None:
    """From now on tell other ranks of errors that end this one, and say more about errors that came of others'."""
    if not _here:
        sys.excepthook = functools.partial(_hook, sys.excepthook)
    _here[:] = [_Here(topology.rank, topology.world, times)]


def _hook(before: Any, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    note_uncaught(error)  # before this process ends, and its connections close
    before(kind, error, trace)
    is_lost = not isinstance(error, ThinwireError) and _is_consequence(error)
    if is_lost and (message := _within(_STORE_S, _why_lost)):
        print(f"thinwire: {message}", file=sys.stderr, flush=True)


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """What a call gives, or None if it fails or takes longer: a store behind a link that is cut never answers."""
    found: list[Any] = []

    def work() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            found.append(call())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
