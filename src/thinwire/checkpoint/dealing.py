"""Who trains which samples, and which of them count: a queue of tickets that is dealt again when groups change.

Ticket t is sample t mod n of epoch t // n, in that epoch's order. The queue has every ticket that does not count yet
and is not in the model of a group that is here. Of W workers the rth takes the rth ticket of the queue, the (r + W)th,
and so on, so each knows its own without asking.

A ticket counts once groups have averaged what was trained on it. What a group trained since its last average is pending
with it: nobody else is dealt it, and if the group is lost, it goes back into the queue. All workers know how far each
had come when they last averaged, since they vote on it, and when groups change, since they report it. So all of them
deal the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Came(NamedTuple):
    """How far workers have come in a deal."""

    commits: int
    """Averages so far."""
    done: list[int]
    """Of each worker: tickets that count."""
    trained: int
    """Of the one who says it: tickets that its model was trained on."""


class Deal:
    """This worker's view of it; all but `drawn` and `trained` is the same on all of them."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.open, self.next = np.empty(0, np.int64), 0
        """The queue: some tickets below `next`, and all from there on."""
        self.done = [0] * size
        self.pending: dict[str, np.ndarray] = {}
        """By process, what it trained before this deal and has not averaged."""
        self.drawn = self.trained = 0
        """How many of its own tickets this worker has taken, and how many its model was trained on."""
        self.commits = self.number = 0

    def own(self, begin: int, end: int) -> np.ndarray:
        """This worker's tickets, counted from the first of the deal on."""
        return self._tickets(self.rank, begin, end)

    def _tickets(self, rank: int, begin: int, end: int) -> np.ndarray:
        places = rank + self.size * np.arange(begin, end)
        behind = places - len(self.open)
        tickets = behind + self.next
        inside = behind < 0
        tickets[inside] = self.open[places[inside]]
        return tickets

    @property
    def says(self) -> Came:
        """What others must know when groups change."""
        return Came(self.commits, self.done, self.trained)

    def votes(self, *, drawn: bool) -> list[float]:
        """How far this worker has come, among zeros for the others."""
        found = [0.0] * self.size
        found[self.rank] = float(self.drawn if drawn else self.trained)
        return found

    def commit(self, done: Iterable[float]) -> None:
        """Groups have averaged: so much counts of each worker, and nothing is pending from before."""
        self.done, self.pending = [int(count) for count in done], {}
        self.commits += 1

    def again(self, before: Sequence[str], came: Mapping[str, Came], rank: int, size: int) -> None:
        """Deal anew after groups have changed, by what those that are left of the processes `before` have reported."""
        latest = max(came.values(), key=lambda each: each.commits)
        if latest.commits > self.commits:
            self.commit(latest.done)
        ends = [max(d, came[p].trained) if p in came else d for p, d in zip(before, self.done, strict=True)]
        for number, process in enumerate(before):
            if ends[number] > self.done[number]:
                more = self._tickets(number, self.done[number], ends[number])
                self.pending[process] = np.concatenate([self.pending.get(process, more[:0]), more])
        back = [self.pending.pop(process) for process in [*self.pending] if process not in came]
        self._requeue(ends, back)
        self.begin(rank, size)

    def _requeue(self, ends: Sequence[int], back: Sequence[np.ndarray]) -> None:
        """Take what each worker has come to out of the queue, and put some tickets back."""
        length = max((number + self.size * (end - 1) + 1 for number, end in enumerate(ends) if end), default=0)
        is_left = np.ones(length, bool)
        for number, end in enumerate(ends):
            is_left[number : number + self.size * end : self.size] = False
        first = np.concatenate([self.open[:length], self.next + np.arange(max(0, length - len(self.open)))])
        self.next += max(0, length - len(self.open))
        self.open = np.sort(np.concatenate([first[is_left], self.open[length:], *back])).astype(np.int64)

    def begin(self, rank: int, size: int) -> None:
        """Begin with the queue as it is."""
        self.rank, self.size, self.done = rank, size, [0] * size
        self.drawn = self.trained = 0
        self.number += 1

    # As a part of a run.

    def read(self) -> dict[str, Any]:
        """For a group that joins, where a deal has just begun."""
        pending = {process: tickets.tolist() for process, tickets in self.pending.items()}
        return {"next": self.next, "open": self.open.tolist(), "pending": pending, "commits": self.commits}

    def fill(self, queue: Mapping[str, Any], rank: int, size: int) -> None:
        """Begin with another's queue."""
        self.next, self.open = queue["next"], np.array(queue["open"], np.int64)
        self.pending = {process: np.array(tickets, np.int64) for process, tickets in queue["pending"].items()}
        self.commits = queue["commits"]
        self.begin(rank, size)

    def saved(self, rows: Sequence[Sequence[float]], members: Sequence[str]) -> dict[str, Any]:
        """For a save: the queue, and by worker what counts, what was trained, and what is pending."""
        empty = np.empty(0, np.int64)
        return {
            "next": self.next,
            "open": self.open.tolist(),
            "commits": self.commits,
            "done": [int(row[0]) for row in rows],
            "trained": [int(row[1]) for row in rows],
            "pending": [self.pending.get(process, empty).tolist() for process in members],
        }

    def resume(self, queue: Mapping[str, Any], heirs: Mapping[int, str], rank: int, size: int) -> None:
        """Go on from a save: what a worker had trained since the last average is pending with its heir, if it has one.

        Else it goes back into the queue, as its model is lost.
        """
        self.size = len(queue["done"])
        self.next, self.open = queue["next"], np.array(queue["open"], np.int64)
        self.commits, self.done, self.pending = queue["commits"], list(queue["done"]), {}
        ends = [trained if number in heirs else done for number, (done, trained) in enumerate(_pairs(queue))]
        back = []
        for number, before in enumerate(queue["pending"]):
            tickets = [np.array(before, np.int64), self._tickets(number, self.done[number], ends[number])]
            if number in heirs:
                held = self.pending.get(heirs[number], tickets[0][:0])
                self.pending[heirs[number]] = np.concatenate([held, *tickets])
            else:
                back.append(tickets[0])
        self.pending = {process: tickets for process, tickets in self.pending.items() if len(tickets)}
        self._requeue(ends, back)
        self.begin(rank, size)

    @property
    def counted(self) -> int:
        """How many tickets count."""
        pending = sum(map(len, self.pending.values()))
        return self.next - len(self.open) - pending + sum(self.done)


def _pairs(queue: Mapping[str, Any]) -> list[tuple[int, int]]:
    return list(zip(queue["done"], queue["trained"], strict=True))
