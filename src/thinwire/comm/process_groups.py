"""torch's process groups: made once for the same ranks, asked who is missing, and left in order."""

import atexit
import contextlib
import functools
import gc
import itertools
import json
import logging
import os
import sys
import time
import weakref
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from thinwire.comm.sent import Ranks

# Process groups cost connections, and a process that attaches twice wants the same ones again.
_process_groups: dict[tuple[Any, ...], Any] = {}
_CONTROL: Ranks = ()
_STEPS_EVERY_S = 1.0


def leave() -> None:
    """End `torch.distributed` in order.

    A process group's threads live as long as somebody holds it. Those that the interpreter's own end finds running
    abort the process now and then ("terminate called without an active exception"), when all work is done.
    """
    let_go()
    if dist.is_initialized():
        dist.destroy_process_group()


class Holder(Protocol):
    """Whatever holds process groups."""

    def let_go(self) -> None:
        """Hold none any more."""


_holders: weakref.WeakSet[Any] = weakref.WeakSet()
_opened_here = False
_failed_with: int | None = None


def held_by(holder: Holder) -> None:
    """It holds process groups from now on, until the process ends or leaves."""
    if not _holders:
        _at_exit()
    _holders.add(holder)


def opened_here() -> None:
    """The process group of the world was opened by Thinwire, which thus has to leave it."""
    global _opened_here
    _opened_here = True


def failed(code: int) -> None:
    """A command ends with this exit code because something went wrong, and has said what."""
    global _failed_with
    _failed_with = code


def let_go() -> None:
    """Give up every process group that Thinwire holds; what is only waiting to be collected, too."""
    for holder in list(_holders):
        holder.let_go()
    _holders.clear()
    _process_groups.clear()
    gc.collect()  # replicas that are gone but for cycles


@functools.cache
def _at_exit() -> None:
    atexit.register(_end)


def _end() -> None:
    """The end of a script that has not left: a thread of a group that wants Python then would abort the process.

    Not behind an error: leaving waits for what is under way, and others must hear of the failure first. A command of
    ours then ends at once; a user's script goes through the rest of its end, with whatever else it has to do there.
    """
    if getattr(sys, "last_type", None) is not None:
        return
    if _failed_with is not None and dist.is_initialized():
        logging.shutdown()
        sys.stdout.flush()
        os._exit(_failed_with)
    if _opened_here:
        leave()
    else:
        let_go()


# Only rank 0 hears from a barrier who is missing, and nobody if it is rank 0. So each rank leaves a note first.
_barriers = itertools.count(1)


class Note(NamedTuple):
    """What a rank leaves when it comes to a barrier."""

    number: int
    """Which barrier of its own it is."""
    call: str
    """What the barrier is for."""
    steps: int
    """Steps that it had taken."""


def sign_in(rank: int, call: str, steps: int, failed: str | None = None) -> int:
    """Leave a note that this rank has come to its next barrier, maybe with a failure, and say which barrier it is."""
    number = next(_barriers)
    if failed is not None:
        _store().set(f"thinwire/failed/{number}", json.dumps([rank, failed]))
    _store().set(f"thinwire/barrier/{rank}", json.dumps([number, call, steps]))
    return number


def notes(world: Ranks) -> dict[int, Note]:
    """The last note of each rank that left one."""
    found = {rank: _read(f"thinwire/barrier/{rank}") for rank in world}
    return {rank: Note(*note) for rank, note in found.items() if note is not None}


def failure(number: int) -> tuple[int, str] | None:
    """A rank that came to that barrier with a failure, and what it said; asked after the barrier."""
    found = _read(f"thinwire/failed/{number}")
    return None if found is None else (found[0], found[1])


def steps_begun(rank: int) -> int | None:
    """As far as `StepNotes` of that rank said."""
    return _read(f"thinwire/steps/{rank}")


def _read(key: str) -> Any:
    """The JSON at this key; None if there is none, or whoever kept it has left."""
    try:
        return json.loads(_store().get(key)) if _store().check([key]) else None
    except (RuntimeError, ValueError):
        return None


class StepNotes:
    """A note of the steps that a rank has begun, once a second at most: others cannot ask while it waits for them."""

    def __init__(self, rank: int) -> None:
        self._key = f"thinwire/steps/{rank}"
        self._due = 0.0

    def __call__(self, step: int) -> None:
        """Step number `step` begins."""
        if time.monotonic() >= self._due and dist.is_initialized():
            self._due = time.monotonic() + _STEPS_EVERY_S
            with contextlib.suppress(RuntimeError):
                _store().set(self._key, json.dumps(step))


def world_size() -> int:
    """Ranks there are; none where nobody has joined."""
    return dist.get_world_size() if dist.is_initialized() else 0


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def process_group(members: Ranks, thread: str = "") -> Any:
    """The one of these ranks, or another one for a thread; all workers make them in one order."""
    known, key = _known_groups(), (*members, thread) if thread else members
    if key not in known:
        known[key] = dist.new_group(list(members), timeout=timeout_of(dist.group.WORLD))
    return known[key]


def control_group() -> Any:
    """A gloo group of the world, for small numbers on the CPU and for noticing who is missing."""
    known = _known_groups()
    if _CONTROL not in known:
        known[_CONTROL] = dist.new_group(backend="gloo", timeout=timeout_of(dist.group.WORLD))
    return known[_CONTROL]


def _known_groups() -> dict[tuple[Any, ...], Any]:
    """This world's groups; those of a world that was destroyed are forgotten."""
    world = tuple(range(dist.get_world_size()))
    if _process_groups.get(world) is not dist.group.WORLD:
        _process_groups.clear()
        _process_groups[world] = dist.group.WORLD
    return _process_groups


def timeout_of(group: Any) -> timedelta:
    """How long its collectives wait for a missing rank."""
    device = "cpu" if "cpu" in dist.get_backend_config(group) else "cuda"
    options = group._get_backend(torch.device(device)).options
    return options._timeout
