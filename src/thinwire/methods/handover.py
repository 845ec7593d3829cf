"""Momentum and weight decay taken over from `torch.optim.SGD` by a method that applies momentum before it sends."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD

from thinwire.base.errors import ConfigError
from thinwire.factor.optimizers import Optimizers


@dataclass
class Settings:
    """What was taken from one parameter group."""

    momentum: float = 0.0
    nesterov: bool = False
    decay: float = 0.0
    used: bool = False
    """Whether there ever was momentum."""


class MomentumHandover:
    """The settings taken from SGD optimizers; other optimizers keep theirs."""

    def __init__(self, optimizers: Optimizers, given: float | None) -> None:
        self.optimizers = optimizers
        self.given = given
        self.taken: list[Settings] = []
        self.group_of: dict[int, int] = {}
        self._places: list[int] = []
        self._find_groups()

    def begin(self) -> None:
        """Refuse what cannot be taken over, then take."""
        self.check()
        self.update()

    def check(self) -> None:
        """Refuse what would be applied twice or is not known."""
        for optimizer, group in self.optimizers.groups:
            kind, is_sgd = type(optimizer).__name__, isinstance(optimizer, SGD)
            if is_sgd and (group["dampening"] or group["maximize"]):
                raise ConfigError(
                    "SGD with dampening or maximize cannot be taken over: set dampening=0 and maximize=False"
                )
            if self.given and (not is_sgd or group["momentum"]):
                raise ConfigError(
                    f"`momentum`={self.given} would be applied twice: {kind} has its own; leave the field out, then it "
                    "is taken over from torch.optim.SGD, and other optimizers keep theirs"
                )

    def update(self) -> None:
        """Take the present settings; at every step, because a scheduler may have set momentum again."""
        self._find_groups()
        for (optimizer, group), taken in zip(self.optimizers.groups, self.taken, strict=True):
            if not isinstance(optimizer, SGD):
                continue
            if self.given is not None:
                taken.momentum = self.given
            elif group["momentum"]:
                taken.momentum, taken.nesterov = group["momentum"], group["nesterov"]
                group["momentum"], group["nesterov"] = 0.0, False
            taken.used = taken.used or bool(taken.momentum)
            if group["weight_decay"] and taken.momentum:
                taken.decay, group["weight_decay"] = group["weight_decay"], 0.0

    def _find_groups(self) -> None:
        """Find parameter groups again, in case one was added."""
        groups = self.optimizers.groups
        if len(groups) != len(self.taken):
            known = dict(zip(self._places, self.taken, strict=True))
            self._places = [id(group) for _, group in groups]
            self.taken = [known.get(place, Settings()) for place in self._places]
            self.group_of = {id(p): i for i, (_, group) in enumerate(groups) for p in group["params"]}

    def of(self, parameter: nn.Parameter) -> Settings:
        """The settings for a parameter; one that the optimizer does not hold has no momentum."""
        place = self.group_of.get(id(parameter))
        return self.taken[place] if place is not None else Settings()

    def give_back(self) -> None:
        """Leave the optimizers as they were."""
        for (_, group), taken in zip(self.optimizers.groups, self.taken, strict=True):
            if self.given is None and taken.momentum:
                group["momentum"], group["nesterov"] = taken.momentum, taken.nesterov
            if taken.decay:
                group["weight_decay"] = taken.decay
        self.taken = [Settings() for _ in self.taken]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the user's settings back inside the block, and take them again at the end."""
        self.update()
        self.give_back()
        try:
            yield
        finally:
            self.update()


def with_momentum(g: Tensor, u: Tensor, taken: Settings, again: bool, out: Tensor) -> Tensor:
    """What SGD would make of a gradient; `again` is one more of the same step. The new momentum is `out`."""
    if not taken.momentum:
        if taken.used and not again:
            out.copy_(u)
        return g
    torch.add(g, u, alpha=1.0 if again else taken.momentum, out=out)
    if taken.nesterov:
        return g + taken.momentum * (g if again else out)
    return g if again else out
