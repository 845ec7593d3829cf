"""AB training: groups that train alone, at full rank and then low-rank factors, and average in few bits.

    1. warm-up: the whole world averages gradients at every step, in `warmup_wire`
    2. local: each group trains the full model alone; every `every` steps groups average, in `wire`, and make an outer
       step of the mean change
    3. at the first average from `factor_at` on every weight W becomes A B, without its small singular values
    4. factored: groups train A between two averages, then B, and so on; every `redecompose` averages A B is decomposed
       again, and ranks fall

While all groups train A, B is the same everywhere: the mean of A B is A's mean times B, so an average is exact, and
only half of the factors travel. Each group keeps its own optimizer state, and takes it along when shapes change. What a
code has left out by then is sent in int8 with the last average before the change.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from thinwire.base.checks import check_cutoff, check_fraction, check_length, check_whole, is_number, length
from thinwire.base.errors import ConfigError
from thinwire.comm.topology import Topology
from thinwire.config.common import Averaged, Factored, Nesterov, Radial, listed
from thinwire.exchange.gradients import Gradients
from thinwire.methods.ab_paper import PaperAB
from thinwire.methods.registry import register
from thinwire.methods.timetable import Phase
from thinwire.shape.factors import FactorAverages, Factors

_OUTER = Nesterov(lr=1.0)
_LEAST_ROUND = 4
"""The shortest rounds that `every` is made by itself: those of fewer steps hardly train apart."""


# The cutoff is high because random weights have flat spectra.
@register(
    "ab",
    example={
        "total_steps": 20,
        "warmup": 2,
        "every": 3,
        "factor_at": 5,
        "redecompose": 2,
        "cutoff": 0.6,
        "warmup_wire": "lowrank:2",
    },
    summary="Groups train alone and average in few bits, at full rank and then low-rank factors (AB training)",
)
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

    def timetable(self, topology: Topology) -> list[Phase]:
        """Rounds go on while weights become factors, at the end of one of them."""
        factors = Factors(self)
        averages = [FactorAverages(self, factors)]
        warmup = [Gradients(self.warmup_wire)]
        return [
            Phase(name="warmup", until=self.warmup_length, exchanges=warmup, shape=factors),
            Phase(name="local", until=lambda: bool(factors.factored), exchanges=averages, shape=factors),
            Phase(name="factored", exchanges=averages, shape=factors),
        ]
