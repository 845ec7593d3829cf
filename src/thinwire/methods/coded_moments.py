"""Moments averaged over groups in a few bits: first ones in int8 or int4, second ones as logarithms in as many bits.

What a code leaves out is added to what is sent the next time. By then moments have forgotten most of what they were,
and of the error as much is left: β to the power of the updates since. Without that, a second moment that changes by
less than its code can tell would never change.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.aggregate import Aggregator
from thinwire.comm.buckets import all_finite, reals
from thinwire.comm.codes import aggregator
from thinwire.comm.collectives import Wire
from thinwire.errors import DivergedError
from thinwire.factor.matrix import wide
from thinwire.factor.moments import LINEAR, QUADRATIC
from thinwire.factor.optimizers import State


class CodedMoments:
    """Averages the moments of parts of a model again and again; other state stays each group's own."""

    def __init__(self, wire: Wire, code: str) -> None:
        self.wire, self.code = wire, code
        self._made: dict[str, tuple[list[list[int]], Aggregator]] = {}
        self._loaded: dict[str, Any] = {}

    @property
    def aggregators(self) -> list[Aggregator]:
        """Those that hold what codes left out."""
        return [made for _, made in self._made.values()]

    @torch.no_grad()
    def average(self, part: int, states: Sequence[State], kept: tuple[float, float]) -> None:
        """Replace moments by their means; `kept` is what is left of first and of second ones since the last time.

        All of a part's parameters are in `states`, each time.
        """
        if len(self.wire.topology.groups) > 1:
            for kind, names, share in (("first", LINEAR, kept[0]), ("second", QUADRATIC, kept[1])):
                moments = [reals(state[name].detach()) for state in states for name in sorted(names & state.keys())]
                if moments:
                    self._average(part, kind, moments, share)

    def _average(self, part: int, kind: str, moments: Sequence[Tensor], kept: float) -> None:
        means = [wide(moment).clone() for moment in moments]
        made = self._aggregator(f"{part} {kind}", means, squares=kind == "second")
        for left_out in made.residuals():
            left_out.mul_(kept)
        if not made.run(means, healthy=all_finite(means)):
            raise DivergedError("moments that groups share are not finite; lower the learning rate")
        made.commit()
        for moment, mean in zip(moments, means, strict=True):
            # What is too small for its block of 256 stays each group's own.
            moment.copy_(torch.where(mean > 0, mean, moment) if kind == "second" else mean)

    def _aggregator(self, name: str, like: Sequence[Tensor], *, squares: bool) -> Aggregator:
        """The one of that name; it starts without errors when shapes have changed."""
        shapes = [list(t.shape) for t in like]
        if name not in self._made or self._made[name][0] != shapes:
            made = aggregator(self.code, self.wire, like, "moments", squares=squares)
            loaded = self._loaded.pop(name, None)
            if loaded is not None and loaded["shapes"] == shapes:
                made.load({}, loaded["errors"])
            self._made[name] = shapes, made
        return self._made[name][1]

    def state_dict(self) -> dict[str, Any]:
        """What codes left out; this worker's own."""
        made = {name: {"shapes": shapes, "errors": made.local()} for name, (shapes, made) in self._made.items()}
        return self._loaded | made

    def load_state_dict(self, local: dict[str, Any]) -> None:
        """Taken up when moments are next averaged."""
        self._made, self._loaded = {}, dict(local)
