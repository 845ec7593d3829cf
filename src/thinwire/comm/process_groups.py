"""torch's process groups: created once for the same ranks, destroyed in order, and notes of who is missing."""

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

    A process group's threads live as long as something holds it. Threads still running when the interpreter exits
    sometimes abort the process ("terminate called without an active exception"), although all work is done.
    """
    release_groups()
    if dist.is_initialized():
        dist.destroy_process_group()


def built_in() -> list[str]:
    """The backends that this torch has."""
    if not dist.is_available():
        return []
    known = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return [name for name, there in known.items() if there]


def open_world(store: Any, rank: int, size: int, timeout: float) -> None:
    """Start `torch.distributed` on gloo with workers that meet at a store."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))


def name_from_zero() -> None:
    """Let the next world's process groups have the names that they have on workers that start now.

    torch names them by their number, counts those that could not be opened too, and forgets the count with a world.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


class Holder(Protocol):
    """Anything that holds process groups."""

    def release_groups(self) -> None:
        """Release them."""


_holders: weakref.WeakSet[Any] = weakref.WeakSet()
_initialized_here = False
_failed_with: int | None = None


def register_holder(holder: Holder) -> None:
    """Register something that holds process groups until the process exits or calls `leave`."""
    if not _holders:
        _at_exit()
    _holders.add(holder)


def mark_initialized() -> None:
    """Note that Thinwire initialized `torch.distributed`, and so has to end it."""
    global _initialized_here
    _initialized_here = True


def failed(code: int) -> None:
    """Note that a command ends with this exit code after an error that it has reported."""
    global _failed_with
    _failed_with = code


def release_groups() -> None:
    """Release every process group that Thinwire holds, including those of garbage not collected yet."""
    for holder in list(_holders):
        holder.release_groups()
    _holders.clear()
    _process_groups.clear()
    gc.collect()  # replicas that only reference cycles keep alive


@functools.cache
def _at_exit() -> None:
    atexit.register(_end)


def _end() -> None:
    """At exit of a script that did not call `leave`: a group's thread that needs Python then would abort the process.

    Not after an error: leaving waits for pending collectives, and other ranks must learn of the failure first. A
    command of ours then exits at once; a user's script runs its other exit handlers.
    """
    if getattr(sys, "last_type", None) is not None:
        return
    if _failed_with is not None and dist.is_initialized():
        logging.shutdown()
        sys.stdout.flush()
        os._exit(_failed_with)
    if _initialized_here:
        leave()
    else:
        release_groups()


# A barrier reports missing ranks to rank 0 only, and to no rank if rank 0 is missing. So each rank leaves a note first.
_barriers = itertools.count(1)


class Note(NamedTuple):
    """What a rank leaves when it reaches a barrier."""

    number: int
    """The barrier, counted by this rank."""
    call: str
    """What the barrier is for."""
    steps: int
    """Steps taken before it."""


def sign_in(rank: int, call: str, steps: int, failed: str | None = None) -> int:
    """Note that this rank has reached its next barrier, maybe with a failure; returns the barrier's number."""
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
    """A rank that reached that barrier with a failure, and its message; call it after the barrier."""
    found = _read(f"thinwire/failed/{number}")
    return None if found is None else (found[0], found[1])


def steps_begun(rank: int) -> int | None:
    """The last step that the rank's `StepNotes` recorded."""
    return _read(f"thinwire/steps/{rank}")


def _read(key: str) -> Any:
    """The JSON at this key; None if there is none, or the store is gone."""
    try:
        if _notes is not None:
            text = _notes.get(key)
        else:
            text = _store().get(key) if _store().check([key]) else None
        return None if text is None else json.loads(text)
    except (RuntimeError, ValueError):
        return None


class Notes(Protocol):
    """Where workers leave notes for each other, in place of the store of a world that may end."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> str | None: ...
    def delete(self, key: str) -> None: ...


_notes: Notes | None = None


def keep_notes_in(notes: Notes) -> None:
    """From now on leave and find notes there."""
    global _notes
    _notes = notes


def post(key: str, value: Any) -> None:
    """Leave a plain value where every rank finds it; any thread may."""
    (_store() if _notes is None else _notes).set(key, json.dumps(value))


def posted(key: str) -> Any:
    """What was left under this key; None if nothing was."""
    return _read(key)


def remove_posted(keys: list[str]) -> None:
    """Forget values that were read, so that the store does not grow."""
    for key in keys:
        with contextlib.suppress(RuntimeError):
            if _notes is not None:
                _notes.delete(key)
            else:
                _store().delete_key(key)


class StepNotes:
    """Notes the step a rank is in, at most once per second: it cannot answer while it waits for other ranks."""

    def __init__(self, rank: int) -> None:
        self._key = f"thinwire/steps/{rank}"
        self._due = 0.0

    def __call__(self, step: int) -> None:
        if time.monotonic() >= self._due and dist.is_initialized():
            self._due = time.monotonic() + _STEPS_EVERY_S
            with contextlib.suppress(RuntimeError):
                _store().set(self._key, json.dumps(step))


def world_size() -> int:
    """The number of ranks; 0 without `torch.distributed`."""
    return dist.get_world_size() if dist.is_initialized() else 0


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def process_group(members: Ranks, thread: str = "") -> Any:
    """The process group of these ranks, or a separate one for a thread; all workers create them in the same order."""
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
    """This world's groups; forgets those of a world that was destroyed."""
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


TIMEOUTS_CHANGE = hasattr(dist.ProcessGroupGloo, "_set_default_timeout") if dist.is_gloo_available() else False
"""Whether this version of torch lets a group that is open have another timeout."""


def set_timeout(seconds: float) -> None:
    """Let all groups of this world wait so long."""
    for group in _known_groups().values():
        if TIMEOUTS_CHANGE and group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
