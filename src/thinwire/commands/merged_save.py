"""The model of a save, as `finish` would have it: where groups train apart, their copies merged by the config."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.base.errors import ConfigError, DamagedError, unknown
from thinwire.base.files import read_json, read_tensors
from thinwire.checkpoint.snapshot import WORKER


def merged(folder: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that all workers would hold after a merge."""
    if state["in_sync"]:
        return read_tensors(folder / "model.safetensors")
    files = [folder / f"model-rank{group[0]}.safetensors" for group in state["groups"]]
    copies = [read_tensors(file) for file in files]
    for file, copy in zip(files, copies, strict=True):
        if odd := copies[0].keys() ^ copy.keys():
            raise DamagedError(f"`{file}` is damaged, {min(odd)!r} is only there or only in `{files[0].name}`")
        if name := next((name for name, t in copy.items() if t.shape != copies[0][name].shape), None):
            raise DamagedError(f"`{file}` is damaged, {name!r} has another shape than in `{files[0].name}`")
    sizes = _sizes(folder, state)
    rest = [size / sum(sizes) for size in sizes]
    of_factors = _by_who_trained(sizes, state)
    return {name: _mean([copy[name] for copy in copies], of_factors.get(name, rest)) for name in copies[0]}


_HOW = {
    "mean": "this is the mean of {} groups' copies",
    "trained": "this is the mean of {} groups' copies, and of each factor among those that trained it",
    "weighted": "this is the mean of {} groups' copies, weighted by their losses",
}


def how(state: Mapping[str, Any]) -> str:
    """What a merge makes of the save, in words."""
    way = str(state["config"].get("merge", "mean"))
    if way not in _HOW:
        raise unknown("merge in the save", way, _HOW)
    return _HOW[way].format(len(state["groups"]))


def _sizes(folder: Path, state: Mapping[str, Any]) -> list[float]:
    """Each group's weight in a mean: its workers, divided by its mean loss if the config asks for it."""
    sizes = [float(len(group)) for group in state["groups"]]
    if state["config"].get("merge") != "weighted":
        return sizes
    observed = [
        [read_json(folder / f"worker-rank{rank}.json", schema=WORKER)["method"]["observed"] for rank in group]
        for group in state["groups"]
    ]
    losses, counts = ([sum(own[i] for own in group) for group in observed] for i in (0, 1))
    if not all(counts):
        raise ConfigError(
            "merge='weighted' needs losses, and since the last merge none was observed before this save; "
            "continue the run, or export a later save"
        )
    return [size / max(loss / n, 1e-8) for size, loss, n in zip(sizes, losses, counts, strict=True)]


def _by_who_trained(sizes: Sequence[float], state: Mapping[str, Any]) -> dict[str, list[float]]:
    """The weights of factors, by name, where only those that trained one count: the first half of the groups A.

    With `train="split"` groups change sides at each average.
    """
    split = state["config"].get("train") == "split"
    if not split and state["config"].get("merge") != "trained":
        return {}
    half = math.ceil(len(sizes) / 2)
    first, second = sum(sizes[:half]), sum(sizes[half:])
    a = [size / first if i < half else 0.0 for i, size in enumerate(sizes)]
    b = [0.0 if i < half else size / second for i, size in enumerate(sizes)]
    swapped = split and state["method"]["rounds"] % 2
    of_a, of_b = (b, a) if swapped else (a, b)
    return {f"{key}_{suffix}": own for key in state["method"]["ranks"] for suffix, own in (("a", of_a), ("b", of_b))}


def _mean(copies: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """As in a merge: the mean of numbers that differ, the largest of counters, the first of anything else."""
    first = copies[0]
    if all(torch.equal(first, other) for other in copies[1:]):
        return first
    if first.is_floating_point():
        wide = sum(t.to(torch.promote_types(t.dtype, torch.float32)) * w for t, w in zip(copies, weights, strict=True))
        return torch.as_tensor(wide).to(first.dtype)
    return torch.stack(list(copies)).amax(0) if first.numel() == 1 and not first.is_complex() else first
