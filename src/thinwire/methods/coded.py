"""What methods share that code every gradient after a warm-up."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.base.errors import ConfigError
from thinwire.codecs.aggregate import Aggregator
from thinwire.comm.topology import Topology
from thinwire.comm.wire import Wire
from thinwire.config.common import Warmed
from thinwire.exchange.gradients import Gradients
from thinwire.exchange.second_moment import FreezeSecondMoment
from thinwire.methods.timetable import Phase, warmed_up


@dataclass(frozen=True, kw_only=True)
class Coded(Warmed, ABC):
    """What methods share that code every gradient after a warm-up, for any optimizer."""

    freeze_second_moment: bool = False
    """Whether Adam's second moments stay as the warm-up left them, as in 1-bit Adam (arXiv 2102.02888): those of coded
    gradients are too large where gradients are small."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.freeze_second_moment and not self.warmup_length:
            steps = f", which is no step of total_steps={self.total_steps}" if self.warmup else ""
            raise ConfigError(
                f"freeze_second_moment=True needs a warm-up, which makes the second moments, not `warmup`="
                f"{self.warmup}{steps}; use 0.1 of `total_steps`, or at least one step"
            )

    def timetable(self, topology: Topology) -> list[Phase]:
        """The residual of the warm-up is dropped at its end: it is in another code's terms."""
        rules = [FreezeSecondMoment()] if self.freeze_second_moment else []
        return warmed_up(self, Phase(name="train", exchanges=[Gradients(self.code, self.make)], rules=rules))

    @property
    @abstractmethod
    def code(self) -> str:
        """What gradients travel in after the warm-up."""

    @abstractmethod
    def make(self, wire: Wire, like: Sequence[Tensor]) -> Aggregator:
        """What averages them then."""
