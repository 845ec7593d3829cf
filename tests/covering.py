"""Few cases of a large matrix, chosen so that every pair of values that can occur together does."""

import heapq
import itertools
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Case = dict[str, Hashable]

WHOLE = os.environ.get("THINWIRE_SWEEP") == "all"
"""Whether matrices are tried whole, and not by a covering design."""


def pairs(case: Case, without: Iterable[tuple[str, str]] = ()) -> set[Any]:
    """Return every two values of a case, by their factors, except for pairs of factors in `without`."""
    left_out = {frozenset(names) for names in without}
    two = itertools.combinations(sorted(case), 2)
    return {(a, case[a], b, case[b]) for a, b in two if frozenset((a, b)) not in left_out}


def covering(allowed: Sequence[Case], without: Iterable[tuple[str, str]] = ()) -> list[Case]:
    """Return cases that have every pair of values that some allowed case has, in the order of `allowed`.

    Greedy: each next case has the most pairs that are still missing; of equals the one whose values occur least so far,
    then the first. What is chosen depends on `allowed` alone.
    """
    has = [pairs(case, without) for case in allowed]
    missing, used, chosen = set().union(*has), Counter[Any](), list[int]()
    worth = [(-len(has[i]), 0, i) for i in range(len(allowed))]  # the best is the least
    heapq.heapify(worth)
    while missing:
        _, _, best = worth[0]
        now = -len(has[best] & missing), sum(used[item] for item in allowed[best].items()), best
        if now != worth[0]:  # worth less than when it was looked at; no case is ever worth more
            heapq.heapreplace(worth, now)
            continue
        heapq.heappop(worth)
        missing -= has[best]
        used.update(allowed[best].items())
        chosen.append(best)
    return [allowed[i] for i in sorted(chosen)]


def cases(allowed: Sequence[Case], without: Iterable[tuple[str, str]] = ()) -> list[Case]:
    """Return the covering design, or all cases under THINWIRE_SWEEP=all."""
    return list(allowed) if WHOLE else covering(allowed, without)


def few(number: int, values: Iterable[T]) -> list[T]:
    """Return the first values, or all under THINWIRE_SWEEP=all."""
    return list(values) if WHOLE else list(values)[:number]


def each(cases: Sequence[T], place: int) -> list[T]:
    """Return the first case that has each value of this place; or all under THINWIRE_SWEEP=all."""
    first = {case[place]: case for case in reversed(cases)}  # type: ignore[index]
    return list(cases) if WHOLE else [case for case in cases if case in first.values()]


def gangs(cases: Iterable[T], alike: Callable[[T], Hashable], size: int = 16) -> dict[T, tuple[T, ...]]:
    """Return for each case those of its gang of workers: alike, and at most `size` together."""
    kinds: dict[Hashable, list[T]] = {}
    for case in cases:
        kinds.setdefault(alike(case), []).append(case)
    parts = [tuple(kind[i : i + size]) for kind in kinds.values() for i in range(0, len(kind), size)]
    return {case: part for part in parts for case in part}
