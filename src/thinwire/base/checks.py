"""What values a config may hold; an error says what was given, what is allowed and what to do."""

import math
import numbers
from collections.abc import Iterable
from typing import Any

from thinwire.base.errors import ConfigError


def check_cutoff(cutoff: float, *, zero_allowed: bool = False) -> None:
    """Refuse a cutoff that keeps nothing or means nothing."""
    if not (is_number(cutoff) and (0 < cutoff < 1 or (zero_allowed and cutoff == 0))):
        allowed = "in [0, 1)" if zero_allowed else "between 0 and 1, both excluded"
        raise ConfigError(
            f"`cutoff`={cutoff!r} must be {allowed}; it is a share of the largest singular value, try 0.15"
        )


def is_number(value: Any) -> bool:
    """Whether it is a finite real number, and not a bool."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number with more than 308 digits
        return False


def is_whole(value: Any, least: int) -> bool:
    """Whether it is a whole number from `least` on, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def patterns(keep: Any) -> tuple[str, ...]:
    """Name patterns as a tuple."""
    if isinstance(keep, str):
        raise ConfigError(f"`keep`={keep!r} must be a tuple of patterns: write keep=({keep!r},)")
    if not isinstance(keep, Iterable) or not all(isinstance(pattern, str) for pattern in keep):
        raise ConfigError(f"`keep`={keep!r} must be a tuple of patterns, such as keep=('head*',)")
    return tuple(keep)


def length(value: float, whole: int) -> int:
    """Steps that a fraction of a whole, or a whole number from 1 on, stands for."""
    return int(value) if value >= 1 else round(value * whole)


def check_choice(config: Any, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ConfigError(f"`{name}`={value!r} is not known, choose from: {', '.join(allowed)}")


def check_group_size(group_size: Any) -> None:
    if not (is_whole(group_size, 1) or group_size in (None, "world")):
        raise ConfigError(
            f"`group_size`={group_size!r} must be a whole number of workers from 1 on, "
            '"world", or None for one group per node'
        )


def check_whole(config: Any, name: str, least: int) -> None:
    value = getattr(config, name)
    if not is_whole(value, least):
        raise ConfigError(f"`{name}`={value!r} must be a whole number from {least} on")


def check_share(config: Any, name: str, hint: str) -> None:
    """From 0 to below 1."""
    value = getattr(config, name)
    if not (is_number(value) and 0 <= value < 1):
        raise ConfigError(f"`{name}`={value!r} must be from 0 to below 1; {hint}")


def check_length(config: Any, name: str, value: float | None = None) -> None:
    """Steps, or a fraction of `total_steps`, which then must be there; `value` is what the field stands for."""
    if value is None:
        check_fraction(config, name)
        value = getattr(config, name)
    if config.total_steps is None and 0 < value < 1:
        raise ConfigError(
            f"`{name}`={value!r} is a fraction of `total_steps`, which is not given; "
            "give it, or a whole number of steps"
        )


def check_fraction(config: Any, name: str, *, zero_allowed: bool = True) -> None:
    """A fraction below 1, or a whole number of steps."""
    value = getattr(config, name)
    least = 0 if zero_allowed else math.ulp(0.0)
    if not (is_number(value) and value >= least and (value < 1 or value == int(value))):
        lowest = "from 0" if zero_allowed else "above 0"
        raise ConfigError(f"`{name}`={value!r} must be a fraction {lowest} to below 1, or a whole number of steps")
