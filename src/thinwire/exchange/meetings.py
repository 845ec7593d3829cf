"""What workers say of themselves when they meet: at which step they are, and how long they have trained.

All leave an average at the same moment, as far as the network allows. So each says how long it has trained since the
last one, and the difference from the longest is what it waits; no clocks are compared.
"""

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from thinwire.base.errors import DisagreementError
from thinwire.comm.wire import Pending, Wire
from thinwire.factor.optimizers import Optimizers

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


_SAME = 1e-6
"""Of two learning rates, the relative difference up to which they are the same."""


class Counters:
    """What each worker says of itself: steps, batches, and a weighted sum of its learning rates.

    A worker that skipped a step without the others has run one batch more. Learning rates drift apart where each
    worker's scheduler follows its own loss; groups would be averaged that train at different paces, and nothing else
    would show it. A worker that sat out steps, because it has fewer batches than others, has a schedule that is behind,
    and may differ.
    """

    LENGTH = 3

    def __init__(self, wire: Wire, optimizers: Optimizers, has_scaler: bool) -> None:
        self.wire = wire
        self.optimizers = optimizers
        self.has_scaler = has_scaler
        self.idle = 0
        """Steps of the run that this worker sat out."""

    def own(self, step: int, batches: int) -> list[float]:
        """This worker's; nan in place of rates that need not agree."""
        rates = sum(place * rate for place, rate in enumerate(self.optimizers.rates, 1))
        return [step, batches, math.nan if self.idle else rates]

    def check(self, step: int, batches: int, more: Sequence[float] = ()) -> list[list[float]]:
        """Refuse workers that are at different steps or rates; collective. What `more` each of them says, by rank."""
        rows = self.wire.all_gather_scalars([*self.own(step, batches), *more], "control")
        self.compare([row[: self.LENGTH] for row in rows])
        return [row[self.LENGTH :] for row in rows]

    def gather(self, step: int, batches: int) -> Pending:
        """Every worker's, for `compare`, without waiting."""
        return self.wire.all_gather_scalars_async(self.own(step, batches), "control")

    def compare(self, rows: Sequence[Sequence[float]]) -> None:
        """Refuse workers that are at different steps, or train at different learning rates; collective if so."""
        steps = [(int(row[0]), int(row[1])) for row in rows]
        # Of two equally common, the one with fewer batches: a worker that skipped a step has run one more.
        common = max(Counter(steps).items(), key=lambda item: (item[1], -item[0][1]))[0]
        if odd := [rank for rank, row in enumerate(steps) if row != common]:
            which = ", ".join(f"rank {r} ran {steps[r][1]} batches in {steps[r][0]} steps" for r in odd)
            remedy = "; give every rank the same batches to train on, and evaluate in eval() or under no_grad()"
            if not self.has_scaler:
                remedy += "; if a GradScaler skips steps, pass it to attach(…, scaler=scaler)"
            raise DisagreementError(
                f"workers disagree at step {common[0]}: {which}, the others {common[1]} in {common[0]}{remedy}"
            )
        # With a scaler, a scheduler may wait for steps that only some groups skipped.
        rates = [row[2] for row in rows if not math.isnan(row[2])] or [0.0]
        # Not bit for bit: machines of other kinds may round what a schedule computes in another way.
        if not self.has_scaler and not math.isclose(min(rates), max(rates), rel_tol=_SAME):
            self._refuse_rates(common[0])

    def _refuse_rates(self, step: int) -> NoReturn:
        rates = [tuple(row) for row in self.wire.all_gather_object([] if self.idle else self.optimizers.rates)]
        common = Counter(filter(None, rates)).most_common(1)[0][0]
        apart = [[abs(a - b) for a, b in zip(own, common, strict=False)] for own in rates]
        rank = max(range(len(rates)), key=lambda rank: max(apart[rank], default=0.0))
        place = max(range(len(apart[rank])), key=apart[rank].__getitem__)
        raise DisagreementError(
            f"workers train at different learning rates at step {step}: rank {rank} has {rates[rank][place]:.6g}, the "
            f"others {common[place]:.6g}, in parameter group {place}; give schedulers the same on all workers: "
            "ReduceLROnPlateau the mean of all workers' metrics, not each worker's own"
        )
