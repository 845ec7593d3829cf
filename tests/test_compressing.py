"""Compressed gradients: error feedback, agreement with PyTorch's own hook, and bad gradients."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gang
import thinwire
from selection import first_of
from small import batch as images
from small import mlp, net
from small import step as small_step
from thinwire.codecs.quantize import Rows, cut, elements
from thinwire.codecs.quantized import unsent
from thinwire.codecs.sparse import largest
from thinwire.comm.buckets import checksum
from worlds import batch, optimizer_values, small_model, train_step, values

CONFIGS = {
    "int8": thinwire.AllReduce(wire="int8"),
    "powersgd": thinwire.PowerSGD(rank=2),
    "topk": thinwire.TopK(density=0.05),
    "onebit": thinwire.OneBit(),
}
CODES = {code: thinwire.AllReduce(wire=code) for code in ("int4", "int2", "bit", "lowrank:2", "topk:0.05")}


def sgd(model: nn.Module, **more: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.05, **more)


def backward(replica: nn.Module, rank: int, step: int) -> None:
    """A backward pass of a worker's own batch."""
    x, y = images(rank, step)
    F.cross_entropy(replica(x), y).backward()


# Codes.


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 16])
def test_rows_are_cut_evenly_and_in_order(parts: int) -> None:
    rows = [Rows(64, 27), Rows(10, 640), Rows(1, 300), Rows(7, 5)]
    found = cut(rows, parts)
    flat = [width for part in found for run in part for width in [run.width] * run.number]
    assert flat == [width for run in rows for width in [run.width] * run.number]
    sizes = [elements(part) for part in found]
    assert max(sizes) - min(sizes) <= 2 * 640
    assert cut([Rows(2, 8)], 5).count([]) == 3


@pytest.mark.parametrize("count", [1, 50, 999, 40_000, 100_000])
def test_the_largest_are_found_by_a_sample_too(count: int) -> None:
    x = torch.randn(100_000).pow(3)
    x[1000:3000] = 0.25  # many that are equal
    found = largest(x, count)
    assert len(found) == count == len(found.unique())
    assert float(x[found].abs().min()) == float(x.abs().sort(descending=True).values[count - 1])


# Error feedback.


def full_rank_and_density_one(rank: int) -> dict[str, float]:
    """How far a compressed run that leaves nothing out is from all-reduce."""
    gaps = {}
    for name, config, more in (
        ("powersgd", thinwire.PowerSGD(rank=1000, min_compression=0), {}),
        ("powersgd later", thinwire.PowerSGD(rank=1000, min_compression=0, warmup=2), {}),
        ("topk", thinwire.TopK(density=1.0, masking=False), {"momentum": 0.9}),
        ("topk decay", thinwire.TopK(density=1.0, masking=False), {"momentum": 0.9, "weight_decay": 0.1}),
        (
            "topk nesterov",
            thinwire.TopK(density=1.0, masking=False),
            {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        ),
    ):
        ours, exact = mlp(), mlp()
        optimizers = sgd(ours, **more), sgd(exact, **more)
        replicas = (
            thinwire.attach(ours, optimizers[0], config),
            thinwire.attach(exact, optimizers[1], thinwire.AllReduce()),
        )
        for step in range(6):
            for replica, optimizer in zip(replicas, optimizers, strict=True):
                optimizer.zero_grad()
                backward(replica, rank, step)
                if step == 3:
                    backward(replica, rank, 100)  # accumulated without no_sync
                if step == 4:
                    with replica.no_sync():
                        backward(replica, rank, 101)
                    backward(replica, rank, 102)
                optimizer.step()
        pairs = zip(ours.parameters(), exact.parameters(), strict=True)
        gaps[name] = max(float((p - q).detach().norm() / q.detach().norm()) for p, q in pairs)
    return gaps


@pytest.mark.parametrize("workers", first_of([3, 2]))
def test_leaving_nothing_out_equals_all_reduce(workers: int) -> None:
    for gaps in gang.run(full_rank_and_density_one, workers):
        assert all(gap < 1e-5 for gap in gaps.values()), gaps


def bucket_of(replica: Any) -> Any:
    """What averages all gradients of a model as small as these."""
    (bucket,) = replica._method.gradients.buckets
    return bucket


def kept_by(replica: Any) -> dict[str, Tensor]:
    return {k: t.clone() for k, t in bucket_of(replica).local().items()}


def conservation(rank: int, group_size: int) -> dict[str, list[Any]]:
    """For each step: this group's gradient, what all applied, and what is kept before and after."""
    found = {}
    for name, config in {**CONFIGS, **CODES}.items():
        model = net()
        optimizer = sgd(model)
        replica = thinwire.attach(model, optimizer, replace(config, group_size=group_size))
        own: list[list[Tensor]] = []
        bucket = bucket_of(replica)
        begin = bucket.begin
        bucket.begin = lambda tensors, own=own, begin=begin, **more: (
            own.append([t.clone() for t in tensors]) or begin(tensors, **more)
        )
        found[name] = []
        for step in range(4):
            optimizer.zero_grad()
            before = kept_by(replica)
            if "topk" in name:  # whole numbers add up without rounding
                x, _ = images(rank, step)
                loss = sum((p * torch.randint(-8, 9, p.shape).float()).sum() for p in model.parameters())
                (replica(x).sum() * 0 + loss).backward()
            else:
                backward(replica, rank, step)
            applied = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            found[name].append((own[-1], applied, before, kept_by(replica)))
        if name in CODES:
            bucket.adopt({}, [{}])  # from a group alone, which sent nothing and left nothing out
            assert not any(t.any() for t in bucket.residuals())
    return found


def _kept(states: list[dict[str, Tensor]], which: list[int], sizes: list[int]) -> Tensor:
    """What workers keep, weighted by group, over all coded elements."""
    size = sum(sizes[i] for i in which)
    if any("residual" in s for s in states):
        return unsent(states, max(int(s["place"][1]) for s in states))[:size]
    if any("v" in s for s in states):
        whole = torch.zeros(size)
        for s in states:
            if s:
                start, end, weight = s["place"].tolist()
                whole[int(start) : int(end)] += s["v"] * weight
        return whole
    return torch.stack([torch.cat([s[f"error.{i}"].flatten() for i in which]) for s in states]).mean(0)


def _coded(state: dict[str, Tensor], shapes: list[int]) -> list[int]:
    """Which tensors are coded, by what is kept of them."""
    products = [int(name.split(".")[1]) for name in state if name.startswith("error.")]
    return products or [i for i, dimensions in enumerate(shapes) if dimensions > 1]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "group_size"), first_of([(3, 2), (2, 1), (4, 2)]))
def test_error_feedback_conserves_what_was_to_be_sent(workers: int, group_size: int) -> None:
    """mean(applied + residual) = mean(gradient + old residual), exactly for top-k."""
    results = gang.run(conservation, workers, group_size)
    for name in results[0]:
        for step in range(4):
            gradients, applied, before, after = zip(*(result[name][step] for result in results), strict=True)
            sizes = [g.numel() for g in gradients[0]]
            which = _coded(after[0], [g.dim() for g in gradients[0]])
            flat = [torch.cat([g[i].flatten() for i in which]) for g in gradients]
            wanted = torch.stack(flat).mean(0) + _kept(before, which, sizes)
            found = torch.cat([applied[0][i].flatten() for i in which]) + _kept(after, which, sizes)
            if "topk" in name and workers != 3:
                assert torch.equal(found, wanted)
            else:
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()), msg=name)
            exact = [i for i in range(len(sizes)) if i not in which]
            for i in exact if name != "topk" else ():  # which adds momentum
                mean = torch.stack([g[i] for g in gradients]).mean(0)
                torch.testing.assert_close(applied[0][i], mean, rtol=1e-5, atol=1e-6, msg=name)
            assert all(torch.equal(a, b) for other in applied for a, b in zip(other, applied[0], strict=True))


# PyTorch's own PowerSGD.


def beside_pytorch(rank: int, workers: int) -> tuple[float, int]:
    """PyTorch's hook in one bucket and ours, from the same Q: the largest gap, and how many are compressed."""
    start, steps = 2, 8
    ours, other = mlp(), mlp()
    optimizers = sgd(ours, momentum=0.9), sgd(other, momentum=0.9)
    replica = thinwire.attach(ours, optimizers[0], thinwire.PowerSGD(rank=2, warmup=start, min_compression=2.0))
    ddp = DistributedDataParallel(other, bucket_cap_mb=100)
    state = theirs.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=start, min_compression_rate=2.0)
    ddp.register_comm_hook(state, theirs.powerSGD_hook)
    for step in range(steps):
        for wrapped, optimizer in ((ddp, optimizers[1]), (replica, optimizers[0])):
            if wrapped is replica and step == start:
                _take_their_q(bucket_of(replica))
            optimizer.zero_grad()
            backward(wrapped, rank, step)
            optimizer.step()
    pairs = zip(ours.parameters(), other.parameters(), strict=True)
    return max(float((p - q).detach().norm() / q.detach().norm()) for p, q in pairs), len(bucket_of(replica).errors)


def _take_their_q(bucket: Any) -> None:
    """PyTorch draws all its Qs from one seed, from the last parameter on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
        for i in reversed(bucket.errors):
            bucket.qs[i] = torch.randn(*bucket.qs[i].shape)


@pytest.mark.parametrize("workers", first_of([3, 2]))
def test_powersgd_agrees_with_pytorchs_hook(workers: int) -> None:
    for gap, compressed in gang.run(beside_pytorch, workers, workers):
        assert compressed == 4
        assert gap < 2e-5


# Every worker agrees, stops and resumes.


def journey(rank: int, group_size: int, folder: str) -> dict[str, tuple[list[Any], str]]:
    """Six steps of each method, saved after the third and resumed from there; what each step left."""
    found = {}
    for name, config in _configs(group_size).items():
        trace = []
        replica, optimizer = _attached(config)
        for step in range(6):
            train_step(replica, optimizer, step, rank)
            trace.append((values(replica), optimizer_values(optimizer)))
            if step == 2:
                replica.save(Path(folder) / name)
        again, its_optimizer = _attached(config, seed=5)
        for ahead in (0, 1):  # from a fresh replica, and back from where that came to
            again.load(Path(folder) / name)
            for step in range(3, 6 - ahead):
                train_step(again, its_optimizer, step, rank)
            resumed = values(again), optimizer_values(its_optimizer)
            assert resumed == trace[-1 - ahead], name
        replica.finish()
        found[name] = trace, replica.phase
    return found


def _configs(group_size: int) -> dict[str, Any]:
    changed = {name: replace(config, group_size=group_size) for name, config in {**CONFIGS, **CODES}.items()}
    later = {
        "powersgd later": replace(changed["powersgd"], warmup=0.34, total_steps=6, warmup_wire="topk:0.1"),
        "topk warm": replace(changed["topk"], ramp=4, clip=0.5),
        "onebit later": replace(changed["onebit"], warmup=2, warmup_wire="int4"),
    }
    return {**changed, **later}


def _attached(config: Any, seed: int = 0) -> tuple[Any, Any]:
    model = small_model(seed)
    optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
    # Many buckets inside a group: whatever is exchanged between groups must not depend on them.
    return thinwire.attach(model, optimizer, config, ddp={"bucket_cap_mb": 0.001}), optimizer


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "group_size"), first_of([(2, 1), (3, 2), (4, 2)]))
def test_workers_agree_and_resume_bit_for_bit(tmp_path: Path, workers: int, group_size: int) -> None:
    results = gang.run(journey, workers, group_size, str(tmp_path))
    for name, (trace, phase) in results[0].items():
        assert all(result[name][0] == trace for result in results), name
        assert phase == "finished"
    assert len({results[0][name][0][-1] for name in CONFIGS}) == len(CONFIGS)


def leave_and_enter(rank: int, folder: str, group_size: int, enters: bool) -> list[Any]:
    """What all workers together still have to send, for each method: written by one world, read by another."""
    found = []
    for name in CONFIGS:
        replica, optimizer = _attached(replace(CONFIGS[name], group_size=group_size))
        if enters:
            replica.load(Path(folder) / name)
        else:
            for step in range(3):
                train_step(replica, optimizer, step, rank)
            replica.save(Path(folder) / name)
        sizes = [p.numel() for p in replica.parameters()]
        found.append((kept_by(replica), sizes, [p.dim() for p in replica.parameters()]))
        if enters:
            train_step(replica, optimizer, 3, rank)
            assert replica.step == 4
    return found


@pytest.mark.slow
def test_another_world_goes_on_from_what_was_not_sent(tmp_path: Path) -> None:
    before = gang.run(leave_and_enter, 4, str(tmp_path), 2, False)
    after = gang.run(leave_and_enter, 3, str(tmp_path), 1, True)
    for place in range(len(CONFIGS)):
        first, sizes, shapes = before[0][place]
        which = _coded(first, shapes)
        old, new = (_kept([rank[place][0] for rank in world], which, sizes) for world in (before, after))
        assert float(old.abs().max()) > 0
        torch.testing.assert_close(new, old)


def alone(rank: int) -> bool:
    return all(
        values(train(config)) == values(train(None))
        for config in (*CONFIGS.values(), thinwire.TopK(clip=1.0), thinwire.OneBit(warmup=2))
    )


def train(config: Any) -> nn.Module:
    model = small_model()
    optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
    replica = thinwire.attach(model, optimizer, config) if config else model
    for step in range(4):
        train_step(replica, optimizer, step, 0)
    return model


def test_with_one_group_nothing_is_compressed() -> None:
    assert alone(0)
    assert all(gang.run(one_group, 2))


def one_group(rank: int) -> bool:
    found = []
    for config in (thinwire.AllReduce(), *CONFIGS.values()):
        model = small_model()
        optimizer = sgd(model, momentum=0.9)
        replica = thinwire.attach(model, optimizer, replace(config, group_size="world"))
        for step in range(4):
            train_step(replica, optimizer, step, rank)
        found.append(values(replica))
    return len(set(found)) == 1


# Gradients that are not finite.


def poisoned(rank: int) -> list[tuple[str, bool]]:
    told = []
    for config in CONFIGS.values():
        model = small_model()
        optimizer = sgd(model)
        replica = thinwire.attach(model, optimizer, config)
        train_step(replica, optimizer, 0, rank)
        before = checksum(list(model.parameters()))
        if rank == 1:
            model[7].weight.register_hook(lambda g: g * float("nan"))
        with pytest.raises(thinwire.DivergedError) as error:
            train_step(replica, optimizer, 1, rank)
        told.append((str(error.value), before == checksum(list(model.parameters()))))
        replica.detach()
    return told


def test_a_gradient_that_is_not_finite_is_reported_by_worker_and_layer() -> None:
    for told in gang.run(poisoned, 2):
        for message, unchanged in told:
            assert "rank 1 has one in '7.weight'" in message and "step 2" in message
            assert "rank 0" not in message and unchanged


def scaled(rank: int) -> list[Any]:
    """Half-precision training with a scaler; one worker overflows in the third step."""
    found = []
    for config in CONFIGS.values():
        model = small_model()
        optimizer = sgd(model, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        replica = thinwire.attach(model, optimizer, config, scaler=scaler)
        trace = []
        for step in range(6):
            x, y = batch(step, rank)
            loss = F.cross_entropy(replica(x), y)
            if step == 2 and rank == 1:
                loss = loss * float("inf")
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            trace.append((checksum(list(model.parameters())), scaler.get_scale()))
        kept = max(float(t.abs().max()) for t in bucket_of(replica).residuals())
        found.append((trace, kept / scaler.get_scale()))
    return found


def test_with_a_scaler_all_workers_skip_a_step_that_overflowed() -> None:
    first, second = gang.run(scaled, 2)
    for (mine, kept), (theirs_too, _) in zip(first, second, strict=True):
        assert mine == theirs_too
        assert mine[2][0] == mine[1][0] and mine[3][0] != mine[2][0]
        assert [scale for _, scale in mine] == [1024, 2048, 1024, 1024, 2048, 2048]
        assert 0 < kept < 10  # in units of the gradient, whatever the scale has become


# Bytes.


def sent_in_a_step(rank: int) -> dict[str, Any]:
    found = {}
    for name, config in CONFIGS.items():
        model = mlp()
        optimizer = sgd(model)
        replica = thinwire.attach(model, optimizer, config)
        backward(replica, rank, 0)
        optimizer.step()
        found[name] = replica.traffic.by_purpose["gradients"]["slow_bytes"]
    return found


def test_every_byte_of_a_step_is_counted() -> None:
    """Two workers: what is dealt out and collected is half of the payload each, an all-reduce sends all of it."""
    weights, biases = [(32, 64), (32, 32), (32, 32), (10, 32)], 32 * 3 + 10
    total = sum(n * m for n, m in weights)
    (found, _) = gang.run(sent_in_a_step, 2)
    blocks = -(-total // 256)
    longest = -(-blocks // 2) * 260 + 4
    assert found["int8"] == 2 * longest + 4 * biases
    assert found["powersgd"] == 4 * (sum(2 * (n + m) for n, m in weights) + biases + 1)
    chosen = sum(math.ceil(0.05 * n * m) for n, m in weights)
    assert found["topk"] == 4 * (2 * chosen + 1) + 4 * biases
    assert 2 * (total // 16) < found["onebit"] - 4 * biases < 2 * (total // 16 + 106 * 8 + 100)


# Top-k.


def test_density_falls_in_four_stages() -> None:
    model = mlp()
    optimizer = sgd(model)
    replica = thinwire.attach(model, optimizer, thinwire.TopK(density=0.001, warmup=2, ramp=8))
    method = replica._method
    seen = []
    for step in range(12):
        seen.append(
            (
                replica.phase,
                round(method.exchanges[0].density, 5) if replica.phase != "warmup" else None,
                method.next_event,
            )
        )
        small_step(replica, optimizer, 0, step)
    assert [phase for phase, _, _ in seen] == ["warmup"] * 2 + ["ramp"] * 8 + ["train"] * 2
    stages = [0.25, 0.25, 0.06287, 0.06287, 0.01581, 0.01581, 0.00398, 0.00398, 0.001, 0.001]
    assert [density for _, density, _ in seen[2:]] == stages
    assert [event for _, _, event in seen[:10]] == [2, 2, 4, 4, 6, 6, 8, 8, 10, 10] and seen[10][2] > 10**9


def top_k_and_its_optimizer(rank: int) -> list[Any]:
    told: list[Any] = []
    for config, optimizer in (
        (thinwire.TopK(momentum=0.9), lambda m: sgd(m, momentum=0.9)),
        (thinwire.TopK(momentum=0.9), lambda m: torch.optim.AdamW(m.parameters())),
        (thinwire.TopK(), lambda m: sgd(m, momentum=0.9, dampening=0.1)),
    ):
        model = mlp()
        with pytest.raises(thinwire.ConfigError) as error:
            thinwire.attach(model, optimizer(model), config)
        told.append(str(error.value))
    model = mlp()
    optimizer = sgd(model, momentum=0.8, weight_decay=0.1, nesterov=True)
    replica = thinwire.attach(model, optimizer, thinwire.TopK())
    group = optimizer.param_groups[0]
    inside = group["momentum"], group["weight_decay"], group["nesterov"]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)  # sets momentum at every step
    seen = []
    for step in range(3):
        backward(replica, rank, step)
        seen.append((group["momentum"], replica._method.parts[1].handover.taken[0].momentum))
        optimizer.step()
        scheduler.step()
    replica.detach()
    return [told, inside, seen, (group["momentum"], group["weight_decay"])]


def test_top_k_takes_momentum_over_and_never_applies_it_twice() -> None:
    for told, inside, seen, after in gang.run(top_k_and_its_optimizer, 2):
        assert all("twice" in message for message in told[:2]) and "dampening" in told[2]
        assert inside == (0.0, 0.0, False)
        assert all(momentum == 0.0 and taken > 0.5 for momentum, taken in seen)
        assert seen[0][1] != seen[1][1]
        assert after[0] > 0.5 and after[1] == 0.1


def clipped(rank: int) -> tuple[float, bool]:
    model = mlp()
    optimizer = sgd(model)
    replica = thinwire.attach(model, optimizer, thinwire.TopK(density=0.5, clip=0.01))
    backward(replica, rank, 0)
    bucket = bucket_of(replica)
    whole = torch.cat([bucket.v, bucket.applied])
    return float(whole.norm()), replica.clips


def test_top_k_clips_before_it_accumulates() -> None:
    for norm, clips in gang.run(clipped, 2):
        assert 0 < norm <= 0.01 and clips


class Branches(nn.Module):
    """Uses one of its branches at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return (self.first, self.second)[which](x.flatten(1))


def unused(rank: int) -> list[int]:
    found = []
    for config in CONFIGS.values():
        torch.manual_seed(0)
        model = Branches()
        optimizer = sgd(model)
        replica = thinwire.attach(model, optimizer, config)
        for step in range(4):
            x, y = images(rank, step)
            optimizer.zero_grad()
            F.cross_entropy(replica(x, (step + rank) % 2 if step < 3 else 0), y).backward()
            optimizer.step()
        found.append(values(replica))
    return found


def test_a_parameter_that_a_worker_did_not_use_counts_as_zero_there() -> None:
    first, second = gang.run(unused, 2)
    assert first == second


# What users do in their loops.


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward pass, in a pass of their own."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1).requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True) if self.checkpointed else block(x)
        return x[:, :10]


def unusual_loops(rank: int) -> dict[str, Any]:
    """Parameters, or their gap to a plain loop, for each of the things users do."""
    found: dict[str, Any] = {}
    for name in CONFIGS:
        config, ends = _configs(2)[name], []
        for checkpointed in (False, True):
            model = Checkpointed(checkpointed)
            optimizer = sgd(model)
            replica = thinwire.attach(model, optimizer, config)
            for step in range(2):
                optimizer.zero_grad()
                backward(replica, rank, step)
                optimizer.step()
            ends.append([p.detach().clone() for p in model.parameters()])
            ends.append(replica.traffic.slow_bytes)
        gap = max(float((p - q).abs().max()) for p, q in zip(ends[0], ends[2], strict=True))
        found[f"checkpoint {name}"] = gap, ends[1] == ends[3]
    found["rounded"] = [
        _gradient_in_autocast(rank, config)
        for config in (thinwire.PowerSGD(rank=1000, min_compression=0, group_size=1), thinwire.AllReduce())
    ]
    found["dropped"] = _topk_after_a_spike(rank)
    found["decay"] = _decay_set_later(rank, thinwire.TopK(density=1.0, masking=False, group_size=1))
    found["plain decay"] = _decay_set_later(rank, thinwire.AllReduce())
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Linear(8, 2))
    replica = thinwire.attach(model, sgd(model), thinwire.PowerSGD(group_size=1))
    with pytest.raises(thinwire.ConfigError, match=r"'0.weight' has a sparse gradient.*sparse=False"):
        replica(torch.tensor([1, 2])).sum().backward()
    found["head"] = _overflow_of_a_head(rank)
    return found


def _gradient_in_autocast(rank: int, config: Any) -> Tensor:
    model = mlp()
    replica = thinwire.attach(model, sgd(model), config)
    x, y = images(rank, 0)
    with torch.autocast("cpu", torch.bfloat16):
        F.cross_entropy(replica(x), y).backward()
    assert model[1].weight.grad is not None
    return model[1].weight.grad.clone()


def _topk_after_a_spike(rank: int) -> tuple[float, float]:
    """The gradient after one that was dropped, with the spike kept out of everything, and the usual one."""
    norms = []
    for drops in (False, True):
        model = mlp()
        optimizer = sgd(model)
        replica = thinwire.attach(model, optimizer, thinwire.TopK(density=1.0, group_size=1))
        if drops:
            backward(replica, rank, 0)
            optimizer.zero_grad(set_to_none=rank == 0)
        backward(replica, rank, 1)
        norms.append(float(torch.stack([p.grad.norm() for p in model.parameters()]).norm()))
    return norms[0], norms[1]


def _decay_set_later(rank: int, config: Any) -> float:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    replica = thinwire.attach(model, optimizer, config)
    for step in range(4):
        if step == 2:
            optimizer.param_groups[0]["weight_decay"] = 0.5
            optimizer.add_param_group({"params": mlp().parameters(), "lr": 0.05})  # of another model
        optimizer.zero_grad()
        backward(replica, rank, step)
        optimizer.step()
    return float(torch.stack([p.detach().norm() for p in model.parameters()]).sum())


def _overflow_of_a_head(rank: int) -> list[tuple[int, float]]:
    """The last layer alone is trained, and one worker overflows."""
    found = []
    for config in CONFIGS.values():
        model = mlp()
        for p in list(model.parameters())[:-2]:
            p.requires_grad_(False)
        optimizer = torch.optim.SGD(list(model.parameters())[-2:], 0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        replica = thinwire.attach(model, optimizer, config, scaler=scaler)
        for step in range(4):
            x, y = images(rank, step)
            loss = F.cross_entropy(replica(x), y) * (float("inf") if step == 3 and rank == 1 else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append((checksum(list(model.parameters())), scaler.get_scale()))
    return found


@pytest.mark.slow
def test_what_users_do_in_their_loops() -> None:
    results = gang.run(unusual_loops, 4)
    for found in results:
        checked = {name: value for name, value in found.items() if name.startswith("checkpoint")}
        assert len(checked) == 4 and all(gap < 1e-6 and same for gap, same in checked.values()), checked
        torch.testing.assert_close(*found["rounded"], rtol=1e-4, atol=1e-6)
        usual, after = found["dropped"]
        assert after == pytest.approx(usual, rel=1e-4)
        assert found["decay"] == pytest.approx(found["plain decay"], rel=1e-5)
        assert found["head"] == results[0]["head"] and {scale for _, scale in found["head"]} == {4.0}


def counted_by_each(rank: int) -> list[float]:
    """Slow bytes of gradients: equal for all workers of a node, also for one that carries no share."""
    found = []
    for config in _configs(2).values():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), *[nn.Linear(64, 3) if i == 0 else nn.Linear(3, 3) for i in range(5)])
        model.append(nn.Linear(3, 500))
        replica = thinwire.attach(model, sgd(model), config)
        backward(replica, rank, 0)
        found.append(replica.traffic.by_purpose["gradients"]["slow_bytes"])
    return found


@pytest.mark.parametrize("workers", first_of([3, 4]))
def test_workers_of_a_node_count_the_same(workers: int) -> None:
    results = gang.run(counted_by_each, workers)
    assert results[0] == results[1] and (workers == 3 or results[2] == results[3])
    assert all(sent > 0 for sent in results[0])


# Bad input.


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: thinwire.AllReduce(wire="fp8"), "fp32, bf16, int8, int4, int2, bit, lowrank:R, topk:D"),
        (lambda: thinwire.PowerSGD(rank=0), "`rank`=0 must be a whole number from 1 on"),
        (lambda: thinwire.PowerSGD(rank=2.5), "`rank`=2.5"),
        (lambda: thinwire.PowerSGD(warmup=-1), "`warmup`=-1"),
        (lambda: thinwire.PowerSGD(warmup=0.1), "`warmup`=0.1 is a fraction of `total_steps`"),
        (lambda: thinwire.PowerSGD(min_compression=-1), "`min_compression`=-1"),
        (lambda: thinwire.PowerSGD(total_steps=0), "`total_steps`=0"),
        (lambda: thinwire.TopK(density=0), "`density`=0 must be above 0"),
        (lambda: thinwire.TopK(density=1.5), "`density`=1.5"),
        (lambda: thinwire.TopK(ramp=1.5), "`ramp`=1.5"),
        (lambda: thinwire.TopK(ramp=0.5), "total_steps"),
        (lambda: thinwire.TopK(momentum=1.0), "`momentum`=1.0 must be from 0 to below 1"),
        (lambda: thinwire.TopK(masking="yes"), "`masking`='yes' must be True or False"),
        (lambda: thinwire.TopK(clip=0), "`clip`=0 must be a norm above 0"),
        (lambda: thinwire.TopK(total_steps=1.5), "`total_steps`=1.5"),
        (lambda: thinwire.OneBit(warmup=-0.1), "`warmup`=-0.1"),
        (lambda: thinwire.OneBit(total_steps=-3), "`total_steps`=-3"),
        (lambda: thinwire.LocalSGD(every=0), "`every`=0 must be a whole number from 1 on"),
        (lambda: thinwire.LocalSGD(warmup=float("nan")), "`warmup`=nan"),
        (lambda: thinwire.LocalSGD(moments="carry"), "`moments`='carry' is not known"),
        (lambda: thinwire.LocalSGD(wire="topk:2"), "`wire`='topk:2' is not a code"),
        (lambda: thinwire.LocalSGD(total_steps="9"), "`total_steps`='9'"),
        (lambda: thinwire.DiLoCo(every=1.0), "`every`=1.0"),
        (lambda: thinwire.DiLoCo(outer=thinwire.Nesterov(lr=0)), "`outer.lr`=0 must be a number above 0"),
        (lambda: thinwire.DiLoCo(outer=thinwire.Nesterov(momentum=1)), "`momentum`=1 must be from 0 to below 1"),
        (lambda: thinwire.DiLoCo(warmup_wire="lowrank"), "`warmup_wire`='lowrank' is not a code"),
        (lambda: thinwire.DiLoCo(fragments=0), "`fragments`=0"),
        (lambda: thinwire.DiLoCo(every=4, fragments=5), "use at most 4"),
        (lambda: thinwire.DiLoCo(overlap=-1), "`overlap`=-1"),
        (lambda: thinwire.DiLoCo(every=4, overlap=4), "must be below `every`=4"),
        (lambda: thinwire.DiLoCo(mix=1.0), "`mix`=1.0"),
        (lambda: thinwire.DiLoCo(warmup=0.2), "total_steps"),
        (lambda: thinwire.DiLoCo(total_steps=True), "`total_steps`=True"),
    ],
)
def test_every_field_says_what_it_takes(make: Any, said: str) -> None:
    with pytest.raises(thinwire.ConfigError) as error:
        make()
    assert said in str(error.value)
