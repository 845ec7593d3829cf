"""Which ranks did not reach a barrier, and why: most often ranks have different numbers of batches."""

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

from thinwire.comm import process_groups
from thinwire.comm.times import Times
from thinwire.comm.topology import Topology
from thinwire.errors import MissingRankError, ThinwireError

log = logging.getLogger("thinwire")

_LONG_S = 30.0
_ENTRANCES = ("finish()", "save()", "load()", "merged()", "epoch_end()")
"""User calls that all ranks should make at about the same time; writing a save may take one rank longer."""
REMEDY = (
    "give every rank equally many, by a sampler with drop_last=True or by equal shards "
    "(torch's Join does not apply here)"
)


@contextlib.contextmanager
def warn_if_slow(call: str, topology: Topology, number: int, steps: int) -> Iterator[None]:
    """Warn if a call inside waits for long: the process group's own timeout may be half an hour."""
    if call not in _ENTRANCES:
        yield
        return
    timer = threading.Timer(_LONG_S, lambda: _warn(call, topology, number, steps))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _warn(call: str, topology: Topology, number: int, steps: int) -> None:
    if absent := _absent(topology, number):
        log.warning(
            "rank %d has waited %d s in %s for %s%s",
            *(topology.rank, _LONG_S, call, _named(absent), _batches(topology.rank, steps, absent)),
        )


def explained(call: str, topology: Topology, number: int, steps: int, error: BaseException) -> MissingRankError:
    """The error for a barrier that failed."""
    absent = _absent(topology, number)
    who = f"{_named(absent)} did not" if absent else "another rank came too late, or left"
    why = _batches(topology.rank, steps, absent) if absent and call in _ENTRANCES else ""
    return MissingRankError(f"{call} is collective: every rank must call it, and {who}{why} ({error})")


def _absent(topology: Topology, number: int) -> list[int]:
    """Ranks that left no note of that barrier; none if no rank left a note, not even this one."""
    notes = process_groups.notes(topology.world)
    return [r for r in topology.world if r not in notes or notes[r].number < number] if notes else []


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _batches(rank: int, steps: int, absent: list[int]) -> str:
    """What is known about the numbers of batches: a rank with more of them waits in its next step for this one."""
    known = {other: begun for other in absent if (begun := process_groups.steps_begun(other)) is not None}
    more = {other: begun for other, begun in known.items() if begun > steps}
    if more:
        ahead = ", ".join(f"rank {other} is in step {begun} or later" for other, begun in more.items())
        return f"; ranks took different numbers of batches: rank {rank} is here after {steps} steps, {ahead}; {REMEDY}"
    return f"; rank {rank} is here after {steps} steps: if ranks have different numbers of batches, {REMEDY}"


def uneven_batches() -> str | None:
    """For a step that failed on this rank: which ranks wait at a barrier after fewer steps, if any are known."""
    if not _here:
        return None
    rank, steps = _here[0], _here[1].begun
    notes = process_groups.notes(tuple(range(process_groups.world_size())))
    own = notes[rank].number if rank in notes else 0
    early = {r: n for r, n in notes.items() if n.number > own and n.steps < steps and n.call in _ENTRANCES}
    if not early:
        return None
    others = ", ".join(f"rank {r} came to {note.call} after {note.steps} steps" for r, note in early.items())
    return f"ranks took different numbers of batches: {others}, rank {rank} was in step {steps}; {REMEDY}"


_here: list[Any] = []  # this worker's rank, and the steps it has taken


def explain_uncaught(rank: int, times: Times) -> None:
    """From now on add what is known about batches to torch's own tracebacks, for instance from a backward pass."""
    if not _here:
        sys.excepthook = functools.partial(_hook, sys.excepthook)
    _here[:] = [rank, times]


def _hook(before: Any, kind: type[BaseException], error: BaseException, trace: Any) -> None:
    before(kind, error, trace)
    if issubclass(kind, RuntimeError) and not issubclass(kind, ThinwireError) and (message := uneven_batches()):
        print(f"thinwire: {message}", file=sys.stderr, flush=True)
