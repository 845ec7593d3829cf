"""How much each group counts in an average: less, or not at all, if its values diverged or it came much too far.

Before an average all workers learn what each group has: whether everything is finite, and how far it came, a few bytes
with the losses that they exchange anyway. All decide alike, from the same numbers. A group that is left out sends zeros
and has no weight. It takes the others' result, and starts again without moments and without what its code left unsent.
"""

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import ConfigError
from thinwire.config.common import Averaged
from thinwire.exchange.averaged import AveragedTensors
from thinwire.exchange.diverged import Fault, diverged, find_faults
from thinwire.exchange.parts import MethodContext

log = logging.getLogger("thinwire")

_LEAST = 3
"""Groups among which one can be an outlier: of two, either may be."""


class Contributions:
    """Which groups count in the average under way."""

    def __init__(
        self,
        config: Averaged,
        context: MethodContext,
        events: list[dict[str, Any]],
        absent: Callable[[], frozenset[int]],
    ) -> None:
        """Groups that are `absent` have nothing new, and do not count either."""
        self.config = config
        self.model, self.wire = context.model, context.wire
        self.events = events
        self._absent = absent
        self.left_out: frozenset[int] = frozenset()
        """Groups that do not count now, and start again from the others' result."""
        self.gain = 1.0
        """What this group's change is multiplied by; 0 if it is left out."""
        groups = len(self.wire.topology.groups)
        if config.outliers != "keep" and 1 < groups < _LEAST:
            raise ConfigError(
                f"outliers={config.outliers!r} needs at least {_LEAST} groups, here are {groups}: of two that differ "
                "either may be the outlier; leave `outliers` out, or use smaller groups"
            )

    @property
    def need_agreed(self) -> bool:
        """Whether every worker must hold the agreed values: to measure changes, or as there may be no others."""
        config = self.config
        in_parts = getattr(config, "fragments", 1) > 1 or getattr(config, "train", "") == "split"
        return config.outliers != "keep" or (config.is_screened and in_parts)

    @property
    def is_left_out(self) -> bool:
        return self.wire.topology.group_index in self.left_out

    @property
    def share(self) -> float:
        """This group's share in a mean over the workers that count."""
        topology = self.wire.topology
        if not (self.left_out or self._absent()):
            return len(topology.group) / topology.world_size
        return self.weight([float(len(group)) for group in topology.groups]) or 0.0

    def weight(self, weights: Sequence[float] | None) -> float | None:
        """This group's of all groups' weights, by default of their workers, among those that count."""
        topology = self.wire.topology
        out = self.left_out | self._absent()
        if weights is None and not out:
            return None
        sizes = [float(len(group)) for group in topology.groups] if weights is None else weights
        if not out:
            return sizes[topology.group_index]
        counted = [0.0 if i in out else size for i, size in enumerate(sizes)]
        # Groups that train different factors may all be left out, and then nobody has changed this one.
        return counted[topology.group_index] / (sum(counted) or 1.0)

    def screen(self, fragments: Sequence[AveragedTensors], observed: Tensor, step: int) -> None:
        """Decide by what groups hold, and by how far they came in `fragments`; collective."""
        measures = self.config.outliers != "keep" and bool(fragments)
        norm: list[float] = []
        if measures:
            far = torch.tensor([math.hypot(*(fragment.distance() for fragment in fragments))], dtype=torch.float64)
            norm = self.wire.norms_of_group(far).tolist()
        rows, faults = find_faults(self.wire, self.model, observed, norm)
        groups, own = self.wire.topology.groups, self.wire.topology.group_index
        if len(faults) == len(groups):
            raise diverged(faults, step, ": no group is left that could go on without the others")
        if faults and self.config.diverged == "stop":
            raise diverged(faults, step, ", or let the others go on by diverged='leave_out'")
        for fault in faults:
            self._note_fault(fault, step)
        bad = {fault.group for fault in faults}
        norms = {i: rows[group[0]][2] for i, group in enumerate(groups) if i not in bad} if measures else {}
        medians = {i: median for i, norm in norms.items() if (median := self._exceeded(i, norms)) is not None}
        for i, median in medians.items():
            self._note_outlier(i, norms[i], median, step)
        leaves = self.config.outliers == "leave_out"
        self.left_out = frozenset(bad | (medians.keys() if leaves else set()))
        clipped = medians[own] / norms[own] if own in medians and not leaves else 1.0
        self.gain = 0.0 if own in self.left_out else clipped

    def clear(self) -> None:
        """All groups count again."""
        self.left_out, self.gain = frozenset(), 1.0

    def _exceeded(self, group: int, norms: dict[int, float]) -> float | None:
        """The median of the other groups' norms, if this group's is too far beyond it."""
        others = [norm for i, norm in norms.items() if i != group]
        if len(others) < _LEAST - 1:
            return None
        median = statistics.median(others)
        return median if 0 < self.config.outlier_limit * median < norms[group] else None

    def _note_fault(self, fault: Fault, step: int) -> None:
        event = {"step": step, "event": "left out", "group": fault.group, "rank": fault.rank, "why": fault.what}
        self._note(event, "%s at step %d, first on rank %d: it is left out", str(fault), step, fault.rank)

    def _note_outlier(self, group: int, norm: float, median: float, step: int) -> None:
        done = "left out" if self.config.outliers == "leave_out" else "clipped"
        event = {"step": step, "event": done, "group": group, "norm": norm, "median": median}
        text = "group %d came %.3g times as far as the median of the others at step %d: it is %s"
        self._note({**event, "why": "outlier"}, text, group, norm / median, step, done)

    def _note(self, event: dict[str, Any], text: str, *values: Any) -> None:
        """Once, though an average may be tried again."""
        if event not in self.events:
            self.events.append(event)
            if not self.wire.topology.rank:
                log.warning(text, *values)
