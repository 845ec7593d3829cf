"""Whether all workers are at the same step, with the same learning rates.

A worker that skipped a step without the others has run one batch more. Learning rates drift apart where each worker's
scheduler follows its own loss; groups would be averaged that train at different paces, and nothing else would show it.
"""

import struct
import zlib
from collections import Counter
from collections.abc import Sequence

from thinwire.comm.collectives import Pending, Wire
from thinwire.errors import DisagreementError
from thinwire.factor.optimizers import Optimizers

_LENGTH = 4
"""Of a worker's row: steps, batches, its largest learning rate, and a checksum of all its rates."""


def check_counters(wire: Wire, own: Sequence[float], has_scaler: bool, more: Sequence[float] = ()) -> list[list[float]]:
    """Refuse workers that are at different steps or rates; collective. What `more` each of them says, by rank."""
    rows = wire.all_gather_scalars([*own, *more], "control")
    compare_counters([row[:_LENGTH] for row in rows], has_scaler)
    return [row[_LENGTH:] for row in rows]


def gather_counters(wire: Wire, own: Sequence[float]) -> Pending:
    """Every worker's counters, for `compare_counters`, without waiting."""
    return wire.all_gather_scalars_async(list(own), "control")


def counters(step: int, batches: int, optimizers: Optimizers) -> list[float]:
    """What a worker says of itself."""
    rates = [float(group["lr"]) for _, group in optimizers.groups if "lr" in group]
    return [step, batches, max(rates, default=0.0), zlib.crc32(struct.pack(f"{len(rates)}d", *rates))]


def compare_counters(rows: Sequence[Sequence[float]], has_scaler: bool) -> None:
    """Refuse workers that are at different steps, or train at different learning rates."""
    steps = [(row[0], row[1]) for row in rows]
    # Of two equally common, the one with fewer batches: a worker that skipped a step has run one more.
    common = max(Counter(steps).items(), key=lambda item: (item[1], -item[0][1]))[0]
    if odd := [rank for rank, row in enumerate(steps) if row != common]:
        which = ", ".join(f"rank {r} ran {int(steps[r][1])} batches in {int(steps[r][0])} steps" for r in odd)
        remedy = "; give every rank the same batches to train on, and evaluate in eval() or under no_grad()"
        if not has_scaler:
            remedy += "; if a GradScaler skips steps, pass it to attach(…, scaler=scaler)"
        raise DisagreementError(
            f"workers disagree at step {int(common[0])}: {which}, the others {int(common[1])} in "
            f"{int(common[0])}{remedy}"
        )
    if not has_scaler:  # with one, a scheduler may wait for steps that only some groups skipped
        _compare_rates([(row[2], row[3]) for row in rows], int(common[0]))


def _compare_rates(rates: Sequence[tuple[float, float]], step: int) -> None:
    common = Counter(rates).most_common(1)[0][0]
    if odd := [rank for rank, rate in enumerate(rates) if rate != common]:
        which = ", ".join(f"rank {rank} has {rates[rank][0]:.6g}" for rank in odd)
        groups = "" if any(rates[rank][0] != common[0] for rank in odd) else ", and others in some parameter group"
        raise DisagreementError(
            f"workers train at different learning rates at step {step}: {which}, the others {common[0]:.6g}{groups}; "
            "give schedulers the same on all workers: ReduceLROnPlateau the mean of all workers' metrics, not each "
            "worker's own"
        )
