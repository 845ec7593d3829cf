"""The config of each method but AB: data-parallel training, and methods that send less of it."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from thinwire.base.checks import check_cutoff, check_fraction, check_length, check_share, check_whole, is_number, length
from thinwire.base.errors import ConfigError
from thinwire.config.common import Averaged, Config, Factored, GroupSize, Nesterov, Scheduled, Warmed


@dataclass(frozen=True, kw_only=True)
class AllReduce(Config):
    """Data-parallel training by PyTorch's own DistributedDataParallel, with its bytes counted."""

    wire: str = "fp32"
    """The code that gradients travel in: fp32, bf16, int8, int4, int2, bit, lowrank:R or topk:D."""

    group_size: GroupSize = None
    """Workers per node, where one machine stands for several. In fp32 and bf16 it changes what is counted, not what is
    computed. Other codes are for the link between groups; inside them gradients are averaged exactly."""


@dataclass(frozen=True, kw_only=True)
class Coded(Warmed):
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


@dataclass(frozen=True, kw_only=True)
class OneBit(Coded):
    """One bit per element and two scales per column, with error feedback (1-bit SGD, Seide et al. 2014)."""


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
class OIALR(Factored, Scheduled):
    """Bases frozen once they are stable, the square matrix between them trained, ranks falling (dissertation of
    D. Coquelin, chapter 4).

    `factor_at` and `redecompose` below 1 are fractions of `total_steps`, from 1 on whole steps.
    """

    factor_at: float = 1 / 3
    """Full-rank training before weights become U S Vᵀ; 0 begins with them."""

    redecompose: float = 0.0333
    """Steps between two updates of the bases after that, in which ranks may fall."""

    updates_from: float | None = None
    """The step from which `redecompose` is counted, if not `factor_at`."""

    cutoff: float = 0.1
    """Singular values up to this share of the largest are dropped at an update."""

    layer_fraction: float = 0.1
    """Share of the layers by which each update reaches further from the last layer towards the first."""

    max_shrink: float = 0.5
    """The largest share of a layer's ranks that one update may drop; 1 for no limit but the cutoff."""

    moments: Literal["carry", "reset"] = "carry"
    """What happens to the optimizer's state when bases change: transformed to the new bases, or reset."""

    match_rate: bool | None = None
    """Whether S's updates are scaled by √(m n)/k. Adam's updates have one size per element: scaled, a weight of k²
    elements moves as far as a full one of m n. None does it where the optimizer keeps second moments."""

    keep_first: bool = False

    warmup_wire: str = "fp32"
    """The code that gradients travel in before `factor_at`."""

    wire: str = "fp32"
    """The code that gradients travel in afterwards: fp32, bf16, int8, int4, int2, bit, lowrank:R or topk:D."""

    group_size: GroupSize = None
    """Workers per node, where one machine stands for several; they divide the decompositions among themselves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self, "factor_at", zero_allowed=True)
        check_fraction(self, "redecompose", zero_allowed=False)
        check_cutoff(self.cutoff, zero_allowed=True)
        for name in ("layer_fraction", "max_shrink"):
            value = getattr(self, name)
            if not (is_number(value) and 0 < value <= 1):
                raise ConfigError(f"`{name}`={value!r} must be above 0 and at most 1: a share")
        if self.updates_from is not None:
            check_fraction(self, "updates_from")
        if self.warmup_length >= self.total_steps:
            raise ConfigError(
                f"`factor_at`={self.factor_at} leaves nothing of `total_steps`={self.total_steps} for training at low "
                "rank; use a smaller one, such as a third"
            )

    @property
    def warmup_length(self) -> int:
        """Full-rank training in steps."""
        return length(self.factor_at, self.total_steps)

    @property
    def updates_start(self) -> int:
        """The step from which on updates are counted."""
        return self.warmup_length if self.updates_from is None else length(self.updates_from, self.total_steps)

    @property
    def update_length(self) -> int:
        """Steps from one update of the bases to the next, at least one."""
        return max(1, length(self.redecompose, self.total_steps))

    @property
    def idle(self) -> str:
        if self.updates_start + self.update_length < self.total_steps:
            return ""
        return (
            f"the first update of the bases would be at step {self.updates_start + self.update_length} of "
            f"total_steps={self.total_steps}, so there is none: lower `redecompose`={self.redecompose} or "
            f"`factor_at`={self.factor_at}"
        )


@dataclass(frozen=True, kw_only=True)
class DASO(Scheduled):
    """Gradients averaged inside the node, parameters between nodes every few steps during training (Ch. 3)."""

    warmup: float = 0.1
    """Steps at the beginning in which nodes average their parameters every time, and wait for it: a whole number, or a
    fraction of `total_steps` below 1."""

    warmup_wire: str | None = None
    """The code of these averages; None is the same as `wire`."""

    cooldown: float = 0.1
    """As the warm-up, at the end."""

    every: int = 4
    """B, steps between two averages, at first; it is halved when the loss stops falling."""

    overlap: int = 1
    """S, steps of training while an average is pending, at most B; 0 waits for it."""

    compensate: bool = False
    """Whether a node keeps all that it trained while an average was pending, w ← mean + (w − what it sent), as in
    arXiv 1906.12043; good where S is 1 or 2. Else Eq. 3.2, which takes P·S/(2S + P) steps back every B steps."""

    plateau_patience: int | None = 2
    """More calls of `epoch_end` in a row without a better loss than this halve B and S; at B = 1 both start again. None
    pins them."""

    plateau_threshold: float = 0.05
    """The share by which a loss must fall below the best to be better."""

    second_moment: Literal["group", "estimate"] = "group"
    """What Adam divides by: the root of each node's own second moments, or what all-reduce would divide by, as far as a
    node can tell."""

    sharded: bool = False
    """Whether all workers of a node carry a share of the parameters over the slow link at once; else one of them, in
    turn, carries everything."""

    wire: str = "bf16"
    """The code that averages travel in: fp32, bf16, int8, int4, int2, bit, lowrank:R or topk:D."""

    group_size: GroupSize = None
    """Workers per node: None is as the machines are, and where there is only one each worker stands for a node."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self, "warmup")
        check_fraction(self, "cooldown")
        check_whole(self, "every", 1)
        check_whole(self, "overlap", 0)
        if self.overlap > self.every:
            raise ConfigError(
                f"`overlap`={self.overlap} must be at most `every`={self.every}: an average must arrive before the "
                f"next one is sent; use 0 to {self.every}"
            )
        if self.plateau_patience is not None:
            check_whole(self, "plateau_patience", 0)
        if not (is_number(self.plateau_threshold) and 0 <= self.plateau_threshold < 1):
            raise ConfigError(f"`plateau_threshold`={self.plateau_threshold!r} must be from 0 to below 1, such as 0.05")
        if self.warmup_length + self.cooldown_length > self.total_steps:
            raise ConfigError(
                f"`warmup`={self.warmup} and `cooldown`={self.cooldown} are more than "
                f"`total_steps`={self.total_steps}; lower them"
            )

    @property
    def warmup_code(self) -> str:
        return self.warmup_wire or self.wire

    @property
    def warmup_length(self) -> int:
        return length(self.warmup, self.total_steps)

    @property
    def cooldown_length(self) -> int:
        steps = length(self.cooldown, self.total_steps)
        are_shares = self.warmup + self.cooldown <= 1  # which both may be rounded up
        return min(steps, self.total_steps - self.warmup_length) if are_shares else steps

    @property
    def idle(self) -> str:
        steps = self.total_steps - self.warmup_length - self.cooldown_length
        if self.every + self.overlap <= steps:
            return ""
        return (
            f"total_steps={self.total_steps} leaves {steps} steps between warm-up and cool-down, fewer than "
            f"`every`={self.every} and `overlap`={self.overlap} together: nodes never average there; lower them"
        )
