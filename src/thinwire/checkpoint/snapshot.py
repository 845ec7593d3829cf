"""A replica on disk: model in its shape, optimizer, method, scaler and ledger.

state.json                       what is the same on all workers
model.safetensors                the model; model-rankR where groups hold different ones, R a group's first rank
optimizer.safetensors / .json    the state of all optimizers, likewise
averageN.safetensors             the Nth moving average, if there are any; averageN-rankR where groups differ
worker-rankR.json                a worker's own counters and ledger
worker-rankR.safetensors         a worker's own tensors, such as gradients it has not sent yet
also-rankR.json / .safetensors   a worker's states of what else was saved, such as a scheduler
manifest.json                    size and checksum of all of them
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.base.errors import ConfigError
from thinwire.base.files import json_text, read_json, understood
from thinwire.base.schema import like as like_now
from thinwire.base.schema import wrong
from thinwire.checkpoint import also as beside
from thinwire.checkpoint import loads, optimizer_files
from thinwire.checkpoint.also import Also
from thinwire.checkpoint.manifest import verify
from thinwire.checkpoint.saved_state import (
    STATE,
    WORKER,
    check_groups,
    check_ranks,
    refuse,
)
from thinwire.checkpoint.saves import Files, newest
from thinwire.checkpoint.tensors import apart, copied, read_tensors, together
from thinwire.config.settings import describe
from thinwire.methods.base import Method
from thinwire.methods.context import Saved
from thinwire.methods.registry import name_of

FORMAT = 6


def capture(method: Method, scaler: Any, baseline: dict[str, int], averages: Sequence[nn.Module] = ()) -> Files:
    """This worker's files of a save, copied to memory; collective.

    `baseline` is what all-reduce would have sent so far, by this world and others.
    """
    kept, topology = method.state_dict(), method.topology
    shared, tensors = apart(kept["shared"])
    own, own_tensors = apart(kept["local"])
    traffic = method.wire.node_mean().state()
    common = [method.wire.agree(list(average.state_dict().values()), "checksums") for average in averages]
    model, averaged = _distinct(method.model.state_dict()), [_distinct(average.state_dict()) for average in averages]
    files: Files = {}
    if topology.rank == 0:
        files["state.json"] = json_text(_common(method, shared, scaler, traffic) | {"baseline": baseline})
    for number, (average, same) in enumerate(zip(averaged, common, strict=True)):
        if topology.rank == (0 if same else topology.group[0]):
            ending = "" if same else f"-rank{topology.rank}"
            files[f"average{number}{ending}.safetensors"] = copied(average)
    is_whole = _is_whole(method)
    if topology.rank == (0 if is_whole else topology.group[0]):
        suffix = "" if is_whole else f"-rank{topology.rank}"
        files[f"model{suffix}.safetensors"] = copied(model)
        files[f"method{suffix}.safetensors"] = copied(tensors)
        with method.context.users_optimizers():
            files |= optimizer_files.captured(suffix, method)
    worker = {"method": own, "ledger": method.wire.ledger.state(), "scaler": _scale(scaler)}
    files[f"worker-rank{topology.rank}.json"] = json_text(worker)
    files[f"worker-rank{topology.rank}.safetensors"] = copied(own_tensors)
    optimizer_files.lay_out_in_rows(method)
    # Both a run that goes on and one that resumes continue with a fresh wrapper, so both sum in the same order.
    method.gradients.rewrap()
    return files


def load(
    method: Method,
    scaler: Any,
    folder: Path | str,
    averages: Sequence[nn.Module] = (),
    *,
    check: bool = True,
    also: Also | None = None,
) -> dict[str, int]:
    """Read everything back, the model's shape first; collective. Returns the baseline.

    Checksums are compared first, unless they were already.
    """
    folder = newest(folder)
    if check:
        verify(folder, method.wire)
    state = read_json(folder / "state.json", schema=STATE)
    _check(method, state)
    same_size = state["world_size"] == method.topology.world_size
    states = beside.Found(folder, also, method.topology.rank, same_size)
    suffix = "" if state["in_sync"] else f"-rank{_predecessor(method, state['groups'])}"

    def load_values() -> None:
        _load_model(method.model, folder / f"model{suffix}.safetensors")
        with method.context.users_optimizers():
            optimizer_files.read(folder, suffix, method)

    shared = together(state["method"], _on_device(method, folder / f"method{suffix}.safetensors"))
    method.drop_pending()
    own_state = {part: like_now(kept, fresh=method.step == 0) for part, kept in method.state_dict().items()}
    refuse(folder / "state.json", wrong(shared, own_state["shared"], "method"))
    check_ranks(folder, shared, folder / f"model{suffix}.safetensors")
    workers = _Workers(method, folder, state["world_size"], own_state["local"])
    same = state["groups"] == _groups(method)
    own = method.topology.rank if same else None
    with understood(folder):
        method.load_state_dict(Saved(shared, workers, own, load_values))
        _load_ledger(method, scaler, state, folder)
        for number, average in enumerate(averages):
            _load_average(method, state, folder / f"average{number}", average)
    states.load()
    if (folder / f"average{len(averages)}.safetensors").is_file() or [*folder.glob(f"average{len(averages)}-rank*")]:
        warnings.warn(
            f"{folder} holds more moving averages than the {len(averages)} here; make thinwire.EMA(replica) before "
            "load() to continue it",
            stacklevel=3,
        )
    method.gradients.rewrap()
    return state["baseline"]


def _common(method: Method, shared: Any, scaler: Any, traffic: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "method_name": name_of(method.config),
        "config": describe(method.config),
        "world_size": method.topology.world_size,
        "in_sync": _is_whole(method),
        "groups": _groups(method),
        "optimizers": _kinds(method),
        "method": shared,
        "scaler": _scale(scaler),
        "traffic": traffic,
    }


def _check(method: Method, state: Mapping[str, Any]) -> None:
    name = name_of(method.config)
    if state["format"] != FORMAT:
        raise ConfigError(
            f"the save has format {state['format']}, this version reads {FORMAT}; use the version that wrote it"
        )
    if state["method_name"] != name:
        raise ConfigError(f"the save is of method {state['method_name']!r}, attached is {name!r}; attach the same one")
    if state["optimizers"] != _kinds(method):
        raise ConfigError(
            f"the save is of a run trained by {', '.join(state['optimizers'])}, attached is "
            f"{', '.join(_kinds(method))}, which keeps other state; attach with the same optimizers"
        )
    check_groups(state)
    own = describe(method.config)
    changed = sorted(k for k in own if own[k] != state["config"].get(k) and k != "group_size")
    if changed:
        differences = ", ".join(f"{k}={state['config'].get(k)!r} there, {own[k]!r} here" for k in changed)
        raise ConfigError(f"the save was made with another config: {differences}; attach with the same one")


def _predecessor(method: Method, groups: Sequence[Sequence[int]]) -> int:
    """The first rank of the group whose model this one goes on from, where groups have trained apart.

    Groups that are more than before share one. Of those that nobody goes on from, the steps since the last average
    are lost, as if they had died.
    """
    topology = method.topology
    if method.wire.is_sharded:
        if groups != _groups(method):
            raise ConfigError(
                f"the save is of shards in groups {groups}, here are {_groups(method)}: resume a sharded model with as "
                "many workers and groups"
            )
        return topology.rank
    left = len(groups) - len(topology.groups)
    if left > 0 and method.topology.rank == 0:
        warnings.warn(
            f"the save is of {len(groups)} groups that train apart, here are {len(method.topology.groups)}: what the "
            f"last {left} trained since the last average is lost",
            stacklevel=4,
        )
    return groups[method.topology.group_index % len(groups)][0]


def _load_model(model: nn.Module, file: Path) -> None:
    with loads.ignored():
        model.load_state_dict(_all_keys(model, read_tensors(file, model.state_dict())))


def _scale(scaler: Any) -> dict[str, Any] | None:
    return scaler.state_dict() if scaler is not None else None


class _Workers(Sequence[dict[str, Any]]):
    """The local parts of a save by rank, read when they are looked at: most workers need only their own."""

    def __init__(self, method: Method, folder: Path, count: int, schema: Any) -> None:
        self.method, self.folder, self.workers, self.schema = method, folder, count, schema

    def __len__(self) -> int:
        return self.workers

    def __getitem__(self, rank: Any) -> Any:
        if not 0 <= rank < self.workers:
            raise IndexError(rank)
        tensors = _on_device(self.method, self.folder / f"worker-rank{rank}.safetensors")
        file = self.folder / f"worker-rank{rank}.json"
        found = together(read_json(file, schema=WORKER)["method"], tensors)
        refuse(file, wrong(found, self.schema, "method"))
        return found


def _load_ledger(method: Method, scaler: Any, state: Mapping[str, Any], folder: Path) -> None:
    """This worker's ledger and scale; a world of another size starts from the nodes' mean."""
    if state["world_size"] == method.topology.world_size:
        own = read_json(folder / f"worker-rank{method.topology.rank}.json", schema=WORKER)
        ledger, scale = own["ledger"], own["scaler"]
    else:
        ledger, scale = state["traffic"], state["scaler"]
    method.wire.ledger.load_state(ledger)
    if scaler is not None and scale:
        scaler.load_state_dict(scale)


def _load_average(method: Method, state: Mapping[str, Any], stem: Path, average: nn.Module) -> None:
    """A moving average as it was; groups that are not those that saved it start from the mean of theirs."""
    groups = state["groups"]
    files = [stem.with_name(f"{stem.name}-rank{group[0]}.safetensors") for group in groups]
    if (whole := stem.with_name(f"{stem.name}.safetensors")).is_file():
        found = [read_tensors(whole, average.state_dict())]
    elif files[0].is_file():
        mine = groups == _groups(method)
        values = average.state_dict()
        found = [read_tensors(file, values) for file in (files[method.topology.group_index :][:1] if mine else files)]
    else:
        raise ConfigError(f"{stem.parent} holds no moving average; make thinwire.EMA(replica) after load()")
    if len(found) > 1:
        weights = torch.tensor([len(group) / state["world_size"] for group in groups])
        found = [{name: _mean([tensors[name] for tensors in found], weights) for name in found[0]}]
    average.load_state_dict(_all_keys(average, found[0]))


def _mean(tensors: list[Tensor], weights: Tensor) -> Tensor:
    if not tensors[0].is_floating_point():
        return tensors[0]
    return torch.einsum("g,g...->...", weights.to(tensors[0].dtype), torch.stack(tensors))


def _on_device(method: Method, file: Path) -> dict[str, Tensor]:
    """A file's tensors where the model is; none if there is no such file."""
    device = next(method.model.parameters()).device
    return {name: t.to(device) for name, t in read_tensors(file).items()} if file.is_file() else {}


def _groups(method: Method) -> list[list[int]]:
    return [sorted(group) for group in method.topology.groups]


def _is_whole(method: Method) -> bool:
    """Whether one worker holds all that the others do."""
    return method.in_sync and not method.wire.is_sharded


def _kinds(method: Method) -> list[str]:
    """The optimizers' classes: each keeps state of its own kind."""
    return [type(optimizer).__name__ for optimizer in method.optimizers]


def _distinct(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One name for each tensor: tied weights are written once."""
    seen: set[tuple[int, torch.Size]] = set()
    kept = {}
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise ConfigError(f"{name!r} is a module's extra state, not a tensor: it cannot be saved without pickle")
        place = (t.data_ptr(), t.shape)
        if t.numel() == 0 or place not in seen:
            kept[name] = t
            seen.add(place)
    return kept


def _all_keys(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tied weights under all their names again; a save of another model is refused."""
    own = model.state_dict()
    by_place = {t.data_ptr(): tensors[name] for name, t in own.items() if name in tensors}
    found = {
        name: tensors.get(name, by_place.get(t.data_ptr(), t if t.numel() == 0 else None)) for name, t in own.items()
    }
    wrong = sorted({name for name, t in found.items() if t is None} ^ (tensors.keys() - own.keys()))
    if wrong:
        raise ConfigError(f"the save is of another model: {wrong[0]!r} is in only one of the two; build the same model")
    return {name: t for name, t in found.items() if t is not None}
