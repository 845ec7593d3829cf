"""Atomic folders of safetensors and JSON: written to a temporary name, then renamed into place."""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from thinwire.comm.collectives import Wire
from thinwire.errors import ConfigError, ConsequenceError, DamagedError, ThinwireError
from thinwire.files import REMEDY, on_file, read_safetensors, refuse_link

_SAVED = re.compile(
    r"(state|position|random-\d+|worker-rank\d+|(model|method|optimizer|average).*)\.(json|safetensors)|replica(\.old|\.writing)?"
)
"""File names that belong to a save."""


@contextmanager
def atomic_folder(path: Path | str, wire: Wire | None) -> Iterator[Path]:
    """A temporary folder to write into, renamed to `path` when all workers are done; collective.

    A crash at any moment leaves the old folder or the new one, the old one perhaps under `path` + ".old". If writing
    fails on one worker, it raises there, and the others raise an error that names that worker and the reason.
    """
    path = Path(path)
    draft = _beside(path, ".writing")
    first = wire is None or wire.topology.rank == 0
    try:
        with _together(wire, path):
            if first:
                _refuse_foreign_folder(path)
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir(parents=True)
        with _together(wire, path):
            yield draft
        with _together(wire, path):
            if first:
                _put_in_place(draft, path)
    except (OSError, ThinwireError):
        if first:
            shutil.rmtree(draft, ignore_errors=True)  # frees space on a full disk
        raise


def _refuse_foreign_folder(path: Path) -> None:
    """Other files with the names of a save's files would be overwritten."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"`{path}` is a file and cannot become a saved folder; give another name")
    if path.is_dir() and not any((path / name).is_file() for name in ("state.json", "position.json")):
        names = sorted(entry.name for entry in path.iterdir() if _SAVED.fullmatch(entry.name))
        if names:
            raise ConfigError(f"`{path}` holds {names[0]!r} but is not a Thinwire save; give another folder")


def _put_in_place(draft: Path, path: Path) -> None:
    """Replace an old save; other files in its folder are kept."""
    old = _beside(path, ".old")
    for entry in path.iterdir() if path.exists() else ():
        if not _SAVED.fullmatch(entry.name) and not (draft / entry.name).exists():
            if entry.is_dir() and not entry.is_symlink():
                shutil.copytree(entry, draft / entry.name, symlinks=True)
            else:
                shutil.copy2(entry, draft / entry.name, follow_symlinks=False)
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    draft.rename(path)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _together(wire: Wire | None, path: Path) -> Iterator[None]:
    """Wait for all workers at the end of the block; a failure on one of them raises on all."""
    call = f"writing {path.name}"
    try:
        yield
    except (OSError, ConfigError, ConsequenceError) as error:
        if wire is not None and not isinstance(error, ConnectionError):
            with suppress(ThinwireError):  # raise this worker's own error, not the barrier's
                wire.barrier(call, failed=error)
        raise
    if wire is not None:
        wire.barrier(call)


def newest(path: Path | str) -> Path:
    """`path`, or `path`.old if a crash interrupted its replacement."""
    path = Path(path)
    for candidate in (path, _beside(path, ".old")):
        if candidate.is_dir():
            return candidate
    raise ConfigError(f"there is no saved folder at {str(path)!r}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file."""
    refuse_link(path)
    with on_file(path):
        save_file({name: t.detach().contiguous().cpu().clone() for name, t in tensors.items()}, path)


def read_tensors(path: Path, expected: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Read tensors from a safetensors file, onto the CPU; if some are `expected`, others are refused unread."""
    return read_safetensors(path, expected=expected)


def like(value: Any, current: Any) -> Any:
    """Convert a value from JSON to the type of `current`, where JSON lost it."""
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
            if not isinstance(plain["tensor"], str) or plain["tensor"] not in tensors:
                raise DamagedError(f"the save is damaged, it lacks the tensor {plain['tensor']!r}; {REMEDY}")
            return tensors[plain["tensor"]]
        return {key: together(value, tensors) for key, value in plain.items()}
    return [together(value, tensors) for value in plain] if isinstance(plain, list) else plain
