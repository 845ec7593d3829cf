"""Groups that shard their model with FSDP2."""

import contextlib
import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Muon

import gang
import thinwire
from device import DEVICE, here
from selection import first_of, slow_but
from sharded_net import Net, batch, columns, sharded, steps, whole
from thinwire import AB, DASO, OIALR, AllReduce, ConfigError, DiLoCo, LocalSGD, OneBit, PowerSGD, Radial, TopK
from thinwire.comm.fsdp import _refuse_unknown
from thinwire.comm.sharded import ShardedWire

_AB: dict[str, Any] = {"warmup": 2, "warmup_wire": "lowrank:2", "every": 2, "redecompose": 2, "cutoff": 0.6}
_AB |= {"wire": "fp32", "group_size": 2, "checksum_every": 1}  # all groups hold the same bits after each average
_PINNED: dict[str, Any] = {"plateau_patience": None, "group_size": 2}
_PAPER: dict[str, Any] = {"total_steps": 14, "warmup": 3, "every": 3, "rebound": 2, "cutoff": 0.6, "group_size": 2}
_OIALR: dict[str, Any] = {"total_steps": 14, "factor_at": 3, "redecompose": 3, "cutoff": 0.6, "max_shrink": 1.0}
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
    "daso": DASO(total_steps=14, warmup=2, cooldown=3, every=3, overlap=2, wire="fp32", **_PINNED),
    "daso compensated int8": DASO(total_steps=14, warmup=2, cooldown=2, wire="int8", compensate=True, **_PINNED),
    "daso in lowrank": DASO(total_steps=14, warmup=2, cooldown=2, sharded=True, wire="lowrank:2", **_PINNED),
    "localsgd, moments averaged": LocalSGD(every=3, warmup=2, group_size=2, moments="average"),
    "localsgd, moments reset": LocalSGD(every=3, warmup=2, group_size=2, moments="reset"),
    "localsgd, radial": LocalSGD(every=3, warmup=2, group_size=2, outer=Radial()),
    "localsgd, moments estimated": LocalSGD(every=3, warmup=2, group_size=2, second_moment="estimate"),
    "localsgd, moments shared": LocalSGD(every=3, group_size=2, second_moment="shared", moments_wire="fp32"),
    "daso, moments estimated": DASO(total_steps=14, warmup=2, cooldown=3, second_moment="estimate", **_PINNED),
    "ab factors, moments shared": AB(factor_at=4, second_moment="shared", moments_wire="fp32", **_AB),
    "ab factors, moments averaged": AB(factor_at=4, moments="average", diverged="leave_out", **_AB),
    "ab factors, rates matched": AB(factor_at=4, match_rate=True, **_AB),
    "ab.paper factors": AB.paper(lr_rebound=2, moments="carry", merge="trained", **_PAPER),
    "ab.paper factors, weighted": AB.paper(moments="average", merge="weighted", second_moment="estimate", **_PAPER),
    "ab.paper factors in int8": AB.paper(wire="int8", warmup_wire="lowrank:2", **_PAPER),
    "oialr factors": OIALR(updates_from=4, layer_fraction=1.0, group_size=2, **_OIALR),
    "oialr factors, all reset": OIALR(moments="reset", layer_fraction=0.4, wire="lowrank:2", group_size=2, **_OIALR),
    "powersgd": PowerSGD(rank=2, warmup=2, group_size=2),
    "powersgd, moments frozen": PowerSGD(rank=2, warmup=2, freeze_second_moment=True, group_size=2),
    "onebit": OneBit(warmup=2, group_size=2),
    "topk, sent in topk": TopK(density=0.1, warmup=2, ramp=4, group_size=2),
    "topk of all, with momentum": TopK(density=1.0, clip=0.2, group_size=2),
    "localsgd in topk": LocalSGD(every=3, warmup=2, wire="topk:0.1", group_size=2),
    "diloco of muon": DiLoCo(every=3, warmup=2, group_size=2),
    "diloco of columns": DiLoCo(every=4, warmup=2, fragments=2, overlap=1, group_size=2),
    "ab factors of columns": AB(factor_at=4, **_AB | {"warmup_wire": "fp32"}),
    "ab.paper factors of columns": AB.paper(moments="carry", **_PAPER),
    "diloco pending": DiLoCo(every=4, warmup=2, fragments=2, overlap=2, group_size=2),
}


class Both(list[torch.optim.Optimizer]):
    """Muon for matrices, and AdamW for the rest."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        super().__init__([Muon(matrices, 0.02), AdamW((p for p in model.parameters() if p.ndim != 2), 1e-2)])

    def step(self) -> None:
        for each in self:
            each.step()

    def zero_grad(self) -> None:
        for each in self:
            each.zero_grad()


def optimizer_of(model: nn.Module, name: str) -> Any:
    if "muon" in name:
        return Both(model)
    if "momentum" in name:
        return SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
    return AdamW(model.parameters(), 1e-2)


def trained(rank: int, name: str, shards: bool, folder: str | None = None) -> dict[str, Any]:
    torch.set_num_threads(1)
    model: Any = here(Net())
    with torch.no_grad():  # as another seed would give it: all take the first group's
        model.last.weight.add_(rank // 2)
    how = {"shard_placement_fn": columns} if "columns" in name else {}
    if shards:
        model = sharded(model, **how)
    optimizer = optimizer_of(model, name)
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
    found["ratio"] = replica.agreement.summary() if replica.agreement is not None else None
    if folder is not None:
        other: Any = sharded(here(Net()), **how)
        optimizer = optimizer_of(other, name)
        replica = thinwire.attach(other, optimizer, WAYS[name])
        replica.load(folder)
        steps(rank, other, optimizer, replica, 9, 14)
        replica.finish(cutoff)
        found["resumed"] = whole(other)
    return found


FEW = ("allreduce int8", "diloco", "diloco pending", "diloco lowrank", "diloco of muon", "daso", "powersgd", "onebit")
FEW += ("localsgd, moments averaged", "localsgd, moments shared", "topk, sent in topk", "oialr factors")
FEW += ("ab factors", "ab both factors", "ab factors of columns", "ab.paper factors")
"""One of each kind."""


def trained_all(rank: int, names: list[str], shards: bool, folder: str) -> dict[str, dict[str, Any]]:
    return {name: trained(rank, name, shards, f"{folder}/{name}" if shards else None) for name in names}


@functools.cache
def all_trained(few: bool, shards: bool) -> list[dict[str, dict[str, Any]]]:
    """By rank and way."""
    names = [name for name in WAYS if (name in FEW) == few]
    with tempfile.TemporaryDirectory() as folder:
        return gang.run(trained_all, 4, names, shards, folder, timeout=600, fresh=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(FEW, WAYS))
def test_sharded_groups_train_as_groups_that_are_not(name: str) -> None:
    plain, found = ([worker[name] for worker in all_trained(name in FEW, shards)] for shards in (False, True))
    for one, other in zip(found, plain, strict=True):
        for key, value in one["model"].items():
            assert torch.equal(value, found[0]["model"][key]), key
            off = (value - other["model"][key]).float().abs().mean() / value.float().abs().mean()
            # A code cuts shards into other blocks.
            # So does Muon round parts, which computes in bf16.
            coarse = {"int8": 0.3, "int2": 1.0, "in topk": 0.3, "onebit": 0.3, "muon": 0.1}
            assert off < next((coarse[code] for code in coarse if code in name), 1e-4), (key, off)
            assert torch.equal(value, one["resumed"][key]), key
        assert one["held"] < 0.6 * other["held"]
        assert one["ranks"] == other["ranks"]
        if one["ratio"] is not None and "int2" not in name:  # estimated from parts, in other sketches
            assert one["ratio"]["mean"] == pytest.approx(other["ratio"]["mean"], rel=0.1)
        assert bool(one["ranks"]) == ("factors" in name or name == "localsgd")
        # A member whose shard of a factor is empty sends no block of it; all members send DASO's running statistics.
        odd = {"int2": 0.25, "daso": 0.25, "int8": 0.06}
        assert one["sent"] == pytest.approx(other["sent"], rel=next((odd[n] for n in odd if n in name), 0.03))


class Looked(nn.Module):
    """Words that are looked up, of which each worker sees a few."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(21, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def looked_up(rank: int, shards: bool, folder: str) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model: Any = Looked()
    if shards:
        mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("between", "in"))["in"]
        model = fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), 1e-2)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=3, warmup=2, group_size=2, rows="seen"))

    def walk(first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randint(0, 21, (3,), generator=torch.Generator().manual_seed(10 * rank + step))
            F.cross_entropy(replica(x), x % 5).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                replica(x)  # leaves the root gathered

    walk(0, 7)
    replica.save(folder)
    walk(7, 12)
    before = whole(model)
    replica.load(folder)
    walk(7, 12)
    assert all(torch.equal(value, before[key]) for key, value in whole(model).items())
    replica.finish()
    return whole(model)


@pytest.mark.slow
def test_rows_are_averaged_by_who_saw_them(tmp_path: Path) -> None:
    plain, *_ = gang.run(looked_up, 4, False, str(tmp_path / "plain"), fresh=True)
    for found in gang.run(looked_up, 4, True, str(tmp_path / "save"), fresh=True):
        for key, value in found.items():
            torch.testing.assert_close(value, plain[key])


def odd(rank: int, shards: bool, **settings: Any) -> dict[str, Any]:
    """One member of the last group has something wrong in its part, or its group comes much too far."""
    torch.set_num_threads(1)
    model: Any = sharded(here(Net()), 2, 3) if shards else here(Net())
    optimizer = AdamW(model.parameters(), 1e-3)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=4, group_size=2, **settings))
    for first in (0, 8):
        steps(rank, model, optimizer, replica, first, first + 7)
        weight = model.second.weight
        if rank in ((5,) if shards else (4, 5)):  # the second half of the rows
            with torch.no_grad():
                (weight.to_local() if shards else weight[6:]).add_(float("nan") if "diverged" in settings else 9.0)
        steps(rank, model, optimizer, replica, first + 7, first + 8)
    replica.finish()
    return {"model": whole(model), "events": replica.events}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"diverged": "leave_out"}, {"outliers": "leave_out"}, {"outliers": "clip"}])
def test_a_group_is_judged_by_all_of_its_parts(settings: dict[str, str]) -> None:
    plain = gang.run(functools.partial(odd, **settings), 6, False, fresh=True)
    found = gang.run(functools.partial(odd, **settings), 6, True, fresh=True)
    for one, other in zip(found, plain, strict=True):
        assert len(one["events"]) == len(other["events"]) == 2
        for event, there in zip(one["events"], other["events"], strict=True):
            assert event["group"] == 2 and event["event"] == there["event"] and event["step"] == there["step"]
            assert event.get("norm", 0) == pytest.approx(there.get("norm", 0), rel=1e-3)
        for key, value in one["model"].items():
            assert torch.equal(value, found[0]["model"][key]), key
            off = (value - other["model"][key]).float().abs().mean() / value.float().abs().mean()
            assert off < 1e-3, (key, off)


def said(rank: int) -> dict[str, str]:
    found = {}

    def ask(name: str, config: Any, model: Any = None, optimizer: Any = None, **given: Any) -> None:
        model = sharded(here(Net())) if model is None else model
        with pytest.raises(ConfigError) as error:
            thinwire.attach(model, optimizer or AdamW(model.parameters()), config, **given)
        found[name] = str(error.value)

    ask("group_size", LocalSGD(group_size=1))
    ask("ddp", LocalSGD(), ddp={})
    ask("faults", LocalSGD(), faults=thinwire.Faults())
    for setting in ({"wire": "lowrank:2"}, {"rows": "seen"}, {"second_moment": "shared"}):
        ask(f"columns {setting}", LocalSGD(**setting), sharded(here(Net()), shard_placement_fn=columns))
    part = here(Net())
    fully_shard(part.first, mesh=init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("between", "in"))["in"])
    ask("part", LocalSGD(), part)
    ask("world", LocalSGD(), fully_shard(here(Net())))
    ask(
        "both",
        LocalSGD(),
        fully_shard(here(Net()), mesh=init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "in"))),
    )
    model = sharded(here(Net()))
    ask("Muon", LocalSGD(), model, type("Muon", (AdamW,), {})(model.parameters()))

    model = sharded(here(Net()))
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


def test_what_shards_cannot_have_is_refused() -> None:
    expected = {
        "group_size": "`group_size`=1, and the model is sharded over 2 workers",
        "ddp": "`ddp` is not for sharded models",
        "faults": "faults=… is not for sharded models",
        "columns {'wire': 'lowrank:2'}": "`wire`='lowrank:2' is for models sharded by rows, and shard_placement_fn",
        "columns {'rows': 'seen'}": "`rows`='seen' is for models sharded by rows, and shard_placement_fn chose another",
        "columns {'second_moment': 'shared'}": "`second_moment`='shared' is for models sharded by rows",
        "part": "parameter 'norm.weight' is not sharded and others are: call fully_shard() on the model itself",
        "world": "the model is sharded over all 4 workers, so there are no groups to train apart",
        "both": "the model is sharded over 2 dimensions of 1 meshes",
        "Muon": "test_shards.Muon orthogonalises whole weights, and the model is sharded: use torch.optim.Muon",
        "join": "join() is not for sharded models; give all workers equally many batches",
        "diverged": "is not finite at step 1",
    }
    for found in gang.run(said, 4, fresh=True):
        assert found.keys() == expected.keys()
        for name, text in expected.items():
            assert text in found[name], (name, found[name])


ACCUMULATED: dict[str, Any] = {
    "allreduce": AllReduce(group_size=2),
    "powersgd": PowerSGD(rank=2, group_size=2),
    "topk": TopK(density=1.0, group_size=2),
}


def accumulated(rank: int, name: str, shards: bool) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    model: Any = sharded(here(Net())) if shards else here(Net())
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)
    replica = thinwire.attach(model, optimizer, ACCUMULATED[name])
    for step in range(6):
        x, y = batch(rank, step)
        with replica.no_sync() if step % 2 else contextlib.nullcontext():
            F.cross_entropy(replica(x), y).backward()
        F.cross_entropy(replica(-x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    replica.finish()
    return whole(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ACCUMULATED)
def test_gradients_accumulate(name: str) -> None:
    plain, *_ = gang.run(accumulated, 4, name, False, fresh=True)
    for found in gang.run(accumulated, 4, name, True, fresh=True):
        for key, value in found.items():
            assert torch.allclose(value.float(), plain[key].float(), atol=1e-4), key


def scaled(rank: int, name: str, shards: bool, fused: bool, folder: str) -> dict[str, Any]:
    """Gradients that overflow on one worker, and in a part of the model that one member holds."""
    torch.set_num_threads(1)
    model: Any = sharded(here(Net())) if shards else here(Net())

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
@pytest.mark.parametrize("fused", first_of([False, True]))
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


@pytest.mark.parametrize("error", [TypeError, AttributeError])
def test_another_way_of_sharding_is_refused_at_once(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*_: Any) -> None:
        raise error("missing 1 required positional argument")

    monkeypatch.setattr("torch.distributed.fsdp._fully_shard._fsdp_param.ParamModuleInfo", changed)
    with pytest.raises(ConfigError, match="factors of a sharded model are not for torch"):
        _refuse_unknown(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("others", [0.0, 1.0])
def test_a_group_is_sound_if_all_of_its_members_are(others: float) -> None:
    wire = SimpleNamespace(sum_in_group=lambda total, purpose: total.add_(others))
    sound, unsound = (ShardedWire.all_of_group(wire, own) for own in (True, False))  # type: ignore[arg-type]
    assert (sound, unsound) == (others == 0.0, False)
