"""Data-parallel training, and the methods that send less of it."""

from dataclasses import dataclass
from typing import Literal

from thinwire.checks import (
    check_bool,
    check_choice,
    check_group_size,
    check_length,
    check_share,
    check_whole,
    is_number,
    length,
)
from thinwire.config.groups import GroupSize
from thinwire.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """Data-parallel training by PyTorch's own DistributedDataParallel, with its bytes counted."""

    wire: Literal["fp32", "bf16", "int8"] = "fp32"
    """What gradients are rounded to while they travel; "int8" with a scale a block and error feedback."""

    group_size: GroupSize = None
    """Workers to a node, where one machine stands for several. In fp32 and bf16 it changes what is counted, not what is
    computed; int8 is for the link between groups, inside them gradients are averaged as they are."""

    def __post_init__(self) -> None:
        check_choice(self, "wire", ("fp32", "bf16", "int8"))
        check_group_size(self.group_size)


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """Gradients between groups as low-rank products, with error feedback (arXiv 1905.13727)."""

    rank: int = 4
    """Rank of what is sent of each weight."""

    start_step: float = 0
    """Steps of plain all-reduce before: a whole number, or a fraction of `total_steps` below 1."""

    min_compression: float = 2.0
    """Weights that would not become smaller by at least this factor travel as they are; 0 compresses all."""

    total_steps: int | None = None
    """Optimizer steps of the whole run, where `start_step` is a fraction of it."""

    group_size: GroupSize = None
    """Workers to a group, inside which gradients are averaged as they are: None is one node a group."""

    def __post_init__(self) -> None:
        check_whole(self, "rank", 1)
        check_length(self, "start_step")
        if not (is_number(self.min_compression) and self.min_compression >= 0):
            raise ConfigError(
                f"`min_compression`={self.min_compression!r} must be a number from 0 on: how many times smaller a "
                "weight must become to be compressed"
            )
        check_group_size(self.group_size)

    @property
    def start_length(self) -> int:
        """Plain steps before the first compressed one."""
        return length(self.start_step, self.total_steps or 1)


@dataclass(frozen=True, kw_only=True)
class _Warmed:
    """What methods share that begin with a warm-up."""

    warmup: float = 0
    """Steps of plain all-reduce before: a whole number, or a fraction of `total_steps` below 1."""

    total_steps: int | None = None
    """Optimizer steps of the whole run, where `warmup` is a fraction of it."""

    group_size: GroupSize = None
    """Workers to a group, which averages its gradients as they are at every step: None is one node a group."""

    def __post_init__(self) -> None:
        check_length(self, "warmup")
        check_group_size(self.group_size)

    @property
    def warmup_length(self) -> int:
        """Warm-up in steps."""
        return length(self.warmup, self.total_steps or 1)


@dataclass(frozen=True, kw_only=True)
class LocalSGD(_Warmed):
    """Groups train alone and average their parameters now and then (arXiv 1805.09767, 1808.07217)."""

    every: int = 24
    """Steps between two averages."""

    moments: Literal["keep", "average", "reset"] = "keep"
    """What becomes of the optimizer's state at an average: each group keeps its own, all take the mean, or it starts
    again."""

    wire: Literal["fp32", "bf16"] = "fp32"
    """What parameters are rounded to while they travel; bf16 carries the difference to the last average."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "every", 1)
        check_choice(self, "moments", ("keep", "average", "reset"))
        check_choice(self, "wire", ("fp32", "bf16"))


@dataclass(frozen=True, kw_only=True)
class DiLoCo(_Warmed):
    """Groups train alone; the mean of how far they came is a gradient for an outer Nesterov step (arXiv 2311.08105).

    `fragments` above 1 is the streaming variant (arXiv 2501.18512): a part of the model at a time, sent while training
    goes on and merged `delay` steps later.
    """

    every: int = 48
    """Steps between two outer steps of the same part of the model."""

    outer_lr: float = 0.7
    """Learning rate of the outer step."""

    outer_momentum: float = 0.9
    """Nesterov momentum of the outer step."""

    wire: Literal["fp32", "bf16", "int8"] = "fp32"
    """What differences are rounded to while they travel; "int8" with a scale a block and error feedback."""

    fragments: int = 1
    """Parts of the model that are sent at different times."""

    delay: int = 0
    """Steps that training goes on while a part is under way."""

    mix: float = 0.5
    """Share of a group's own values when a part comes back that was sent `delay` steps before; 0 takes none of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "every", 1)
        check_whole(self, "fragments", 1)
        check_whole(self, "delay", 0)
        check_choice(self, "wire", ("fp32", "bf16", "int8"))
        if not (is_number(self.outer_lr) and self.outer_lr > 0):
            raise ConfigError(f"`outer_lr`={self.outer_lr!r} must be a number above 0; the paper has 0.7")
        check_share(self, "outer_momentum", "the paper has 0.9")
        check_share(self, "mix", "0 takes the outer values as they are")
        if self.fragments > self.every:
            raise ConfigError(
                f"`fragments`={self.fragments} do not fit into `every`={self.every} steps: at most one is sent a step; "
                f"use at most {self.every}"
            )
        if self.delay >= self.every:
            raise ConfigError(
                f"`delay`={self.delay} must be below `every`={self.every}: a part must be back before it is sent again"
            )


@dataclass(frozen=True, kw_only=True)
class TopK(_Warmed):
    """Only the largest accumulated gradients travel: Deep Gradient Compression (arXiv 1712.01887)."""

    density: float = 0.001
    """Share of each weight's elements that is sent a step."""

    warmup: float = 0
    """Steps over which the density falls from a quarter: a whole number, or a fraction of `total_steps` below 1."""

    momentum: float | None = None
    """Momentum that is applied before sending; None takes it over from `torch.optim.SGD`, which then has none."""

    masking: bool = True
    """Whether what was sent starts again without momentum."""

    clip: float | None = None
    """Largest norm of a gradient; each of N groups clips at `clip`/√N, before anything is accumulated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.density) and 0 < self.density <= 1):
            raise ConfigError(f"`density`={self.density!r} must be above 0 and at most 1: a share, such as 0.001")
        if self.momentum is not None:
            check_share(self, "momentum", "None takes it over from the optimizer")
        check_bool(self, "masking")
        if self.clip is not None and not (is_number(self.clip) and self.clip > 0):
            raise ConfigError(f"`clip`={self.clip!r} must be a norm above 0, or None for no clipping")


@dataclass(frozen=True, kw_only=True)
class OneBit(_Warmed):
    """A bit an element and two scales a column, with error feedback: 1-bit SGD (Seide et al., Interspeech 2014)."""
