"""Former names of fields: using one is an error that gives the new one."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from thinwire.errors import ConfigError

C = TypeVar("C", bound=type)


def renamed(**fields: str) -> Callable[[C], C]:
    """For a config class: each old name, and what to write instead."""

    def wrap(config: C) -> C:
        init: Any = config.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **given: Any) -> None:
            refuse(config, given)
            init(self, *args, **given)

        config.__init__ = checked  # type: ignore[misc]
        config.renamed_fields = {**getattr(config, "renamed_fields", {}), **fields}  # type: ignore[attr-defined]
        return config

    return wrap


def refuse(config: type, given: Any) -> None:
    """Raise for a former name among the given fields."""
    known = getattr(config, "renamed_fields", {})
    for name in given:
        if name in known:
            raise ConfigError(f"{config.__name__} no longer has the field `{name}`: write {known[name]}")
