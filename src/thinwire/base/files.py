"""Files that may come from elsewhere: read within limits, with errors that name the file; and writes in their folder.

Nothing here runs code from a file, follows a link when writing, or takes more memory than the file's own size
suggests; see docs/files-from-elsewhere.md.
"""

import errno
import io
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from thinwire.base.errors import ConfigError, DamagedError, ThinwireError
from thinwire.base.schema import wrong

REMEDY = "restore the file, or use an older save"
_LARGEST_JSON = 32 << 20
_LARGEST_LINES = 4 << 30
_LONGEST_LINE = 8 << 20
_BLOCK = 1 << 18
_DEEPEST = 64
_KINDS = {"F": "floating", "B": "floating", "I": "whole", "U": "whole", "C": "complex"}
"""By the first letter of a safetensors dtype, but for BOOL."""
_WIRE = re.compile("gloo|nccl|connection", re.IGNORECASE)
"""In errors about other workers, which say nothing about a file."""


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


def refuse_link(path: Path) -> None:
    """Raise if `path` is a link: a folder from elsewhere could lead a write to any file of the user.

    A pipe or device is refused too; opening it could wait forever.
    """
    if path.is_symlink():
        raise ConfigError(f"`{path}` is a link, and writing there would change another file; remove it")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"`{path}` is neither a file nor a folder; remove it")


def write_json(path: Path, value: Any) -> None:
    """Write plain values as JSON."""
    refuse_link(path)
    with on_file(path):
        path.write_text(json_text(value), encoding="utf-8")


def parse_json(text: str | bytes) -> Any:
    """JSON, with a ValueError for whatever is wrong with it, also what Python's parser allows or cannot do."""
    try:
        found = json.loads(text, object_pairs_hook=_each_once)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    layer = [found]
    for _ in range(_DEEPEST):
        layer = [part for each in layer for part in _parts(each)]
        if not layer:
            return found
    raise ValueError("nested too deeply")


def _parts(value: Any) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def read_json(path: Path, remedy: str = REMEDY, schema: Any = None) -> dict[str, Any]:
    """Read a JSON object, as `schema` describes it; looking up a missing key raises an error that names the file."""
    check_file(path, remedy, _LARGEST_JSON)
    try:
        found = parse_json(path.read_bytes())
    except ValueError as error:  # invalid JSON or not UTF-8
        raise DamagedError(f"`{path}` is damaged, not valid JSON ({error}); {remedy}") from error
    if not isinstance(found, dict):
        raise DamagedError(f"`{path}` is damaged, it holds {type(found).__name__} instead of an object; {remedy}")
    if schema is not None and (what := wrong(found, schema)):
        raise DamagedError(f"`{path}` is damaged, {what}; {remedy}")
    return _Values(path, remedy, found)


def lines_of(path: Path, remedy: str = REMEDY) -> Iterator[str]:
    """The lines of a text, with their ends; the last one may be cut off."""
    for block in raw_blocks_of(path, remedy):
        yield from (line.decode("utf-8", errors="replace") for line in io.BytesIO(block))


def raw_blocks_of(path: Path, remedy: str = REMEDY) -> Iterator[bytes]:
    """The same lines as bytes, many at a time: each block ends with a line, but for a last one that is cut off."""
    check_file(path, remedy, _LARGEST_LINES)
    rest = b""
    with path.open("rb") as file:
        while part := file.read(_BLOCK):
            cut = part.rfind(b"\n") + 1
            if cut:
                yield rest + part[:cut]
                rest = b""
            rest += part[cut:]
            if len(rest) >= _LONGEST_LINE:
                raise DamagedError(f"`{path}` is damaged, a line has more than {_LONGEST_LINE:,} bytes; {remedy}")
    if rest:
        yield rest


def check_file(path: Path, remedy: str = REMEDY, most: int | None = None) -> None:
    """Raise unless there is a regular file of at most so many bytes, by default what this machine could hold."""
    try:
        about = path.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        raise DamagedError(f"`{path}` is missing; {remedy}") from error
    if not stat.S_ISREG(about.st_mode):  # reading a pipe would wait forever
        raise DamagedError(f"`{path}` is not a regular file; {remedy}")
    most = most or memory()
    if about.st_size > most:
        raise DamagedError(f"`{path}` is damaged, it has {about.st_size:,} bytes, more than {most:,}; {remedy}")


def memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Values(dict[str, Any]):
    """The content of a JSON file; a missing key is an error about the file."""

    def __init__(self, path: Path, remedy: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._path, self._remedy = path, remedy

    def __missing__(self, name: str) -> Any:
        raise DamagedError(f"`{self._path}` is damaged, it has no {name!r}; {self._remedy}")


@contextmanager
def understood(path: Path, remedy: str = REMEDY) -> Iterator[None]:
    """Inside, a saved state is given to those that wrote it; whatever they raise means that it is not theirs."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, TypeError) as error:
        raise _not_understood(path, remedy, error) from error
    except (RuntimeError, ValueError) as error:
        if isinstance(error, ThinwireError) or _WIRE.search(str(error)):
            raise
        raise _not_understood(path, remedy, error) from error


def _not_understood(path: Path, remedy: str, error: Exception) -> DamagedError:
    about = " ".join(str(error).split())[:200]
    return DamagedError(f"`{path}` is damaged and cannot be resumed from ({type(error).__name__}: {about}); {remedy}")


def read_tensors(path: Path, remedy: str = REMEDY, expected: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The tensors of a file, onto the CPU; if some are `expected`, they are compared before memory is taken."""
    check_file(path, remedy)
    try:
        if expected is not None:
            _compare(path, expected)
        return load_file(path)
    except SafetensorError as error:
        raise DamagedError(f"`{path}` is damaged, not a valid safetensors file ({error}); {remedy}") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file."""
    refuse_link(path)
    with on_file(path):
        save_file({name: t.contiguous() for name, t in tensors.items()}, path)


def header(path: Path, remedy: str = REMEDY) -> dict[str, list[int]]:
    """The shapes of a file's tensors, without reading them."""
    check_file(path, remedy)
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  (not a dict)
    except SafetensorError as error:
        raise DamagedError(f"`{path}` is damaged, not a valid safetensors file ({error}); {remedy}") from error


def _compare(path: Path, expected: Mapping[str, Tensor]) -> None:
    """Raise unless a file's header names only expected tensors, of their shapes and kinds of numbers."""
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  (it is not a dict)
            if name not in expected:
                raise ConfigError(
                    f"the save is of another model: {name!r} is in only one of the two; build the same model"
                )
            about, own = file.get_slice(name), expected[name]
            shape, kind = about.get_shape(), about.get_dtype()
            if shape != list(own.shape) or _kind(kind) != _kind(own):
                here = f"{list(own.shape)} in {str(own.dtype).removeprefix('torch.')}"
                raise ConfigError(
                    f"`{path}` holds {name!r} as {shape} in {kind}, here it is {here}; build the same model"
                )


def _kind(dtype: str | Tensor) -> str:
    if isinstance(dtype, str):
        return "bool" if dtype == "BOOL" else _KINDS.get(dtype[:1], dtype)
    if dtype.is_floating_point():
        return "floating"
    return "complex" if dtype.is_complex() else "bool" if str(dtype.dtype) == "torch.bool" else "whole"
