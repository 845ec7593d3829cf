"""Tensors and trees of them in files: safetensors for tensors, JSON for the rest."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from thinwire.base.errors import DamagedError
from thinwire.base.files import REMEDY, on_file, read_safetensors, refuse_link


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the CPU's memory, which training does not change."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, as `copied` gives them, to a safetensors file."""
    refuse_link(path)
    with on_file(path):
        save_file({name: t.contiguous() for name, t in tensors.items()}, path)


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
