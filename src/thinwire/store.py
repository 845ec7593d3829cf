"""Folders that are whole or not there: safetensors and JSON, written aside and renamed into place."""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from thinwire.comm.collectives import Wire
from thinwire.errors import ConfigError, ConsequenceError, DamagedError, ThinwireError
from thinwire.files import REMEDY, on_file

_SAVED = re.compile(
    r"(state|position|random-\d+|worker-rank\d+|(model|method|optimizer|average).*)\.(json|safetensors)|replica(\.old|\.writing)?"
)
"""Names of what a save is made of."""


@contextmanager
def atomic_folder(path: Path | str, wire: Wire | None) -> Iterator[Path]:
    """A folder beside `path` to write into, put in its place when all workers are done; collective.

    A crash at any moment leaves the old folder or the new one, the old one perhaps under `path` + ".old". What the
    system refuses to one worker is raised there, and on all others as an error that names that worker and the reason.
    """
    path = Path(path)
    aside = _beside(path, ".writing")
    first = wire is None or wire.topology.rank == 0
    try:
        with _together(wire, path):
            if first:
                _refuse_what_is_no_save(path)
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
        with _together(wire, path):
            yield aside
        with _together(wire, path):
            if first:
                _put_in_place(aside, path)
    except (OSError, ThinwireError):
        if first:
            shutil.rmtree(aside, ignore_errors=True)  # a disk that is full has room again
        raise


def _refuse_what_is_no_save(path: Path) -> None:
    """Files of others that have the names of a save's would be lost."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"`{path}` is a file and cannot become a saved folder; give another name")
    if path.is_dir() and not any((path / name).is_file() for name in ("state.json", "position.json")):
        names = sorted(entry.name for entry in path.iterdir() if _SAVED.fullmatch(entry.name))
        if names:
            raise ConfigError(f"`{path}` holds {names[0]!r} and is no save, nothing was written; give another folder")


def _put_in_place(aside: Path, path: Path) -> None:
    """Replace an old save; what others laid into its folder goes along."""
    old = _beside(path, ".old")
    for entry in path.iterdir() if path.exists() else ():
        if not _SAVED.fullmatch(entry.name) and not (aside / entry.name).exists():
            if entry.is_dir() and not entry.is_symlink():
                shutil.copytree(entry, aside / entry.name, symlinks=True)
            else:
                shutil.copy2(entry, aside / entry.name, follow_symlinks=False)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    aside.rename(path)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _together(wire: Wire | None, path: Path) -> Iterator[None]:
    """Wait for all workers after what is inside; what one of them cannot do ends it for all."""
    call = f"writing {path.name}"
    try:
        yield
    except (OSError, ConfigError, ConsequenceError) as error:
        if wire is not None and not isinstance(error, ConnectionError):
            with suppress(ThinwireError):  # its own reason is the one to be raised here
                wire.barrier(call, failed=error)
        raise
    if wire is not None:
        wire.barrier(call)


def newest(path: Path | str) -> Path:
    """`path`, or what a crash in the middle of replacing it left."""
    path = Path(path)
    for candidate in (path, _beside(path, ".old")):
        if candidate.is_dir():
            return candidate
    raise ConfigError(f"there is no saved folder at {str(path)!r}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Tensors to a safetensors file."""
    with on_file(path):
        save_file({name: t.detach().contiguous().cpu().clone() for name, t in tensors.items()}, path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors from a safetensors file, on the CPU."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise DamagedError(f"`{path}` is damaged, it is no safetensors file ({error}); {REMEDY}") from error
    except FileNotFoundError as error:
        raise DamagedError(f"`{path}` is missing; {REMEDY}") from error


def like(value: Any, current: Any) -> Any:
    """A value from JSON with the type that JSON took from it."""
    if isinstance(current, tuple):
        return tuple(value)
    if isinstance(current, Tensor):
        return torch.as_tensor(value, dtype=current.dtype, device=current.device)
    return value


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def apart(state: Any, place: str = "") -> tuple[Any, dict[str, Tensor]]:
    """A tree of plain values and tensors as a plain one, with {"tensor": PLACE} for each, and the tensors by place."""
    if isinstance(state, Tensor):
        return {"tensor": place}, {place: state.contiguous()}
    if not isinstance(state, dict | list | tuple):
        return state, {}
    pairs = list(state.items()) if isinstance(state, dict) else list(enumerate(state))
    found = {key: apart(value, f"{place}.{key}" if place else str(key)) for key, value in pairs}
    tensors = {name: t for _, own in found.values() for name, t in own.items()}
    plain = {key: value for key, (value, _) in found.items()}
    return (plain if isinstance(state, dict) else list(plain.values())), tensors


def together(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree again."""
    if isinstance(plain, dict):
        if plain.keys() == {"tensor"}:
            if plain["tensor"] not in tensors:
                raise DamagedError(f"the save is damaged, it lacks the tensor {plain['tensor']!r}; {REMEDY}")
            return tensors[plain["tensor"]]
        return {key: together(value, tensors) for key, value in plain.items()}
    return [together(value, tensors) for value in plain] if isinstance(plain, list) else plain
