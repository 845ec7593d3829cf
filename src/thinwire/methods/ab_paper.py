"""AB training (arXiv 2405.01067; dissertation of D. Coquelin, section 5.2), with the paper's cycle.

    1. warm-up: the whole world trains the full model
    2. decompose: every weight W becomes A B, small singular values are dropped
    3. groups: each group trains A or B alone, and everything that was not factored
    4. merge: all copies are averaged, W = A B is rebuilt
    5. rebound: the whole world trains the full model; then again from 2

A group phase begins only if all of it fits before `total_steps`; what is left is trained as in 5.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from thinwire.base.checks import check_cutoff, check_fraction, length
from thinwire.base.errors import ConfigError
from thinwire.comm.topology import Topology
from thinwire.config.common import Factored, GroupSize, Scheduled, listed
from thinwire.exchange.gradients import Gradients
from thinwire.exchange.parts import Exchange
from thinwire.methods.registry import register
from thinwire.methods.timetable import Phase
from thinwire.shape.halves import Halves, Merge, Rebound


# The cutoff is high because random weights have flat spectra.
@register(
    "ab-paper",
    example={"total_steps": 20, "warmup": 3, "every": 4, "rebound": 2, "lr_rebound": 3, "cutoff": 0.6},
    summary="Groups train low-rank factors alone and merge (AB training)",
)
@dataclass(frozen=True, kw_only=True)
class PaperAB(Factored, Scheduled):
    """AB training as published: full-rank rebounds between group phases (arXiv 2405.01067).

    `warmup` and `every` below 1 are fractions of `total_steps`, `rebound` and `lr_rebound`
    below 1 are fractions of a group phase; any of them from 1 on is a whole number of steps.
    """

    cuts_at_end: ClassVar = True

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

    def timetable(self, topology: Topology) -> list[Phase]:
        """Group phases and rebounds as long as a whole group phase fits; the rest is trained at full rank."""
        halves = Halves(self, phase="groups")
        full, merge = [Gradients(self.warmup_wire)], [Merge(self, halves)]
        rules = [Rebound(halves, self.lr_rebound_length)]

        def phase(name: str, until: int | None, exchanges: Sequence[Exchange]) -> Phase:
            return Phase(name=name, until=until, exchanges=exchanges, shape=halves, rules=rules)

        step = self.warmup_length
        phases = [phase("warmup", step, full)]
        while step + self.group_length <= self.total_steps:
            phases.append(phase("groups", step + self.group_length, merge))
            step = min(step + self.group_length + self.rebound_length, self.total_steps)
            phases.append(phase("rebound", step, full))
        return [*phases, phase("final", None, full)]
