"""What is done with the mean change of groups."""

import math
from dataclasses import dataclass, replace

from thinwire.base.checks import check_share, is_number
from thinwire.base.errors import ConfigError


@dataclass(frozen=True)
class Nesterov:
    """An outer step of SGD with Nesterov momentum, whose gradient is minus the mean change of groups."""

    lr: float = 1.0

    momentum: float | None = None
    """None is 1 − 1/√G for G groups. Where gradients are mostly noise, the step of an adaptive optimizer in a group is
    √G times too short, since it divides by the noise of a smaller batch; this momentum makes up for it."""

    def __post_init__(self) -> None:
        if not (is_number(self.lr) and self.lr > 0):
            raise ConfigError(f"`outer.lr`={self.lr!r} must be a number above 0, such as 1.0; DiLoCo's paper has 0.7")
        if self.momentum is not None:
            check_share(self, "momentum", "None fits it to the number of groups; DiLoCo's paper has 0.9")

    def among(self, groups: int) -> "Nesterov":
        """The same with a momentum for so many groups, if it has none of its own."""
        return self if self.momentum is not None else replace(self, momentum=1 - 1 / math.sqrt(groups))


@dataclass(frozen=True)
class Radial:
    """The mean change of groups, made longer: a mean of changes that partly cancel is shorter than they are.

    Each tensor's mean change is multiplied by mean‖Δᵢ‖ / ‖mean Δ‖.
    """

    most: float | None = None
    """The largest factor; None is √G for G groups, which is what unrelated changes give."""

    def __post_init__(self) -> None:
        if self.most is not None and not (is_number(self.most) and self.most >= 1):
            raise ConfigError(f"`outer.most`={self.most!r} must be a number from 1 on, or None for √groups")
