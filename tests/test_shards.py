"""Groups that shard their model with FSDP2."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import gang
import thinwire
from sharded_net import Net, batch, sharded, steps, whole
from thinwire import AB, AllReduce, ConfigError, DiLoCo, LocalSGD

_AB: dict[str, Any] = {"warmup": 2, "warmup_wire": "lowrank:2", "every": 2, "redecompose": 2, "cutoff": 0.6}
_AB |= {"wire": "fp32", "group_size": 2, "checksum_every": 1}  # all groups hold the same bits after each average
WAYS: dict[str, Any] = {
    "allreduce": AllReduce(group_size=2),
    "allreduce int8": AllReduce(wire="int8", group_size=2),
    "localsgd": LocalSGD(every=3, warmup=2, group_size=2),
    "diloco": DiLoCo(every=4, warmup=2, group_size=2),
    "ab": AB(factor_at=None, **_AB | {"every": 3}),
    "ab factors": AB(factor_at=4, keep_first=False, keep_last=False, **_AB),
    "ab factors of rank 1": AB(factor_at=2, **_AB | {"cutoff": 0.99}),
    "ab factors of rank 1 in int2": AB(factor_at=2, **_AB | {"cutoff": 0.99, "wire": "int2"}),
    "ab factors, each half of the groups its own": AB(factor_at=4, train="split", merge="weighted", **_AB),
    "ab factors within a target": AB(factor_at=4, keep_first=False, keep_last=False, target=1.7, **_AB),
    "ab both factors": AB(factor_at=4, train="both", **_AB | {"overlap": 1, "redecompose": 3}),
    "diloco lowrank": DiLoCo(every=4, wire="lowrank:2", group_size=2),
    "diloco pending": DiLoCo(every=4, warmup=2, fragments=2, overlap=2, group_size=2),
}


def trained(rank: int, name: str, shards: bool, folder: str | None = None) -> dict[str, Any]:
    torch.set_num_threads(1)
    model: Any = Net()
    with torch.no_grad():  # as another seed would give it: all take the first group's
        model.last.weight.add_(rank // 2)
    if shards:
        model = sharded(model)
    optimizer = AdamW(model.parameters(), 1e-2)
    replica = thinwire.attach(model, optimizer, WAYS[name])
    steps(rank, model, optimizer, replica, 0, 9)
    if folder is not None:
        replica.save(folder)
    steps(rank, model, optimizer, replica, 9, 14)
    if folder is not None:  # again, from another shape if there are factors
        before = whole(model)
        replica.load(folder)
        steps(rank, model, optimizer, replica, 9, 14)
        assert all(torch.equal(value, before[key]) for key, value in whole(model).items())
    cutoff = 0.6 if name == "localsgd" else None
    replica.finish(cutoff)
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    found = {"model": whole(model), "held": held, "sent": replica.traffic.slow_bytes_for("merge")}
    found["ranks"] = replica.finished_ranks
    if folder is not None:
        other: Any = sharded(Net())
        optimizer = AdamW(other.parameters(), 1e-2)
        replica = thinwire.attach(other, optimizer, WAYS[name])
        replica.load(folder)
        steps(rank, other, optimizer, replica, 9, 14)
        replica.finish(cutoff)
        found["resumed"] = whole(other)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name == "diloco" else pytest.param(name, marks=pytest.mark.slow) for name in WAYS],
)
def test_sharded_groups_train_as_groups_that_are_not(name: str, tmp_path: Path) -> None:
    plain = gang.run(trained, 4, name, False, fresh=True)
    found = gang.run(trained, 4, name, True, str(tmp_path / "save"), fresh=True)
    for one, other in zip(found, plain, strict=True):
        for key, value in one["model"].items():
            assert torch.equal(value, found[0]["model"][key]), key
            off = (value - other["model"][key]).float().abs().mean() / value.float().abs().mean()
            # A code cuts shards into other blocks.
            assert off < (0.3 if "int8" in name else 1.0 if "int2" in name else 1e-4), (key, off)
            assert torch.equal(value, one["resumed"][key]), key
        assert one["held"] < 0.6 * other["held"]
        assert one["ranks"] == other["ranks"]
        assert bool(one["ranks"]) == ("factors" in name or name == "localsgd")
        # A member whose shard of a factor is empty sends no block of it.
        assert one["sent"] == pytest.approx(other["sent"], rel=0.25 if "int2" in name else 0.03)


def said(rank: int) -> dict[str, str]:
    found = {}

    def ask(name: str, config: Any, model: Any = None, optimizer: Any = None, **given: Any) -> None:
        model = sharded(Net()) if model is None else model
        with pytest.raises(ConfigError) as error:
            thinwire.attach(model, optimizer or AdamW(model.parameters()), config, **given)
        found[name] = str(error.value)

    ask("AB", AB.paper(total_steps=100))
    ask("match_rate", AB(total_steps=1000, match_rate=True))
    ask("topk", LocalSGD(warmup=4, warmup_wire="topk:0.01"))
    ask("moments", LocalSGD(moments="average"))
    ask("group_size", LocalSGD(group_size=1))
    ask("ddp", LocalSGD(), ddp={})
    ask("faults", LocalSGD(), faults=thinwire.Faults())
    part = Net()
    fully_shard(part.first, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "in"))["in"])
    ask("part", LocalSGD(), part)
    ask("world", LocalSGD(), fully_shard(Net()))
    ask("both", LocalSGD(), fully_shard(Net(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "in"))))
    model = sharded(Net())
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    ask("Muon", LocalSGD(), model, [torch.optim.Muon(matrices), AdamW(others)])

    model = sharded(Net())
    optimizer = AdamW(model.parameters())
    replica = thinwire.attach(model, optimizer, LocalSGD(every=1))
    with pytest.raises(ConfigError) as error, replica.join():
        pass
    found["join"] = str(error.value)
    if rank == 1:  # one of two workers that hold different parts of the same weights
        with torch.no_grad():
            next(model.parameters()).to_local().fill_(float("nan"))
    with pytest.raises(thinwire.DivergedError) as error:
        steps(rank, model, optimizer, replica, 0, 1)
    found["diverged"] = str(error.value)
    return found


def test_what_needs_whole_weights_is_refused() -> None:
    expected = {
        "AB": "PaperAB needs whole weights on a worker, and the model is sharded: use AllReduce, LocalSGD, DiLoCo or",
        "match_rate": "`match_rate`=True measures whole factors, and the model is sharded: leave it out",
        "topk": "`warmup_wire`='topk:0.01' looks at whole weights",
        "moments": "`moments`='average' is not for sharded models: leave it out, it is 'keep' then",
        "group_size": "`group_size`=1, and the model is sharded over 2 workers",
        "ddp": "`ddp` is not for sharded models",
        "faults": "faults=… is not for sharded models",
        "part": "parameter 'norm.weight' is not sharded and others are: call fully_shard() on the model itself",
        "world": "the model is sharded over all 4 workers, so there are no groups to train apart",
        "both": "the model is sharded over 2 dimensions of 1 meshes",
        "Muon": "Muon orthogonalises whole weights",
        "join": "join() is not for sharded models; give all workers equally many batches",
        "diverged": "is not finite at step 1",
    }
    for found in gang.run(said, 4, fresh=True):
        assert found.keys() == expected.keys()
        for name, text in expected.items():
            assert text in found[name], (name, found[name])


def accumulated(rank: int, shards: bool) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model: Any = sharded(Net()) if shards else Net()
    optimizer = AdamW(model.parameters(), 1e-2)
    replica = thinwire.attach(model, optimizer, AllReduce(group_size=2))
    for step in range(6):
        x, y = batch(rank, step)
        with replica.no_sync():
            F.cross_entropy(replica(x), y).backward()
        F.cross_entropy(replica(-x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    replica.finish()
    return whole(model)


@pytest.mark.slow
def test_gradients_accumulate() -> None:
    plain, *_ = gang.run(accumulated, 4, False, fresh=True)
    for found in gang.run(accumulated, 4, True, fresh=True):
        for key, value in found.items():
            assert torch.allclose(value.float(), plain[key].float(), atol=1e-4), key


def scaled(rank: int, name: str, shards: bool, fused: bool, folder: str) -> dict[str, Any]:
    """Gradients that overflow on one worker, and in a part of the model that one member holds."""
    torch.set_num_threads(1)
    model: Any = sharded(Net()) if shards else Net()

    def begin() -> tuple[Any, Any, Any]:
        optimizer = AdamW(model.parameters(), 1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        return optimizer, scaler, thinwire.attach(model, optimizer, WAYS[name], scaler=scaler)

    def walk(optimizer: Any, scaler: Any, replica: Any, first: int, last: int) -> list[Any]:
        seen = []
        for step in range(first, last):
            x, y = batch(rank, step)
            loss = F.cross_entropy(replica(x), y)
            scaler.scale(loss * float("inf") if step == 11 and rank == 2 else loss).backward()
            gradient = model.second.weight.grad
            if name == "diloco" and step == 5 and rank in ((2,) if shards else (2, 3)):  # on one member of a group
                (gradient.to_local() if shards else gradient)[0, 0] = float("inf")
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append((scaler.get_scale(), bool(torch.isfinite(norm))))
        return seen

    optimizer, scaler, replica = begin()
    seen = walk(optimizer, scaler, replica, 0, 8)
    replica.save(folder)
    rest = walk(optimizer, scaler, replica, 8, 14)
    before = whole(model)
    replica.detach()
    optimizer, scaler, replica = begin()
    replica.load(folder)
    assert walk(optimizer, scaler, replica, 8, 14) == rest
    assert all(torch.equal(value, before[key]) for key, value in whole(model).items())
    replica.finish()
    return {"model": whole(model), "seen": seen + rest}


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["allreduce int8", "diloco"])
def test_a_scaler_skips_the_steps_that_it_skips_unsharded(name: str, fused: bool, tmp_path: Path) -> None:
    plain = gang.run(scaled, 4, name, False, fused, str(tmp_path / "plain"), fresh=True)
    found = gang.run(scaled, 4, name, True, fused, str(tmp_path / "save"), fresh=True)
    for one, other in zip(found, plain, strict=True):
        assert one["seen"] == other["seen"]
        assert one["seen"][11][1] == (name == "diloco" and one["seen"][5][1])
        for key, value in one["model"].items():
            assert torch.equal(value, found[0]["model"][key]), key
            off = (value - other["model"][key]).float().abs().mean() / value.float().abs().mean()
            assert off < (0.3 if "int8" in name else 1e-4), (key, off)
