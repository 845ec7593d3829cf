"""Hierarchical, asynchronous averaging."""

from dataclasses import dataclass
from typing import Literal

from thinwire.checks import check_bool, check_choice, check_group_size, check_total, check_whole, is_number
from thinwire.config.groups import GroupSize
from thinwire.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DASO:
    """Gradients averaged inside the node, parameters between nodes now and then, while training goes on (Ch. 3)."""

    total_steps: int
    """Optimizer steps of the whole run."""

    steps_per_epoch: float
    """Optimizer steps of an epoch; need not be whole, as where the last batch of one reaches into the next."""

    warmup_epochs: float = 4
    """Epochs at the beginning in which nodes average their parameters at every step, and wait for it."""

    cooldown_epochs: float = 4
    """The same at the end."""

    max_skips: int = 4
    """B, steps between two averages, to begin with; it is halved when the loss does not fall any more."""

    wait: int = 1
    """S, steps that training goes on while an average is under way, at most B; 0 waits for it."""

    compensate: bool = False
    """Whether a node keeps all that it trained while an average was under way, w ← mean + (w − what it sent), as in
    arXiv 1906.12043; good where S is 1 or 2. Else Eq. 3.2, which takes P·S/(2S + P) steps back every B steps."""

    plateau_patience: int | None = 2
    """Calls of `epoch_end` without a better loss, after the first of which more than so many halve B and S; at B = 1
    both start again. None pins them."""

    plateau_threshold: float = 0.05
    """The share by which a loss must fall below the best to be better."""

    sharded: bool = False
    """Whether all workers of a node carry a share of the parameters over the slow link at once; else one of them, in
    turn, carries everything."""

    wire: Literal["fp32", "bf16", "int8"] = "bf16"
    """What differences to the last agreed values are rounded to while they travel; "int8" with a scale a block and
    error feedback."""

    group_size: GroupSize = None
    """Workers to a node: None is as the machines are, and where there is only one each worker stands for a node."""

    def __post_init__(self) -> None:
        check_total(self.total_steps)
        if not (is_number(self.steps_per_epoch) and self.steps_per_epoch > 0):
            raise ConfigError(
                f"`steps_per_epoch`={self.steps_per_epoch!r} must be above 0: len(loader), for most loops"
            )
        for name in ("warmup_epochs", "cooldown_epochs"):
            if not (is_number(value := getattr(self, name)) and value >= 0):
                raise ConfigError(f"`{name}`={value!r} must be a number of epochs from 0 on")
        check_whole(self, "max_skips", 1)
        check_whole(self, "wait", 0)
        if self.wait > self.max_skips:
            raise ConfigError(
                f"`wait`={self.wait} must be at most `max_skips`={self.max_skips}: an average must be there before the "
                f"next one is sent; use 0 to {self.max_skips}"
            )
        if self.plateau_patience is not None:
            check_whole(self, "plateau_patience", 0)
        if not (is_number(self.plateau_threshold) and 0 <= self.plateau_threshold < 1):
            raise ConfigError(f"`plateau_threshold`={self.plateau_threshold!r} must be from 0 to below 1, such as 0.05")
        check_bool(self, "sharded")
        check_bool(self, "compensate")
        check_choice(self, "wire", ("fp32", "bf16", "int8"))
        check_group_size(self.group_size)
        epochs = self.total_steps / self.steps_per_epoch
        if self.warmup_epochs + self.cooldown_epochs > epochs * (1 + 1e-9):
            raise ConfigError(
                f"`warmup_epochs`={self.warmup_epochs} and `cooldown_epochs`={self.cooldown_epochs} are more than the "
                f"{epochs:.4g} epochs of this run (`total_steps`={self.total_steps}, "
                f"`steps_per_epoch`={self.steps_per_epoch:.4g}); lower them"
            )

    @property
    def warmup_length(self) -> int:
        """Warm-up in steps."""
        return round(self.warmup_epochs * self.steps_per_epoch)

    @property
    def cooldown_length(self) -> int:
        """Cool-down in steps."""
        return min(round(self.cooldown_epochs * self.steps_per_epoch), self.total_steps - self.warmup_length)
