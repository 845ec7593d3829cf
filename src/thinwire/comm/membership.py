"""Which groups train together: one generation after another, agreed on through a store that all of them reach.

A generation is a list of groups. It ends when a group is lost or another one wants in; then every worker that is left
reports to the next one, and the first to see that nobody else is coming writes down who is in it. The store takes the
first such list and no other, so all workers read the same one, and whoever is not on it stops: a network that was cut
in two never trains two models. Whoever cannot reach the store stops too.

Keys, of which only small JSON is the value:

    N/report/GROUP/WORKER            what a worker reports to generation N
    N/groups                         the groups of generation N, with their sizes
    N/wants, N/called, N/at, alive   what workers tell each other meanwhile: heartbeat.py
    now                              the generation that is going on
    seen/V                           somebody has seen vote V and is gone, as all are at the end of a run
    over                             the run has ended
    N/world/…                        where torch's process groups of generation N meet
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinwire.comm import process_groups
from thinwire.comm.connections import Connections
from thinwire.comm.heartbeat import Heartbeat
from thinwire.comm.losses import tried
from thinwire.comm.rendezvous import Seat, meeting
from thinwire.comm.sent import Ranks
from thinwire.comm.topology import Topology
from thinwire.config.faults import Faults
from thinwire.errors import ThinwireError

log = logging.getLogger("thinwire")

_POLL_S = 0.05
_ATTEMPTS = 5

JOINS = {"joins": True}
"""What a worker reports that has nothing yet."""
Reports = Mapping[tuple[int, int], Any]
"""What each worker reported, by its group and its number in it."""


class LostError(ThinwireError, RuntimeError):
    """This worker cannot go on: its group was given up, too few are left, or the store is gone."""


class Membership:
    """This worker's view of the generations."""

    def __init__(self, store: Any, seat: Seat, groups: int, faults: Faults) -> None:
        self.store, self.seat, self.faults = store, seat, faults
        self.generation = -1
        self.groups: dict[int, int] = {}
        """Workers of each group of this generation."""
        self.joined: set[int] = set()
        """Groups that are new in it."""
        self._expected = groups
        self.connections = Connections()
        """Those of this generation's process groups."""
        self.heartbeat = Heartbeat(store, seat, faults)

    @classmethod
    def from_environment(cls, faults: Faults) -> "Membership":
        """Find the store and this worker's seat; every launcher sets the same store and its own group."""
        return cls(*meeting(faults), faults)

    # Generations.

    @property
    def is_under_way(self) -> bool:
        """Whether the run has begun without this group, which can only join it."""
        return self.store.check(["0/groups"])

    def begin(self) -> Reports:
        """The first generation: all groups meet."""
        return self._renew({}, dict.fromkeys(range(self._expected), 0))

    def renew(self, report: Any) -> Reports:
        """The next generation, of those who are left and those who want in; what each of them reported."""
        return self._renew(report, self.groups)

    def join_and(self, work: Callable[[], None]) -> None:
        """Join, then do this with the others; again from the start where one of them is lost meanwhile."""
        lost = None
        for _ in range(_ATTEMPTS):
            self.join()
            if (lost := tried(work)) is None:
                return
            self.leave_world()
        raise LostError(
            f"group {self.seat.group} was let in {_ATTEMPTS} times and lost the others each time ({lost}); see whether "
            "its machine reaches theirs, and give a longer `timeout` if all of them are busy"
        )

    def join(self) -> Reports:
        """Ask to be let in, again after each generation that has come about without this group."""
        asked = -1
        with self._reaching_the_store():
            while True:
                if self.store.check(["over"]):
                    raise LostError(f"the run is over: group {self.seat.group} came too late to join it")
                if asked >= 0 and self.store.check([f"{asked}/groups"]):
                    groups = self._groups_of(asked)
                    if groups.get(self.seat.group) == self.seat.workers:
                        return self._enter(asked, groups)
                now = int(self.store.get("now")) if self.store.check(["now"]) else 0
                if now >= asked:
                    asked = now + 1
                    self._report(asked, JOINS)
                    self.store.set(f"{asked}/wants", "")
                time.sleep(_POLL_S)

    def _renew(self, report: Any, before: Mapping[int, int]) -> Reports:
        number = self.generation + 1
        with self._reaching_the_store():
            self._report(number, report)
            self.store.set(f"{number}/called", "")
            groups = self._decided(number, before)
            found = self._enter(number, groups)
        self._refuse_if_lost(before, sum(found[group, 0] != JOINS for group in groups))
        return found

    def _enter(self, number: int, groups: dict[int, int]) -> Reports:
        self.connections = Connections()
        self.generation, self.groups = number, groups
        self.heartbeat.enter(number, self.connections)
        self.store.set("now", str(number))
        found = {seat: self._read_report(number, seat)[1] for seat in _seats(groups)}
        self.joined = {group for group in groups if found[group, 0] == JOINS}
        return found

    def _report(self, number: int, report: Any) -> None:
        self.store.set(f"{number}/report/{self.seat.group}/{self.seat.worker}", json.dumps([self.seat, report]))

    @contextlib.contextmanager
    def _reaching_the_store(self) -> Iterator[None]:
        try:
            yield
        except LostError:
            raise
        except RuntimeError as error:
            raise LostError(
                f"the store cannot be reached any more ({error}), so nobody can say who goes on; this worker stops. "
                "Resume from a checkpoint"
            ) from error

    def arrive(self, step: int) -> None:
        """This group waits at this step for others to average."""
        if self.faults.skip_after is not None and self.seat.worker == 0:
            with self._reaching_the_store():
                self.store.set(f"{self.generation}/at", str(step))

    def testify(self, votes: int) -> None:
        """Say that this vote, the last one, was complete, for those who did not see it; this worker leaves now."""
        with self._reaching_the_store():
            self.store.set(f"seen/{votes}", "")
            self.store.set("over", "")

    def was_seen(self, votes: int) -> bool:
        """Whether somebody who has left has said so."""
        with self._reaching_the_store():
            return self.store.check([f"seen/{votes}"])

    def _decided(self, number: int, before: Mapping[int, int]) -> dict[int, int]:
        """Wait until all are here or will not come; the list that was written first."""
        key, deadline = f"{number}/groups", time.monotonic() + self._patience
        while not self.store.check([key]):
            here = self._complete(number, before)
            wanting = self._wanting(number, here)
            missing = [group for group in before if group not in here and not self._wants(number, group)]
            late = time.monotonic() > deadline
            if not missing or late or (self.generation >= 0 and not any(map(self._is_alive, missing))):
                if self.generation < 0 and missing:
                    raise LostError(
                        f"after {self._patience:g} s group {missing[0]} has not come; start a launcher for each "
                        f"of the {len(before)} groups, or give a longer `timeout`"
                    )
                self.store.compare_set(key, "", json.dumps(here | wanting))
                break
            time.sleep(_POLL_S)
        return self._groups_of(number)

    @property
    def _patience(self) -> float:
        return self.faults.timeout if self.generation >= 0 else self.faults.start

    def _groups_of(self, number: int) -> dict[int, int]:
        return {int(group): size for group, size in json.loads(self.store.get(f"{number}/groups")).items()}

    def _complete(self, number: int, before: Mapping[int, int], wanting: bool = False) -> dict[int, int]:
        """Groups all of whose workers have reported, with their sizes: members, or those that want in."""
        found = {}
        for group in sorted(before):
            if self._has_report(number, (group, 0)):
                (_, _, size), report = self._read_report(number, (group, 0))
                whole = all(self._has_report(number, (group, worker)) for worker in range(1, size))
                if whole and (report == JOINS) == wanting:
                    found[group] = size
        return found

    def _wants(self, number: int, group: int) -> bool:
        """Whether it was started again, so that it does not come back as it was."""
        return self._has_report(number, (group, 0)) and self._read_report(number, (group, 0))[1] == JOINS

    def _wanting(self, number: int, here: Mapping[int, int]) -> dict[int, int]:
        """Groups that want in, if all members are where they can let them."""
        if not all(self._read_report(number, seat)[1].get("admits") for seat in _seats(here)):
            return {}
        others = {group: 0 for group in range(self._expected) if group not in here}
        return self._complete(number, others, wanting=True)

    def _has_report(self, number: int, seat: tuple[int, int]) -> bool:
        return self.store.check([f"{number}/report/{seat[0]}/{seat[1]}"])

    def _read_report(self, number: int, seat: tuple[int, int]) -> Any:
        return json.loads(self.store.get(f"{number}/report/{seat[0]}/{seat[1]}"))

    def _is_alive(self, group: int) -> bool:
        """Whether all workers of a group have shown a sign of life of late."""
        workers = range(max(1, self.groups.get(group, 1)))
        return all(self.heartbeat.is_alive((group, worker)) for worker in workers)

    def _refuse_if_lost(self, before: Mapping[int, int], left: int) -> None:
        then = len(before)
        if self.seat.group not in self.groups:
            raise LostError(
                f"group {self.seat.group} was given up: it did not answer for {self.faults.timeout:g} s, or a worker "
                "of it is gone; start it again to join"
            )
        if left < self.faults.min_groups or 2 * left < then:
            raise LostError(
                f"{left} of {then} groups are left: too few to go on (`min_groups`={self.faults.min_groups}, and at "
                "least half of those before); resume from a checkpoint"
            )

    # The world.

    def leave_world(self) -> None:
        """Abandon all process groups; whoever waits for this worker learns of it at once."""
        self.connections.hang_up()
        process_groups.leave()
        process_groups.name_from_zero()

    @contextlib.contextmanager
    def opened_world(self) -> Iterator[None]:
        """Open process groups for this generation, more of them inside; those of the last one were abandoned.

        All workers were here a moment ago, so nobody waits long for one that does not connect: those that are left
        try again without it. Only at the start of a run they cannot. What they do later may be slow.
        """
        seats = _seats(self.groups)
        rank = seats.index((self.seat.group, self.seat.worker))
        hurries = self.generation > 0 and process_groups.TIMEOUTS_CHANGE
        deadline = self.faults.opening if hurries else self.faults.timeout
        with self.connections.noted():
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"{self.generation}/world", self.store),
                rank=rank,
                world_size=len(seats),
                timeout=timedelta(seconds=deadline),
            )
            yield
            if self.joined:
                process_groups.process_group(self.donor_and_new)  # here, where nobody waits long for one that dies
            process_groups.set_timeout(self.faults.timeout)

    @property
    def joins(self) -> bool:
        """Whether this group has just come to a run that was under way."""
        return self.seat.group in self.joined

    @property
    def donor_and_new(self) -> Ranks:
        """Where groups join: the rank that gives, and those that take."""
        layout = dict(zip(sorted(self.groups), self.layout, strict=True))
        donor = next(ranks[0] for group, ranks in layout.items() if group not in self.joined)
        return (donor, *(rank for group in sorted(self.joined) for rank in layout[group]))

    @property
    def topology(self) -> Topology:
        """The layout of this generation, once its world is open."""
        return Topology(dist.get_rank(), self.layout, self.layout)

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group."""
        ranks = iter(range(sum(self.groups.values())))
        return tuple(tuple(next(ranks) for _ in range(self.groups[group])) for group in sorted(self.groups))


def _seats(groups: Mapping[int, int]) -> list[tuple[int, int]]:
    """All workers in the order of their ranks."""
    return [(group, worker) for group in sorted(groups) for worker in range(groups[group])]
