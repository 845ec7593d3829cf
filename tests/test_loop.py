"""A block around a loop in which nothing changes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW

import gang
import small
import thinwire
from test_shards import Net, batch, sharded, whole
from thinwire import AB, AllReduce, DiLoCo
from thinwire.integrations.loop import attached

WAYS: dict[str, Any] = {
    "allreduce": AllReduce(),
    "diloco": DiLoCo(every=4, warmup=2),
    "ab": AB(total_steps=16, warmup=3, every=3, factor_at=8, cutoff=0.5),
}


def loop(rank: int, model: nn.Module, optimizer: Any, called: nn.Module) -> None:
    """Somebody's loop."""
    for step in range(16):
        x, y = small.batch(rank, step)
        loss = F.cross_entropy(called(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        called.eval()(x)
    called.train()


def trained(rank: int, name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for way in ("plain", "block"):
        model = small.net()
        kind, optimizer, counts = type(model), AdamW(model.parameters(), 3e-3), []
        model.register_forward_hook(lambda *_, counts=counts: counts.append(1))
        if way == "plain":
            replica = thinwire.attach(model, optimizer, WAYS[name])
            loop(rank, model, optimizer, replica)
            replica.finish()
        else:
            with attached(model, optimizer, WAYS[name]) as replica:
                assert isinstance(model, kind) and type(model).__name__ == kind.__name__
                loop(rank, model, optimizer, model)
            assert type(model) is kind
        found[way] = small.model_bits(model)
        found[f"calls {way}"] = len(counts)
        found[f"sent {way}"] = replica.traffic.slow_bytes
    return found


@pytest.mark.parametrize("name", WAYS)
def test_a_block_trains_as_a_replica_in_the_loop(name: str) -> None:
    for found in gang.run(trained, 2, name):
        assert found["plain"] == found["block"]
        assert found["calls plain"] == found["calls block"] == 17
        assert found["sent plain"] == found["sent block"] > 0


def raises(rank: int) -> bool:
    model = small.net()
    kind, optimizer = type(model), AdamW(model.parameters())
    with pytest.raises(ZeroDivisionError), attached(model, optimizer, AllReduce()):
        raise ZeroDivisionError
    with attached(model, optimizer, AllReduce()):  # nothing of the first is left
        x, y = small.batch(rank, 0)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return type(model) is kind


def test_a_loop_that_raises_releases_the_model() -> None:
    assert gang.run(raises, 2) == [True, True]


def of_shards(rank: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    found = {}
    for way in ("plain", "block"):
        model: Any = sharded(Net())
        optimizer = AdamW(model.parameters(), 1e-2)

        def steps(called: nn.Module, model: Any = model, optimizer: Any = optimizer) -> None:
            for step in range(10):
                x, y = batch(rank, step)
                F.cross_entropy(called(x), y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

        if way == "plain":
            replica = thinwire.attach(model, optimizer, DiLoCo(every=3))
            steps(replica)
            replica.finish()
        else:
            with attached(model, optimizer, DiLoCo(every=3)):
                steps(model)
        found[way] = whole(model)
    return found


@pytest.mark.slow
def test_a_block_around_a_loop_of_a_sharded_model() -> None:
    for found in gang.run(of_shards, 4):
        for name, value in found["plain"].items():
            assert torch.equal(value, found["block"][name]), name
