"""JSON files as values by name; one that is damaged is named."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.errors import DamagedError

REMEDY = "restore the file, or use an older save"


def read_json(path: Path, remedy: str = REMEDY) -> dict[str, Any]:
    """Plain values by name from a JSON file; a name that is not there is an error that says which file lacks it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # broken JSON, and bytes that are no text
        raise DamagedError(f"`{path}` is damaged, it is no JSON ({error}); {remedy}") from error
    except FileNotFoundError as error:
        raise DamagedError(f"`{path}` is missing; {remedy}") from error
    if not isinstance(found, dict):
        raise DamagedError(f"`{path}` is damaged, it holds {type(found).__name__} and not values by name; {remedy}")
    return _Values(path, remedy, found)


class _Values(dict[str, Any]):
    """What a file holds, by name."""

    def __init__(self, path: Path, remedy: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._path, self._remedy = path, remedy

    def __missing__(self, name: str) -> Any:
        raise DamagedError(f"`{self._path}` is damaged, it has no {name!r}; {self._remedy}")
