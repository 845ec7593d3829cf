"""What a search may change, and how a search algorithm sees it.

A parameter is a range of numbers or a list of choices. An algorithm sees its *code*: a float, its logarithm, or a whole
number. A choice's code is its index: Propulate 1.2.2 can also take texts, but loses track of them after the first
mutation (see `tests/test_tune_propulate.py`).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.base.checks import is_number
from thinwire.base.errors import ConfigError, unknown
from thinwire.base.files import check_file

Code = int | float
Value = int | float | str | bool
_LARGEST = 1_000_000
_RANGE, _CHOICES = {"from", "to", "scale", "when"}, {"choices", "when"}


@dataclass(frozen=True)
class Condition:
    """That a parameter is only used with some choices of another."""

    name: str
    values: tuple[str, ...]
    unless: bool = False

    @classmethod
    def parse(cls, text: str) -> Condition:
        """NAME=VALUE, NAME=VALUE|VALUE or NAME!=VALUE."""
        name, equals, values = text.partition("=")
        if not equals or not name.strip(" !") or not values:
            raise ConfigError(f"`when`={text!r} must be NAME=VALUE, NAME=VALUE|VALUE or NAME!=VALUE")
        unless = name.endswith("!")
        return cls(name.rstrip("!").strip(), tuple(value.strip() for value in values.split("|")), unless)

    def holds(self, given: Mapping[str, Value]) -> bool:
        """Whether it does; a parameter that is itself not used meets no condition."""
        return self.name in given and (as_text(given[self.name]) in self.values) != self.unless


@dataclass(frozen=True)
class Parameter:
    """One of a space: a range, or choices."""

    low: Code = 0
    high: Code = 0
    log: bool = False
    choices: tuple[Value, ...] = ()
    when: Condition | None = None

    @property
    def is_whole(self) -> bool:
        """Whether its code is a whole number."""
        return bool(self.choices) or (isinstance(self.low, int) and not self.log)

    @property
    def limits(self) -> tuple[Code, Code]:
        """The smallest and the largest code."""
        if self.choices:
            return 0, len(self.choices) - 1
        if self.log:
            # Whole numbers on a logarithmic scale have as wide a share at both ends as between them.
            wide = 0.5 if isinstance(self.low, int) else 0.0
            return math.log(self.low - wide), math.log(self.high + wide)
        return self.low, self.high

    def value(self, code: Code) -> Value:
        """What a code stands for."""
        if self.choices:
            return self.choices[min(max(round(code), 0), len(self.choices) - 1)]
        number = math.exp(code) if self.log else code
        number = min(max(number, self.low), self.high)
        return min(max(round(number), int(self.low)), int(self.high)) if isinstance(self.low, int) else float(number)

    def code(self, value: Value) -> Code:
        """The code of a value."""
        if self.choices:
            return self.choices.index(value)
        assert not isinstance(value, str)
        return math.log(value) if self.log else value

    def nearest(self, value: Any) -> Code:
        """The code nearest to a value from outside the space; the middle where it has no place in it."""
        low, high = self.limits
        if self.choices:
            return self._nearest_choice(value)
        if not is_number(value) or (self.log and value <= 0):
            return (low + high) // 2 if self.is_whole else (low + high) / 2
        code = min(max(self.code(value), low), high)
        return round(code) if self.is_whole else code

    def _nearest_choice(self, value: Any) -> int:
        texts = [as_text(choice) for choice in self.choices]
        if as_text(value) in texts:
            return texts.index(as_text(value))
        apart = {index: abs(number - value) for index, number in self._numbers() if is_number(value)}
        return min(apart, key=lambda index: apart[index], default=0)

    def _numbers(self) -> Iterator[tuple[int, float]]:
        """Choices that are numbers, with their codes; settings such as 0.5 are often written as texts beside "none"."""
        for index, choice in enumerate(self.choices):
            with suppress(ValueError):
                yield index, float(choice)

    @property
    def tested(self) -> Sequence[Value]:
        """All choices, or both ends and a value between them, which is whole only if all are."""
        low, high = self.limits
        return self.choices or (self.low, self.high, self.value(low + (high - low) * 0.382))

    def described(self) -> dict[str, Any]:
        """As it is written in a file."""
        written: dict[str, Any] = (
            {"choices": list(self.choices)} if self.choices else {"from": self.low, "to": self.high}
        )
        written |= {"scale": "log"} if self.log else {}
        if self.when:
            written["when"] = f"{self.when.name}{'!' * self.when.unless}={'|'.join(self.when.values)}"
        return written


@dataclass(frozen=True)
class Space:
    """The parameters of a search by name, those that conditions name first."""

    parameters: Mapping[str, Parameter]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __getitem__(self, name: str) -> Parameter:
        return self.parameters[name]

    def values(self, codes: Mapping[str, Code]) -> dict[str, Value]:
        """What codes stand for, without parameters whose condition is not met."""
        given: dict[str, Value] = {}
        for name, parameter in self.parameters.items():
            if parameter.when is None or parameter.when.holds(given):
                given[name] = parameter.value(codes[name])
        return given

    def described(self) -> dict[str, Any]:
        """As it is written in a file."""
        return {name: parameter.described() for name, parameter in self.parameters.items()}


def as_text(value: Value) -> str:
    """A value as the command line has it; floats with six digits, so that a run can be repeated by hand."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def read_space(path: Path) -> Space:
    """The space in a TOML file."""
    remedy = "see docs/tuning.md for what a space looks like"
    check_file(path, remedy, most=_LARGEST)
    try:
        written = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not TOML, or not even UTF-8
        raise ConfigError(f"`{path}` is not a TOML file ({error}); {remedy}") from error
    return space_of(written, f"`{path}`")


def space_of(written: Mapping[str, Any], where: str = "the space") -> Space:
    """A space as it is written: NAME = {from, to, scale} or {choices}, each with an optional `when`."""
    if not written:
        raise ConfigError(f"{where} is empty; give at least one parameter, such as lr = {{from = 1e-4, to = 1e-2}}")
    found = {name: _parameter(f"{name} in {where}", table) for name, table in written.items()}
    for name, parameter in found.items():
        if (when := parameter.when) is not None:
            other = found.get(when.name)
            if other is None or not other.choices:
                choices = [key for key, own in found.items() if own.choices]
                raise unknown(f"parameter with choices in `when` of {name}", when.name, choices)
            for value in when.values:
                if value not in map(as_text, other.choices):
                    raise unknown(f"choice of {when.name} in `when` of {name}", value, map(as_text, other.choices))
            if not any(when.holds({when.name: choice}) for choice in other.choices):
                raise ConfigError(f"{name} is used with no choice of {when.name}; change its `when`")
    return Space(dict(sorted(found.items(), key=lambda item: _depth(item[0], found))))


def _depth(name: str, found: Mapping[str, Parameter]) -> int:
    """How many conditions are between a parameter and one without any."""
    depth, when = 0, found[name].when
    while when is not None:
        depth, when = depth + 1, found[when.name].when
        if depth > len(found):
            raise ConfigError(f"the conditions of {name} go around in a circle; remove one `when`")
    return depth


def _parameter(what: str, table: Any) -> Parameter:
    if not isinstance(table, Mapping) or not (set(table) <= _CHOICES or set(table) <= _RANGE):
        raise ConfigError(
            f"{what} is {table!r}; write {{from = 1e-4, to = 1e-2, scale = 'log'}} or {{choices = ['int2', 'int4']}}, "
            "and `when = 'NAME=VALUE'` if it depends on a choice"
        )
    when = Condition.parse(str(table["when"])) if "when" in table else None
    if "choices" in table:
        choices = table["choices"]
        if not isinstance(choices, list | tuple) or len(choices) < 2 or len(set(map(str, choices))) < len(choices):
            raise ConfigError(f"`choices`={choices!r} of {what} must be at least two different values")
        if not all(isinstance(choice, str | int | float) for choice in choices):
            raise ConfigError(f"`choices`={choices!r} of {what} must be texts, numbers, true or false")
        return Parameter(choices=tuple(choices), when=when)
    low: Any = table.get("from")
    high: Any = table.get("to")
    scale = table.get("scale", "linear")
    if not (is_number(low) and is_number(high) and low < high):
        raise ConfigError(f"{what} goes from {low!r} to {high!r}; `from` and `to` must be numbers, the lower first")
    if scale not in ("linear", "log"):
        raise unknown(f"`scale` of {what}", scale, ("linear", "log"))
    if scale == "log" and low <= 0:
        raise ConfigError(f"{what} is on a logarithmic scale and begins at {low}; `from` must be above 0 there")
    if isinstance(low, int) != isinstance(high, int):
        low, high = float(low), float(high)
    return Parameter(low=low, high=high, log=scale == "log", when=when)


_RATE = {"lr_scale": {"from": 0.3, "to": 3.0, "scale": "log"}}
_APART = {
    "every": {"from": 4, "to": 64, "scale": "log"},
    "wire": {"choices": ["int2", "int4", "int8"]},
    "warmup": {"from": 0.02, "to": 0.15, "scale": "log"},
    "warmup_wire": {"choices": ["lowrank:8", "lowrank:16", "lowrank:32", "int4"]},
}
_OUTER = {"outer": {"choices": ["none", "1.0/0.3", "1.0/0.5", "1.0/0.7", "0.7/0.9"]}}

# Spaces by name, for `--space`. `lr_scale` multiplies the recipe's learning rate, so that they fit any recipe.
PRESETS: dict[str, dict[str, Any]] = {
    "ab": {
        **_RATE,
        **_APART,
        **_OUTER,
        "factor_at": {"choices": ["none", "0.5", "0.65", "0.75", "0.85"]},
        "cutoff": {"from": 0.08, "to": 0.35, "when": "factor_at!=none"},
    },
    "allreduce": {**_RATE, "wire": {"choices": ["fp32", "bf16", "int8", "int4", "int2", "lowrank:16"]}},
    "localsgd": {**_RATE, **_APART},
    "diloco": {**_RATE, **_APART, **_OUTER},
    "daso": {
        **_RATE,
        "every": {"from": 4, "to": 64, "scale": "log"},
        "warmup": {"from": 0.02, "to": 0.2, "scale": "log"},
        "cooldown": {"from": 0.02, "to": 0.2, "scale": "log"},
    },
    "oialr": {
        **_RATE,
        "factor_at": {"from": 0.05, "to": 0.6},
        "redecompose": {"from": 0.02, "to": 0.2, "scale": "log"},
        "cutoff": {"from": 0.01, "to": 0.5, "scale": "log"},
    },
    "powersgd": {**_RATE, "rank": {"from": 1, "to": 32, "scale": "log"}, "warmup": _APART["warmup"]},
    "topk": {**_RATE, "density": {"from": 0.0005, "to": 0.05, "scale": "log"}, "warmup": _APART["warmup"]},
    # The dissertation's Tables A.3 and A.5. Rates there are absolute; `rate.floor` and `rate.start` are multiples of
    # `lr`. Steps and epochs there are shares of the run here: of 300 epochs of 49 steps, and of 20 of 1,073.
    "minivit": {
        "lr": {"from": 5e-5, "to": 1e-3, "scale": "log"},
        "rate.floor": {"from": 0.02, "to": 5.0, "scale": "log"},
        "rate.start": {"from": 0.02, "to": 1.0, "scale": "log"},
        "rate.k_decay": {"from": 0.1, "to": 2.0},
        "rate.warmup": {"from": 0.0033, "to": 0.067},
        "cutoff": {"from": 0.01, "to": 0.9},
        "redecompose": {"from": 0.0137, "to": 0.068},
        "factor_at": {"from": 0.068, "to": 0.68},
    },
    "autoformer": {
        "lr": {"from": 1e-5, "to": 5e-3, "scale": "log"},
        "rate.floor": {"from": 0.01, "to": 5.0, "scale": "log"},
        "rate.start": {"from": 0.01, "to": 1.0, "scale": "log"},
        "rate.k_decay": {"from": 0.001, "to": 2.0},
        "rate.warmup": {"from": 0.1, "to": 0.5},
        "cutoff": {"from": 0.01, "to": 0.9},
        "redecompose": {"from": 0.0025, "to": 0.095},
        "updates_from": {"from": 0.012, "to": 0.12},  # factors from the start: Table A.4's warm-up at full rank is off
        "keep_first": {"choices": [False, True]},
        "keep_last": {"choices": [False, True]},
    },
}


def chosen_space(text: str | None, method: str, steps: int) -> Space:
    """A preset by its name, or the space in a file; by default the preset of the method's name.

    A preset's rounds are at most a quarter of a run of so many steps.
    """
    name = text or method
    if name in PRESETS:
        own = dict(PRESETS[name])
        if "every" in own:
            own["every"] = own["every"] | {"to": min(own["every"]["to"], max(own["every"]["from"] + 1, steps // 4))}
        return space_of(own, f"the preset {name}")
    path = Path(name)
    if text is None or not (path.suffix == ".toml" or path.exists()):
        known = ", ".join(PRESETS)
        raise ConfigError(f"`--space`={name!r} is neither a TOML file nor a preset; give a file, or one of: {known}")
    return read_space(path)
