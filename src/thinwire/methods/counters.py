"""Whether all workers are at the same step; one that skipped a step without the others has run one batch more."""

from collections import Counter
from collections.abc import Sequence

from thinwire.comm.collectives import Pending, Wire
from thinwire.errors import DisagreementError


def check_counters(
    wire: Wire, step: int, batches: int, has_scaler: bool, more: Sequence[float] = ()
) -> list[list[float]]:
    """Refuse workers that are at different steps; collective. What `more` each of them says, by rank."""
    rows = wire.all_gather_scalars([step, batches, *more], "control")
    compare_counters([row[:2] for row in rows], step, has_scaler)
    return [row[2:] for row in rows]


def gather_counters(wire: Wire, step: int, batches: int) -> Pending:
    """Every worker's steps and batches, for `compare_counters`, without waiting."""
    return wire.all_gather_scalars_async([step, batches], "control")


def compare_counters(rows: list[list[float]], step: int, has_scaler: bool) -> None:
    """Refuse workers that are at different steps."""
    # Of two equally common, the one with fewer batches: a worker that skipped a step has run one more.
    counted = Counter((steps, batches) for steps, batches in rows)
    common = list(max(counted.items(), key=lambda item: (item[1], -item[0][1]))[0])
    odd = [rank for rank, row in enumerate(rows) if row != common]
    if odd:
        which = ", ".join(f"rank {r} ran {int(rows[r][1])} batches in {int(rows[r][0])} steps" for r in odd)
        remedy = "; give every rank the same batches to train on, and evaluate in eval() or under no_grad()"
        if not has_scaler:
            remedy += "; if a GradScaler skips steps, pass it to attach(…, scaler=scaler)"
        raise DisagreementError(
            f"workers disagree at step {step}: {which}, the others {int(common[1])} in {int(common[0])}{remedy}"
        )
