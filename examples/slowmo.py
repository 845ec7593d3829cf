"""SlowMo (arXiv 1910.00643): groups train alone; every average is followed by a step of a slow momentum."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

import thinwire.extend as tw


class SlowMomentum(tw.Exchange):
    """u ← βu + (start − mean)/γ, x ← start − αγu: γ is the learning rate, and `start` what the last step left."""

    def refuses(self, feature: tw.Feature, config: object) -> str | None:
        said = "SlowMo's momentum is of whole parameters: use DiLoCo for a model that is sharded"
        return said if feature is tw.Feature.SHARDS else None

    def attach(self, run: tw.Run) -> None:
        super().attach(run)
        self.schedule = Rounds(self, run.config.every)

    def begin(self, *, again: bool) -> None:
        self.start = tw.pack_wide(self.run.optimizers.parameters)
        self.slow = torch.zeros_like(self.start)

    def after_step(self) -> None:
        run, (beta, alpha) = self.run, (self.run.config.beta, self.run.config.alpha)
        if run.step % run.config.every:
            return
        run.check_counters()
        tw.average_model(run.wire, run.model, run.observed, run.step, run.weight)
        # In join() schedules may be behind: all take the highest rate of the groups that count.
        rates = torch.tensor(run.optimizers.rates, device=self.start.device) * (run.weight > 0)
        rates = run.wire.all_reduce_max(rates, "control")
        sizes = [sum(p.numel() for p in group["params"]) for _, group in run.optimizers.groups]
        lr = torch.cat([rate.expand(size) for rate, size in zip(rates, sizes, strict=True)])
        change = self.start - tw.pack_wide(run.optimizers.parameters)
        self.slow = beta * self.slow + torch.where(lr > 0, change / lr, 0)
        self.start = self.start - alpha * torch.where(lr > 0, lr * self.slow, change)
        tw.unpack_into(self.start, run.optimizers.parameters)

    def end(self, *, again: bool) -> None:
        run = self.run
        if run.step % run.config.every:  # an unfinished round ends with the mean
            tw.average_model(run.wire, run.model, run.observed, run.step, run.weight)

    @contextmanager
    def merged(self) -> Iterator[None]:
        with tw.restored(self.run.model):
            self.end(again=False)
            yield

    def forget(self, how: Literal["drop", "abandon", "restart"]) -> None:
        if how == "restart":
            self.begin(again=False)

    def state_dict(self) -> tw.PartState:
        return tw.PartState(shared={"start": self.start, "slow": self.slow})

    def load_state_dict(self, state: tw.PartState, *, stays: bool) -> None:
        self.begin(again=False)
        self.start.copy_(state.shared["start"])
        self.slow.copy_(state.shared["slow"])


class Rounds(tw.Every):
    """A step of the slow momentum at the end of every round."""

    @property
    def holds_one_model(self) -> bool:
        return self.run.step % self.run.config.every == 0


@tw.register("slowmo", example={"every": 4})
@dataclass(frozen=True, kw_only=True)
class SlowMo(tw.Config):
    """Groups train alone; every average is followed by a step of a slow momentum."""

    every: int = 12
    """Steps between two averages."""
    beta: float = 0.7
    """The slow momentum."""
    alpha: float = 1.0
    """The slow learning rate."""
    group_size: int | str | None = None
    """Workers per group: None is one group per node."""

    def __post_init__(self) -> None:
        super().__post_init__()
        tw.check_whole(self, "every", 1)
        tw.check_share(self, "beta", "the slow momentum")
        if not 0 < self.alpha < float("inf"):
            raise tw.ConfigError(f"`alpha`={self.alpha} must be a number above 0")

    def timetable(self, topology: tw.Topology) -> list[tw.Phase]:
        return [tw.Phase(name="train", exchanges=[SlowMomentum()])]
