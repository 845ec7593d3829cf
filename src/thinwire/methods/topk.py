"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally, ICLR 2018; arXiv 1712.01887): gradients in the code topk:D."""

from dataclasses import dataclass

from thinwire.base.checks import check_length, check_share, is_number, length
from thinwire.base.errors import ConfigError
from thinwire.comm.topology import Topology
from thinwire.config.common import Warmed
from thinwire.exchange.gradients import Gradients
from thinwire.exchange.momentum import SparseGradients, TakesMomentum
from thinwire.methods.registry import register
from thinwire.methods.timetable import Phase


@register(
    "topk",
    example={"density": 0.05, "ramp": 4},
    summary="Only the largest accumulated gradients (Deep Gradient Compression)",
)
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

    def timetable(self, topology: Topology) -> list[Phase]:
        """The ramp and what follows are one exchange, whose density falls."""
        rules, ramp_end = [TakesMomentum(self)], self.warmup_length + self.ramp_length
        sparse = [SparseGradients(self, rules[0])]
        phases = [Phase(name="train", exchanges=sparse, rules=rules)]
        if self.ramp_length:
            phases.insert(0, Phase(name="ramp", until=ramp_end, exchanges=sparse, rules=rules))
        if self.warmup_length:
            dense = [Gradients(self.warmup_wire)]
            phases.insert(0, Phase(name="warmup", until=self.warmup_length, exchanges=dense, rules=rules))
        return phases
