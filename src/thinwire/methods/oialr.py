"""OIALR, orthogonality-informed adaptive low-rank training (dissertation of D. Coquelin, section 4.3, Algorithm 1).

    1. warm-up: full rank until `factor_at`, when the bases of the weights are stable
    2. every weight becomes U S Vᵀ: U and V are frozen, the square S is trained
    3. every `redecompose` steps S of the last layers is decomposed, its vectors are folded into U and V, and small
       singular values are dropped; each time more layers are among the last ones

Only S and what is not factored have gradients, so only they cross the wire.
"""

from dataclasses import dataclass
from typing import Literal

from thinwire.base.checks import check_cutoff, check_fraction, is_number, length
from thinwire.base.errors import ConfigError
from thinwire.comm.topology import Topology
from thinwire.config.common import Factored, GroupSize, Scheduled
from thinwire.exchange.gradients import Gradients
from thinwire.methods.registry import register
from thinwire.methods.timetable import Phase
from thinwire.shape.basis import Basis


@register(
    "oialr",
    example={"total_steps": 20, "factor_at": 4, "redecompose": 3, "cutoff": 0.3, "layer_fraction": 0.5},
    summary="Bases frozen once stable, the small matrix between them trained (OIALR)",
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

    def timetable(self, topology: Topology) -> list[Phase]:
        basis = Basis(self)
        return [
            Phase(name="warmup", until=self.warmup_length, exchanges=[Gradients(self.warmup_wire)], shape=basis),
            Phase(name="lowrank", exchanges=[Gradients(self.wire)], shape=basis),
        ]
