"""Who waits for whom when groups average.

All leave an average at the same moment, as far as the network allows. So each says how long it has trained since the
last one, and the difference from the longest is what it waits; no clocks are compared.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

log = logging.getLogger("thinwire")

_MUCH = 0.2
"""Share of the time above which a warning is logged."""
_AVERAGES = 8
"""Averages over which that share is taken."""
_LONG = 5.0
"""Seconds of waiting in these; less is noise."""


class Late(NamedTuple):
    """The group that others waited for at an average, and how long the first of them did."""

    group: int
    seconds: float


class Waits:
    """Seconds that groups have waited for one another, as every worker knows them."""

    def __init__(self) -> None:
        self.averages = 0
        self.latest: Late | None = None
        """At the last average."""
        self.skipped = 0
        """Steps that this group has left out since the last average because others waited."""
        self._waited: dict[int, float] = {}
        self._last: dict[int, int] = {}
        self._skipped: dict[int, int] = {}
        self._recent: list[tuple[float, Late]] = []
        self._warned = False
        self._met = self._arrived = time.monotonic()

    def arrive(self) -> None:
        """This worker has ended a step; if it meets others now, it has not waited for them yet."""
        self._arrived = time.monotonic()

    @property
    def own(self) -> tuple[float, float]:
        """What others are to know: seconds since the last average, steps left out."""
        return max(0.0, self._arrived - self._met), float(self.skipped)

    def meet(self, rows: Sequence[Sequence[float]], groups: Sequence[Sequence[int]], rank: int) -> None:
        """All are here; a row for each worker."""
        has_trained = self._arrived > self._met
        self._met, self.skipped = time.monotonic(), 0
        if len(groups) < 2 or not has_trained:
            return
        trained = [max(rows[member][0] for member in group) for group in groups]
        slowest = max(trained)
        self.latest = Late(trained.index(slowest), slowest - min(trained))
        self.averages += 1
        self._last[self.latest.group] = self._last.get(self.latest.group, 0) + 1
        for number, group in enumerate(groups):
            self._waited[number] = self._waited.get(number, 0.0) + slowest - trained[number]
            self._skipped[number] = self._skipped.get(number, 0) + int(rows[group[0]][1])
        self._warn(slowest, rank)

    def summary(self) -> dict[str, Any] | None:
        """Over all averages so far; None if there were none."""
        if not self.averages:
            return None
        by_group = [
            {"group": number, "waited_s": round(waited, 3), "last": self._last.get(number, 0)}
            | ({"steps_left_out": left_out} if (left_out := self._skipped[number]) else {})
            for number, waited in sorted(self._waited.items())
        ]
        return {"averages": self.averages, "groups": by_group}

    def _warn(self, slowest: float, rank: int) -> None:
        """Once, if the same group is late again and again."""
        assert self.latest is not None, "nobody has met"
        self._recent = [*self._recent, (slowest, self.latest)][-_AVERAGES:]
        late = [each for _, each in self._recent]
        waited, total = sum(each.seconds for each in late), sum(seconds for seconds, _ in self._recent)
        same = len({each.group for each in late}) == 1
        if self._warned or len(late) < _AVERAGES or not same or waited < max(_LONG, _MUCH * total):
            return
        self._warned = True
        if not rank:
            log.warning(
                "group %d is slow: in the last %d averages others waited for it %.0f %% of the time. Give it smaller "
                "batches, or let it leave out steps with faults=thinwire.Faults(skip_after=…)",
                *(self.latest.group, _AVERAGES, 100 * waited / total),
            )
