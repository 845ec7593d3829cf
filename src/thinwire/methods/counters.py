"""Whether all workers are at the same step, with the same learning rates.

A worker that skipped a step without the others has run one batch more. Learning rates drift apart where each worker's
scheduler follows its own loss; groups would be averaged that train at different paces, and nothing else would show it.
A worker that sat out steps, because it has fewer batches than others, has a schedule that is behind, and may differ.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from thinwire.base.errors import DisagreementError
from thinwire.comm.wire import Pending, Wire
from thinwire.factor.optimizers import Optimizers

_SAME = 1e-6
"""Of two learning rates, the relative difference up to which they are the same."""


class Counters:
    """What each worker says of itself: steps, batches, and a weighted sum of its learning rates."""

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
