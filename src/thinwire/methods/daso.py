"""DASO: hierarchical, asynchronous averaging (dissertation of D. Coquelin, chapter 3).

Gradients are averaged inside the node at every step. Between nodes, parameters:

    1. warm-up: at every step, and all workers wait
    2. cycling: every B steps nodes send what they hold and keep training. S steps later the mean has arrived, and
       w ← (2S·w + P·mean) / (2S + P), with P the number of nodes (Eq. 3.2); or, compensated, the mean and all that
       the node itself has trained since
    3. cool-down: as the warm-up, so that all nodes end with one model

Once the loss does not fall any more B and S are halved; at B = 1 both start again. Running statistics travel with the
parameters, in fp32; other buffers are averaged where phases change. The optimizer's state is each node's own. With one
node it is plain data-parallel training.
"""

from dataclasses import dataclass
from typing import Literal

from thinwire.base.checks import check_fraction, check_whole, is_number, length
from thinwire.base.errors import ConfigError
from thinwire.comm.topology import Topology
from thinwire.config.common import GroupSize, Scheduled
from thinwire.exchange.nodes import NodeAverages
from thinwire.methods.registry import register
from thinwire.methods.timetable import Phase


@register(
    "daso",
    example={"total_steps": 20, "warmup": 4, "cooldown": 4, "every": 4, "overlap": 2, "plateau_patience": None},
    summary="Gradients inside the node, parameters between nodes while training goes on",
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

    def timetable(self, topology: Topology) -> list[Phase]:
        nodes = [NodeAverages(self, cycling="cycling")]
        return [
            Phase(name="warmup", until=self.warmup_length, exchanges=nodes),
            Phase(name="cycling", until=self.total_steps - self.cooldown_length, exchanges=nodes),
            Phase(name="cooldown", exchanges=nodes),
        ]
