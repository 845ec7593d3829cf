"""A state dict that is loaded in mid-run holds: nothing from before it comes back, and all workers have the same."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import gang
import small
import thinwire
from thinwire.base.errors import DisagreementError, MissingRankError
from thinwire.checkpoint import loads

WAYS: dict[str, Any] = {
    "int8": lambda: thinwire.AllReduce(wire="int8"),
    "powersgd": lambda: thinwire.PowerSGD(rank=2),
    "topk": lambda: thinwire.TopK(density=0.1),
    "onebit": thinwire.OneBit,
    "localsgd, bit": lambda: thinwire.LocalSGD(warmup=0, every=3, wire="bit"),
    "diloco": lambda: thinwire.DiLoCo(warmup=0, every=3),
    "diloco, under way": lambda: thinwire.DiLoCo(warmup=0, every=4, overlap=2),
    "daso, under way": lambda: thinwire.DASO(
        total_steps=40, warmup=0, cooldown=4, every=3, overlap=2, plateau_patience=None
    ),
    "ab": lambda: thinwire.AB(total_steps=60, warmup=2, every=3, factor_at=4, cutoff=0.6, redecompose=9),
    "paper": lambda: small.ab(total_steps=60, every=20),
    "oialr": lambda: thinwire.OIALR(total_steps=60, factor_at=10, redecompose=30, wire="int8"),
}


def test_loads_of_ours_are_ignored_only_while_they_last() -> None:
    with loads.ignored(), pytest.raises(KeyError), loads.ignored():
        assert loads._ignored == 2
        raise KeyError
    assert loads._ignored == 0


def rolled_back(rank: int, names: list[str]) -> dict[str, float]:
    """By method, how far the model moves at a learning rate of 0 after it was rolled back."""
    return {name: _roll_back(rank, WAYS[name]()) for name in names}


def _roll_back(rank: int, config: Any) -> float:
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, config)
    best: dict[str, Any] = {}
    for number in small.walk(replica, optimizer, rank, 18):
        if number == 12:
            with replica.merged():
                best = {name: t.clone() for name, t in model.state_dict().items()}
    (model if rank else replica).load_state_dict(best)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for number in range(18, 22):
        small.step(replica, optimizer, rank, number)
    with replica.merged():
        now = model.state_dict()
        return max(float((now[name] - t).abs().max()) for name, t in best.items())


QUICK = ["localsgd, bit", "diloco, under way", "daso, under way"]


@pytest.mark.parametrize("names", [QUICK, pytest.param([n for n in WAYS if n not in QUICK], marks=pytest.mark.slow)])
def test_what_was_loaded_holds(names: list[str]) -> None:
    for found in gang.run(rolled_back, 2, names):
        assert found == dict.fromkeys(names, 0.0)


class Words(nn.Module):
    """An embedding of which each worker sees rows of its own, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(8, 8), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


def forgotten(rank: int, **fields: Any) -> list[tuple[bool, float]]:
    """What is left of moments' residuals and of rows, before a load and in the batch after it."""
    model = Words()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    replica = thinwire.attach(model, optimizer, thinwire.LocalSGD(warmup=0, every=3, **fields))
    scales, found = replica._method.exchanges[0].scales, []
    best = copy.deepcopy(model.state_dict())
    for number in range(5):
        if number == 4:
            found.append(_left(scales))
            model.load_state_dict(best)
        loss = replica(torch.arange(4) + rank).square().mean()
        if number == 4:
            found.append(_left(scales))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


def _left(scales: Any) -> tuple[bool, float]:
    """Whether a code left anything out, and how many rows were seen."""
    kept = [t for aggregator in scales.moments.coded.aggregators for t in aggregator.residuals()]
    rows = {} if scales.rows is None else scales.rows.counts
    return any(bool(t.any()) for t in kept), sum(float(seen.sum()) for seen in rows.values())


def both_forgotten(rank: int) -> list[Any]:
    return [forgotten(rank, second_moment="shared", moments_wire="int4"), forgotten(rank, rows="seen")]


def test_what_scales_changes_is_forgotten() -> None:
    """What a code left out of moments, and counts of rows but the four of the batch after the load."""
    for moments, rows in gang.run(both_forgotten, 2):
        assert moments == [(True, 0), (False, 0)]
        assert rows == [(False, 4), (False, 4)]


def evaluated_alone(rank: int) -> list[str]:
    """Rank 0 looks at other weights for a while, and all load what they have; or not."""
    found = []
    for looks in (False, True):
        model = small.mlp()
        optimizer = small.sgd(model)
        replica = thinwire.attach(model, optimizer, thinwire.DiLoCo(warmup=0, every=4))
        for number in small.walk(replica, optimizer, rank, 10):
            if looks and number == 6:
                model.load_state_dict(model.state_dict())
            if looks and number == 7:
                optimizer.load_state_dict(optimizer.state_dict())
            if looks and number == 5 and rank == 0:
                own = copy.deepcopy(model.state_dict())
                model.load_state_dict(small.mlp(1).state_dict())
                model.load_state_dict(own)
                copy.deepcopy(model).load_state_dict(small.mlp(1).state_dict())
                pickle.loads(pickle.dumps(model)).load_state_dict(small.mlp(1).state_dict())
        found.append(small.model_bits(replica.finish()))
    return found


def test_loads_that_change_nothing_in_the_end_change_nothing() -> None:
    first, second = gang.run(evaluated_alone, 2)
    assert first == second and first[0] == first[1]


def refused(rank: int, config: Any, kind: str) -> str:
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, config)
    for _ in small.walk(replica, optimizer, rank, 5):
        pass
    if kind == "other values":
        model.load_state_dict(small.mlp(rank).state_dict())
    elif kind == "a part":
        replica.module.get_submodule("3").load_state_dict(small.mlp().get_submodule("3").state_dict())
    elif kind == "one optimizer's" and rank == 1:
        state = copy.deepcopy(optimizer.state_dict())
        state["state"][0]["momentum_buffer"] += 1
        optimizer.load_state_dict(state)
    elif kind == "one optimizer's":
        optimizer.load_state_dict(optimizer.state_dict())
    elif rank == 0:
        model.load_state_dict(small.mlp().state_dict())
    with pytest.raises((DisagreementError, RuntimeError)) as caught:
        for number in range(5, 200):
            small.step(replica, optimizer, rank, number)
    return f"{type(caught.value).__name__}: {caught.value}"


APART = thinwire.LocalSGD(warmup=0, every=4)


@pytest.mark.parametrize(
    ("config", "kind"),
    [(APART, "other values"), (APART, "a part"), (thinwire.AllReduce(), "one optimizer's")],
)
def test_workers_that_loaded_different_things_are_told(config: Any, kind: str) -> None:
    for message in gang.run(refused, 2, config, kind):
        assert message.startswith(DisagreementError.__name__)
        assert "load_state_dict(): after it rank 1 holds other values than rank 0, after step 5" in message
        assert "load the same state of the model" in message


@pytest.mark.slow
@pytest.mark.parametrize("config", [APART, thinwire.AllReduce()], ids=["apart", "together"])
def test_a_worker_that_loaded_alone_is_told(config: Any) -> None:
    first, _ = gang.run(refused, 2, config, "alone", patience=60)
    assert first.startswith(MissingRankError.__name__)
    assert "load_state_dict() is collective: every rank must call it, and rank 1 did not" in first


def test_weights_that_are_loaded_after_attach_are_where_training_begins() -> None:
    model, trained = small.mlp(), small.mlp(1)
    optimizer = small.sgd(model, lr=0.0)
    replica = thinwire.attach(model, optimizer, thinwire.DiLoCo(warmup=0, every=2))
    model.load_state_dict(trained.state_dict())
    for _ in small.walk(replica, optimizer, 0, 4):
        pass
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), trained.parameters(), strict=True))


def compiled(rank: int) -> list[str]:
    """A compiled replica, by all of whose workers a state is loaded; and one that is not compiled."""
    found = []
    for compiles in (False, True):
        model = small.mlp()
        optimizer = small.sgd(model)
        replica = thinwire.attach(model, optimizer, thinwire.DiLoCo(warmup=0, every=4))
        called = torch.compile(replica, backend="eager") if compiles else replica
        for number in small.walk(called, optimizer, rank, 8):
            if number == 5:
                model.load_state_dict(small.mlp(1).state_dict())
        found.append(small.model_bits(replica.finish()))
    return found


@pytest.mark.slow
def test_a_compiled_replica_begins_again_too() -> None:
    first, second = gang.run(compiled, 2)
    assert first == second and first[0] == first[1]
