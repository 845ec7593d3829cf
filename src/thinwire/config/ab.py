"""AB training, and its published cycle."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from thinwire.base.checks import check_cutoff, check_fraction, check_length, check_whole, is_number, length
from thinwire.base.errors import ConfigError
from thinwire.config.common import Averaged, Factored, GroupSize, Nesterov, Radial, Scheduled, listed

_OUTER = Nesterov(lr=1.0)
_LEAST_ROUND = 4
"""The shortest rounds that `every` is made by itself: those of fewer steps hardly train apart."""


@dataclass(frozen=True, kw_only=True)
class PaperAB(Factored, Scheduled):
    """AB training as published: full-rank rebounds between group phases (arXiv 2405.01067).

    `warmup` and `every` below 1 are fractions of `total_steps`, `rebound` and `lr_rebound`
    below 1 are fractions of a group phase; any of them from 1 on is a whole number of steps.
    """

    warmup: float = 0.20
    """Full-rank training by the whole world before the first group phase."""

    warmup_wire: str = "fp32"
    """The code that gradients travel in while the whole world trains: in the warm-up and in the rebounds."""

    every: float = 0.0333
    """Steps that groups train alone before a merge."""

    rebound: float = 0.25
    """Full-rank training by the whole world after a merge."""

    lr_rebound: float = 0.5
    """Steps over which the learning rate climbs back after each change of shape."""

    cutoff: float = 0.15
    """Singular values up to this share of the largest are dropped."""

    group_size: GroupSize = None
    """Workers per group: None is one group per node, "world" trains B by all workers without groups."""

    merge: Literal["mean", "trained", "weighted"] = "mean"
    """How copies are averaged: all of them, only the trained ones, or by observed loss."""

    moments: Literal["reset", "average", "carry"] = "reset"
    """What becomes of the optimizer's state at a merge."""

    second_moment: Literal["group", "estimate"] = "group"
    """What Adam divides by while groups train apart: the root of each group's own second moments, or what all-reduce
    would divide by, as far as a group can tell."""

    wire: str = "fp32"
    """The code that merges travel in: fp32, bf16, int8, int4, int2, bit, lowrank:R or topk:D."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("warmup", "every", "rebound", "lr_rebound"):
            check_fraction(self, name, zero_allowed=name != "every")
        check_cutoff(self.cutoff)
        self._check_one_cycle_fits()

    @property
    def warmup_length(self) -> int:
        return length(self.warmup, self.total_steps)

    @property
    def group_length(self) -> int:
        return length(self.every, self.total_steps)

    @property
    def rebound_length(self) -> int:
        return length(self.rebound, self.group_length)

    @property
    def lr_rebound_length(self) -> int:
        return length(self.lr_rebound, self.group_length)

    @property
    def idle(self) -> str:
        steps = {"rebound": self.rebound_length, "lr_rebound": self.lr_rebound_length}
        lost = {name: getattr(self, name) for name, taken in steps.items() if getattr(self, name) and not taken}
        if not lost:
            return ""
        return (
            f"group phases of {self.group_length} steps (`every`={self.every} of total_steps={self.total_steps}) make "
            f"{listed(lost)} no step at all: use a larger `every`, or whole steps, as {next(iter(lost))}=1"
        )

    def _check_one_cycle_fits(self) -> None:
        if self.group_length < 1:
            least = math.floor(0.5 / self.every) + 1
            raise ConfigError(
                f"`total_steps`={self.total_steps} is too small for one cycle: `every`={self.every} of it is "
                f"less than one step; use total_steps of at least {least}, or whole steps: {self._fitting}"
            )
        needed = self.warmup_length + self.group_length
        if needed > self.total_steps:
            room = self.total_steps - self.group_length
            raise ConfigError(
                f"`total_steps`={self.total_steps} is too small for one cycle: warm-up takes {self.warmup_length} "
                f"steps (`warmup`={self.warmup}) and a group phase {self.group_length} "
                f"(`every`={self.every}), together {needed}; "
                + (f"a warm-up of at most {room} steps fits" if room >= 0 else "shorten the group phase")
                + f"; {self._fitting}"
            )

    @property
    def _fitting(self) -> str:
        """Values of all fields that fit into a run of any length."""
        quarter = self.total_steps // 4
        fields = {"warmup": quarter, "every": max(1, quarter), "rebound": 1, "lr_rebound": 1}
        return f"{listed(fields)} fit together"


@dataclass(frozen=True, kw_only=True)
class AB(Factored, Averaged):
    """AB training: groups train alone, at full rank and then low-rank factors A·B, and average in few bits.

    `warmup` and `factor_at` below 1 are fractions of `total_steps`; from 1 on they are whole numbers of steps, and
    a run whose length is not known needs no `total_steps`. `AB.paper` is the published cycle (arXiv 2405.01067).
    """

    usual: ClassVar = {"every": 24, "factor_at": 0.75}

    every: int | Literal["auto"] = "auto"
    """Steps between two averages of the same parameters. "auto" is 24, and less where fewer steps are left from
    `factor_at` on."""

    warmup: float = 0.05
    """Steps at the beginning in which the whole world averages gradients."""

    warmup_wire: str = "lowrank:16"
    """The code that those gradients travel in."""

    wire: str = "int2"
    """The code that averages travel in: fp32, bf16, int8, int4, int2, bit, lowrank:R or topk:D."""

    outer: Nesterov | Radial | None = _OUTER
    """What to do with the mean change of groups: None applies it, Nesterov(lr=1.0) is an outer step with a
    momentum for that many groups, Radial() makes it as long as the changes it is the mean of."""

    factor_at: float | Literal["auto"] | None = "auto"
    """When weights become factors: at the first average from there on. "auto" is 0.75, or the last average that leaves
    a round for training factors where that is earlier. The end of the warm-up factors from the start, None only when
    `replica.factor_now()` is called."""

    cutoff: float = 0.2
    """Singular values up to this share of the largest are dropped, each time weights are decomposed."""

    target: float | None = None
    """How many times smaller the model is to become, in place of `cutoff`: all layers then have the cutoff that leaves
    the model at this size."""

    redecompose: int = 4
    """Averages from one decomposition to the next; ranks only fall."""

    train: Literal["alternate", "split", "both"] = "alternate"
    """The factor that groups train between two averages: all of them A, then all B; half of them A and half B, swapping
    at each average; or both."""

    merge: Literal["mean", "weighted"] = "mean"
    """How groups are weighted in an average: by their workers, or also by 1 / observed loss."""

    moments: Literal["keep", "average"] = "keep"
    """What happens to the optimizer's state when shapes change: each group transforms its own, or all take the mean of
    these, in bf16."""

    match_rate: bool = False
    """Whether updates of a factor are scaled so that A·B moves as far as the full weight did, where the optimizer keeps
    second moments."""

    offload: bool = False
    """Whether what averages need (agreed values, momentum, residuals) is held on the CPU between them."""

    def __post_init__(self) -> None:
        if self.factor_at not in (None, "auto"):
            check_fraction(self, "factor_at")
        super().__post_init__()
        check_cutoff(self.cutoff)
        if self.target is not None and not (is_number(self.target) and self.target > 1):
            raise ConfigError(f"`target`={self.target!r} must be above 1: how many times fewer parameters, try 5")
        check_whole(self, "redecompose", 1)
        if self.second_moment != "group" and self.match_rate:
            raise ConfigError("`match_rate` scales updates that `second_moment` corrects; leave out one of them")
        if self.second_moment == "shared" and self.train == "split":
            raise ConfigError("second_moment='shared' needs groups that train the same factor; use train='alternate'")
        self._check_lengths()

    @classmethod
    def paper(cls, total_steps: int, **fields: Any) -> PaperAB:
        """The published cycle: groups train A or B alone, merge, and all train the full model for a while."""
        return PaperAB(total_steps=total_steps, **fields)

    @property
    def round_length(self) -> int:
        """`every` in this run: a round must fit between the first factors and the end."""
        total, usual = self.total_steps, self.usual["every"]
        if isinstance(self.every, int) or self.factor_at is None or total is None:
            return super().round_length
        at = self.usual["factor_at"] if isinstance(self.factor_at, str) else self.factor_at
        left = total - max(self.warmup_length, length(at, total))
        if not _LEAST_ROUND <= left < usual:
            return usual
        return max(left, min(self._least_round, usual))

    @property
    def factor_step(self) -> int | None:
        """`factor_at` in steps."""
        at = self._factor_at
        return None if at is None else length(at, self.total_steps or 1)

    @property
    def _factor_at(self) -> float | None:
        """`factor_at` in this run."""
        if not isinstance(self.factor_at, str):
            return self.factor_at
        usual, total, start = self.usual["factor_at"], self.total_steps, self.warmup_length
        if total is None or start <= length(usual, total) <= total - self.round_length:
            return usual
        rounds = (total - start) // self.round_length
        return start + (rounds - 1) * self.round_length if rounds else usual

    @property
    def in_force(self) -> dict[str, Any]:
        return super().in_force | ({"factor_at": self._factor_at} if self.factor_at == "auto" else {})

    def _check_lengths(self) -> None:
        """One round must fit after the warm-up, and one from `factor_at` on."""
        start, total, every, at = self.warmup_length, self.total_steps, self.round_length, self._factor_at
        if total is not None and start + every > total:
            raise ConfigError(
                f"`total_steps`={total} is too small: the warm-up takes {start} steps (`warmup`={self.warmup}) and "
                f"groups then train for `every`={every} before they average; "
                + (f"use every={total - start} or less" if total > start else "shorten the warm-up")
                + self._fitting(total)
            )
        if at is None:
            return
        check_length(self, "factor_at", at)
        step = self.factor_step or 0
        if step < start:
            raise ConfigError(
                f"`factor_at`={at} is step {step}, before the warm-up ends at step {start}; use "
                f"factor_at={start} to factor from its end on, or a later one"
            )
        if total is not None and step + every > total:
            raise ConfigError(
                f"`factor_at`={at} is step {step}, which leaves less than `every`={every} of "
                f"`total_steps`={total} for training factors; use at most {total - every}, or None to stay at "
                f"full rank{self._fitting(total)}"
            )

    def _fitting(self, total: int) -> str:
        """Values of all fields that fit into a run of any length."""
        fields = {"warmup": total // 8, "every": min(24, max(1, total // 4)), "factor_at": total // 2}
        return f"; {listed(fields)} fit together"
