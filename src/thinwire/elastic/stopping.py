"""Stopping in order: a signal that reaches some of the workers stops all of them after the same step.

A signal only leaves a request. Workers learn of each other's through the job's store, which a thread looks at twice a
second, so that a step costs nothing and no byte crosses a wire that the ledger counts. They agree on a step like this:

1. Each worker that learns of the request notes the step it is in. It begins no later one until it knows them all.
2. The latest of these steps is the last one: all can still take it, whatever they wait for from each other.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thinwire.base.errors import MissingRankError
from thinwire.comm import process_groups
from thinwire.comm.wire import Wire
from thinwire.elastic.membership import Membership
from thinwire.elastic.store import Store

EXIT_CODE = 75
"""The exit code of a command that was stopped by a signal and can be resumed: EX_TEMPFAIL of sysexits.h."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
ENDED = "THINWIRE_ENDED"
"""The environment variable of a file in which a worker leaves this code: torchrun ends with another one."""
_ASKED = "thinwire/stop"
_LOOK_S, _ANSWER_S, _OTHERS_S = 0.5, 0.02, 120.0
_SAME_S = 1.0
"""torchrun passes on a signal that the job's workers may have received already: both are one request."""

_requested: list[str] = []


def request(why: str) -> None:
    """Ask for a stop after the current step, of all workers of this job; from any thread."""
    _requested.append(why)


def requested() -> str | None:
    """What asked for a stop in this process, such as "SIGTERM"."""
    return _requested[0] if _requested else None


def forget() -> None:
    """Withdraw all requests of this process."""
    _requested.clear()


def exit_code() -> int:
    """The code of a process that was asked to stop, noted for whoever has started its launcher."""
    if path := os.environ.get(ENDED):
        with contextlib.suppress(OSError):
            Path(path).write_text(str(EXIT_CODE))
    return EXIT_CODE


@contextlib.contextmanager
def on_signals() -> Iterator[None]:
    """Inside, a first SIGTERM or SIGINT is a request to stop, and a second one ends the process at once.

    Only the main thread can handle signals; called from another one, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Python's own handlers wait until a collective in C++ returns. The byte that the system's handler writes does not.
    heard, wakes = socket.socketpair()
    for end in (heard, wakes):
        end.setblocking(end is heard)
    before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
    earlier = signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=_listen, args=(heard,), daemon=True, name="thinwire-signals")
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        for number, handler in before.items():
            signal.signal(number, handler)
        wakes.close()
        listener.join()
        heard.close()


def _listen(heard: socket.socket) -> None:
    first = 0.0
    while received := heard.recv(1):
        if received[0] not in SIGNALS:
            continue
        if first and time.monotonic() - first > _SAME_S:
            os._exit(128 + received[0])
        first = first or time.monotonic()
        request(signal.Signals(received[0]).name)


class Stop:
    """Whether the workers of a job stop now; one worker's end of it."""

    def __init__(self, wire: Wire, number: int) -> None:
        """`number` is `process_groups.next_number()`, which all workers have called equally often."""
        self._world = wire.topology.world
        self.asked: str | None = None
        """Why this worker asks for a stop, if no signal does."""
        self._request = f"{_ASKED}/{number}"
        self._keys = [f"{_ASKED}/{number}/{rank}" for rank in self._world]
        self._own = self._keys[wire.topology.rank]
        self._lock = threading.Lock()
        self._taken = 0
        self._noted: int | None = None
        self._last: int | None = None
        self._known, self._ended = threading.Event(), threading.Event()
        self._why: str | None = None
        self._thread: threading.Thread | None = None
        if len(self._world) > 1:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="thinwire-stop")
            process_groups.register_holder(self)
            self._thread.start()

    @property
    def why(self) -> str | None:
        """What asked for the stop."""
        return self._own_request or self._why

    @property
    def _own_request(self) -> str | None:
        return requested() or self.asked

    def now(self, step: int = 0) -> bool:
        """Whether this step was the last; all workers ask after each step, and get the same answer."""
        if self._thread is None:
            return self._own_request is not None
        with self._lock:
            self._taken += 1
            if self._noted is None:
                return False
        if not self._known.wait(_OTHERS_S):
            raise MissingRankError(f"a stop was asked for, and not all ranks have answered within {_OTHERS_S:.0f} s")
        return self._last is not None and self._taken >= self._last

    def release_groups(self) -> None:
        """Look no more; process groups may be about to end, and with them the store."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and so is the job
            while not self._ended.wait(_LOOK_S):
                self._why = process_groups.posted(self._request)
                if self._why is None and (own := self._own_request) is not None:
                    process_groups.post(self._request, own)
                    self._why = own
                if self._why is not None:
                    self._agree()
                    return

    def _agree(self) -> None:
        with self._lock:
            self._noted = self._taken + 1
        process_groups.post(self._own, self._noted)
        while None in (noted := [process_groups.posted(key) for key in self._keys]):
            if self._ended.wait(_ANSWER_S):
                return
        self._last = max(noted)
        self._known.set()


_handling = contextlib.ExitStack()
_holders: weakref.WeakSet[Any] = weakref.WeakSet()
atexit.register(_handling.close)


def handle_signals(holder: Any) -> None:
    """Let a first SIGTERM or SIGINT be a request until all who asked for it have called `release_signals`."""
    if not _holders:
        _handling.enter_context(on_signals())
    _holders.add(holder)


def release_signals(holder: Any) -> None:
    """Signals mean to this process what they did before: nobody would look at a request."""
    _holders.discard(holder)
    if not _holders and threading.current_thread() is threading.main_thread():
        _handling.close()


log = logging.getLogger("thinwire")

_GRACE_S = 2.0
"""A signal to all groups may reach one of them first; so long it waits to see whether it is alone."""
_POLL_S = 0.02
_UNHEARD_S = 5.0


class Left(SystemExit):
    """This group left the run, as a signal asked it to; the others go on. Ends the process with exit code 75."""

    def __init__(self) -> None:
        super().__init__(exit_code())


class ElasticStop:
    """Whether groups that may come and go stop now, all after the same step, or one of them alone; one worker's end.

    A request is written to the store. Every worker that learns of it says in its beats in which step it is, and begins
    no later one until it knows the last: the latest of these steps, which all can still take, whatever they wait for
    from each other. It is written to the store once, so that groups that are lost or join meanwhile change nothing.

    With `Faults(on_term="leave")` a group that SIGTERM has reached leaves the run instead, as long as enough others
    stay that no signal has reached; best right after an average, when nothing is lost with it.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership, self._heartbeat = membership, membership.heartbeat
        self.asked: str | None = None
        """Why this worker asks for a stop, if no signal does."""
        self._lock = threading.Lock()
        self._step = 0
        self._noted: int | None = None
        self._last: int | None = None
        self._why: str | None = None
        self._signal_at: float | None = None
        self._asked_at: float | None = None
        self._said = False
        self._heartbeat.on_look.append(self._look)

    @property
    def why(self) -> str | None:
        """What asked for the stop."""
        return self._why or requested() or self.asked

    def now(self, step: int) -> bool | None:
        """Whether this step was the last; asked after each step, with the same answer on all workers.

        None if that cannot be agreed on with the groups that there are: one is silent, or others have left it.
        """
        with self._lock:
            self._step = step
            noted = self._noted
        self._heartbeat.say(at=step)
        if noted is None:
            self._say_if_ignored()
            return False
        while self._last is None:
            if self._heartbeat.is_called or self._heartbeat.any_gone:
                return None
            self._membership.store.get("run")  # raises if the store stays away, in which nobody counts as silent
            time.sleep(_POLL_S)
        return step >= self._last

    def learn(self, step: int) -> None:
        """Find out at once whether a stop was asked for, in a group that joins."""
        with self._lock:
            self._step = step
        self._look(self._membership.store)

    def _say_if_ignored(self) -> None:
        """A request cannot reach the others while the store is away."""
        if (why := requested() or self.asked) is None or self._signal_at is not None:
            return
        self._asked_at = self._asked_at or time.monotonic()
        if not self._said and time.monotonic() - self._asked_at > _UNHEARD_S:
            self._said = True
            log.warning("%s asks for a stop, but the store does not answer: all stop when it is back", why)

    def leaves(self, *, after_average: bool) -> bool:
        """Whether this group leaves now; without an average only if none comes soon."""
        if self._signal_at is None or self._why is not None or not self._enough_stay():
            return False
        patience = _GRACE_S if after_average else max(_GRACE_S, self._membership.faults.timeout / 6)
        return time.monotonic() - self._signal_at >= patience

    # The heartbeat's thread.

    def _look(self, store: Store) -> None:
        run = self._membership.run
        if self._membership.generation < 0:
            return
        why, last = store.get_all([f"{run}/stop", f"{run}/last"])
        if why is None and (own := requested() or self.asked) is not None and not self._would_leave(own):
            why = store.first(f"{run}/stop", own)
        if why is None:
            return
        self._why = why
        self._note()
        if last is None and self._last is None and None not in (noted := self._all_noted()):
            last = store.first(f"{run}/last", str(max(step for step in noted if step is not None)))
        if last is not None:
            self._last = int(last)
        elif self._last is not None:
            store.first(f"{run}/last", str(self._last))  # the store has been away

    def _would_leave(self, own: str) -> bool:
        if self._membership.faults.on_term != "leave" or own != "SIGTERM":
            return False
        self._signal_at = self._signal_at or time.monotonic()
        self._heartbeat.say(leaving=True)
        return self._enough_stay()

    def _enough_stay(self) -> bool:
        """Whether enough other groups are there that no signal has reached."""
        beats, membership = self._heartbeat, self._membership
        staying = [
            group
            for group, own in membership.groups.items()
            if group != membership.slot.group
            and not any(beats.gone(p) or ((beat := beats.of(p)) is not None and beat.leaving) for p in own)
        ]
        return len(staying) >= membership.faults.min_groups

    def _note(self) -> None:
        with self._lock:
            if self._noted is None:
                self._noted = self._step + 1
                self._heartbeat.say(stop=self._noted)

    def _all_noted(self) -> list[int | None]:
        """The step that each worker can stop after; None for one that has not said it yet."""
        noted: list[int | None] = [self._noted]
        for own in self._membership.groups.values():
            for process in own:
                if process != self._membership.process:
                    beat = self._heartbeat.of(process)
                    noted.append(beat.stop if beat is not None and beat.stop >= 0 else None)
        return noted
