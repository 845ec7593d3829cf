"""Methods that code every gradient after a warm-up: engine 1 alone."""

import sys
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from thinwire.codecs import aggregator
from thinwire.codecs.aggregate import Aggregator
from thinwire.comm.topology import Topology
from thinwire.comm.wire import Wire
from thinwire.methods.base import Method
from thinwire.methods.context import MethodContext
from thinwire.methods.features import Feature, joins_not, needs_whole_weights
from thinwire.methods.frozen import FrozenSecondMoment


class CodedGradients(Method):
    """A warm-up in one code, then another one to the end."""

    phases: ClassVar[tuple[str, ...]] = ("warmup", "train")
    only_gradients: ClassVar[bool] = True

    @classmethod
    def role(cls, config: Any, topology: Topology) -> Hashable:
        """All workers do the same."""
        return None

    @classmethod
    def refuses(cls, config: Any, feature: Feature) -> str | None:
        """Codes here are of whole weights; a worker without batches does not know when moments were frozen."""
        if feature is Feature.SHARDS:
            return needs_whole_weights(config)
        if feature is Feature.JOIN and getattr(config, "freeze_second_moment", False):
            return joins_not("freeze_second_moment=True")
        return super().refuses(config, feature)

    @staticmethod
    @abstractmethod
    def code_of(config: Any) -> str:
        """What gradients travel in after the warm-up."""

    @abstractmethod
    def aggregator(self, wire: Wire, like: Sequence[Tensor]) -> Aggregator:
        """What averages them after the warm-up."""

    def __init__(self, config: Any, context: MethodContext) -> None:
        super().__init__(config, context)
        self.gradients.makers[self.code_of(config)] = self._make
        is_wanted = getattr(config, "freeze_second_moment", False) and len(self.topology.groups) > 1
        self.frozen = FrozenSecondMoment(context, is_wanted, lambda: is_wanted and self.phase != "warmup")

    def _make(self, wire: Wire, like: Sequence[Tensor]) -> Aggregator:
        """The method's own; a warm-up in the code of that name has the plain one."""
        if self.phase == "warmup":
            return aggregator(self.config.warmup_wire, wire, like, "gradients")
        return self.aggregator(wire, like)

    def attach(self) -> None:
        """Begin with the warm-up; one of no steps is over at once."""
        self.gradients.check(self.code_of(self.config))
        if self.config.warmup_length:
            self.gradients.together(self.config.warmup_wire)
        else:
            self._begin()

    def after_step(self) -> None:
        """The residual of the warm-up is dropped at its end: it is in another code's terms."""
        if self.step == self.config.warmup_length:
            self.check_counters()
            self._begin()

    @property
    def next_event(self) -> int:
        """The end of the warm-up; then every step is like every other."""
        return self.config.warmup_length if self.phase == "warmup" else sys.maxsize

    def _begin(self) -> None:
        self.frozen.freeze()
        self.set_phase("train")
        self.gradients.together(self.code_of(self.config))
