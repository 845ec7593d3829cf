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
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from thinwire.comm.connections import connection_to, is_hung_up
from thinwire.comm.times import Stage
from thinwire.comm.topology import Ranks

# Process groups cost connections, and a process that attaches twice wants the same ones again.
_process_groups: dict[tuple[Any, ...], Any] = {}
_CONTROL: Ranks = ()
_NOTE_S, _BEAT_S, _STOP_S, _POLL_S = 1.0, 2.0, 2.0, 0.01


def leave() -> None:
    """End `torch.distributed` in order.

    A process group's threads live as long as something holds it. Threads still running when the interpreter exits
    sometimes abort the process ("terminate called without an active exception"), although all work is done.
    """
    release_groups()
    if dist.is_initialized():
        dist.destroy_process_group()


def settle(patience: float) -> None:
    """Wait for what nccl still does for this worker; not for ever, since a worker of its group may be gone."""
    if any(_all_nccl()):
        given, end = torch.cuda.current_stream().record_event(), time.monotonic() + patience
        while not given.query() and time.monotonic() < end:
            time.sleep(_POLL_S)


def abort() -> None:
    """End nccl's communicators without the others, which leaving them in order would wait for; any thread may."""
    for communicator in _all_nccl():
        communicator.abort()


def _all_nccl() -> Iterator[Any]:
    for group in list(_process_groups.values()):
        if group is not dist.GroupMember.NON_GROUP_MEMBER and "nccl" in dist.get_backend_config(group):
            yield group._get_backend(torch.device("cuda"))


def built_in() -> list[str]:
    """The backends that this torch has."""
    if not dist.is_available():
        return []
    known = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    return [name for name, there in known.items() if there]


def open_world(store: Any, rank: int, size: int, timeout: float) -> None:
    """Start `torch.distributed` on gloo with workers that meet at a store."""
    hook = sys.excepthook
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    sys.excepthook = hook  # torch adds one more for each world, with a rank that may be another's by then


def name_from_zero() -> None:
    """Let the next world's process groups have the names that they have on workers that start now.

    torch names them by their number, counts those that could not be opened too, and forgets the count with a world.
    """
    open_world(dist.HashStore(), 0, 1, 60.0)
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
    raised = getattr(sys, "last_type", None) is not None
    if _notes is not None:
        _notes.close(ended=not raised and _failed_with is None)
    if raised:
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
_meetings = 0  # barriers of this world that all ranks have passed, and loops with `join()` that all have left


_numbers: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()


def next_number() -> int:
    """How often this was called in this world: the same number on all workers that call it equally often."""
    return next(_numbers.setdefault(dist.group.WORLD, itertools.count(1))) if dist.is_initialized() else 1


class Note(NamedTuple):
    """What a rank leaves when it reaches a barrier."""

    number: int
    """The barrier, counted by this rank."""
    call: str
    """What the barrier is for."""
    steps: int
    """Steps taken before it."""
    gave_up: bool = False
    """Whether the rank waits there no more."""


def sign_in(rank: int, call: str, steps: int, failed: str | None = None) -> int:
    """Note that this rank has reached its next barrier, maybe with a failure; returns the barrier's number."""
    number, store = _meetings + 1, _quiet(_store())
    if failed is not None:
        store.set(f"thinwire/failed/{number}", json.dumps([rank, failed]))
    store.set(f"thinwire/barrier/{rank}", json.dumps(Note(number, call, steps)))
    store.add(f"thinwire/came/{number}", 1)
    return number


def sign_out(rank: int, note: Note) -> None:
    """Note that this rank has given up on a barrier, which it may try again."""
    with contextlib.suppress(RuntimeError):
        store = _quiet(_store())
        store.set(f"thinwire/barrier/{rank}", json.dumps(note._replace(gave_up=True)))
        store.add(f"thinwire/came/{note.number}", -1)


def came(number: int) -> int:
    """How many ranks have reached that barrier, as long as not all have passed it."""
    return _quiet(_store()).add(f"thinwire/came/{number}", 0)


def note_meeting(rank: int) -> None:
    """Note that all ranks are at the same place of their scripts."""
    global _meetings
    if _notes is not None:
        _notes.restart()  # first: old steps after a new meeting would look like going on
    _meetings += 1
    if rank == 0:  # all have counted, and have read what there was to read of the barrier before
        remove_posted([f"thinwire/came/{_meetings}", f"thinwire/failed/{_meetings - 1}"])


def notes(world: Ranks) -> dict[int, Note]:
    """The last note of each rank that left one."""
    found = {rank: _read(f"thinwire/barrier/{rank}", _lasting_store) for rank in world}
    return {rank: Note(*note) for rank, note in found.items() if note is not None}


def failure(number: int) -> tuple[int, str] | None:
    """A rank that reached that barrier with a failure, and its message; call it after the barrier."""
    found = _read(f"thinwire/failed/{number}")
    return None if found is None else (found[0], found[1])


class Uncaught(NamedTuple):
    """The error by which a rank ended."""

    rank: int
    kind: str
    """As whoever noted it calls it."""
    line: str


def note_uncaught(error: Uncaught) -> None:
    """Leave a note of an error that ends this process; also after the script itself has ended the world."""
    store = _lasting_store()
    number = store.add("thinwire/uncaught", 1)
    store.set(f"thinwire/uncaught/{number}", json.dumps(error))


def uncaught() -> list[Uncaught]:
    """The errors by which ranks ended, the first of them first; raises RuntimeError if the store is gone."""
    store = _lasting_store()
    keys = [f"thinwire/uncaught/{i}" for i in range(1, 1 + store.add("thinwire/uncaught", 0))]
    return [Uncaught(*json.loads(store.get(key))) for key in keys if store.check([key])]


def _read(key: str, store: Callable[[], Any] | None = None) -> Any:
    """The JSON at this key; None if there is none, or the store is gone."""
    try:
        found = (store or _store)()
        return json.loads(found.get(key)) if found.check([key]) else None
    except (RuntimeError, ValueError):
        return None


class Board(Protocol):
    """Where workers leave notes for each other, in place of the store of a world that may end."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> str | None: ...
    def delete(self, key: str) -> None: ...


_board: Board | None = None


def keep_notes_in(board: Board) -> None:
    """From now on leave and find notes there."""
    global _board
    _board = board


def post(key: str, value: Any) -> None:
    """Leave a plain value where every rank finds it; any thread may."""
    (_store() if _board is None else _board).set(key, json.dumps(value))


def posted(key: str) -> Any:
    """What was left under this key; None if nothing was."""
    if _board is None:
        return _read(key)
    text = _board.get(key)
    return None if text is None else json.loads(text)


def remove_posted(keys: list[str]) -> None:
    """Forget values that were read, so that the store does not grow."""
    for key in keys:
        with contextlib.suppress(RuntimeError):
            if _board is not None:
                _board.delete(key)
            else:
                _store().delete_key(key)


class Progress(NamedTuple):
    """How far a rank has come, as it notes itself."""

    meetings: int
    """How often it has met all others."""
    place: int
    """Where it is since then: grows with each step, and within a step."""
    step: int
    """The number of the step it is in, or has taken last."""
    beat: int
    """Changes as long as the rank lives and is attached."""
    ended: bool = False
    """Whether its script is over."""


class StepNotes:
    """Notes how far this rank has come, from a thread: a rank cannot answer while it waits for others.

    At most once per second. While nothing changes it still writes now and then, so that others know that it lives.
    """

    def __init__(self, rank: int) -> None:
        self._key = f"thinwire/steps/{rank}"
        self._world = weakref.ref(dist.group.WORLD)
        self.lasting = _client(rank)
        self.line = None if (store := _tcp()) is None else connection_to(store.port)
        self._taken = self._stage = self._step = self._beat = 0
        self._rests = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True, name="thinwire-steps")
        register_holder(self)
        self._thread.start()

    def __call__(self, step: int, stage: Stage) -> None:
        self._step, self._rests = step, False
        if stage is Stage.TAKEN:
            self._stage = 0  # first: the thread may look in between
            self._taken += 1
        else:
            self._stage = max(self._stage, stage)

    @property
    def place(self) -> int:
        """Where this rank is since it met all others."""
        return Stage.TAKEN * self._taken + self._stage

    def restart(self) -> None:
        """Count from here."""
        self._taken = 0

    def rest(self, rests: bool = True) -> None:
        """Write nothing: no replica is attached, and whoever keeps the store may leave."""
        self._rests = rests

    def close(self, *, ended: bool = False) -> None:
        """Write no more, but that the script has ended."""
        self._over.set()
        self._thread.join(_STOP_S)
        if ended and not self._rests and not self._thread.is_alive():
            with contextlib.suppress(RuntimeError, ValueError):
                self._note(ended=True)

    def release_groups(self) -> None:
        """Write no more: process groups may be about to end, and with them the store."""
        self.close()

    def _write(self) -> None:
        before, due = None, 0.0
        with contextlib.suppress(RuntimeError, ValueError):  # the store is gone, or the world
            while dist.group.WORLD is self._world():
                now = _meetings, self.place, self._step
                if not self._rests and (now != before or time.monotonic() >= due):
                    self._note()
                    before, due = now, time.monotonic() + _BEAT_S
                if self._over.wait(_NOTE_S):
                    return

    def _note(self, *, ended: bool = False) -> None:
        self._beat += 1
        _lasting_store().set(self._key, json.dumps(Progress(_meetings, self.place, self._step, self._beat, ended)))


_notes: StepNotes | None = None


def step_notes(rank: int) -> StepNotes:
    """Notes of this world's steps; one for all replicas, since they share a script."""
    global _notes
    if _notes is None:
        _notes = StepNotes(rank)
    _notes.rest(False)
    return _notes


def rest() -> None:
    """Tell nobody any more that this rank lives: it is attached to nothing."""
    if _notes is not None:
        _notes.rest()


def place() -> int:
    """Where this rank is since it met all others."""
    return 0 if _notes is None else _notes.place


def progress(rank: int) -> Progress | None:
    """How far a rank has come, within a second; None if nothing was heard of it."""
    found = _read(f"thinwire/steps/{rank}", _lasting_store)
    return None if found is None else Progress(*found)


def world_size() -> int:
    """The number of ranks; 0 without `torch.distributed`."""
    return dist.get_world_size() if dist.is_initialized() else 0


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _lasting_store() -> Any:
    """The job's store, also after the script itself has ended the world, if another process serves it."""
    lasting = None if dist.is_initialized() or _notes is None else _notes.lasting
    return _quiet(lasting or _store())


def _quiet(store: Any) -> Any:
    """The store, if its server is there: torch would say that it is gone in a page of C++."""
    if _notes is not None and _notes.line is not None and is_hung_up(*_notes.line):
        raise RuntimeError("the job's store is gone")
    return store


def _client(rank: int) -> Any:
    """The store if this process is only a client of it: one that serves it must be able to end it."""
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    return None if serves or _tcp() is None else _store()


def _tcp() -> Any:
    store = getattr(_store(), "_underlying_non_prefix_store", None)
    return store if isinstance(store, dist.TCPStore) else None


def process_group(
    members: Ranks, thread: str = "", backend: str | None = None, opened: Callable[[Any], None] | None = None
) -> Any:
    """The process group of these ranks, or a separate one for a thread; all workers create them in the same order.

    On the world's backends or on another one. Its members call `opened` with a new one.
    """
    known, key = _known_groups(), (*members, thread, backend) if thread or backend else members
    if key not in known:
        group = dist.new_group(list(members), timeout=timeout_of(dist.group.WORLD), backend=backend)
        if opened is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
            opened(group)
        known[key] = group
    return known[key]


def control_group() -> Any:
    """A gloo group of the world, for small numbers on the CPU and for noticing who is missing."""
    known = _known_groups()
    if _CONTROL not in known:
        known[_CONTROL] = dist.new_group(backend="gloo", timeout=timeout_of(dist.group.WORLD))
    return known[_CONTROL]


def _known_groups() -> dict[tuple[Any, ...], Any]:
    """This world's groups; forgets those of a world that was destroyed."""
    global _notes, _meetings
    world = tuple(range(dist.get_world_size()))
    if _process_groups.get(world) is not dist.group.WORLD:
        _process_groups.clear()
        _process_groups[world] = dist.group.WORLD
        _notes, _meetings = None, 0
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
