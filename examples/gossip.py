"""Gossip averaging: every so often each group averages its parameters with one other group, drawn at random."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from thinwire.extend import (
    Config,
    Method,
    average_model,
    check_whole,
    pack_wide,
    refuse_diverged,
    register,
    restored,
    unpack_into,
)


@dataclass(frozen=True, kw_only=True)
class Gossip(Config):
    every: int = 8
    """Steps between two averages."""
    group_size: int | str | None = None
    """Workers per group: None is one group per node."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "every", 1)


@register("gossip", Gossip, example=lambda **more: Gossip(**{"every": 4, **more}))
class GossipMethod(Method):
    """Groups train alone and average with one random partner at a time."""

    def attach(self) -> None:
        self.gradients.apart()  # gradients are averaged inside the group alone

    def after_step(self) -> None:
        if self.step % self.config.every or self.in_sync:
            return
        self.check_counters()
        refuse_diverged(self.wire, self.model, self.observed, self.step)
        self.observed.zero_()
        order = list(range(len(self.topology.groups)))
        random.Random(self.step).shuffle(order)  # all groups draw the same pairs
        place = order.index(self.topology.group_index) ^ 1
        if place < len(order):  # of an odd number one is left out
            partner = order[place]
            trained = [p for p in self.model.parameters() if p.requires_grad]
            own = pack_wide(trained)
            others = self.wire.swap(own, partner, "merge")
            mine, theirs = (float(group not in self.absent) for group in (self.topology.group_index, partner))
            if mine or theirs:  # in join() a group may have trained nothing
                unpack_into((mine * own + theirs * others) / (mine + theirs), trained)

    @property
    def in_sync(self) -> bool:
        return len(self.topology.groups) == 1

    @property
    def next_event(self) -> int:
        return (self.step // self.config.every + 1) * self.config.every

    @contextmanager
    def merged(self) -> Iterator[None]:
        with restored(self.model):
            average_model(self.wire, self.model, self.observed, self.step)
            yield

    def finish(self, cutoff: float | None) -> None:
        self.check_counters()
        average_model(self.wire, self.model, self.observed, self.step)
        super().finish(cutoff)
