"""Whether all workers hold the same bits after an average: one checksum of each, compared every so many averages.

Every worker applies an average to values that it holds itself. One bit that is wrong in one of them, by bad memory or
a fault of a driver, stays there and is trained on.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from thinwire.base.errors import DisagreementError
from thinwire.comm.wire import Wire

Named = list[tuple[str, Tensor]]


class SameBits:
    """Counts averages, and compares after every so many."""

    def __init__(self, wire: Wire, every: int | None) -> None:
        self.wire = wire
        self.every = every
        """None never compares."""
        self.averages = 0
        """So far."""

    @property
    def place(self) -> int:
        """For plans: averages since the last comparison."""
        return self.averages % self.every if self.every else 0

    def averaged(self, held: Callable[[], Named], step: int) -> None:
        """Count an average that has left all workers with the same values, as `held`; collective if it is due."""
        self.averages += 1
        if self.every and not self.place and self.wire.topology.world_size > 1:
            refuse_different(self.wire, held(), step)


def refuse_different(wire: Wire, held: Named, step: int) -> None:
    """All workers raise if their bits differ: 16 bytes per worker, and if they do 16 more per tensor."""
    rows = wire.all_gather_scalars(wire.checksum([t for _, t in held]), "checksums")
    if all(row == rows[0] for row in rows):
        return
    each = wire.all_gather_scalars([half for _, t in held for half in wire.checksum([t])], "checksums")
    place = next((i for i in range(len(held)) if len({tuple(row[2 * i : 2 * i + 2]) for row in each}) > 1), None)
    what = held[place][0] if place is not None else "the order of tensors"
    raise DisagreementError(
        f"workers do not hold the same bits after the average at step {step}: {_who([tuple(row) for row in rows])}, "
        f"first in {what}. Values were changed on some workers only, by bad memory or by something other than "
        "training, or workers run different versions or hardware; resume from a checkpoint, and replace the machine "
        "if it happens again"
    )


def _who(rows: Sequence[tuple[float, ...]]) -> str:
    """Who does not hold what most do, if most do."""
    common, count = Counter(rows).most_common(1)[0]
    odd = [rank for rank, row in enumerate(rows) if row != common]
    names = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
    if 2 * count > len(rows):
        return f"{names} not those of the {count} others"
    return f"{names} not those of rank {rows.index(common)}, and no majority says whose are right"
