"""Trajectories of every method, as they were: a refactoring keeps them.

Each file in `golden/` holds losses, norms of the parameters and bytes of one method in two layouts. CPUs round
differently, so values are compared within a tolerance. `pytest --golden=bits` also compares digests of all bits, which
only holds on the machine and the version of torch that wrote them; `pytest --golden=write` rewrites the files.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gang
import small
import thinwire
from every_method import STEPS, WAYS

FOLDER = Path(__file__).parent / "golden"
LAYOUTS = {"2 groups of 2": (4, 2), "3 groups of 1": (3, 1)}


def _trajectory(rank: int, name: str, group_size: int) -> dict[str, Any]:
    model = small.net(smooth=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    replica = thinwire.attach(model, optimizer, WAYS[name].config(group_size=group_size))
    losses, norms, digests = [], [], []
    for number in range(STEPS):
        losses.append(float(small.step(replica, optimizer, rank, number)))
        norms.append(float(torch.stack([p.detach().double().norm() for p in model.parameters()]).norm()))
        digests.append(small.model_bits(model)[:16] + small.optimizer_bits(optimizer)[:16])
    replica.finish()
    norms.append(float(torch.stack([p.detach().double().norm() for p in replica.module.parameters()]).norm()))
    digests.append(small.model_bits(replica.module)[:16])
    return {"losses": losses, "norms": norms, "digests": digests, "slow_bytes": replica.traffic.slow_bytes}


def _trajectories(rank: int, group_size: int) -> dict[str, Any]:
    return {name: _trajectory(rank, name, group_size) for name in WAYS}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, list[Any]]]:
    """By method and layout, of the first and the last worker."""
    runs = {layout: gang.run(_trajectories, workers, size) for layout, (workers, size) in LAYOUTS.items()}
    return {name: {layout: [ranks[0][name], ranks[-1][name]] for layout, ranks in runs.items()} for name in WAYS}


@pytest.mark.parametrize("name", WAYS)
def test_a_trajectory_is_the_golden_one(name: str, found: Any, request: pytest.FixtureRequest) -> None:
    file, mode = FOLDER / f"{name.replace(' ', '-')}.json", request.config.getoption("--golden")
    if mode == "write":
        FOLDER.mkdir(exist_ok=True)
        file.write_text(json.dumps(found[name], indent=1) + "\n")
    golden = json.loads(file.read_text())
    for layout, workers in golden.items():
        for now, before in zip(found[name][layout], workers, strict=True):
            assert now["slow_bytes"] == before["slow_bytes"]
            assert now["losses"] == pytest.approx(before["losses"], rel=2e-3)
            assert now["norms"] == pytest.approx(before["norms"], rel=1e-3)
            if mode == "bits":
                assert now["digests"] == before["digests"]
