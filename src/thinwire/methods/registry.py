"""Every method there is, by the name users type."""

import logging
from collections.abc import Callable, Hashable, Sequence
from importlib.metadata import entry_points
from typing import Any, NamedTuple, TypeVar

from thinwire.base.errors import ConfigError
from thinwire.comm.topology import Topology, arrange
from thinwire.exchange.parts import Feature, MethodContext
from thinwire.methods.runner import Runner, names_of
from thinwire.methods.timetable import Phase, parts_of

log = logging.getLogger("thinwire")
C = TypeVar("C", bound=type)


class Entry(NamedTuple):
    """A method: its config, one line for `thinwire list`, and a config for the contract suite."""

    config: Any
    summary: str
    example: Callable[..., Any]


METHODS: dict[str, Entry] = {}


def register(name: str, *, example: dict[str, Any] | None = None, summary: str = "") -> Callable[[C], C]:
    """Make a config known under a name that users type, for `attach` and for the command line.

    It has `timetable(topology)`. The fields of `example` are those of a config whose phases all happen within 20 steps,
    for the contract suite. The summary is the first line of its documentation, unless given.
    """

    def add(config: C) -> C:
        taken = METHODS.get(name)
        if taken is not None and taken.config.__qualname__ != config.__qualname__:
            raise ConfigError(f"the name {name!r} is taken by {taken.config.__qualname__}; register under another one")
        line = summary or (config.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        METHODS[name] = Entry(config, line, lambda **more: config(**{**(example or {}), **more}))
        return config

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


def timetable_of(given: Any, topology: Topology | None = None) -> Sequence[Phase]:
    """The phases that a config asks for; without a layout those of one worker."""
    return list(given.timetable(topology or arrange(0, [0], None)))


def phases_of(given: Any) -> tuple[str, ...]:
    """The names of these phases."""
    return names_of(timetable_of(given))


def role(given: Any, topology: Topology) -> Hashable:
    """The same for workers that do the same, where their groups have the same size."""
    exchanges = [each for phase in timetable_of(given, topology) for each in phase.exchanges]
    return tuple(each.role(topology) for each in dict.fromkeys(exchanges))


def refuse(given: Any, feature: Feature) -> None:
    """Refuse a feature that the method of a config cannot have."""
    name_of(given)
    for part in parts_of(timetable_of(given)):
        if (why := part.refuses(feature, given)) is not None:
            raise ConfigError(why)


def make(given: Any, context: MethodContext) -> Runner:
    """The method that a config asks for."""
    name_of(given)
    return Runner(given, context)
