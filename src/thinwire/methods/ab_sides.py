"""Which group trains which factor in which round, and what that makes it count in an average."""

import math
from collections.abc import Sequence

from thinwire.comm.topology import Topology


class Sides:
    """The factors of one group; rounds are counted from when weights became factors."""

    def __init__(self, train: str, topology: Topology) -> None:
        self.train = train
        self.sizes = [float(len(group)) for group in topology.groups]
        self.own = topology.group_index
        self.half = math.ceil(len(self.sizes) / 2)
        """Of groups that train different factors, how many train the first one."""

    @property
    def is_first(self) -> bool:
        """Whether this group is in the first half."""
        return self.own < self.half

    def trained(self, rounds: int) -> str:
        """The factors that this group trains: "a", "b" or "ab"."""
        if self.train == "both":
            return "ab"
        second = self.train == "split" and not self.is_first
        return "ab"[(rounds + second) % 2]

    def senders(self, kind: str, rounds: int) -> Sequence[int] | None:
        """The groups that trained this factor, where groups train different ones; None for all groups."""
        if self.train != "split" or not kind:
            return None
        first = "ab"[rounds % 2] == kind
        return [i for i in range(len(self.sizes)) if (i < self.half) == first]

    def weights(self, kind: str, rounds: int, losses: Sequence[float] | None) -> list[float] | None:
        """Of all groups: by workers, by loss too if losses are given, among those that trained it; None by workers."""
        senders, sizes = self.senders(kind, rounds), self.sizes
        if losses is None and senders is None:
            return None
        if losses is not None:
            sizes = [size / max(loss, 1e-8) for size, loss in zip(sizes, losses, strict=True)]
        if senders is not None:
            sizes = [size if i in senders else 0.0 for i, size in enumerate(sizes)]
        return [size / sum(sizes) for size in sizes]
