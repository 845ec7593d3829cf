"""Folders that are whole or not there: safetensors and JSON, written aside and renamed into place."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from thinwire.comm.collectives import Wire
from thinwire.errors import ConfigError


@contextmanager
def atomic_folder(path: Path | str, wire: Wire | None) -> Iterator[Path]:
    """A folder beside `path` to write into, put in its place when all workers are done; collective.

    A crash at any moment leaves the old folder or the new one, the old one perhaps under `path` + ".old".
    """
    path = Path(path)
    aside, old = _beside(path, ".writing"), _beside(path, ".old")
    first = wire is None or wire.topology.rank == 0
    if first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    _wait(wire, path)
    yield aside
    _wait(wire, path)
    if first:
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            path.rename(old)
        aside.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    _wait(wire, path)


def newest(path: Path | str) -> Path:
    """`path`, or what a crash in the middle of replacing it left."""
    path = Path(path)
    for candidate in (path, _beside(path, ".old")):
        if candidate.is_dir():
            return candidate
    raise ConfigError(f"there is no saved folder at {str(path)!r}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Tensors to a safetensors file."""
    save_file({name: t.detach().contiguous().cpu().clone() for name, t in tensors.items()}, path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors from a safetensors file, on the CPU."""
    return load_file(path)


def write_json(path: Path, value: Any) -> None:
    """Plain values to a JSON file; floats come back bit for bit."""
    path.write_text(json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Plain values from a JSON file."""
    return json.loads(path.read_text())


def like(value: Any, current: Any) -> Any:
    """A value from JSON with the type that JSON took from it."""
    if isinstance(current, tuple):
        return tuple(value)
    if isinstance(current, Tensor):
        return torch.as_tensor(value, dtype=current.dtype, device=current.device)
    return value


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _wait(wire: Wire | None, path: Path) -> None:
    if wire is not None:
        wire.barrier(f"writing {path.name}")
