"""Training on from a model that was trained elsewhere, without a warm-up."""

from importlib.resources import files
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW

import gang
import thinwire
from thinwire import AB, OIALR, LocalSGD

STEPS = 120
WAYS: dict[str, Any] = {
    "localsgd": LocalSGD(every=8, wire="int4"),
    "ab": AB(total_steps=STEPS, warmup=0, every=6, factor_at=0, cutoff=0.2),
    "ab later": AB(total_steps=STEPS, warmup=0, every=6, factor_at=0.5, cutoff=0.2),
    "oialr": OIALR(total_steps=STEPS, factor_at=1, redecompose=20, cutoff=0.1),
}


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    with np.load(str(files("thinwire") / "datasets" / "digits8x8.npz")) as found:
        names = sorted(found.files)
        images, labels = found[names[0]], found[names[1]]
    return torch.tensor(images).flatten(1).float() / 16, torch.tensor(labels).long()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def tuned(rank: int, name: str, adapters: bool) -> dict[str, Any]:
    """Trained on digits 0 to 4, then on all of them."""
    torch.set_num_threads(1)
    x, y = digits()
    model, few = mlp(), (y < 5).nonzero().flatten()
    optimizer: Any = AdamW(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        chosen = few[torch.randint(len(few), (64,), generator=generator)]
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = accuracy(model, x, y)
    frozen = model[0].weight.detach().clone()
    if adapters:
        for layer in (model[0], model[2]):
            layer.requires_grad_(False)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    replica = thinwire.attach(model, optimizer, WAYS[name])
    generator = torch.Generator().manual_seed(10 + rank)
    for _ in range(STEPS):
        chosen = torch.randint(len(x), (64,), generator=generator)
        F.cross_entropy(replica(x[chosen]), y[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = accuracy(replica.finish(), x, y)
    same = torch.equal(frozen, model[0].weight) if adapters else True
    return {"before": before, "after": after, "ranks": replica.finished_ranks, "frozen": same}


@pytest.mark.parametrize(
    ("name", "adapters"),
    [
        ("ab", False),
        pytest.param("localsgd", True, marks=pytest.mark.slow),
        pytest.param("oialr", False, marks=pytest.mark.slow),
        pytest.param("ab later", False, marks=pytest.mark.slow),
    ],
)
def test_a_trained_model_is_trained_on(name: str, adapters: bool) -> None:
    """The model knows half of the digits; after 120 steps from it more than nine tenths."""
    for found in gang.run(tuned, 2, name, adapters):
        assert found["before"] < 0.55
        assert found["after"] > (0.7 if adapters else 0.9), found
        assert bool(found["ranks"]) == name.startswith("ab")  # OIALR's bases pay only in larger layers
        assert found["frozen"]


def attached_twice(rank: int) -> list[bool]:
    """Each group has moments of its own by the end of the first training."""
    x, y = digits()
    model = mlp()
    optimizer = AdamW(model.parameters(), 3e-3)
    found = []
    for config in (LocalSGD(every=4), thinwire.AllReduce()):
        replica = thinwire.attach(model, optimizer, config)
        for step in range(6):
            chosen = torch.randint(len(x), (32,), generator=torch.Generator().manual_seed(10 * step + rank))
            F.cross_entropy(replica(x[chosen]), y[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
        replica.finish()
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        found.append(replica.wire.agree(moments, "checksums"))
    return found


def test_moments_that_groups_kept_are_one_when_the_model_is_attached_again() -> None:
    assert gang.run(attached_twice, 2) == [[False, True]] * 2
