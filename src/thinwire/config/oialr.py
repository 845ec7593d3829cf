"""OIALR."""

from dataclasses import dataclass
from typing import Literal

from thinwire.base.checks import (
    check_bool,
    check_choice,
    check_cutoff,
    check_fraction,
    check_group_size,
    check_total,
    is_number,
    length,
    patterns,
)
from thinwire.base.errors import ConfigError
from thinwire.config.codes import check_code
from thinwire.config.groups import GroupSize
from thinwire.config.timed import Timed


@dataclass(frozen=True, kw_only=True)
class OIALR(Timed):
    """Bases frozen once they are stable, the square matrix between them trained, ranks falling (dissertation of
    D. Coquelin, chapter 4).

    `factor_at` and `redecompose` below 1 are fractions of `total_steps`, from 1 on whole steps.
    """

    total_steps: int
    """Optimizer steps of the whole run."""

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
    """Leave the first layer full."""

    keep_last: bool = True
    """Leave the last layer full."""

    keep: tuple[str, ...] = ()
    """Name patterns (as in a shell) of layers to leave full."""

    warmup_wire: str = "fp32"
    """The code that gradients travel in before `factor_at`."""

    wire: str = "fp32"
    """The code that gradients travel in afterwards: fp32, bf16, int8, int4, int2, bit, lowrank:R or topk:D."""

    group_size: GroupSize = None
    """Workers per node, where one machine stands for several; they divide the decompositions among themselves."""

    def __post_init__(self) -> None:
        check_total(self.total_steps)
        check_fraction(self, "factor_at", zero_allowed=True)
        check_fraction(self, "redecompose", zero_allowed=False)
        check_cutoff(self.cutoff, zero_allowed=True)
        for name in ("layer_fraction", "max_shrink"):
            value = getattr(self, name)
            if not (is_number(value) and 0 < value <= 1):
                raise ConfigError(f"`{name}`={value!r} must be above 0 and at most 1: a share")
        check_choice(self, "moments", ("carry", "reset"))
        check_code(self, "wire")
        check_code(self, "warmup_wire")
        for name in ("keep_first", "keep_last"):
            check_bool(self, name)
        if self.match_rate is not None:
            check_bool(self, "match_rate")
        check_group_size(self.group_size)
        object.__setattr__(self, "keep", patterns(self.keep))
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
