"""What a user may set: one frozen dataclass a method, checked once, at construction."""

import math
from dataclasses import dataclass
from typing import Literal

from thinwire.checks import (
    check_bool,
    check_choice,
    check_cutoff,
    check_fraction,
    check_group_size,
    check_length,
    check_share,
    check_total,
    check_whole,
    is_number,
    length,
    patterns,
)
from thinwire.errors import ConfigError

GroupSize = int | Literal["world"] | None


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
class AB:
    """AB training: low-rank factors A·B, trained alone by groups of workers and merged (arXiv 2405.01067).

    `warmup` and `group_steps` below 1 are fractions of `total_steps`, `rebound` and `lr_rebound`
    below 1 are fractions of a group phase; any of them from 1 on is a whole number of steps.
    """

    total_steps: int
    """Optimizer steps of the whole run."""

    warmup: float = 0.20
    """Full-rank training by the whole world before the first group phase."""

    group_steps: float = 0.0333
    """Steps that groups train alone between two merges."""

    rebound: float = 0.25
    """Full-rank training by the whole world after a merge."""

    lr_rebound: float = 0.5
    """Steps over which the learning rate climbs back after each change of shape."""

    cutoff: float = 0.15
    """Singular values up to this share of the largest are dropped."""

    group_size: GroupSize = None
    """Workers to a group: None is one node a group, "world" trains B by all workers without groups."""

    merge: Literal["mean", "trained", "weighted"] = "mean"
    """How copies are averaged: all of them, only the trained ones, or by observed loss."""

    moments: Literal["reset", "average", "carry"] = "reset"
    """What becomes of the optimizer's state at a merge."""

    cycle: Literal["paper"] = "paper"
    """The order of phases; "paper" rebuilds the full model after every merge."""

    keep_first: bool = True
    """Leave the first layer full."""

    keep_last: bool = True
    """Leave the last layer full."""

    keep: tuple[str, ...] = ()
    """Name patterns (as in a shell) of layers to leave full."""

    wire: Literal["fp32", "bf16"] = "fp32"
    """What gradients and merged differences are rounded to while they travel."""

    def __post_init__(self) -> None:
        check_total(self.total_steps)
        for name in ("warmup", "group_steps", "rebound", "lr_rebound"):
            check_fraction(self, name, zero_allowed=name != "group_steps")
        check_choice(self, "merge", ("mean", "trained", "weighted"))
        check_choice(self, "moments", ("reset", "average", "carry"))
        check_choice(self, "cycle", ("paper",))
        check_choice(self, "wire", ("fp32", "bf16"))
        check_group_size(self.group_size)
        check_cutoff(self.cutoff)
        check_bool(self, "keep_first")
        check_bool(self, "keep_last")
        object.__setattr__(self, "keep", patterns(self.keep))
        self._check_one_cycle_fits()

    @property
    def warmup_length(self) -> int:
        """Warm-up in steps."""
        return length(self.warmup, self.total_steps)

    @property
    def group_length(self) -> int:
        """A group phase in steps."""
        return length(self.group_steps, self.total_steps)

    @property
    def rebound_length(self) -> int:
        """A full-rank rebound in steps."""
        return length(self.rebound, self.group_length)

    @property
    def lr_rebound_length(self) -> int:
        """A learning-rate rebound in steps."""
        return length(self.lr_rebound, self.group_length)

    def _check_one_cycle_fits(self) -> None:
        if self.group_length < 1:
            least = math.floor(0.5 / self.group_steps) + 1
            raise ConfigError(
                f"`total_steps`={self.total_steps} is too small for one cycle: `group_steps`={self.group_steps} "
                f"of it is less than one step; use total_steps of at least {least}, or whole steps, as group_steps=1"
            )
        needed = self.warmup_length + self.group_length
        if needed > self.total_steps:
            room = self.total_steps - self.group_length
            raise ConfigError(
                f"`total_steps`={self.total_steps} is too small for one cycle: warm-up takes {self.warmup_length} "
                f"steps (`warmup`={self.warmup}) and a group phase {self.group_length} "
                f"(`group_steps`={self.group_steps}), together {needed}; "
                + (
                    f"a warm-up of at most {room} steps fits"
                    if room >= 0
                    else "shorten the group phase, as group_steps=1"
                )
            )


@dataclass(frozen=True, kw_only=True)
class OIALR:
    """Bases frozen once they are stable, the square matrix between them trained, ranks falling (dissertation of
    D. Coquelin, chapter 4).

    `delay` and `frequency` below 1 are fractions of `total_steps`, from 1 on whole steps.
    """

    total_steps: int
    """Optimizer steps of the whole run."""

    delay: float = 1 / 3
    """Full-rank training before weights become U S Vᵀ; without `warmup`, steps before the first update of the bases."""

    frequency: float = 0.0333
    """Steps between two updates of the bases, in which ranks may fall."""

    cutoff: float = 0.1
    """Singular values up to this share of the largest are dropped at an update."""

    layer_fraction: float = 0.1
    """By how many of the layers, as a share of all, each update reaches further from the last one towards the first."""

    max_shrink: float = 0.5
    """The largest share of a layer's ranks that one update may drop; 1 drops all that the cutoff says."""

    warmup: bool = True
    """Whether training begins at full rank; False makes weights U S Vᵀ at once."""

    moments: Literal["carry", "reset"] = "carry"
    """What becomes of the optimizer's state when bases change: turned into the new ones, or it starts again."""

    match_rate: bool | None = None
    """Whether S's updates are scaled by √(m n)/k. Adam's updates are of one size an element: of k² elements instead of
    m n, a weight moves as far as a full one only so. None does it where the optimizer keeps second moments."""

    keep_first: bool = False
    """Leave the first layer full."""

    keep_last: bool = True
    """Leave the last layer full."""

    keep: tuple[str, ...] = ()
    """Name patterns (as in a shell) of layers to leave full."""

    wire: Literal["fp32", "bf16"] = "fp32"
    """What gradients are rounded to while they travel."""

    group_size: GroupSize = None
    """Workers to a node, where one machine stands for several; they share the decompositions out."""

    def __post_init__(self) -> None:
        check_total(self.total_steps)
        check_fraction(self, "delay", zero_allowed=True)
        check_fraction(self, "frequency", zero_allowed=False)
        check_cutoff(self.cutoff, zero_allowed=True)
        for name in ("layer_fraction", "max_shrink"):
            value = getattr(self, name)
            if not (is_number(value) and 0 < value <= 1):
                raise ConfigError(f"`{name}`={value!r} must be above 0 and at most 1: a share")
        check_choice(self, "moments", ("carry", "reset"))
        check_choice(self, "wire", ("fp32", "bf16"))
        for name in ("warmup", "keep_first", "keep_last"):
            check_bool(self, name)
        if self.match_rate is not None:
            check_bool(self, "match_rate")
        check_group_size(self.group_size)
        object.__setattr__(self, "keep", patterns(self.keep))
        if self.warmup and self.delay_length >= self.total_steps:
            raise ConfigError(
                f"`delay`={self.delay} leaves nothing of `total_steps`={self.total_steps} for training at low rank; "
                "use a smaller one, such as a third"
            )

    @property
    def delay_length(self) -> int:
        """The delay in steps."""
        return length(self.delay, self.total_steps)

    @property
    def update_length(self) -> int:
        """Steps from one update of the bases to the next, at least one."""
        return max(1, length(self.frequency, self.total_steps))


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
