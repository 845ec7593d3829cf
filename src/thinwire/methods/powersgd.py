"""PowerSGD (arXiv 1905.13727): gradients in the code lowrank:R; `codecs/lowrank.py` has the equations."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.base.checks import check_whole, is_number
from thinwire.base.errors import ConfigError
from thinwire.codecs import low_rank
from thinwire.codecs.aggregate import Aggregator
from thinwire.comm.wire import Wire
from thinwire.methods.coded import Coded
from thinwire.methods.registry import register


@register(
    "powersgd",
    example={"rank": 2, "warmup": 2},
    summary="Gradients as low-rank products, with error feedback",
)
@dataclass(frozen=True, kw_only=True)
class PowerSGD(Coded):
    """Gradients between groups as low-rank products, with error feedback (arXiv 1905.13727)."""

    rank: int = 4
    """Rank of what is sent of each weight."""

    min_compression: float = 2.0
    """Weights that would not become smaller by at least this factor travel as they are; 0 compresses all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "rank", 1)
        if not (is_number(self.min_compression) and self.min_compression >= 0):
            raise ConfigError(
                f"`min_compression`={self.min_compression!r} must be a number from 0 on: how many times smaller a "
                "weight must become to be compressed"
            )

    @property
    def code(self) -> str:
        return f"lowrank:{self.rank}"

    def make(self, wire: Wire, like: Sequence[Tensor]) -> Aggregator:
        """With this threshold for weights that are worth it."""
        return low_rank(wire, like, "gradients", self.rank, self.min_compression)
