"""Gossip averaging: every so often each group averages its parameters with one other group, drawn at random."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from thinwire.extend import (
    Config,
    Every,
    Exchange,
    Phase,
    Run,
    Topology,
    average_model,
    check_whole,
    pack_wide,
    refuse_diverged,
    register,
    restored,
    unpack_into,
)


class Pairs(Exchange):
    """Parameters, averaged by two groups at a time."""

    def __init__(self, every: int) -> None:
        self.every = every

    def attach(self, run: Run) -> None:
        super().attach(run)
        self.schedule = Every(self, self.every)

    def after_step(self) -> None:
        run, groups = self.run, len(self.run.topology.groups)
        if run.step % self.every or groups == 1:
            return
        run.check_counters()
        refuse_diverged(run.wire, run.model, run.observed, run.step)
        run.observed.zero_()
        order = list(range(groups))
        random.Random(run.step).shuffle(order)  # all groups draw the same pairs
        place = order.index(run.topology.group_index) ^ 1
        if place < groups:  # of an odd number one is left out
            partner = order[place]
            trained = [p for p in run.model.parameters() if p.requires_grad]
            own = pack_wide(trained)
            others = run.wire.swap(own, partner, "merge")
            mine, theirs = (float(group not in run.absent) for group in (run.topology.group_index, partner))
            if mine or theirs:  # in join() a group may have trained nothing
                unpack_into((mine * own + theirs * others) / (mine + theirs), trained)

    def end(self, *, again: bool) -> None:
        average_model(self.run.wire, self.run.model, self.run.observed, self.run.step, self.run.weight)

    @contextmanager
    def merged(self) -> Iterator[None]:
        with restored(self.run.model):
            self.end(again=False)
            yield


@register("gossip", example={"every": 4})
@dataclass(frozen=True, kw_only=True)
class Gossip(Config):
    """Groups train alone and average with one random partner at a time."""

    every: int = 8
    """Steps between two averages."""
    group_size: int | str | None = None
    """Workers per group: None is one group per node."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "every", 1)

    def timetable(self, topology: Topology) -> list[Phase]:
        return [Phase(name="train", exchanges=[Pairs(self.every)])]
