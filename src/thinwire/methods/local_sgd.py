"""Local SGD (arXiv 1805.09767; with a warm-up, post-local SGD, arXiv 1808.07217): the mean of parameters is taken."""

from dataclasses import dataclass
from typing import Literal

from thinwire.base.checks import check_whole
from thinwire.base.errors import ConfigError
from thinwire.comm.topology import Topology
from thinwire.config.common import Averaged
from thinwire.exchange.gradients import Gradients
from thinwire.exchange.parameters import Parameters
from thinwire.methods.registry import register
from thinwire.methods.timetable import Phase


@register(
    "localsgd",
    example={"warmup": 2, "every": 4},
    summary="Groups train alone and average parameters every so often",
)
@dataclass(frozen=True, kw_only=True)
class LocalSGD(Averaged):
    """Groups train alone and average their parameters every few steps (arXiv 1805.09767, 1808.07217)."""

    fragments: int = 1
    """Parts of the model that are sent at different times."""

    moments: Literal["keep", "average", "reset"] = "keep"
    """What happens to the optimizer's state at an average: each group keeps its own, all take the mean, or it starts
    again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "fragments", 1)
        if self.second_moment == "shared" and (self.fragments > 1 or self.moments != "keep"):
            raise ConfigError(
                "second_moment='shared' averages all moments at each average; leave out `fragments` and `moments`"
            )
        if self.fragments > self.round_length:
            raise ConfigError(
                f"`fragments`={self.fragments} do not fit into `every`={self.round_length} steps: at most one is sent "
                f"per step; use at most {self.round_length}"
            )

    @property
    def _least_round(self) -> int:
        return max(super()._least_round, self.fragments)

    def timetable(self, topology: Topology) -> list[Phase]:
        return [
            Phase(name="warmup", until=self.warmup_length, exchanges=[Gradients(self.warmup_wire)]),
            Phase(name="local", exchanges=[Parameters(self)]),
        ]
