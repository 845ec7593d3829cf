"""Data-parallel training, and the methods that send less of it."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from thinwire.base.checks import (
    check_bool,
    check_choice,
    check_group_size,
    check_length,
    check_share,
    check_whole,
    is_number,
    length,
)
from thinwire.base.errors import ConfigError
from thinwire.config.codes import check_code
from thinwire.config.groups import GroupSize
from thinwire.config.outer import Nesterov
from thinwire.config.warmed import Averaged, Coded, Warmed


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """Data-parallel training by PyTorch's own DistributedDataParallel, with its bytes counted."""

    wire: str = "fp32"
    """The code that gradients travel in: fp32, bf16, int8, int4, int2, bit, lowrank:R or topk:D."""

    group_size: GroupSize = None
    """Workers per node, where one machine stands for several. In fp32 and bf16 it changes what is counted, not what is
    computed. Other codes are for the link between groups; inside them gradients are averaged exactly."""

    def __post_init__(self) -> None:
        check_code(self, "wire")
        check_group_size(self.group_size)


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


_PAPERS = Nesterov(lr=0.7, momentum=0.9)


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
        check_choice(self, "moments", ("keep", "average", "reset"))
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


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGD):
    """Groups train alone; their mean change is a gradient for an outer Nesterov step (arXiv 2311.08105).

    `fragments` above 1 is the streaming variant (arXiv 2501.18512): one part of the model at a time, sent
    during training and merged `overlap` steps later.
    """

    usual: ClassVar = {"every": 48}

    every: int | Literal["auto"] = "auto"
    """Steps between two outer steps of the same fragment of the model. "auto" is 48, or half of what follows the
    warm-up where that is less than 48 steps."""

    outer: Nesterov | None = _PAPERS
    """The outer step, with the paper's values; 1.0 and 0.5 are better with small `every`."""


@dataclass(frozen=True, kw_only=True)
class TopK(Warmed):
    """Only the largest accumulated gradients travel: Deep Gradient Compression (arXiv 1712.01887)."""

    density: float = 0.001
    """Share of each weight's elements that is sent per step."""

    ramp: float = 0
    """Steps after the warm-up over which the density falls from a quarter: a whole number, or a fraction of
    `total_steps` below 1."""

    momentum: float | None = None
    """Momentum that is applied before sending; None takes it over from `torch.optim.SGD`, which then has none."""

    masking: bool = True
    """Whether what was sent starts again without momentum."""

    clip: float | None = None
    """Largest norm of a gradient; each of N groups clips at `clip`/√N, before anything is accumulated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self, "ramp")
        if not (is_number(self.density) and 0 < self.density <= 1):
            raise ConfigError(f"`density`={self.density!r} must be above 0 and at most 1: a share, such as 0.001")
        if self.momentum is not None:
            check_share(self, "momentum", "None takes it over from the optimizer")
        check_bool(self, "masking")
        if self.clip is not None and not (is_number(self.clip) and self.clip > 0):
            raise ConfigError(f"`clip`={self.clip!r} must be a norm above 0, or None for no clipping")

    @property
    def ramp_length(self) -> int:
        return length(self.ramp, self.total_steps or 1)

    @property
    def idle(self) -> str:
        steps = self.warmup_length + self.ramp_length
        if super().idle or self.total_steps is None or steps < self.total_steps:
            return super().idle
        return (
            f"`warmup`={self.warmup} and `ramp`={self.ramp} are all of total_steps={self.total_steps}: the density of "
            f"{self.density} is never reached; shorten them"
        )


@dataclass(frozen=True, kw_only=True)
class OneBit(Coded):
    """One bit per element and two scales per column, with error feedback (1-bit SGD, Seide et al. 2014)."""
