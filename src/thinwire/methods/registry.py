"""Every method there is, by the name users type."""

import logging
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, NamedTuple, TypeVar

from thinwire.base.errors import ConfigError
from thinwire.methods.base import Method
from thinwire.methods.context import MethodContext
from thinwire.methods.features import Feature

log = logging.getLogger("thinwire")
M = TypeVar("M", bound=type[Method])


class Entry(NamedTuple):
    """A method: its config, its class, one line for `thinwire list`, and a config for the contract suite."""

    config: type
    method: type[Method]
    summary: str
    example: Callable[..., Any]


METHODS: dict[str, Entry] = {}


def register(name: str, config: type, *, example: Callable[..., Any], summary: str = "") -> Callable[[M], M]:
    """Make a method known under a name that users type, for `attach` and for the command line.

    `example(group_size=…)` makes a config whose phases all happen within 20 steps, for the contract suite. The summary
    is the class's first line of documentation, unless given.
    """

    def add(method: M) -> M:
        taken = METHODS.get(name)
        if taken is not None and taken.method.__qualname__ != method.__qualname__:
            raise ConfigError(f"the name {name!r} is taken by {taken.method.__qualname__}; register under another one")
        line = summary or (method.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        METHODS[name] = Entry(config, method, line, example)
        return method

    return add


def load_installed() -> None:
    """Import what installed packages name in the entry point group `thinwire.methods`: it registers their methods."""
    for entry in entry_points(group="thinwire.methods"):
        try:
            entry.load()
        except Exception as error:  # another package's import may raise anything
            log.warning("the method `%s` (`%s`) cannot be imported: %s", entry.name, entry.value, error)


def name_of(given: Any) -> str:
    """The name of the method that a config belongs to."""
    for name, entry in METHODS.items():
        if type(given) is entry.config:
            return name
    known = ", ".join(entry.config.__name__ for entry in METHODS.values())
    raise ConfigError(f"{given!r} is not the config of a method, choose from: {known}")


def refuse(given: Any, feature: Feature) -> None:
    """Refuse a feature that the method of a config cannot have."""
    if (why := METHODS[name_of(given)].method.refuses(given, feature)) is not None:
        raise ConfigError(why)


def make(given: Any, context: MethodContext) -> Method:
    """The method that a config asks for."""
    return METHODS[name_of(given)].method(given, context)
