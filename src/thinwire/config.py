"""What a user may set: one frozen dataclass a method, checked once, at construction."""

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from thinwire.errors import ConfigError, unknown

Config = TypeVar("Config")
GroupSize = int | Literal["world"] | None


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """Data-parallel training by PyTorch's own DistributedDataParallel, with its bytes counted."""

    wire: Literal["fp32", "bf16", "int8"] = "fp32"
    """What gradients are rounded to while they travel; "int8" with a scale a block and error feedback."""

    group_size: GroupSize = None
    """Workers to a node, where one machine stands for several. In fp32 and bf16 it changes what is counted, not what is
    computed; int8 is for the link between groups, inside them gradients are averaged as they are."""

    def __post_init__(self) -> None:
        _check_choice(self, "wire", ("fp32", "bf16", "int8"))
        _check_group_size(self.group_size)


@dataclass(frozen=True, kw_only=True)
class AB:
    """AB training: low-rank factors A·B, trained alone by groups of workers and merged (arXiv 2405.01067).

    `warmup` and `group_steps` below 1 are fractions of `total_steps`, `rebound` and `lr_rebound`
    below 1 are fractions of a group phase; any of them from 1 on is a whole number of steps.
    """

    total_steps: int
    """Optimizer steps of the whole run."""

    warmup: float = 0.20
    """Full-rank training by the whole world before the first group phase."""

    group_steps: float = 0.0333
    """Steps that groups train alone between two merges."""

    rebound: float = 0.25
    """Full-rank training by the whole world after a merge."""

    lr_rebound: float = 0.5
    """Steps over which the learning rate climbs back after each change of shape."""

    cutoff: float = 0.15
    """Singular values up to this share of the largest are dropped."""

    group_size: GroupSize = None
    """Workers to a group: None is one node a group, "world" trains B by all workers without groups."""

    merge: Literal["mean", "trained", "weighted"] = "mean"
    """How copies are averaged: all of them, only the trained ones, or by observed loss."""

    moments: Literal["reset", "average", "carry"] = "reset"
    """What becomes of the optimizer's state at a merge."""

    cycle: Literal["paper"] = "paper"
    """The order of phases; "paper" rebuilds the full model after every merge."""

    keep_first: bool = True
    """Leave the first layer full."""

    keep_last: bool = True
    """Leave the last layer full."""

    keep: tuple[str, ...] = ()
    """Name patterns (as in a shell) of layers to leave full."""

    wire: Literal["fp32", "bf16"] = "fp32"
    """What gradients and merged differences are rounded to while they travel."""

    def __post_init__(self) -> None:
        _check_steps(self)
        _check_choice(self, "merge", ("mean", "trained", "weighted"))
        _check_choice(self, "moments", ("reset", "average", "carry"))
        _check_choice(self, "cycle", ("paper",))
        _check_choice(self, "wire", ("fp32", "bf16"))
        _check_group_size(self.group_size)
        check_cutoff(self.cutoff)
        _check_bool(self, "keep_first")
        _check_bool(self, "keep_last")
        object.__setattr__(self, "keep", _patterns(self.keep))
        self._check_one_cycle_fits()

    @property
    def warmup_length(self) -> int:
        """Warm-up in steps."""
        return _length(self.warmup, self.total_steps)

    @property
    def group_length(self) -> int:
        """A group phase in steps."""
        return _length(self.group_steps, self.total_steps)

    @property
    def rebound_length(self) -> int:
        """A full-rank rebound in steps."""
        return _length(self.rebound, self.group_length)

    @property
    def lr_rebound_length(self) -> int:
        """A learning-rate rebound in steps."""
        return _length(self.lr_rebound, self.group_length)

    def _check_one_cycle_fits(self) -> None:
        if self.group_length < 1:
            least = math.floor(0.5 / self.group_steps) + 1
            raise ConfigError(
                f"`total_steps`={self.total_steps} is too small for one cycle: `group_steps`={self.group_steps} "
                f"of it is less than one step; use total_steps of at least {least}, or whole steps, as group_steps=1"
            )
        needed = self.warmup_length + self.group_length
        if needed > self.total_steps:
            room = self.total_steps - self.group_length
            raise ConfigError(
                f"`total_steps`={self.total_steps} is too small for one cycle: warm-up takes {self.warmup_length} "
                f"steps (`warmup`={self.warmup}) and a group phase {self.group_length} "
                f"(`group_steps`={self.group_steps}), together {needed}; "
                + (
                    f"a warm-up of at most {room} steps fits"
                    if room >= 0
                    else "shorten the group phase, as group_steps=1"
                )
            )


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """Gradients between groups as low-rank products, with error feedback (arXiv 1905.13727)."""

    rank: int = 4
    """Rank of what is sent of each weight."""

    start_step: float = 0
    """Steps of plain all-reduce before: a whole number, or a fraction of `total_steps` below 1."""

    min_compression: float = 2.0
    """Weights that would not become smaller by at least this factor travel as they are; 0 compresses all."""

    total_steps: int | None = None
    """Optimizer steps of the whole run, where `start_step` is a fraction of it."""

    group_size: GroupSize = None
    """Workers to a group, inside which gradients are averaged as they are: None is one node a group."""

    def __post_init__(self) -> None:
        _check_whole(self, "rank", 1)
        _check_length(self, "start_step")
        if not (_is_number(self.min_compression) and self.min_compression >= 0):
            raise ConfigError(
                f"`min_compression`={self.min_compression!r} must be a number from 0 on: how many times smaller a "
                "weight must become to be compressed"
            )
        _check_group_size(self.group_size)

    @property
    def start_length(self) -> int:
        """Plain steps before the first compressed one."""
        return _length(self.start_step, self.total_steps or 1)


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Groups train alone and average their parameters now and then (arXiv 1805.09767, 1808.07217)."""

    every: int = 24
    """Steps between two averages."""

    warmup: float = 0
    """Steps of plain all-reduce before: a whole number, or a fraction of `total_steps` below 1."""

    moments: Literal["keep", "average", "reset"] = "keep"
    """What becomes of the optimizer's state at an average: each group keeps its own, all take the mean, or it starts
    again."""

    wire: Literal["fp32", "bf16"] = "fp32"
    """What parameters are rounded to while they travel; bf16 carries the difference to the last average."""

    total_steps: int | None = None
    """Optimizer steps of the whole run, where `warmup` is a fraction of it."""

    group_size: GroupSize = None
    """Workers to a group, which averages its gradients at every step: None is one node a group."""

    def __post_init__(self) -> None:
        _check_whole(self, "every", 1)
        _check_length(self, "warmup")
        _check_choice(self, "moments", ("keep", "average", "reset"))
        _check_choice(self, "wire", ("fp32", "bf16"))
        _check_group_size(self.group_size)

    @property
    def warmup_length(self) -> int:
        """Warm-up in steps."""
        return _length(self.warmup, self.total_steps or 1)


@dataclass(frozen=True, kw_only=True)
class DiLoCo:
    """Groups train alone; the mean of how far they came is a gradient for an outer Nesterov step (arXiv 2311.08105).

    `fragments` above 1 is the streaming variant (arXiv 2501.18512): a part of the model at a time, sent while training
    goes on and merged `delay` steps later.
    """

    every: int = 48
    """Steps between two outer steps of the same part of the model."""

    outer_lr: float = 0.7
    """Learning rate of the outer step."""

    outer_momentum: float = 0.9
    """Nesterov momentum of the outer step."""

    wire: Literal["fp32", "bf16", "int8"] = "fp32"
    """What differences are rounded to while they travel; "int8" with a scale a block and error feedback."""

    fragments: int = 1
    """Parts of the model that are sent at different times."""

    delay: int = 0
    """Steps that training goes on while a part is under way."""

    mix: float = 0.5
    """Share of a group's own values when a part comes back that was sent `delay` steps before; 0 takes none of them."""

    warmup: float = 0
    """Steps of plain all-reduce before: a whole number, or a fraction of `total_steps` below 1."""

    total_steps: int | None = None
    """Optimizer steps of the whole run, where `warmup` is a fraction of it."""

    group_size: GroupSize = None
    """Workers to a group, which averages its gradients at every step: None is one node a group."""

    def __post_init__(self) -> None:
        _check_whole(self, "every", 1)
        _check_whole(self, "fragments", 1)
        _check_whole(self, "delay", 0)
        _check_length(self, "warmup")
        _check_choice(self, "wire", ("fp32", "bf16", "int8"))
        _check_group_size(self.group_size)
        if not (_is_number(self.outer_lr) and self.outer_lr > 0):
            raise ConfigError(f"`outer_lr`={self.outer_lr!r} must be a number above 0; the paper has 0.7")
        _check_share(self, "outer_momentum", "the paper has 0.9")
        _check_share(self, "mix", "0 takes the outer values as they are")
        if self.fragments > self.every:
            raise ConfigError(
                f"`fragments`={self.fragments} do not fit into `every`={self.every} steps: at most one is sent a step; "
                f"use at most {self.every}"
            )
        if self.delay >= self.every:
            raise ConfigError(
                f"`delay`={self.delay} must be below `every`={self.every}: a part must be back before it is sent again"
            )

    @property
    def warmup_length(self) -> int:
        """Warm-up in steps."""
        return _length(self.warmup, self.total_steps or 1)


@dataclass(frozen=True, kw_only=True)
class TopK:
    """Only the largest accumulated gradients travel: Deep Gradient Compression (arXiv 1712.01887)."""

    density: float = 0.001
    """Share of each weight's elements that is sent a step."""

    warmup: float = 0
    """Steps over which the density falls from a quarter: a whole number, or a fraction of `total_steps` below 1."""

    momentum: float | None = None
    """Momentum that is applied before sending; None takes it over from `torch.optim.SGD`, which then has none."""

    masking: bool = True
    """Whether what was sent starts again without momentum."""

    clip: float | None = None
    """Largest norm of a gradient; each of N groups clips at `clip`/√N, before anything is accumulated."""

    total_steps: int | None = None
    """Optimizer steps of the whole run, where `warmup` is a fraction of it."""

    group_size: GroupSize = None
    """Workers to a group, inside which gradients are averaged as they are: None is one node a group."""

    def __post_init__(self) -> None:
        if not (_is_number(self.density) and 0 < self.density <= 1):
            raise ConfigError(f"`density`={self.density!r} must be above 0 and at most 1: a share, such as 0.001")
        _check_length(self, "warmup")
        if self.momentum is not None:
            _check_share(self, "momentum", "None takes it over from the optimizer")
        _check_bool(self, "masking")
        if self.clip is not None and not (_is_number(self.clip) and self.clip > 0):
            raise ConfigError(f"`clip`={self.clip!r} must be a norm above 0, or None for no clipping")
        _check_group_size(self.group_size)

    @property
    def warmup_length(self) -> int:
        """Warm-up in steps."""
        return _length(self.warmup, self.total_steps or 1)


@dataclass(frozen=True, kw_only=True)
class OneBit:
    """A bit an element and two scales a column, with error feedback: 1-bit SGD (Seide et al., Interspeech 2014)."""

    warmup: float = 0
    """Steps of plain all-reduce before: a whole number, or a fraction of `total_steps` below 1."""

    total_steps: int | None = None
    """Optimizer steps of the whole run, where `warmup` is a fraction of it."""

    group_size: GroupSize = None
    """Workers to a group, inside which gradients are averaged as they are: None is one node a group."""

    def __post_init__(self) -> None:
        _check_length(self, "warmup")
        _check_group_size(self.group_size)

    @property
    def warmup_length(self) -> int:
        """Warm-up in steps."""
        return _length(self.warmup, self.total_steps or 1)


def check_cutoff(cutoff: float, *, zero_allowed: bool = False) -> None:
    """Refuse a cutoff that keeps nothing or means nothing."""
    if not (_is_number(cutoff) and (0 < cutoff < 1 or (zero_allowed and cutoff == 0))):
        allowed = "in [0, 1)" if zero_allowed else "between 0 and 1, both excluded"
        raise ConfigError(
            f"`cutoff`={cutoff!r} must be {allowed}; it is a share of the largest singular value, try 0.15"
        )


def describe(config: Any) -> dict[str, Any]:
    """A config's fields as plain values."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def from_strings(cls: type[Config], given: Mapping[str, str], **defaults: Any) -> Config:
    """Build a config from FIELD=VALUE texts; `defaults` that `cls` has no field for are left out."""
    hints = typing.get_type_hints(cls)
    for name in given:
        if name not in hints:
            raise unknown(f"field of {cls.__name__}", name, hints)
    values = {name: value for name, value in defaults.items() if name in hints}
    values.update({name: _parse(cls, name, text, hints[name]) for name, text in given.items()})
    required = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING]  # type: ignore[arg-type]
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"{cls.__name__} needs a value for: {', '.join(missing)}")
    return cls(**values)


def _parse(cls: type, name: str, text: str, hint: Any) -> Any:
    for candidate in _alternatives(hint):
        try:
            return _parse_as(candidate, text)
        except ValueError:
            continue
    allowed = " or ".join(_describe(candidate) for candidate in _alternatives(hint))
    raise ConfigError(f"`{name}`={text!r} does not fit {cls.__name__}: it takes {allowed}")


def _alternatives(hint: Any) -> list[Any]:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return [a for part in typing.get_args(hint) for a in _alternatives(part)]
    return [hint]


def _parse_as(hint: Any, text: str) -> Any:
    if hint is type(None) and text.lower() == "none":
        return None
    if hint is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if hint in (int, float):
        return hint(text)
    if typing.get_origin(hint) is Literal and text in typing.get_args(hint):
        return text
    if typing.get_origin(hint) is tuple:
        return tuple(part for part in text.split(",") if part)
    raise ValueError(text)


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(repr(value) for value in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return "names separated by commas"
    names = {int: "a whole number", float: "a number", bool: "true or false", type(None): "none"}
    return names.get(hint, str(hint))


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _patterns(keep: Any) -> tuple[str, ...]:
    if isinstance(keep, str):
        raise ConfigError(f"`keep`={keep!r} must be a tuple of patterns: write keep=({keep!r},)")
    if not isinstance(keep, Iterable) or not all(isinstance(pattern, str) for pattern in keep):
        raise ConfigError(f"`keep`={keep!r} must be a tuple of patterns, such as keep=('head*',)")
    return tuple(keep)


def _length(value: float, whole: int) -> int:
    return int(value) if value >= 1 else round(value * whole)


def _check_choice(config: Any, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ConfigError(f"`{name}`={value!r} is not known, choose from: {', '.join(allowed)}")


def _check_group_size(group_size: Any) -> None:
    whole = isinstance(group_size, int) and not isinstance(group_size, bool) and group_size >= 1
    if not (whole or group_size in (None, "world")):
        raise ConfigError(
            f"`group_size`={group_size!r} must be a whole number of workers from 1 on, "
            '"world", or None for one node a group'
        )


def _check_bool(config: Any, name: str) -> None:
    if not isinstance(getattr(config, name), bool):
        raise ConfigError(f"`{name}`={getattr(config, name)!r} must be True or False")


def _check_whole(config: Any, name: str, least: int) -> None:
    value = getattr(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"`{name}`={value!r} must be a whole number from {least} on")


def _check_share(config: Any, name: str, hint: str) -> None:
    value = getattr(config, name)
    if not (_is_number(value) and 0 <= value < 1):
        raise ConfigError(f"`{name}`={value!r} must be from 0 to below 1; {hint}")


def _check_length(config: Any, name: str) -> None:
    """Steps, or a fraction of `total_steps`, which then must be there."""
    _check_fraction(config, name)
    if config.total_steps is not None:
        _check_total(config.total_steps)
    elif 0 < getattr(config, name) < 1:
        raise ConfigError(
            f"`{name}`={getattr(config, name)!r} is a fraction of `total_steps`, which is not given; "
            "give it, or a whole number of steps"
        )


def _check_fraction(config: Any, name: str, *, zero_allowed: bool = True) -> None:
    value = getattr(config, name)
    least = 0 if zero_allowed else math.ulp(0.0)
    if not (_is_number(value) and value >= least and (value < 1 or value == int(value))):
        lowest = "from 0" if zero_allowed else "above 0"
        raise ConfigError(f"`{name}`={value!r} must be a fraction {lowest} to below 1, or a whole number of steps")


def _check_total(total: Any) -> None:
    if not isinstance(total, int) or isinstance(total, bool) or total < 1:
        raise ConfigError(f"`total_steps`={total!r} must be a whole number from 1 on: the optimizer steps of the run")


def _check_steps(config: AB) -> None:
    _check_total(config.total_steps)
    for name in ("warmup", "group_steps", "rebound", "lr_rebound"):
        _check_fraction(config, name, zero_allowed=name != "group_steps")
