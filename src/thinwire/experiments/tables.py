"""AB's published step counts, as fractions of a run (dissertation of D. Coquelin, Tables A.7 to A.9)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from thinwire.train.task import MethodOverrides


class Counts(NamedTuple):
    """One column of a table."""

    warmup: int
    group: int
    rebound: int
    lr_rebound: int
    epoch: int
    """Iterations per epoch."""

    def fields(self, epochs: int = 150) -> dict[str, float]:
        """AB's fields as fractions, for a run of any length."""
        total = self.epoch * epochs
        return {
            "warmup": self.warmup / total,
            "every": self.group / total,
            "rebound": self.rebound / self.group,
            "lr_rebound": self.lr_rebound / self.group,
        }


VGG16 = Counts(4330, 759, 60, 267, 49)
RESNET50 = {
    2048: Counts(24000, 6000, 600, 1500, 600),
    4096: Counts(9300, 3000, 300, 750, 300),
    8192: Counts(6150, 1500, 150, 325, 150),
    16384: Counts(3750, 600, 75, 188, 75),
    32768: Counts(1900, 400, 38, 94, 38),
}
"""By global batch."""
VIT_B16 = {
    2048: Counts(24000, 4360, 600, 1500, 600),
    4096: Counts(12300, 2180, 300, 750, 300),
    8192: Counts(6150, 1500, 150, 325, 150),
    16384: Counts(3750, 750, 75, 188, 75),
    32768: Counts(1520, 270, 38, 94, 38),
}


def nearest(table: Mapping[int, Counts], batch: int) -> Counts:
    """The column of the nearest batch size, on a logarithmic scale."""
    return table[min(table, key=lambda known: abs(math.log2(known / batch)))]


def ab(counts: Counts, **settings: Any) -> MethodOverrides:
    """AB with a table's counts, or with the papers' guideline, which is the method's default."""
    return MethodOverrides(settings, schedules={"table": counts.fields(), "guideline": {}})
