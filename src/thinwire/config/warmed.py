"""Fields that methods share: a warm-up, and averages of parameters every so often."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

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
from thinwire.config.outer import Nesterov, Radial
from thinwire.config.timed import Timed


@dataclass(frozen=True, kw_only=True)
class Warmed(Timed):
    """What methods with a warm-up share."""

    warmup: float = 0
    """Steps at the beginning in which the whole world averages gradients: a whole number, or a fraction of
    `total_steps` below 1."""

    warmup_wire: str = "fp32"
    """The code that those gradients travel in; a cheap one such as lowrank:16 keeps the warm-up from being most of the
    bytes."""

    total_steps: int | None = None
    """Optimizer steps of the whole run. Fractions are of it, and fields that are "auto" follow it."""

    group_size: GroupSize = None
    """Workers per group, which averages its gradients exactly at every step: None is one group per node."""

    def __post_init__(self) -> None:
        check_length(self, "warmup")
        check_code(self, "warmup_wire")
        check_group_size(self.group_size)

    @property
    def warmup_length(self) -> int:
        return length(self.warmup, self.total_steps or 1)

    @property
    def idle(self) -> str:
        if self.total_steps is None or self.warmup_length < self.total_steps:
            return ""
        return f"the warm-up (`warmup`={self.warmup}) is all of total_steps={self.total_steps}: shorten it"


@dataclass(frozen=True, kw_only=True)
class Coded(Warmed):
    """What methods share that code every gradient after a warm-up, for any optimizer."""

    freeze_second_moment: bool = False
    """Whether Adam's second moments stay as the warm-up left them, as in 1-bit Adam (arXiv 2102.02888): those of coded
    gradients are too large where gradients are small."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bool(self, "freeze_second_moment")
        if self.freeze_second_moment and not self.warmup_length:
            steps = f", which is no step of total_steps={self.total_steps}" if self.warmup else ""
            raise ConfigError(
                f"freeze_second_moment=True needs a warm-up, which makes the second moments, not `warmup`="
                f"{self.warmup}{steps}; use 0.1 of `total_steps`, or at least one step"
            )


@dataclass(frozen=True, kw_only=True)
class Averaged(Warmed):
    """What methods share whose groups train alone and average their parameters."""

    usual: ClassVar = {"every": 24}

    every: int | Literal["auto"] = "auto"
    """Steps between two averages of the same parameters. "auto" is 24, or half of what follows the warm-up where that
    is less than 24 steps."""

    every_max: int | None = None
    """None keeps `every` constant. A number lets it grow up to this as the learning rate falls: with the square of the
    highest rate so far over the present one (quadratic synchronisation rule, arXiv 2310.14423)."""

    wire: str = "fp32"
    """The code that averages travel in: fp32, bf16, int8, int4, int2, bit, lowrank:R or topk:D."""

    outer: Nesterov | Radial | None = None
    """What to do with the mean change of groups: None applies it, Nesterov(lr=1.0, momentum=0.5) is an outer step,
    Radial() makes it as long as the changes it is the mean of."""

    second_moment: Literal["group", "estimate", "shared"] = "group"
    """What Adam divides by while groups train apart: "group" by the root of each group's own second moments; "estimate"
    by what all-reduce would, as far as a group can tell; "shared" by what groups know together: first moments and the
    size of each row of second ones are averaged too."""

    moments_wire: str = "int2"
    """The code that first moments travel in, if they are shared: fp32, bf16, int8, int4 or int2."""

    rows: Literal["mean", "seen"] = "mean"
    """How rows of embeddings are averaged: "mean" like everything else, "seen" by how often each group saw them.
    Shared second moments do as much."""

    overlap: int = 0
    """Steps of training while an average is pending."""

    mix: float = 0.5
    """Share of a group's own values when an average comes back that was sent `overlap` steps before; 0 takes none."""

    diverged: Literal["stop", "leave_out"] = "stop"
    """What happens at an average if a group has values that are not finite: the run stops on all workers, or the others
    average without the group, which goes on from their result."""

    outliers: Literal["keep", "clip", "leave_out"] = "keep"
    """What happens at an average to a group that came much further than the others: nothing, its change is shortened to
    the others' median, or it is left out. Needs three groups."""

    outlier_limit: float = 5.0
    """How many times as long as the median of the others a change must be for its group to be an outlier."""

    checksum_every: int | None = None
    """Averages from one comparison of checksums to the next: whether all workers hold the same bits. None compares
    never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every != "auto":
            check_whole(self, "every", 1)
        check_whole(self, "overlap", 0)
        check_code(self, "wire")
        check_share(self, "mix", "0 takes the average as it is")
        check_choice(self, "second_moment", ("group", "estimate", "shared"))
        check_choice(self, "moments_wire", ("fp32", "bf16", "int8", "int4", "int2"))
        check_choice(self, "rows", ("mean", "seen"))
        self._check_left_out()
        if self.second_moment == "shared" and self.overlap:
            raise ConfigError(
                f"second_moment='shared' is for averages that are waited for, not for `overlap`={self.overlap}: groups "
                "would go on with other moments; use overlap=0, or second_moment='estimate'"
            )
        if self.second_moment == "shared" and self.rows == "seen":
            raise ConfigError(
                "rows='seen' is for second_moment 'group' or 'estimate': with 'shared' it makes up a second time for "
                "what one group alone has seen, and rare words overfit; leave `rows` out"
            )
        if self.every_max is not None:
            check_whole(self, "every_max", self.round_length)
        if not (self.outer is None or isinstance(self.outer, Nesterov | Radial)):
            raise ConfigError(
                f"`outer`={self.outer!r} must be None, thinwire.Nesterov(lr=1.0, momentum=0.5) or thinwire.Radial()"
            )
        if self.overlap >= self.round_length:
            raise ConfigError(
                f"`overlap`={self.overlap} must be below `every`={self.round_length}: an average must be back before "
                "the next one is sent"
            )

    @property
    def round_length(self) -> int:
        """`every` in this run."""
        if isinstance(self.every, int):
            return self.every
        usual, total = self.usual["every"], self.total_steps
        left = usual if total is None else total - self.warmup_length
        return usual if left >= usual else max(left // 2, min(self._least_round, usual))

    @property
    def _least_round(self) -> int:
        """The shortest round that has room for what happens in it."""
        return self.overlap + 1

    @property
    def in_force(self) -> dict[str, Any]:
        return {"every": self.round_length} if self.every == "auto" else {}

    @property
    def idle(self) -> str:
        left = None if self.total_steps is None else self.total_steps - self.warmup_length
        if super().idle or left is None or self.round_length <= left:
            return super().idle
        return (
            f"`every`={self.round_length} is more than the {left} steps after the warm-up: groups average only at the "
            "end; lower it"
        )

    @property
    def is_screened(self) -> bool:
        """Whether some groups may count less than others in an average, or not at all."""
        return self.diverged != "stop" or self.outliers != "keep"

    def _check_left_out(self) -> None:
        if self.checksum_every is not None:
            check_whole(self, "checksum_every", 1)
        check_choice(self, "diverged", ("stop", "leave_out"))
        check_choice(self, "outliers", ("keep", "clip", "leave_out"))
        if not (is_number(self.outlier_limit) and self.outlier_limit > 1):
            raise ConfigError(
                f"`outlier_limit`={self.outlier_limit!r} must be a number above 1: how many times as long as the "
                "others' median a change must be, such as 5"
            )
        name = f"diverged={self.diverged!r}" if self.diverged != "stop" else f"outliers={self.outliers!r}"
        if self.is_screened and (self.second_moment == "shared" or self.rows == "seen"):
            other = "second_moment='shared'" if self.second_moment == "shared" else "rows='seen'"
            raise ConfigError(f"{name} cannot take a group out of what {other} shares; leave out one of them")
        if self.outliers == "leave_out" and self.overlap:
            raise ConfigError(
                f"outliers='leave_out' is for averages that are waited for, not for `overlap`={self.overlap}; use "
                "outliers='clip', or overlap=0"
            )
