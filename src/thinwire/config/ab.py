"""AB training."""

from dataclasses import dataclass
from typing import Any, Literal

from thinwire.checks import (
    check_bool,
    check_choice,
    check_cutoff,
    check_length,
    check_whole,
    is_number,
    length,
    patterns,
)
from thinwire.config.ab_paper import PaperAB
from thinwire.config.outer import Nesterov, Radial
from thinwire.config.renamed import renamed
from thinwire.config.warmed import Averaged
from thinwire.errors import ConfigError

_OUTER = Nesterov(lr=1.0)
_PAPERS = "AB.paper({}=…): the published cycle has it"


@renamed(
    group_steps="every",
    rebound=_PAPERS.format("rebound"),
    lr_rebound=_PAPERS.format("lr_rebound"),
)
@dataclass(frozen=True, kw_only=True)
class AB(Averaged):
    """AB training: groups train alone, at full rank and then low-rank factors A·B, and average in few bits.

    `warmup` and `factor_at` below 1 are fractions of `total_steps`; from 1 on they are whole numbers of steps, and
    a run whose length is not known needs no `total_steps`. `AB.paper` is the published cycle (arXiv 2405.01067).
    """

    warmup: float = 0.05
    """Steps at the beginning in which the whole world averages gradients."""

    warmup_wire: str = "lowrank:16"
    """The code that those gradients travel in."""

    wire: str = "int2"
    """The code that averages travel in: fp32, bf16, int8, int4, int2, bit, lowrank:R or topk:D."""

    outer: Nesterov | Radial | None = _OUTER
    """What to do with the mean change of groups: None applies it, Nesterov(lr=1.0) is an outer step with a
    momentum for that many groups, Radial() makes it as long as the changes it is the mean of."""

    factor_at: float | None = 0.75
    """When weights become factors: at the first average from there on. The end of the warm-up factors from the start,
    None only when `replica.factor_now()` is called."""

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

    keep_first: bool = True
    """Leave the first layer full."""

    keep_last: bool = True
    """Leave the last layer full."""

    keep: tuple[str, ...] = ()
    """Name patterns (as in a shell) of layers to leave full."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cutoff(self.cutoff)
        if self.target is not None and not (is_number(self.target) and self.target > 1):
            raise ConfigError(f"`target`={self.target!r} must be above 1: how many times fewer parameters, try 5")
        check_whole(self, "redecompose", 1)
        check_choice(self, "train", ("alternate", "split", "both"))
        check_choice(self, "merge", ("mean", "weighted"))
        check_choice(self, "moments", ("keep", "average"))
        for name in ("match_rate", "offload", "keep_first", "keep_last"):
            check_bool(self, name)
        object.__setattr__(self, "keep", patterns(self.keep))
        if self.second_moment != "group" and self.match_rate:
            raise ConfigError("`match_rate` scales updates that `second_moment` corrects; leave out one of them")
        if self.second_moment == "shared" and self.train == "split":
            raise ConfigError("second_moment='shared' needs groups that train the same factor; use train='alternate'")
        self._check_factor_at()

    @classmethod
    def paper(cls, total_steps: int, **fields: Any) -> PaperAB:
        """The published cycle: groups train A or B alone, merge, and all train the full model for a while."""
        return PaperAB(total_steps=total_steps, **fields)

    @property
    def factor_step(self) -> int | None:
        """`factor_at` in steps."""
        return None if self.factor_at is None else length(self.factor_at, self.total_steps or 1)

    def _check_factor_at(self) -> None:
        start, total = self.warmup_length, self.total_steps
        if total is not None and start + self.every > total:
            raise ConfigError(
                f"`total_steps`={total} is too small: the warm-up takes {start} steps (`warmup`={self.warmup}) and "
                f"groups then train for `every`={self.every} before they average; "
                + (f"use every={total - start} or less" if total > start else "shorten the warm-up")
            )
        if self.factor_at is None:
            return
        check_length(self, "factor_at")
        step = self.factor_step or 0
        if step < start:
            raise ConfigError(
                f"`factor_at`={self.factor_at} is step {step}, before the warm-up ends at step {start}; use "
                f"factor_at={start} to factor from its end on, or a later one"
            )
        if total is not None and step + self.every > total:
            raise ConfigError(
                f"`factor_at`={self.factor_at} is step {step}, which leaves less than `every`={self.every} of "
                f"`total_steps`={total} for training factors; use at most {total - self.every}, or None to stay at "
                "full rank"
            )
