"""Signs of life: each worker raises a counter in the store, and sees there what others want while it trains.

alive/GROUP/WORKER               a counter that each worker raises every second
N/called                         somebody has left generation N − 1
N/wants                          a group asks to be in generation N
N/at                             the last step at which a group of generation N waits to average
"""

import contextlib
import threading
import time
from typing import Any

from thinwire.comm.connections import Connections, given_up_after
from thinwire.comm.rendezvous import Seat
from thinwire.config.faults import Faults

_BEAT_S = 0.5
_LEAST_S = 0.05


class Heartbeat:
    """A thread that beats until it is closed, or the store is gone."""

    def __init__(self, store: Any, seat: Seat, faults: Faults) -> None:
        self._store, self._seat, self._faults = store, seat, faults
        self._generation = -1
        self._connections = Connections()
        self.wanted = -1
        """The last generation that a group has asked to be in, as far as this worker has noticed."""
        self._awaited: tuple[int, float] | None = None
        """The last step at which another group waits to average, and since when this worker knows."""
        self._called = threading.Event()
        self._stop = threading.Event()
        self._seen: dict[tuple[int, int], tuple[bytes, float]] = {}
        # Cloned here: a connection opened while process groups are made counts as theirs, and is hung up with them.
        with given_up_after(faults.timeout):
            own = store.clone() if hasattr(store, "clone") else store
        threading.Thread(target=self._beat, args=(own,), daemon=True).start()

    def enter(self, generation: int, connections: Connections) -> None:
        """This worker is in this generation, and has these connections to the others in it."""
        self._connections = connections
        self._generation = generation
        self._called.clear()
        self._seen.clear()
        self._awaited = None

    def close(self) -> None:
        """No more signs of life."""
        self._stop.set()

    @property
    def is_called(self) -> bool:
        """Whether a worker has left this generation."""
        return self._called.is_set()

    def holds_up(self, step: int) -> bool:
        """Whether another group has waited at this step for longer than it should."""
        if self._faults.skip_after is None or self._awaited is None or self._awaited[0] != step:
            return False
        return time.monotonic() - self._awaited[1] >= self._faults.skip_after

    def is_alive(self, seat: tuple[int, int]) -> bool:
        """Whether a worker has shown a sign of life of late, as seen from here."""
        key, now = f"alive/{seat[0]}/{seat[1]}", time.monotonic()
        count = self._store.get(key) if self._store.check([key]) else b""
        last, since = self._seen.get(seat, (None, now))
        if count != last:
            self._seen[seat] = count, now
            return True
        return now - since < self._faults.silence

    def _beat(self, store: Any) -> None:
        key, count = f"alive/{self._seat.group}/{self._seat.worker}", 0
        with contextlib.suppress(RuntimeError):  # a connection that has failed does not come back
            while not self._stop.wait(self._pause):
                count += 1
                store.set(key, str(count))
                self._look(store)

    def _look(self, store: Any) -> None:
        """Note what others want, and whether they have called for the next generation."""
        generation, connections = self._generation, self._connections
        if generation >= 0 and store.check([f"{generation + 1}/wants"]):
            self.wanted = generation + 1
        if self._faults.skip_after is not None and store.check([f"{generation}/at"]):
            step = int(store.get(f"{generation}/at"))
            if self._awaited is None or self._awaited[0] != step:
                self._awaited = step, time.monotonic()
        if store.check([f"{generation + 1}/called"]) and generation == self._generation:
            self._called.set()
            connections.hang_up()  # this worker may wait for one that has left

    @property
    def _pause(self) -> float:
        """Seconds between two looks at the store; short enough to notice in time that others wait."""
        after = self._faults.skip_after
        return _BEAT_S if after is None else min(_BEAT_S, max(_LEAST_S, after / 4))
