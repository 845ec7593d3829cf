"""How far groups agree before an average, and whether they do after it.

Before it, the length of their changes is compared with that of the mean change:

    ratio = mean‖Δᵢ‖ / ‖mean Δ‖

It is 1 where all groups moved alike, and √G where G groups moved in directions that have nothing in common: then an
average makes no more progress than noise does.

After it all hold the same bits, unless something is wrong.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.base.errors import DisagreementError
from thinwire.comm.wire import Wire
from thinwire.config.common import Radial
from thinwire.exchange.averaged import SIZE, AveragedTensors

log = logging.getLogger("thinwire")

_NOISE = 0.98
"""Share of √G from which on the mean change is mostly noise."""
_AVERAGES = 8
"""Averages over which the ratio is taken before anybody is warned: one of them is estimated to a few per cent."""


class Agreement:
    """The ratio at each average, by layer and for the whole model."""

    def __init__(self, model: nn.Module, wire: Wire, is_annealing: Callable[[], bool]) -> None:
        self.model = model
        self.is_annealing = is_annealing
        self.wire = wire
        self.averages = 0
        """Averages measured so far."""
        self.ratio: float | None = None
        """Of everything that was averaged last."""
        self.ratios: dict[str, float] = {}
        """Of each weight of two dimensions or more."""
        self._recent: list[float] = []
        self._warned = False
        self._sum = self._highest = 0.0

    def summary(self) -> dict[str, float | int | None] | None:
        """Over all averages so far; None if there were none."""
        if not self.averages:
            return None
        mean = self._sum / self.averages
        return {"averages": self.averages, "mean": mean, "highest": self._highest, "last": self.ratio}

    def state_dict(self) -> dict[str, Any]:
        names = ("averages", "ratio", "_sum", "_highest", "_recent", "_warned")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def measure(self, fragments: Sequence[AveragedTensors], step: int) -> list[Tensor | None]:
        """Measure what has arrived; what a radial step multiplies each tensor by.

        What a code made of the mean change cannot be compared, because it contains what earlier averages left out.
        Groups add up sketches of their changes instead, 260 bytes per tensor.
        """
        notes = [f.notes.values for f in fragments if f.notes is not None and f.notes.values is not None]
        nothing: list[Tensor | None] = [None] * len(fragments)
        if len(notes) < len(fragments) or not notes:
            return nothing
        return self.wire.read(lambda: self._measure(fragments, notes, step), nothing)

    def _measure(self, fragments: Sequence[AveragedTensors], notes: list[Tensor], step: int) -> list[Tensor | None]:
        lengths, sketches = torch.cat(notes, dim=1).split([1, SIZE])
        self._note(fragments, lengths[0], self.wire.norms_of_group(sketches.norm(dim=0)), step)
        return [self._gains(fragment, own[0]) for fragment, own in zip(fragments, notes, strict=True)]

    def _gains(self, fragment: AveragedTensors, lengths: Tensor) -> Tensor | None:
        if not isinstance(fragment.outer, Radial):
            return None
        most = fragment.outer.most or math.sqrt(len(self.wire.topology.groups))
        return (lengths / fragment.mean_lengths()).nan_to_num(1.0, 1.0, 1.0).clamp(1.0, most)

    def _note(self, fragments: Sequence[AveragedTensors], lengths: Tensor, means: Tensor, step: int) -> None:
        names = {id(p): name for name, p in self.model.named_parameters()}
        tensors = [t for fragment in fragments for t in fragment.tensors()]
        both = torch.stack([lengths, means]).tolist()
        self.ratios = {
            names[id(t)]: a / b
            for t, a, b in zip(tensors, *both, strict=True)
            if t.dim() > 1 and b > 0 and id(t) in names
        }
        whole = math.hypot(*both[1])
        self.ratio = math.hypot(*both[0]) / whole if whole > 0 else 1.0
        self.averages += 1
        self._sum += self.ratio
        self._highest = max(self._highest, self.ratio)
        self._warn(step)

    def _warn(self, step: int) -> None:
        """Once; not while the learning rate is low, as at the end of most runs, where every step is mostly noise."""
        limit = math.sqrt(len(self.wire.topology.groups))
        self._recent = [*self._recent, self.ratio or 1.0][-_AVERAGES:]
        mean = sum(self._recent) / _AVERAGES
        if self._warned or self.is_annealing() or mean <= _NOISE * limit:
            return
        self._warned = True
        if not self.wire.topology.rank:
            log.warning(
                "groups have moved in unrelated directions in the last %d averages (ratio %.2f at step %d; 1 is "
                "agreement, %.2f is noise): averaging undoes most of what they learn. Average more often (a smaller "
                "`every`), lower the learning rate, or use larger batches per group",
                *(_AVERAGES, mean, step, limit),
            )


Named = list[tuple[str, Tensor]]


class SameBits:
    """Counts averages, and compares a checksum of what workers hold after every so many.

    Every worker applies an average to values that it holds itself. One bit that is wrong in one of them, by bad memory
    or a fault of a driver, stays there and is trained on.
    """

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
