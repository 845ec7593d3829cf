"""Which groups train together: one generation after another, agreed on through a store that all of them reach.

A run is begun by all its groups together and has an id; every process that is started has one too. A generation is a
list of the processes that train together. It ends when a group is lost or another one wants in; then every worker that
is left reports to the next one, and the first to see that nobody else is coming writes down who is in it. The store
takes the first such list and no other, so all workers read the same one, and whoever is not on it does not go on: a
network that was cut in two never trains two models.

A process that starts finds out what there is on the store: a run that is alive, which it joins; one that is over or
dead, after which it waits for all groups to begin another; or another process in its own slot, and then it is refused.

Keys, of which only small JSON is the value:

    run                            the id of the run that is going on
    slot/GROUP/WORKER              the process that was started last in this slot
    beat/PROCESS                   its signs of life: heartbeat.py
    RUN/about                      what a group must have in common with the run to join it
    RUN/N/report/GROUP/WORKER      what a worker reports to generation N
    RUN/N/groups                   the groups of generation N: for each, the processes of its workers
    RUN/N/called, RUN/N/wants      somebody has left generation N - 1, or asks to be in generation N
    RUN/N/at                       the last step at which a group of generation N waits to average
    RUN/now                        the generation that is going on
    RUN/seen/V                     somebody has seen vote V and is gone, as all are at the end of a run
    RUN/over                       the run has ended
    RUN/stop, RUN/last             why a stop was asked for, and the last step before it
    RUN/N/world/…                  where torch's process groups of generation N meet
"""

import atexit
import contextlib
import functools
import json
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from thinwire.base.errors import CollectiveError, ConfigError, GivenUpError, LostError, one_line
from thinwire.comm import process_groups
from thinwire.comm.connections import Connections
from thinwire.comm.topology import Ranks, Topology
from thinwire.comm.wire import attempt
from thinwire.config.faults import Faults
from thinwire.elastic.heartbeat import Heartbeat
from thinwire.elastic.store import Meeting, Store, StoreLostError

log = logging.getLogger("thinwire")

_POLL_S = 0.05
_ATTEMPTS = 5
_SAY_S = 30.0
_KNOWN_S = 2.0
"""Seconds in which members write down again what a store has forgotten."""

Groups = dict[int, list[str]]
"""For each group the processes of its workers."""


class Report(NamedTuple):
    """What a worker reports to the next generation."""

    process: str
    workers: int
    """Of its group."""
    joins: bool = False
    """Whether it has nothing yet."""
    votes: int = 0
    """Votes that it has seen complete."""
    call: str = ""
    step: int = 0
    """The joint call in which it waited, and its step."""
    waited: float = 0.0
    """Seconds that it waited there in vain."""
    why: str = ""
    """What failed there."""
    admits: bool = False
    """Whether all is done, so that groups can be let in."""
    data: list[Any] | None = None
    """How far it has come in the data, if that is dealt to groups."""


Reports = Mapping[tuple[int, int], Report]
"""By group and worker."""


class Membership:
    """This worker's view of the generations."""

    def __init__(self, meeting: Meeting, faults: Faults, about: Mapping[str, str]) -> None:
        self.store, self.slot, self._expected = meeting
        self.faults, self._about = faults, {"groups": str(self._expected), **about}
        self.process = uuid.uuid4().hex[:12]
        self.run = ""
        self.generation = -1
        self.groups: Groups = {}
        """The groups of this generation."""
        self.joined: set[int] = set()
        """Groups that are new in it."""
        self.caller = -1
        """The group that called for it first."""
        self.last_words: dict[str, str] = {}
        """Why workers are gone, as far as it is known."""
        self.wanted = -1
        """The last generation that a group has asked to be in, as far as this worker has noticed."""
        self._awaited: tuple[int, float] | None = None
        self.heartbeat = Heartbeat(self.store, self.process, faults)
        self.heartbeat.on_look.append(self._look)
        process_groups.keep_notes_in(self.store.another("notes/"))
        _leave_at_exit(self.heartbeat)

    # Beginning.

    @property
    def joins(self) -> bool:
        """Whether this group has just come to a run that was under way."""
        return self.slot.group in self.joined

    def begin(self, work: Callable[[], None]) -> None:
        """Begin a run with all groups, or join the one that is under way; then do this with the others."""
        self._claim_slot()
        while True:
            self.run = self._find_run()
            if self._has_begun:
                if not self.faults.joins:
                    raise ConfigError(
                        f"group {self.slot.group} cannot join the run on this store, which is under way: `joins` of "
                        "its Faults is False; wait for its end, or give this run another THINWIRE_RUN"
                    )
                log.info("group %d joins a run that is under way", self.slot.group)
                if self._joined_and(work):
                    return
            elif self._met():
                if (lost := attempt(work)) is not None:
                    members = [process for own in self.groups.values() for process in own]
                    why = next((why for process in members if (why := self.heartbeat.gone(process))), lost)
                    raise LostError(f"a group was lost while the run began ({why}); start all groups again")
                return

    @property
    def _has_begun(self) -> bool:
        """A store that has been away knows only the generation that is going on."""
        return any(text is not None for text in self.store.get_all([f"{self.run}/now", f"{self.run}/0/groups"]))

    def _claim_slot(self) -> None:
        """Refuse a second process in this slot; one that has died is silent, and one of two may begin."""
        key = f"slot/{self.slot.group}/{self.slot.worker}"
        while True:
            if text := self.store.get(key) or "":
                before = json.loads(text)
                self.heartbeat.follow([before["process"], *self._members(self.store.get("run") or "")])
                if self._is_alive([before["process"]]):
                    raise ConfigError(
                        f"worker {self.slot.worker} of group {self.slot.group} is running already: process "
                        f"{before['pid']} on {before['host']}; give each launcher a THINWIRE_GROUP of its own, or each "
                        "run that shares a store a THINWIRE_RUN of its own"
                    )
            if self.store.first(key, self._about_process, instead_of=text) == self._about_process:
                return

    @property
    def _about_process(self) -> str:
        return json.dumps({"process": self.process, "host": socket.gethostname(), "pid": os.getpid()})

    def _refuse_if_replaced(self) -> None:
        now = json.loads(self.store.get(f"slot/{self.slot.group}/{self.slot.worker}") or self._about_process)
        if now["process"] != self.process:
            raise LostError(
                f"group {self.slot.group} was given up and started again as process {now['pid']} on {now['host']}; "
                "this one stops"
            )

    def _is_alive(self, processes: Sequence[str]) -> bool:
        """Whether one of them beats; waits until that is known, which it is from the start of following them on."""
        while not all(map(self.heartbeat.gone, processes)):
            if any(map(self.heartbeat.is_beating, processes)):
                return True
            self.store.get("run")  # raises if the store stays away, in which nobody counts as silent
            time.sleep(_POLL_S)
        return False

    def _find_run(self) -> str:
        """The run on the store: under way, about to begin, or a new one in place of one that is over or dead."""
        run = self.store.get("run") or ""
        if run and not self._is_over(run):
            return run
        return self.store.first("run", uuid.uuid4().hex[:8], instead_of=run)

    def _is_over(self, run: str) -> bool:
        members = self._members(run)
        self.heartbeat.follow(members)
        return self.store.get(f"{run}/over") is not None or (bool(members) and not self._is_alive(members))

    def _members(self, run: str) -> list[str]:
        """The processes of a run's last generation; none if it has not begun."""
        now = int(self.store.get(f"{run}/now") or 0)
        return [process for own in self._groups_of(now, run).values() for process in own]

    def _met(self) -> bool:
        """Wait until all groups are here to begin a run; False if they began another one."""
        began = time.monotonic()
        self._report(0, Report(self.process, self.slot.workers))
        key, said = f"{self.run}/0/groups", began
        while self.store.get(key) is None:
            run, now = self.store.get_all(["run", f"{self.run}/now"])
            if run not in (None, self.run):
                return False
            if now is not None:  # it has begun, perhaps just now and with this group: the list was written first
                if self.store.get(key) is None:
                    return False
                continue
            if run is None:
                self.store.first("run", self.run)  # the store has been away
                self._report(0, Report(self.process, self.slot.workers))
            here = self._here(0, range(self._expected))
            if len(here) == self._expected:
                self._about["workers"] = json.dumps([len(here[group]) for group in range(self._expected)])
                self.store.first(f"{self.run}/about", json.dumps(self._about))
                self.store.first(key, json.dumps(here))
                break
            missing = [group for group in range(self._expected) if group not in here]
            if time.monotonic() > began + self.faults.start:
                raise LostError(
                    f"after {self.faults.start:g} s group {missing[0]} has not come; start a launcher for each "
                    f"of the {self._expected} groups, or give a longer `timeout`"
                )
            if time.monotonic() > said + _SAY_S:
                said = time.monotonic()
                names = ", ".join(map(str, missing))
                log.info("group %d waits for groups %s to begin the run", self.slot.group, names)
            time.sleep(_POLL_S)
        groups = self._groups_of(0)
        if self.process not in groups.get(self.slot.group, ()):
            return False
        self._refuse_another_run()
        self._enter(0, groups, {})
        return True

    def _refuse_another_run(self) -> None:
        """What all groups must have in common, before anything is handed over."""
        about = json.loads(self._key("about") or "{}")
        self._about["workers"] = about.get("workers", self._about.get("workers", "[]"))
        for name, here in self._about.items():
            if (there := about.get(name, here)) != here:
                what = "THINWIRE_GROUPS" if name == "groups" else name
                raise ConfigError(
                    f"group {self.slot.group} cannot join the run on this store: its {what} is {here}, the run has "
                    f"{there}; start it with the same"
                )

    # Joining.

    def join_and(self, work: Callable[[], None]) -> None:
        """Join again, then do this with the others."""
        if not self._joined_and(work):
            raise LostError(f"the run has ended without group {self.slot.group}, which was given up before")

    def _joined_and(self, work: Callable[[], None]) -> bool:
        """Join, then do this with the others; again where one of them is lost meanwhile. False if the run is over."""
        lost = None
        for _ in range(_ATTEMPTS):
            if not self._join():
                return False
            if (lost := attempt(work)) is None:
                return True
            log.warning("group %d lost the others as it joined (%s), and asks again", self.slot.group, lost)
            self.leave_world()
        raise LostError(
            f"group {self.slot.group} was let in {_ATTEMPTS} times and lost the others each time ({lost}); see whether "
            "its machine reaches theirs, and give a longer `timeout` if all of them are busy"
        )

    def _join(self) -> bool:
        """Ask to be let in, again after each generation that has come about without this group."""
        self._refuse_if_replaced()
        self._refuse_another_run()
        mates = self.groups.get(self.slot.group, [])
        asked, wait = -1, _Wait(self)
        while True:
            wants, own = f"{self.run}/{asked}/wants", self._report_key(asked)
            now, over, *request = self.store.get_all([f"{self.run}/now", f"{self.run}/over", wants, own])
            if over is not None:
                return False
            if asked >= 0 and (text := self._key(f"{asked}/groups")) is not None:
                groups = _parsed(text)
                if self.process in groups.get(self.slot.group, ()):
                    self._enter(asked, groups, self._reports(asked, _slots(groups)))
                    return True
            if int(now or 0) >= asked:
                asked, request = int(now or 0) + 1, [None]
                groups = self._groups_of(asked - 1) or self.groups  # as far as known, if the store has been away
                members = [process for group in groups.keys() - {self.slot.group} for process in groups[group]]
                self.heartbeat.follow([*members, *mates], mates)
                if not self._is_alive(members):
                    return False
            if None in request:  # now, or the store has been away
                self._report(asked, Report(self.process, self.slot.workers, joins=True))
                self.store.set(f"{self.run}/{asked}/wants", "")
            if all(self.heartbeat.gone(process) for process in members):
                return False
            wait.check(asked, members, mates)
            time.sleep(_POLL_S)

    def mates_reported(self, number: int) -> bool:
        """Whether all workers of this group have reported to a generation."""
        slots = [(self.slot.group, worker) for worker in range(self.slot.workers)]
        return len(self._reports(number, slots)) == self.slot.workers

    # The next generation.

    def renew(self, report: Report) -> Reports:
        """Form the next generation, of those who are left and those who want in; what each of them reported."""
        before, number = dict(self.groups), self.generation + 1
        self._report(number, report)
        self.caller = int(self.store.first(f"{self.run}/{number}/called", str(self.slot.group)))
        self.hang_up()  # only now: one that has merely lost its connection must not be the first to call
        groups = self._decided(number, report)
        is_over = int(self._key("now") or 0) > number  # the others are further by now
        if is_over or self.process not in groups.get(self.slot.group, ()):
            remedy = "start it again to join the others" if self.faults.joins else "with `joins`=False it stops here"
            raise GivenUpError(f"group {self.slot.group} was given up: {self._why_given_up(number)}; {remedy}")
        found = self._reports(number, _slots(groups))
        self._enter(number, groups, found)
        self._refuse_if_too_few(before, found)
        return found

    def _decided(self, number: int, report: Report) -> Groups:
        """Wait until all are here or will not come; the list that was written first."""
        patience = max(self.faults.timeout - report.waited, 2 * self.faults.silence)
        key, end = f"{self.run}/{number}/groups", time.monotonic() + patience
        known = time.monotonic() + (_KNOWN_S if self._key("now") is None else 0.0)
        while (text := self.store.get(key)) is None:
            if int(self._key("now") or 0) >= number and self.store.get(key) is None:
                return {}  # the others are further, and the store has forgotten how
            reports = self._reports(number, self._all_slots(number))
            own = reports.get((self.slot.group, self.slot.worker))
            if own is None or own.process != self.process:
                self._report(number, report)  # the store has been away, and has forgotten it
            here = {g: own for g, own in self.groups.items() if self._has_reported(g, own, reports)}
            missing = [g for g, own in self.groups.items() if g not in here and not self._is_gone(g, own, reports)]
            if time.monotonic() > known and (not missing or time.monotonic() > end):
                self.store.first(key, json.dumps(self._without_slow(here, reports) | self._wanting(here, reports)))
            else:
                time.sleep(_POLL_S)
        return _parsed(text)

    def _has_reported(self, group: int, own: Sequence[str], reports: Reports) -> bool:
        found = [reports.get((group, worker)) for worker in range(len(own))]
        return all(r is not None and not r.joins and r.process == p for r, p in zip(found, own, strict=True))

    def _is_gone(self, group: int, own: Sequence[str], reports: Reports) -> bool:
        """Whether a worker of it has left, shows no sign of life, or was started again."""
        again = [worker for worker in range(len(own)) if (r := reports.get((group, worker))) is not None and r.joins]
        return bool(again) or any(self.heartbeat.gone(process) for process in own)

    def _without_slow(self, here: Groups, reports: Reports) -> Groups:
        """Give up groups that others have waited for in vain for as long as they wait, if most of them are not."""
        votes = [r.votes for r in reports.values() if r.waited >= 0.9 * self.faults.timeout and not r.joins]
        slow = [
            group
            for group, own in here.items()
            if votes and all(not (r := reports[group, w]).call and r.votes == max(votes) for w in range(len(own)))
        ]
        if not slow or 2 * (len(here) - len(slow)) < len(self.groups):
            return here
        return {group: own for group, own in here.items() if group not in slow}

    def _wanting(self, here: Groups, reports: Reports) -> Groups:
        """Groups that want in, if all members are where they can let them."""
        if not all(reports[group, worker].admits for group, worker in _slots(here)):
            return {}
        found = {}
        for group in range(self._expected):
            first = reports.get((group, 0))
            if group not in here and first is not None and first.joins:
                own = [reports.get((group, worker)) for worker in range(first.workers)]
                if all(each is not None and each.joins for each in own):
                    found[group] = [each.process for each in own if each is not None]
        return found

    def _why_given_up(self, number: int) -> str:
        reports = self._reports(number, self._all_slots(number))
        waited = max((r.waited for r in reports.values()), default=0.0)
        own = reports.get((self.slot.group, self.slot.worker))
        if own is not None and waited >= 0.9 * self.faults.timeout:
            return (
                f"others have waited {waited:.0f} s for it (give it smaller batches, or all a longer `timeout`, or "
                "`skip_after`)"
            )
        return f"it showed no sign of life for {self.faults.silence:g} s, or a worker of it is gone"

    def _refuse_if_too_few(self, before: Groups, found: Reports) -> None:
        then, left = len(before), len(self.groups) - len(self.joined)
        if left < self.faults.min_groups or 2 * left < then:
            raise LostError(
                f"{left} of {then} groups are left: too few to go on (`min_groups`={self.faults.min_groups}, and at "
                "least half of those before); start the others again, and resume from a save"
            )

    # What the store has.

    def _key(self, key: str) -> str | None:
        return self.store.get(f"{self.run}/{key}")

    def _report(self, number: int, report: Report) -> None:
        self.store.set(self._report_key(number), json.dumps(report))

    def _report_key(self, number: int) -> str:
        return f"{self.run}/{number}/report/{self.slot.group}/{self.slot.worker}"

    def _reports(self, number: int, slots: Sequence[tuple[int, int]]) -> Reports:
        found = self.store.get_all([f"{self.run}/{number}/report/{g}/{w}" for g, w in slots])
        return {slot: Report(*json.loads(text)) for slot, text in zip(slots, found, strict=True) if text is not None}

    def _all_slots(self, number: int) -> list[tuple[int, int]]:
        """Those of this generation, and of groups that may want in."""
        others = [(group, 0) for group in range(self._expected) if group not in self.groups]
        first = self._reports(number, others)
        sizes = {group: len(own) for group, own in self.groups.items()}
        sizes |= {group: report.workers for (group, _), report in first.items()}
        return [(group, worker) for group in sorted(sizes) for worker in range(sizes[group])]

    def _here(self, number: int, groups: Sequence[int]) -> Groups:
        """Groups all of whose workers have reported and are alive."""
        found = {}
        for (group, _), first in self._reports(number, [(group, 0) for group in groups]).items():
            own = self._reports(number, [(group, worker) for worker in range(first.workers)])
            if len(own) == first.workers:
                found[group] = [own[group, worker].process for worker in range(first.workers)]
        self.heartbeat.follow([process for own in found.values() for process in own])
        return {group: own for group, own in found.items() if all(map(self.heartbeat.is_beating, own))}

    def _groups_of(self, number: int, run: str | None = None) -> Groups:
        return _parsed(self.store.get(f"{run or self.run}/{number}/groups") or "{}")

    def _enter(self, number: int, groups: Groups, reports: Reports) -> None:
        for process in (process for own in self.groups.values() for process in own):
            if (why := self.heartbeat.gone(process)) is not None:
                self.last_words[process] = why
        self.generation, self.groups = number, groups
        self.joined = {group for group in groups if (r := reports.get((group, 0))) is not None and r.joins}
        self._awaited = None
        self.heartbeat.enter(number, Connections())
        own = groups[self.slot.group]
        self.heartbeat.follow([process for each in groups.values() for process in each], own)
        self._register(self.store)

    def _register(self, store: Store) -> None:
        """Write down what the store must know of this generation; it may have been away."""
        store.set("run", self.run)
        store.first(f"slot/{self.slot.group}/{self.slot.worker}", self._about_process)
        store.first(f"{self.run}/about", json.dumps(self._about))
        store.first(f"{self.run}/{self.generation}/groups", json.dumps(self.groups))
        key = f"{self.run}/now"
        now = store.get(key) or ""
        while not now or int(now) < self.generation:  # one that wakes up late must not turn it back
            now = store.first(key, str(self.generation), instead_of=now)

    # What the heartbeat's thread looks at.

    def _look(self, store: Store) -> None:
        """Note what others want, and whether they have called for the next generation."""
        generation, base = self.generation, f"{self.run}/{self.generation + 1}"
        if generation < 0:
            return
        keys = ["run", f"{self.run}/now", f"{base}/wants", f"{base}/called", f"{self.run}/{generation}/at"]
        run, now, wants, called, at = store.get_all(keys)
        if generation != self.generation:
            return
        # The store has been away, or a group that was given up wrote an old generation into it; or a group took this
        # run for dead and waits for another.
        if int(now or -1) < generation or (run != self.run and store.get(f"{run}/now") is None):
            self._register(store)
        if wants is not None:
            self.wanted = generation + 1
        if at is not None and (self._awaited is None or self._awaited[0] != int(at)):
            self._awaited = int(at), time.monotonic()
        if called is not None:
            self.heartbeat.call(generation)

    def arrive(self, step: int) -> None:
        """Say that this group waits at this step for others to average."""
        if self.faults.skip_after is not None and self.slot.worker == 0:
            self.store.set(f"{self.run}/{self.generation}/at", str(step))

    def holds_up(self, step: int) -> bool:
        """Whether another group has waited at this step for longer than it should."""
        if self.faults.skip_after is None or self._awaited is None or self._awaited[0] != step:
            return False
        return time.monotonic() - self._awaited[1] >= self.faults.skip_after

    # The end.

    def testify(self, votes: int) -> None:
        """Say that this vote, the last one, was complete, for those who did not see it; this worker leaves now."""
        store = self.store.another(patience=self.faults.silence)
        try:
            store.set(f"{self.run}/seen/{votes}", "")
            store.set(f"{self.run}/over", "")
        except StoreLostError as error:
            log.warning("the run is over and its model complete, but the store does not know: %s", error)
        self.heartbeat.close("finished")

    def was_seen(self, votes: int) -> bool:
        """Whether somebody who has left has said so."""
        with contextlib.suppress(StoreLostError):
            return self.store.another(patience=self.faults.silence).get(f"{self.run}/seen/{votes}") is not None
        return False

    @property
    def data_place(self) -> tuple[int, int]:
        """This worker's number among all that there would be if no group were missing, and how many these are."""
        workers = json.loads(self._about.get("workers") or "[]")
        return sum(workers[: self.slot.group]) + self.slot.worker, sum(workers)

    # The world.

    def hang_up(self) -> None:
        """Let whoever waits for this worker in another group learn at once that it has left."""
        self.heartbeat.connections.hang_up()

    def leave_world(self) -> None:
        """Abandon all process groups."""
        process_groups.settle(self.faults.opening)  # gradients of this group may be on their way
        self.heartbeat.connections.hang_up(within=True)
        process_groups.abort()
        process_groups.leave()
        process_groups.name_from_zero()

    @contextlib.contextmanager
    def opened_world(self) -> Iterator[None]:
        """Open process groups for this generation, more of them inside; those of the last one were abandoned.

        All workers were here a moment ago, so nobody waits long for one that does not connect: those that are left
        try again without it. Only at the start of a run they cannot. What they do later may be slow.
        """
        slots = _slots(self.groups)
        rank = slots.index(self.slot[:2])
        hurries = self.generation > 0 and process_groups.TIMEOUTS_CHANGE
        deadline = self.faults.opening if hurries else self.faults.timeout
        with self.heartbeat.collective(), self.heartbeat.opening():
            process_groups.open_world(self._store_for_torch(deadline), rank, len(slots), deadline)
            yield
            if self.joined:
                for part in self.topology.relay(self.donor_and_new):  # here, where nobody waits long for one that dies
                    process_groups.process_group(part)
            process_groups.set_timeout(self.faults.timeout)

    def _store_for_torch(self, deadline: float) -> Any:
        try:
            return self.store.for_torch(f"{self.run}/{self.generation}/world", deadline)
        except OSError as error:
            raise CollectiveError(str(error), error) from None

    @property
    def donor_and_new(self) -> Ranks:
        """Where groups join: the rank that gives, and those that take."""
        layout = dict(zip(sorted(self.groups), self.layout, strict=True))
        donor = next(ranks[0] for group, ranks in layout.items() if group not in self.joined)
        return (donor, *(rank for group in sorted(self.joined) for rank in layout[group]))

    def processes(self) -> list[str]:
        """All workers of this generation, by rank."""
        return [self.groups[group][worker] for group, worker in _slots(self.groups)]

    @property
    def topology(self) -> Topology:
        """The layout of this generation, once its world is open."""
        return Topology(_slots(self.groups).index(self.slot[:2]), self.layout, self.layout)

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group."""
        ranks = iter(range(sum(map(len, self.groups.values()))))
        return tuple(tuple(next(ranks) for _ in self.groups[group]) for group in sorted(self.groups))


class _Wait:
    """A group that waits to be let in: for as long as the run makes progress and the group itself is whole."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self._patience = membership, membership.faults.start
        self._latest, self._said = (-1, -1), time.monotonic()
        self._progress = self._whole = self._said

    def check(self, asked: int, members: Sequence[str], mates: Sequence[str]) -> None:
        """Raise if there is no hope left, and say now and then what is waited for."""
        now, group, heartbeat = time.monotonic(), self._membership.slot.group, self._membership.heartbeat
        beats = [beat for process in members if (beat := heartbeat.of(process)) is not None]
        if (latest := max(((beat.votes, beat.at) for beat in beats), default=(0, 0))) > self._latest:
            self._latest, self._progress = latest, now
        if self._membership.mates_reported(asked):
            self._whole = now
        left = next((beat.left for p in mates if (beat := heartbeat.of(p)) is not None and beat.left), None)
        if left is not None:
            raise LostError(f"a worker of group {group} is gone ({left}): start the whole group again to join")
        if now > self._whole + self._patience:
            raise LostError(f"group {group} has waited {self._patience:g} s for a worker of its own; start it again")
        if now > self._progress + self._patience:
            raise LostError(
                f"group {group} has asked to be let in, and for {self._patience:g} s the run has not taken a step or "
                "come to an average, after which it could be; see what the other groups wait for"
            )
        if now > self._said + _SAY_S:
            self._said = now
            log.info("group %d waits to be let in: the run is at step %d", group, max((b.at for b in beats), default=0))


def _slots(groups: Mapping[int, Sequence[str]]) -> list[tuple[int, int]]:
    """All workers in the order of their ranks."""
    return [(group, worker) for group in sorted(groups) for worker in range(len(groups[group]))]


def _parsed(text: str) -> Groups:
    return {int(group): list(own) for group, own in json.loads(text).items()}


def _leave_at_exit(heartbeat: Heartbeat) -> None:
    """Let the others know at once when this process ends, and why if it fails."""
    atexit.register(heartbeat.close, "its script has ended")

    def hook(before: Any, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        heartbeat.close(f"it failed: {one_line(error)}"[:500])
        before(kind, error, trace)

    sys.excepthook = functools.partial(hook, sys.excepthook)
