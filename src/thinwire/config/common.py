"""What configs share: fields, the codes of the slow link, outer steps, and checks of values by a field's type."""

import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from thinwire.base.checks import (
    check_choice,
    check_group_size,
    check_length,
    check_share,
    check_whole,
    is_number,
    is_whole,
    length,
    patterns,
)
from thinwire.base.errors import ConfigError

GroupSize = int | Literal["world"] | None
"""Workers per group: None is one group per node."""

EXACT = ("fp32", "bf16")
QUANTIZED = ("int8", "int4", "int2", "bit")


class Code(NamedTuple):
    """A code, with the rank or the density where it has one."""

    kind: str
    number: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether it only rounds numbers, and needs no error feedback."""
        return self.kind in EXACT


def parse_code(text: Any) -> Code:
    """What a name such as "int4" or "lowrank:16" stands for."""
    kind, _, number = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind in (*EXACT, *QUANTIZED) and not number:
        return Code(kind)
    if kind == "lowrank" and number.isdecimal() and int(number):
        return Code(kind, int(number))
    if kind == "topk" and (density := _share(number)):
        return Code(kind, density)
    raise ConfigError(
        f"{text!r} is not a code for the wire, choose from: {', '.join((*EXACT, *QUANTIZED))}, lowrank:R, topk:D, with "
        "a rank R such as lowrank:16, or the share D of the values that are sent, such as topk:0.01"
    )


def _share(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value <= 1 else None


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


def alternatives(hint: Any) -> list[Any]:
    """The types of a field that may have several."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return [a for part in typing.get_args(hint) for a in alternatives(part)]
    return [hint]


@functools.cache
def _types(cls: type) -> dict[str, list[Any]]:
    return {name: alternatives(hint) for name, hint in typing.get_type_hints(cls).items()}


def _check_code(name: str, value: Any) -> None:
    try:
        parse_code(value)
    except ConfigError as error:
        raise ConfigError(f"`{name}`={error}") from None


class Config:
    """The base of every method's config, which checks what a field's type or name says; the rest is the method's."""

    usual: ClassVar[Mapping[str, Any]] = {}
    """What fields are that are "auto", in a run that is long enough."""
    cuts_at_end: ClassVar[bool] = False
    """Whether `finish` cuts at `cutoff` where none is given."""

    def __post_init__(self) -> None:
        for name, kinds in _types(type(self)).items():  # type: ignore[arg-type]  # mypy finds classes unhashable
            value = getattr(self, name)
            if value is None and type(None) in kinds:
                continue
            if bool in kinds and not isinstance(value, bool):
                raise ConfigError(f"`{name}`={value!r} must be True or False")
            if typing.get_origin(kinds[0]) is Literal:
                check_choice(self, name, typing.get_args(kinds[0]))
            if name in ("wire", "warmup_wire"):
                _check_code(name, value)
            if name == "group_size":
                check_group_size(value)
            if name == "total_steps" and not is_whole(value, 1):
                raise ConfigError(
                    f"`total_steps`={value!r} must be a whole number from 1 on: the optimizer steps of the run"
                )

    @property
    def in_force(self) -> dict[str, Any]:
        """What fields are that are "auto", in this run."""
        return {}

    @property
    def chosen(self) -> str:
        """Which fields differ from the usual ones since the run is short; for the log."""
        chosen = {name: value for name, value in self.in_force.items() if value != self.usual[name]}
        if not chosen:
            return ""
        usual = {name: self.usual[name] for name in chosen}
        total = getattr(self, "total_steps", None)
        return f"total_steps={total} is short for {listed(usual)}: {listed(chosen)} instead"

    @property
    def idle(self) -> str:
        """What the method never does in so few steps, and why; for the log."""
        return ""


def listed(fields: Mapping[str, Any]) -> str:
    """Fields and values, as one would write them."""
    return ", ".join(f"{name}={value}" for name, value in fields.items())


@dataclass(frozen=True, kw_only=True)
class Scheduled(Config):
    """What methods share whose schedule needs the length of the run."""

    total_steps: int
    """Optimizer steps of the whole run."""


@dataclass(frozen=True, kw_only=True)
class Factored(Config):
    """What methods share that factor weights: which of them stay full."""

    keep_first: bool = True
    """Leave the first layer full."""

    keep_last: bool = True
    """Leave the last layer full."""

    keep: tuple[str, ...] = ()
    """Name patterns (as in a shell) of layers to leave full."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "keep", patterns(self.keep))


@dataclass(frozen=True, kw_only=True)
class Warmed(Config):
    """What methods with a warm-up share."""

    warmup: float = 0
    """Steps at the beginning in which the whole world averages gradients: a whole number, or a fraction of
    `total_steps` below 1."""

    warmup_wire: str = "fp32"
    """The code that those gradients travel in; a cheap one such as lowrank:16 keeps the warm-up from being most of the
    bytes."""

    total_steps: int | None = None
    """Optimizer steps of the whole run. Fractions are of it, and fields that are "auto" follow it."""

    group_size: GroupSize = None
    """Workers per group, which averages its gradients exactly at every step: None is one group per node."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_length(self, "warmup")

    @property
    def warmup_length(self) -> int:
        return length(self.warmup, self.total_steps or 1)

    @property
    def idle(self) -> str:
        if self.total_steps is None or self.warmup_length < self.total_steps:
            return ""
        return f"the warm-up (`warmup`={self.warmup}) is all of total_steps={self.total_steps}: shorten it"


@dataclass(frozen=True, kw_only=True)
class Averaged(Warmed):
    """What methods share whose groups train alone and average their parameters."""

    usual: ClassVar = {"every": 24}

    every: int | Literal["auto"] = "auto"
    """Steps between two averages of the same parameters. "auto" is 24, or half of what follows the warm-up where that
    is less than 24 steps."""

    every_max: int | None = None
    """None keeps `every` constant. A number lets it grow up to this as the learning rate falls: with the square of the
    highest rate so far over the present one (quadratic synchronisation rule, arXiv 2310.14423)."""

    wire: str = "fp32"
    """The code that averages travel in: fp32, bf16, int8, int4, int2, bit, lowrank:R or topk:D."""

    outer: Nesterov | Radial | None = None
    """What to do with the mean change of groups: None applies it, Nesterov(lr=1.0, momentum=0.5) is an outer step,
    Radial() makes it as long as the changes it is the mean of."""

    second_moment: Literal["group", "estimate", "shared"] = "group"
    """What Adam divides by while groups train apart: "group" by the root of each group's own second moments; "estimate"
    by what all-reduce would, as far as a group can tell; "shared" by what groups know together: first moments and the
    size of each row of second ones are averaged too."""

    moments_wire: str = "int2"
    """The code that first moments travel in, if they are shared: fp32, bf16, int8, int4 or int2."""

    rows: Literal["mean", "seen"] = "mean"
    """How rows of embeddings are averaged: "mean" like everything else, "seen" by how often each group saw them.
    Shared second moments do as much."""

    overlap: int = 0
    """Steps of training while an average is pending."""

    mix: float = 0.5
    """Share of a group's own values when an average comes back that was sent `overlap` steps before; 0 takes none."""

    diverged: Literal["stop", "leave_out"] = "stop"
    """What happens at an average if a group has values that are not finite: the run stops on all workers, or the others
    average without the group, which goes on from their result."""

    outliers: Literal["keep", "clip", "leave_out"] = "keep"
    """What happens at an average to a group that came much further than the others: nothing, its change is shortened to
    the others' median, or it is left out. Needs three groups."""

    outlier_limit: float = 5.0
    """How many times as long as the median of the others a change must be for its group to be an outlier."""

    checksum_every: int | None = None
    """Averages from one comparison of checksums to the next: whether all workers hold the same bits. None compares
    never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every != "auto":
            check_whole(self, "every", 1)
        check_whole(self, "overlap", 0)
        check_share(self, "mix", "0 takes the average as it is")
        check_choice(self, "moments_wire", ("fp32", "bf16", "int8", "int4", "int2"))
        self._check_screening()
        if self.second_moment == "shared" and self.overlap:
            raise ConfigError(
                f"second_moment='shared' is for averages that are waited for, not for `overlap`={self.overlap}: groups "
                "would go on with other moments; use overlap=0, or second_moment='estimate'"
            )
        if self.second_moment == "shared" and self.rows == "seen":
            raise ConfigError(
                "rows='seen' is for second_moment 'group' or 'estimate': with 'shared' it makes up a second time for "
                "what one group alone has seen, and rare words overfit; leave `rows` out"
            )
        if self.every_max is not None:
            check_whole(self, "every_max", self.round_length)
        if not (self.outer is None or isinstance(self.outer, Nesterov | Radial)):
            raise ConfigError(
                f"`outer`={self.outer!r} must be None, thinwire.Nesterov(lr=1.0, momentum=0.5) or thinwire.Radial()"
            )
        if self.overlap >= self.round_length:
            raise ConfigError(
                f"`overlap`={self.overlap} must be below `every`={self.round_length}: an average must be back before "
                "the next one is sent"
            )

    @property
    def round_length(self) -> int:
        """`every` in this run."""
        if isinstance(self.every, int):
            return self.every
        usual, total = self.usual["every"], self.total_steps
        left = usual if total is None else total - self.warmup_length
        return usual if left >= usual else max(left // 2, min(self._least_round, usual))

    @property
    def _least_round(self) -> int:
        """The shortest round that has room for what happens in it."""
        return self.overlap + 1

    @property
    def in_force(self) -> dict[str, Any]:
        return {"every": self.round_length} if self.every == "auto" else {}

    @property
    def idle(self) -> str:
        left = None if self.total_steps is None else self.total_steps - self.warmup_length
        if super().idle or left is None or self.round_length <= left:
            return super().idle
        return (
            f"`every`={self.round_length} is more than the {left} steps after the warm-up: groups average only at the "
            "end; lower it"
        )

    @property
    def is_screened(self) -> bool:
        """Whether some groups may count less than others in an average, or not at all."""
        return self.diverged != "stop" or self.outliers != "keep"

    def _check_screening(self) -> None:
        if self.checksum_every is not None:
            check_whole(self, "checksum_every", 1)
        if not (is_number(self.outlier_limit) and self.outlier_limit > 1):
            raise ConfigError(
                f"`outlier_limit`={self.outlier_limit!r} must be a number above 1: how many times as long as the "
                "others' median a change must be, such as 5"
            )
        name = f"diverged={self.diverged!r}" if self.diverged != "stop" else f"outliers={self.outliers!r}"
        if self.is_screened and (self.second_moment == "shared" or self.rows == "seen"):
            other = "second_moment='shared'" if self.second_moment == "shared" else "rows='seen'"
            raise ConfigError(f"{name} cannot take a group out of what {other} shares; leave out one of them")
        if self.outliers == "leave_out" and self.overlap:
            raise ConfigError(
                f"outliers='leave_out' is for averages that are waited for, not for `overlap`={self.overlap}; use "
                "outliers='clip', or overlap=0"
            )
