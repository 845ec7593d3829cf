"""JSON files, with errors that name the file: damaged content, and writes that the system refuses."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from thinwire.errors import DamagedError

REMEDY = "restore the file, or use an older save"


@contextmanager
def on_file(path: Path) -> Iterator[None]:
    """Make sure that an OSError raised inside names the file; safetensors errors become OSErrors."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def json_text(value: Any) -> str:
    """Plain values as JSON; floats round-trip exactly."""
    return json.dumps(value, indent=1) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write plain values as JSON."""
    with on_file(path):
        path.write_text(json_text(value), encoding="utf-8")


def read_json(path: Path, remedy: str = REMEDY) -> dict[str, Any]:
    """Read a JSON object; looking up a missing key raises an error that names the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # invalid JSON or not UTF-8
        raise DamagedError(f"`{path}` is damaged, not valid JSON ({error}); {remedy}") from error
    except FileNotFoundError as error:
        raise DamagedError(f"`{path}` is missing; {remedy}") from error
    if not isinstance(found, dict):
        raise DamagedError(f"`{path}` is damaged, it holds {type(found).__name__} instead of an object; {remedy}")
    return _Values(path, remedy, found)


class _Values(dict[str, Any]):
    """The content of a JSON file; a missing key is an error about the file."""

    def __init__(self, path: Path, remedy: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._path, self._remedy = path, remedy

    def __missing__(self, name: str) -> Any:
        raise DamagedError(f"`{self._path}` is damaged, it has no {name!r}; {self._remedy}")
