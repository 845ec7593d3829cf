"""Stopping groups that may come and go: all after the same step, or one of them alone.

A request is written to the store. Every worker that learns of it says in its beats in which step it is, and begins no
later one until it knows the last: the latest of these steps, which all can still take, whatever they wait for from
each other. It is written to the store once, so that groups that are lost or join meanwhile change nothing.

With `Faults(on_term="leave")` a group that SIGTERM has reached leaves the run instead, as long as enough others stay
that no signal has reached; best right after an average, when nothing is lost with it.
"""

import logging
import threading
import time

from thinwire.elastic.membership import Membership
from thinwire.elastic.stopping import EXIT_CODE, requested
from thinwire.elastic.store import Store

log = logging.getLogger("thinwire")

_GRACE_S = 2.0
"""A signal to all groups may reach one of them first; so long it waits to see whether it is alone."""
_POLL_S = 0.02
_UNHEARD_S = 5.0


class Left(SystemExit):
    """This group left the run, as a signal asked it to; the others go on. Ends the process with exit code 75."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)


class ElasticStop:
    """Whether the workers of a run stop now; one worker's end of it."""

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
