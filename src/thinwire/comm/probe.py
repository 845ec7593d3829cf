"""Rates and round-trip times of links, measured by gloo's own transfers between workers.

Links form rings: of the workers inside each node, and of the first workers of all nodes. All links of a ring are used
at once, as in an all-reduce, and each is measured by itself:

1. Pings, one link of a worker at a time, which also warm up its connection.
2. Transfers of growing size, until one takes a tenth of a second.
3. Transfers of a size that takes about 0.4 seconds, and tiny ones. The difference of their times is free of what a
   transfer costs besides its bytes.
"""

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from thinwire.comm.topology import Ranks

_FIRST, _LARGEST, _GROWTH, _TINY = 1 << 14, 1 << 26, 4, 64
_LONG_ENOUGH_S, _TRANSFER_S, _REPEATS = 0.1, 0.4, 5
_PINGS, _PINGS_S = 40, 0.5
_CALLS = 30

Edge = tuple[int, int]
"""The rank that sends, and the one that receives."""


@dataclass(frozen=True)
class Link:
    """What was measured from one worker to another."""

    source: int
    target: int
    bits_per_second: float
    """Of payload, one way, while other links of the ring are used too."""
    round_trip_s: float
    """Of a few bytes."""
    bytes: int
    """Size of the transfers that the rate is from."""


def rings(nodes: Sequence[Ranks]) -> tuple[list[Edge], list[Edge]]:
    """The links inside nodes, and those between the first workers of nodes."""
    inside = [edge for node in nodes for edge in _ring(node)]
    return inside, _ring([node[0] for node in nodes])


def _ring(ranks: Sequence[int]) -> list[Edge]:
    return list(zip(ranks, [*ranks[1:], ranks[0]], strict=True)) if len(ranks) > 1 else []


def measure(edges: Sequence[Edge]) -> list[Link]:
    """Every link's rate and round-trip time; collective over the world, whose ranks must give the same links."""
    if not edges:
        return []
    rank = dist.get_rank()
    pings = _round_trips(edges, rank)
    sizes = dict.fromkeys(edges, _FIRST)
    while True:
        seconds = _transfer(sizes, rank)
        growing = {edge for edge in edges if seconds[edge] < _LONG_ENOUGH_S and sizes[edge] < _LARGEST}
        if not growing:
            break
        sizes |= {edge: sizes[edge] * _GROWTH for edge in growing}
    sizes = {edge: _worth(sizes[edge], seconds[edge], pings[edge]) for edge in edges}
    rounds = [(_transfer(dict.fromkeys(edges, _TINY), rank), _transfer(sizes, rank)) for _ in range(_REPEATS)]
    found = []
    for edge in edges:
        # The quickest of each: other programs and other traffic only slow transfers down.
        tiny, large = (min(each[edge] for each in column) for column in zip(*rounds, strict=True))
        rate = 8 * (sizes[edge] - _TINY) / max(large - tiny, 1e-6)
        found.append(Link(*edge, rate, pings[edge], sizes[edge]))
    return found


def _worth(size: int, seconds: float, round_trip: float) -> int:
    """Bytes that take long enough: 0.4 seconds, or many round trips, over which TCP reaches the link's rate."""
    wanted = max(_TRANSFER_S, min(2.0, 10 * round_trip))
    return int(min(_LARGEST, max(_FIRST, size * wanted / max(seconds, 1e-6))))


def _transfer(sizes: Mapping[Edge, int], rank: int) -> dict[Edge, float]:
    """Send over all links at once; seconds until each receiver had everything."""
    arrives = {edge: torch.empty(size, dtype=torch.uint8) for edge, size in sizes.items() if edge[1] == rank}
    leaves = {edge: torch.zeros(size, dtype=torch.uint8) for edge, size in sizes.items() if edge[0] == rank}
    dist.barrier()
    begin = time.perf_counter()
    # Receivers first: a sender that finds none ready waits for a message that says so.
    coming = {edge: dist.irecv(buffer, edge[0]) for edge, buffer in arrives.items()}
    going = [dist.isend(buffer, edge[1]) for edge, buffer in leaves.items()]
    mine = {}
    for edge, work in coming.items():
        assert work is not None
        work.wait()
        mine[edge] = time.perf_counter() - begin
    for sent in going:
        assert sent is not None
        sent.wait()
    return _gathered(mine)


def _round_trips(edges: Sequence[Edge], rank: int) -> dict[Edge, float]:
    """Pings over every link, at no time two of the same worker: they would wait for each other."""
    mine: dict[Edge, float] = {}
    left = list(edges)
    while left:
        busy: set[int] = set()
        now = []
        for edge in left:
            if not busy & set(edge):
                busy |= set(edge)
                now.append(edge)
        left = [edge for edge in left if edge not in now]
        dist.barrier()
        for source, target in now:
            if rank == source:
                mine[source, target] = _ping(target)
            elif rank == target:
                _echo(source)
    return _gathered(mine)


def _ping(target: int) -> float:
    """The median round trip; the last ping says that it is the last."""
    begin, times = time.perf_counter(), []
    for number in itertools.count(1):
        last = number == _PINGS or time.perf_counter() - begin > _PINGS_S
        answer = torch.empty(1)
        waiting: Any = dist.irecv(answer, target)
        start = time.perf_counter()
        dist.send(torch.tensor([float(last)]), target)
        waiting.wait()
        times.append(time.perf_counter() - start)
        if last:
            return statistics.median(times[1:] or times)  # the first one found nobody ready
    raise AssertionError("unreachable")


def _echo(source: int) -> None:
    heard = torch.zeros(1)
    waiting: Any = dist.irecv(heard, source)
    while True:
        waiting.wait()
        last = bool(heard.item())
        if not last:  # ready for the next one before this one is answered
            heard = torch.zeros(1)
            waiting = dist.irecv(heard, source)
        dist.send(torch.ones(1), source)
        if last:
            return


def overhead(latency: float) -> float:
    """Seconds of an all-reduce of a few bytes besides the latency of its rounds; collective over the world."""
    value, times = torch.zeros(2), []
    for _ in range(_CALLS):
        begin = time.perf_counter()
        dist.all_reduce(value)
        times.append(time.perf_counter() - begin)
    own = (dist.get_rank(), dist.get_rank())
    slowest = max(_gathered({own: statistics.median(times)}).values())
    return max(0.0, slowest - 2 * (dist.get_world_size() - 1) * latency)


def _gathered(mine: Mapping[Edge, float]) -> dict[Edge, float]:
    """What every worker has measured, on all of them."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(mine.items()))
    return {tuple(edge): seconds for each in found for edge, seconds in each}
