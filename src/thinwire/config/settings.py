"""Configs as plain values, and from the texts that a command line has."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from thinwire.base.errors import ConfigError, unknown
from thinwire.config.common import Config, Nesterov, Radial, alternatives

C = TypeVar("C")


def describe(config: Any) -> dict[str, Any]:
    """A config's fields as plain values; those that are "auto" as they are in this run."""
    return {field.name: _plain(in_force(config, field.name)) for field in dataclasses.fields(config)}


def in_force(config: Any, name: str) -> Any:
    """A field of a config; one that is "auto" as it is in this run."""
    chosen = config.in_force if isinstance(config, Config) else {}
    return chosen[name] if name in chosen else getattr(config, name, None)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, tuple) else value


def from_strings(cls: type[C], given: Mapping[str, str], **defaults: Any) -> C:
    """Build a config from FIELD=VALUE texts; `defaults` that `cls` has no field for are left out."""
    own = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = {name: hint for name, hint in typing.get_type_hints(cls).items() if name in own}
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
    for candidate in sorted(alternatives(hint), key=lambda each: each is str):  # any text is a text
        try:
            return _parse_as(candidate, text)
        except ValueError:
            continue
    raise ConfigError(f"`{name}`={text!r} does not fit {cls.__name__}: it takes {allowed(hint)}")


def allowed(hint: Any) -> str:
    """The values that a field of this type takes, in words."""
    return " or ".join(_describe(candidate) for candidate in alternatives(hint))


def _parse_as(hint: Any, text: str) -> Any:
    if hint is type(None) and text.lower() == "none":
        return None
    if hint is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if hint in (int, float):
        return hint(text)
    if hint is str:
        return text
    if hint is Radial and text.lower() == "radial":
        return Radial()
    if hint is Nesterov:
        lr, _, momentum = text.partition("/")
        return Nesterov(float(lr), float(momentum) if momentum else None)
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
    names = {
        Nesterov: "an outer step as LR or LR/MOMENTUM, such as 1.0/0.5",
        Radial: "radial",
        str: "text",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        type(None): "none",
    }
    return names.get(hint, str(hint))
