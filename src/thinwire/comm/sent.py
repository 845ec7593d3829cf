"""What a collective sends over which link: the pieces of `topology.py`'s arithmetic."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import NamedTuple

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Sent:
    """What a collective sends from one node, by link, and how much of it must be sent one after the other."""

    slow: int = 0
    """Bytes that leave the node."""
    fast: int = 0
    """Bytes sent between workers of the node."""
    slow_queue: int = 0
    """Bytes in a row over the slow link of the node that sends most."""
    fast_queue: int = 0
    """Bytes in a row from one worker to the next inside a node."""
    slow_rounds: int = 0
    """Messages between nodes that wait for one another."""
    fast_rounds: int = 0
    """Messages inside a node that wait for one another."""

    def __add__(self, other: "Sent") -> "Sent":
        """One collective after the other."""
        return Sent(
            self.slow + other.slow,
            self.fast + other.fast,
            self.slow_queue + other.slow_queue,
            self.fast_queue + other.fast_queue,
            self.slow_rounds + other.slow_rounds,
            self.fast_rounds + other.fast_rounds,
        )

    def in_parallel(self, other: "Sent") -> "Sent":
        """Both at the same time: they share the links' bandwidth, but do not wait for one another."""
        both = self + other
        slow_rounds = max(self.slow_rounds, other.slow_rounds)
        return replace(both, slow_rounds=slow_rounds, fast_rounds=max(self.fast_rounds, other.fast_rounds))


def all_in_parallel(parts: Iterable[Sent]) -> Sent:
    """All of these at once."""
    return _at_once(tuple(parts))


@lru_cache(maxsize=256)
def _at_once(parts: tuple[Sent, ...]) -> Sent:
    """Counted once: a run repeats a few collectives a thousand times."""
    return reduce(lambda one, other: one.in_parallel(other), parts)


class Edges(NamedTuple):
    """How many messages of one pattern leave each node, stay in each, and leave the busiest one."""

    leaving: Mapping[int, int]
    staying: Mapping[int, int]
    busiest: int


def ring_pairs(members: Ranks) -> Iterable[tuple[int, int]]:
    """Each member sends to the next."""
    return zip(members, (*members[1:], members[0]), strict=True)


def tree_pairs(members: Ranks) -> Iterable[tuple[int, int]]:
    """A member receives from the one whose index lacks its own highest bit."""
    for place in range(1, len(members)):
        yield members[place - (1 << (place.bit_length() - 1))], members[place]


def star_pairs(members: Ranks) -> Iterable[tuple[int, int]]:
    """Each member sends to the first, which answers."""
    for member in members[1:]:
        yield member, members[0]
        yield members[0], member


PATTERNS: dict[str, Callable[[Ranks], Iterable[tuple[int, int]]]] = {
    "ring": ring_pairs,
    "tree": tree_pairs,
    "star": star_pairs,
}
"""Who sends to whom."""


def count_edges(pattern: str, members: Ranks, node_of: Mapping[int, int], senders: Ranks | None = None) -> Edges:
    """The messages of one pattern, by the node that sends them; in a mesh perhaps only some are `senders`."""
    leaving, staying = Counter[int](), Counter[int]()
    if pattern == "mesh":  # too many pairs to look at each
        sending = Counter(node_of[rank] for rank in (members if senders is None else senders))
        for node, here in Counter(node_of[rank] for rank in members).items():
            leaving[node] = sending[node] * (len(members) - here)
            staying[node] = sending[node] * (here - 1)
    else:
        for source, target in PATTERNS[pattern](members):
            node = node_of[source]
            (staying if node == node_of[target] else leaving)[node] += 1
    return Edges(leaving, staying, max(leaving.values(), default=0))
