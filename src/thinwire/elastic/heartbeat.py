"""Signs of life: a thread of each worker writes a beat to the store twice a second and reads those of the others.

A beat says what its worker does, so that everybody knows at any time who is alive, who waits where, and who leaves:

    number     raised with each beat
    votes      votes that the worker has seen complete
    call, step the joint call in which it waits for other groups; none while it trains alone
    at         the step it is in
    stop       the step after which it can stop, once a stop was asked for
    leaving    whether a signal asked its group to leave
    left       why it has left, if it has

The thread interrupts a worker that waits in a joint call for a group that cannot come: one that has left, shows no
sign of life, waits in another call, or has begun to form the next generation.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from thinwire.base.errors import CollectiveError, ThinwireError, one_line
from thinwire.comm import process_groups
from thinwire.comm.connections import Connections
from thinwire.comm.wire import Watch
from thinwire.config.faults import Faults
from thinwire.elastic.store import Store, StoreLostError

log = logging.getLogger("thinwire")

_BEAT_S = 0.5
_LEAST_S = 0.05
_DIFFERENT_S = 2.0
"""For so long workers may seem to wait in different calls: what others do is known with a delay of a beat or two."""
_STORE_AWAY_S = 5.0


class Beat(NamedTuple):
    """What a worker says of itself."""

    number: int = 0
    votes: int = 0
    call: str = ""
    step: int = 0
    at: int = 0
    stop: int = -1
    leaving: bool = False
    left: str = ""

    @property
    def waits_in(self) -> tuple[int, str, int] | None:
        """The joint call that it waits in, after how many votes, and at which step."""
        return (self.votes, self.call, self.step) if self.call else None


class _Peer:
    """What is known of another worker."""

    def __init__(self, now: float) -> None:
        self.beat: Beat | None = None
        self.since = now
        self.beats = 0

    def hear(self, beat: Beat, now: float) -> None:
        if beat != self.beat:
            self.beat, self.since = beat, now
            self.beats += 1


class Heartbeat(Watch):
    """One worker's beats, and what it knows of the others."""

    def __init__(self, store: Store, own: str, faults: Faults) -> None:
        self._store, self._own, self._faults = store.another(patience=0.0), own, faults
        self.beat = Beat()
        self._lock = threading.Lock()
        self.connections = Connections()
        """Those of this generation's process groups."""
        self.on_look: list[Callable[[Store], None]] = []
        """Called by the thread at each look at the store."""
        self.on_close: list[Callable[[], None]] = []
        """Called when this worker leaves."""
        self.step: Callable[[], int] = lambda: 0
        """The steps that this worker has taken."""
        self._peers: dict[str, _Peer] = {}
        self._mates: frozenset[str] = frozenset()
        self._joint_since = 0.0
        self._differ_since: float | None = None
        self._generation = self._called = -1
        self._looked = time.monotonic()
        self._store_away_since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="thinwire-heartbeat")
        self._thread.start()

    # For the worker itself.

    def follow(self, peers: Iterable[str], mates: Iterable[str] = ()) -> None:
        """Listen to these workers, of whom `mates` are of this worker's own group; to no others."""
        now = time.monotonic()
        known = self._peers
        self._peers = {peer: known.get(peer) or _Peer(now) for peer in peers if peer != self._own}
        self._mates = frozenset(mates)

    def enter(self, generation: int, connections: Connections) -> None:
        """A new generation begins: its connections are others, and nobody has left it."""
        self.connections = connections
        self._differ_since = None
        self._generation = generation

    def say(self, **fields: Any) -> None:
        """Change what the next beats say."""
        with self._lock:
            self.beat = self.beat._replace(**fields)

    def call(self, generation: int) -> None:
        """Note that a worker has left a generation."""
        self._called = generation

    @property
    def is_called(self) -> bool:
        """Whether a worker has left this generation."""
        return self._called == self._generation >= 0

    def of(self, peer: str) -> Beat | None:
        """The last beat of another worker that was heard."""
        known = self._peers.get(peer)
        return known.beat if known is not None else None

    def is_beating(self, peer: str) -> bool:
        """Whether a worker has been heard more than once: a beat alone may be what a dead one left in the store."""
        known = self._peers.get(peer)
        return peer == self._own or (known is not None and known.beats > 1 and self.gone(peer) is None)

    def gone(self, peer: str) -> str | None:
        """Why a worker will not come, if it will not."""
        known = self._peers.get(peer)
        if peer == self._own or known is None:
            return None
        if known.beat is not None and known.beat.left:
            return known.beat.left
        silent = time.monotonic() - known.since
        return f"no sign of life for {silent:.1f} s" if silent >= self._faults.silence else None

    @property
    def any_gone(self) -> bool:
        """Whether one of those that are followed is gone."""
        return any(map(self.gone, list(self._peers)))

    def close(self, why: str) -> None:
        """Say that this worker leaves, as far as the store can be reached, and beat no more."""
        if not self._stop.is_set():
            self.say(left=why)
            self._stop.set()
            for callback in self.on_close:
                callback()
            if threading.current_thread() is not self._thread:
                self._thread.join(2.0)

    # Around what the wire does.

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Raise whatever fails in a collective as one kind of error; who is gone is found out afterwards."""
        began = time.monotonic()
        try:
            yield
        except ThinwireError:
            raise
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ValueError) and process_groups.world_size():
                raise
            # A ValueError says that there is no world: this group was given up before it could open the next one.
            raise CollectiveError(_in_short(error), error, time.monotonic() - began) from None

    @contextmanager
    def joint(self, call: str) -> Iterator[None]:
        """Say in which call this worker waits for other groups."""
        if self.beat.call:
            yield
            return
        step = self.step()
        self._joint_since = time.monotonic()
        self.say(call=call, step=step, at=step)
        try:
            yield
        finally:
            self.say(call="", at=self.step())

    def check(self) -> None:
        """Raise if this worker waits for somebody who cannot come."""
        if self.beat.call and (self.is_called or self._waits_in_vain()):
            error = RuntimeError("waiting was in vain")
            raise CollectiveError("a group is gone", error, time.monotonic() - self._joint_since)

    def opening(self, *, within: bool = False) -> Any:
        """Note the connections of process groups."""
        return self.connections.noted(within=within)

    # The thread.

    def _run(self) -> None:
        while not self._stop.wait(self._pause):
            self._once()
        self._once()  # says that it leaves

    def _once(self) -> None:
        now = time.monotonic()
        if now - self._looked > max(4 * _BEAT_S, self._faults.silence / 2):
            for peer in self._peers.values():  # this process stood still, not the others
                peer.since = now
        self._looked = now
        try:
            self._exchange(now)
        except StoreLostError as error:
            self._note_store(str(error))
            return
        except Exception as error:  # without beats this worker would be given up, and would notice nothing itself
            if self._failed != (why := one_line(error)):  # once: beats of another version fail for ever
                self._failed = why
                log.exception("a heartbeat failed; the next ones are tried")
            return
        self._note_store(None)
        self._interrupt_if_in_vain()

    def _exchange(self, now: float) -> None:
        self.say(number=self.beat.number + 1, at=max(self.beat.at, self.step()))
        self._store.set(f"beat/{self._own}", json.dumps(self.beat))
        peers = self._peers
        for peer, text in zip(peers.values(), self._store.get_all([f"beat/{peer}" for peer in peers]), strict=True):
            if text is not None:
                peer.hear(Beat(*json.loads(text)), time.monotonic())
        for callback in self.on_look:
            callback(self._store)

    def _note_store(self, why: str | None) -> None:
        """Say that the store is away, and that it is back; nobody counts as silent meanwhile."""
        now = time.monotonic()
        if why is None:
            if self._store_away_since is not None and self._warned:
                log.info("the store is back after %.0f s", now - self._store_away_since)
            self._store_away_since, self._warned = None, False
            return
        for peer in self._peers.values():
            peer.since = now
        if self._store_away_since is None:
            self._store_away_since, self._warned = now, False
        elif not self._warned and now - self._store_away_since > _STORE_AWAY_S:
            self._warned = True
            log.warning(
                "the store at %s:%d has not answered for %.0f s: training goes on, but no group can be lost or join "
                "until it is back",
                *(self._store.host, self._store.port, now - self._store_away_since),
            )

    def _interrupt_if_in_vain(self) -> None:
        """Hang up if this worker waits for somebody who cannot come.

        Inside its own group only for one that has left: one that is silent may hold Python's lock for a while.
        """
        if any((beat := self.of(mate)) is not None and beat.left for mate in self._mates):
            self.connections.hang_up(within=True)
            process_groups.abort()
        elif self.beat.call and (self.is_called or self._waits_in_vain()):
            self.connections.hang_up()
        if self.any_gone:
            self.connections.interrupt_opening()

    def _waits_in_vain(self) -> bool:
        now = time.monotonic()
        if any(peer.beat is not None and peer.beat.left for peer in self._peers.values()):
            return True
        if now - self._joint_since > self._faults.silence / 2 and any(self.gone(peer) for peer in self._peers):
            return True
        mine = self.beat.waits_in
        others = [peer.beat.waits_in for peer in self._peers.values() if peer.beat is not None]
        if mine is None or not any(each and each != mine and each[0] == mine[0] for each in others):
            self._differ_since = None
            return False
        self._differ_since = self._differ_since or now
        return now - self._differ_since > _DIFFERENT_S

    @property
    def _pause(self) -> float:
        """Seconds between two looks at the store; short enough to notice in time that others wait."""
        after = self._faults.skip_after
        return _BEAT_S if after is None else min(_BEAT_S, max(_LEAST_S, after / 4))

    _warned = False
    _failed = ""


def _in_short(error: BaseException) -> str:
    """What gloo says, without its source file and its advice."""
    text = str(error).rpartition("] ")[2] if str(error).startswith("[") else str(error)
    return (text.split(". This is typically")[0].splitlines() or [type(error).__name__])[0]
