"""First moments averaged over groups again and again, in a few bits.

What a code leaves out is added to what is sent the next time. By then moments have forgotten most of what they were,
and of the error as much is left: β to the power of the updates since.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import DivergedError
from thinwire.codecs import aggregator
from thinwire.codecs.aggregate import Aggregator
from thinwire.comm.buckets import all_finite, reals
from thinwire.comm.wire import Wire
from thinwire.factor.matrix import wide
from thinwire.factor.moments import LINEAR
from thinwire.factor.optimizers import State


class CodedMoments:
    """Averages the first moments of parts of a model; other state stays each group's own."""

    def __init__(self, wire: Wire, code: str) -> None:
        self.wire, self.code = wire, code
        self._made: dict[int, tuple[list[list[int]], Aggregator]] = {}
        self._loaded: dict[str, Any] = {}

    @property
    def aggregators(self) -> list[Aggregator]:
        """Those that hold what codes left out."""
        return [made for _, made in self._made.values()]

    @torch.no_grad()
    def average(self, part: int, states: Sequence[State], kept: float) -> None:
        """Replace first moments by their means; `kept` is what is left of them since the last time.

        All of a part's parameters are in `states`, each time.
        """
        moments = [reals(state[name].detach()) for state in states for name in sorted(LINEAR & state.keys())]
        if not moments or len(self.wire.topology.groups) == 1:
            return
        means = [wide(moment).clone() for moment in moments]
        made = self._aggregator(part, means)
        for left_out in made.residuals():
            left_out.mul_(kept)
        if not made.run(means, healthy=all_finite(means)):
            raise DivergedError("moments that groups share are not finite; lower the learning rate")
        made.commit()
        for moment, mean in zip(moments, means, strict=True):
            moment.copy_(mean)

    def _aggregator(self, part: int, like: Sequence[Tensor]) -> Aggregator:
        """The one of that part; it starts without errors when shapes have changed."""
        shapes = [list(t.shape) for t in like]
        if part not in self._made or self._made[part][0] != shapes:
            made = aggregator(self.code, self.wire, like, "moments")
            loaded = self._loaded.pop(str(part), None)
            if loaded is not None and loaded["shapes"] == shapes:
                made.load({}, loaded["errors"])
            self._made[part] = shapes, made
        return self._made[part][1]

    def state_dict(self) -> dict[str, Any]:
        """What codes left out; this worker's own."""
        made = {str(part): {"shapes": shapes, "errors": made.local()} for part, (shapes, made) in self._made.items()}
        return self._loaded | made

    def load_state_dict(self, local: dict[str, Any]) -> None:
        """Taken up when moments are next averaged."""
        self._made, self._loaded = {}, dict(local)
