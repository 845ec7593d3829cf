"""Runs of every method in several situations, as the golden files hold them.

Beside plain ones in two layouts: a run that is saved and loaded, groups that shard the model, a group that dies.
"""

import functools
import math
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gang
import small
import thinwire
from device import DEVICE
from every_method import STEPS, WAYS, WAYS_OF_ADAM, Way
from launchers import TIMEOUT, Launchers
from selection import first_of
from thinwire.methods.registry import METHODS

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import desloc
import gossip
import slowmo


class Situation(NamedTuple):
    """What a run goes through."""

    workers: int
    group_size: int
    saved: bool = False
    """After step `TURN` into a new model and optimizer."""
    shards: bool = False
    """Groups shard the model with FSDP2."""
    lost: bool = False
    """The second group dies in the backward pass of step `TURN`."""


TURN = 11
"""Between two averages, and after weights were factored."""
POISONED = 4
RATE = 3e-3
LAYOUTS = {"2 groups of 2": (4, 2), "3 groups of 1": (3, 1)}
layouts = pytest.mark.parametrize("layout", first_of(LAYOUTS))
SITUATIONS = {name: Situation(*layout) for name, layout in LAYOUTS.items()} | {
    "saved and loaded": Situation(4, 2, saved=True),
    "2 groups of 2 shards": Situation(4, 2, shards=True),
    "a group of 3 lost": Situation(3, 1, lost=True),
}
OWN = {
    "gossip": Way(config=lambda **more: gossip.Gossip(every=4, **more)),
    "desloc": Way(
        config=lambda **more: desloc.DesLoc(every=4, every_first=6, every_second=8, **more),
        parameters=lambda step: step % 4 == 0,
        buffers=lambda step: step % 4 == 0,
    ),
    "slowmo": Way(
        config=lambda **more: slowmo.SlowMo(every=4, **more),
        parameters=lambda step: step % 4 == 0,
        buffers=lambda step: step % 4 == 0,
    ),
}
"""Those of `examples/`."""
CASES = {**WAYS, **OWN}
assert METHODS.keys() <= CASES.keys(), "a method's name is also the name of its example's case"
GROWING, CLIPPED, LEFT_OUT = "localsgd every_max", "localsgd clipped", "diloco left out"
MORE = {
    **WAYS_OF_ADAM,
    GROWING: Way(config=lambda **more: thinwire.LocalSGD(warmup=2, every=2, every_max=6, **more)),
    CLIPPED: Way(config=lambda **more: thinwire.LocalSGD(warmup=2, every=4, outliers="clip", **more)),
    LEFT_OUT: Way(config=lambda **more: thinwire.DiLoCo(warmup=2, every=4, wire="int8", diverged="leave_out", **more)),
}
"""What golden files hold beside the cases that are always taken: Adam's moments, a learning rate that falls, and a last
group that is thrown far away or to NaN."""


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all runs here."""
    return torch.optim.AdamW(model.parameters(), lr=RATE)


@functools.cache
def trajectories(situation: str, names: tuple[str, ...] = tuple(CASES)) -> list[dict[str, dict[str, Any]]]:
    """By rank and case."""
    place = SITUATIONS[situation]
    with tempfile.TemporaryDirectory() as folder:
        return gang.run(_all, place.workers, situation, names, folder, fresh=place.shards)


def without_one_group(name: str, situation: str) -> list[dict[str, Any]]:
    """One case, by group, of those that live to the end."""
    found = Launchers(_survive, SITUATIONS[situation].workers, 1, name, situation).collect()
    for seen in found.values():
        assert isinstance(seen, dict), seen  # or it is why a worker ended
        seen.pop("slow_bytes", None)  # how often groups ask one another depends on when each learns of the loss
    return [found[seat] for seat in sorted(found)]


def _all(rank: int, situation: str, names: tuple[str, ...], folder: str) -> dict[str, dict[str, Any]]:
    return {name: _run(rank, name, situation, Path(folder) / name) for name in names}


def _survive(group: int, worker: int, name: str, situation: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    return _run(group, name, situation, Path())


def _run(rank: int, name: str, situation: str, folder: Path) -> dict[str, Any]:
    """What one worker saw of a run: after each step, and after `finish`; or why there is none."""
    place = SITUATIONS[situation]
    try:
        replica, optimizer = _begin(name, place)
    except thinwire.ThinwireError as error:
        return {"refused": str(error)}
    seen: dict[str, Any] = {each: [] for each in ("losses", "norms", "parameters", "buffers", "state")}
    seen |= {"in_sync": [], "phases": [], "ranks": []}
    last_group = (place.workers - 1) // place.group_size
    while (number := replica.step) < STEPS:
        for each in ("losses", "norms", "parameters", "buffers", "state", "in_sync", "phases"):
            del seen[each][number:]  # a step that is taken again
        if place.saved and number == TURN:
            replica.save(folder)
            replica, optimizer = _begin(name, place)
            replica.load(folder)
        if place.lost and number == TURN and rank == 1:
            trained = next(p for p in replica.parameters() if p.requires_grad)  # bases are frozen
            trained.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        if name == GROWING:
            optimizer.param_groups[0]["lr"] = RATE * (1 - number / STEPS)
        if name in (CLIPPED, LEFT_OUT) and number == POISONED and rank // place.group_size == last_group:
            with torch.no_grad():
                for p in replica.parameters():
                    p.add_(3.0 if name == CLIPPED else math.nan)
        loss = small.step(replica, optimizer, rank, number)
        if replica.decompositions > len(seen["ranks"]):
            seen["ranks"].append((replica.step, dict(replica.found_ranks)))
        seen["losses"].append(float(loss))
        seen["state"].append(small.optimizer_bits(optimizer)[:16])
        seen["in_sync"].append(replica.in_sync)
        seen["phases"].append(replica.phase)
        _look(seen, replica.module)
    module = replica.finish()
    seen["ranks"].append((replica.step, dict(replica.found_ranks)))
    _look(seen, module)
    rows = [row[:-1] for row in replica.traffic.state()["rows"]]
    events = replica.describe()["events"]
    return seen | {"rows": rows, "slow_bytes": replica.traffic.slow_bytes, "events": events}


def _begin(name: str, place: Situation) -> tuple[Any, Any]:
    model: nn.Module = small.net(smooth=True)
    if place.shards:
        groups = place.workers // place.group_size
        mesh = init_device_mesh(DEVICE.type, (groups, place.group_size), mesh_dim_names=("between", "in"))["in"]
        for layer in (model.conv, model.middle):
            fully_shard(layer, mesh=mesh)
        model = fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    config = (CASES | MORE)[name].config
    if place.lost:  # a launcher's workers are a group
        return thinwire.attach(model, optimizer, config(), faults=thinwire.Faults(timeout=TIMEOUT)), optimizer
    return thinwire.attach(model, optimizer, config(group_size=place.group_size)), optimizer


def _look(seen: dict[str, Any], model: torch.nn.Module) -> None:
    norms = [small.whole(p).detach().double().norm() for p in model.parameters()]
    seen["norms"].append(float(torch.stack(norms).norm()))
    seen["parameters"].append(small.bits(*model.parameters())[:16])
    seen["buffers"].append(small.bits(*model.buffers())[:16])
