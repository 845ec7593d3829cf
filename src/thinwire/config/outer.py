"""What is done with the mean change of groups."""

from dataclasses import dataclass

from thinwire.checks import check_share, is_number
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Nesterov:
    """An outer step of SGD with Nesterov momentum, whose gradient is minus the mean change of groups."""

    lr: float = 1.0
    momentum: float = 0.5

    def __post_init__(self) -> None:
        if not (is_number(self.lr) and self.lr > 0):
            raise ConfigError(f"`outer.lr`={self.lr!r} must be a number above 0, such as 1.0; DiLoCo's paper has 0.7")
        check_share(self, "momentum", "0.5 is a good start; DiLoCo's paper has 0.9")


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
