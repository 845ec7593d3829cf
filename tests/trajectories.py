"""Whole runs of every method in two layouts, taken once for all tests that look at them."""

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gang
import small
import thinwire
from every_method import STEPS, WAYS, Way
from selection import first_of
from thinwire.methods.registry import METHODS

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import gossip

LAYOUTS = {"2 groups of 2": (4, 2), "3 groups of 1": (3, 1)}
layouts = pytest.mark.parametrize("layout", first_of(LAYOUTS))
CASES = {**WAYS, "gossip": Way(config=lambda **more: gossip.Gossip(every=4, **more))}
assert METHODS.keys() <= CASES.keys(), "a method's name is also the name of its example's case"


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all runs here."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


@functools.cache
def trajectories(layout: str) -> list[dict[str, dict[str, Any]]]:
    """By rank and case."""
    workers, group_size = LAYOUTS[layout]
    return gang.run(_all, workers, group_size)


def _all(rank: int, group_size: int) -> dict[str, dict[str, Any]]:
    return {name: _run(rank, CASES[name].config(group_size=group_size)) for name in CASES}


def _run(rank: int, config: Any) -> dict[str, Any]:
    """What one worker saw of a run: after each step, and after `finish`."""
    model = small.net(smooth=True)
    optimizer = adamw(model)
    replica = thinwire.attach(model, optimizer, config)
    seen: dict[str, Any] = {name: [] for name in ("losses", "norms", "parameters", "buffers", "state")}
    seen |= {"in_sync": [], "phases": [], "ranks": []}
    for number in range(STEPS):
        loss = small.step(replica, optimizer, rank, number)
        if replica.decompositions > len(seen["ranks"]):
            seen["ranks"].append((replica.step, dict(replica.found_ranks)))
        seen["losses"].append(float(loss))
        seen["state"].append(small.optimizer_bits(optimizer)[:16])
        seen["in_sync"].append(replica.in_sync)
        seen["phases"].append(replica.phase)
        _look(seen, model)
    module = replica.finish()
    seen["ranks"].append((replica.step, dict(replica.found_ranks)))
    _look(seen, module)
    rows = [row[:-1] for row in replica.traffic.state()["rows"]]
    return seen | {"rows": rows, "slow_bytes": replica.traffic.slow_bytes}


def _look(seen: dict[str, Any], model: torch.nn.Module) -> None:
    seen["norms"].append(float(torch.stack([p.detach().double().norm() for p in model.parameters()]).norm()))
    seen["parameters"].append(small.bits(*model.parameters())[:16])
    seen["buffers"].append(small.bits(*model.buffers())[:16])
