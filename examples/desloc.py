"""DES-LOC: parameters, first and second moments of the optimizer are averaged at intervals of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import thinwire.extend as tw


class Desynchronized(tw.Exchange):
    """Parameters and moments, averaged exactly over groups."""

    averages_moments = True

    def attach(self, run: tw.Run) -> None:
        super().attach(run)
        self.schedule = Intervals(self, run.config.every, run.config.every_first, run.config.every_second)

    def after_step(self) -> None:
        run, config = self.run, self.run.config
        names = ("exp_avg", "momentum_buffer") if run.step % config.every_first == 0 else ()
        names += ("exp_avg_sq", "max_exp_avg_sq") if run.step % config.every_second == 0 else ()
        if len(run.topology.groups) == 1 or (run.step % config.every and not names):
            return
        run.check_counters()
        if run.step % config.every == 0:
            tw.average_model(run.wire, run.model, run.observed, run.step, run.weight)
        if names:
            trained = run.optimizers.parameters

            def mean() -> None:  # by now all groups have state of the same parameters
                states = [run.optimizers.state_of(p) for p in trained]
                moments = [tw.local(s[name]) for s in states for name in names if s.get(name) is not None]
                tw.average(run.wire, moments, run.weight, "moments")

            tw.average_moments(run.wire, run.optimizers, trained, run.weight, average_states=mean)

    def end(self, *, again: bool) -> None:
        run = self.run
        if run.step % run.config.every:  # or it has just been averaged
            tw.average_model(run.wire, run.model, run.observed, run.step, run.weight)

    @contextmanager
    def merged(self) -> Iterator[None]:
        with tw.restored(self.run.model):
            self.end(again=False)
            yield


class Intervals(tw.Every):
    """When anything is averaged."""

    @property
    def last_average(self) -> int | None:  # of parameters: groups also meet for moments alone
        step, every = self.run.step + 1, self.run.config.every
        return None if step % every else step - every

    @property
    def holds_one_model(self) -> bool:
        return self.run.step % self.run.config.every == 0


@tw.register("desloc", example={"every": 4, "every_first": 6, "every_second": 8})
@dataclass(frozen=True, kw_only=True)
class DesLoc(tw.Config):
    """Groups train alone; parameters are averaged often, moments of the optimizer seldom."""

    every: int = 24
    """Steps between two averages of parameters."""
    every_first: int = 72
    """Steps between two averages of first moments."""
    every_second: int = 144
    """Steps between two averages of second moments."""
    group_size: int | str | None = None
    """Workers per group: None is one group per node."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("every", "every_first", "every_second"):
            tw.check_whole(self, name, 1)

    def timetable(self, topology: tw.Topology) -> list[tw.Phase]:
        return [tw.Phase(name="train", exchanges=[Desynchronized()])]
