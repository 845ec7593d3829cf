"""Compressed gradients: the laws of error feedback, agreement with PyTorch's own hook, and what they say of bad gradients."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import gang
import thinwire
from small import mlp, net
from small import batch as images
from thinwire.comm.coders import Bits, Int8, Rows, cut, elements, pack_signs, unpack_signs
from thinwire.comm.compressed import unsent
from thinwire.methods.topk import largest
from worlds import small_model, train_step, values

ALL = [
    thinwire.AllReduce(wire="int8"),
    thinwire.PowerSGD(rank=2),
    thinwire.TopK(density=0.05),
    thinwire.OneBit(),
]
NAMES = ["int8", "powersgd", "topk", "onebit"]


def sgd(model: nn.Module, **more: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.05, **more)


def backward(replica: nn.Module, rank: int, step: int) -> None:
    """A backward pass of a worker's own batch."""
    x, y = images(rank, step)
    F.cross_entropy(replica(x), y).backward()


# Codes.


@pytest.mark.parametrize("width", [1, 7, 8, 64, 1000])
def test_packed_bits_unpack_to_the_same_signs(width: int) -> None:
    signs = torch.rand(5, width) < 0.5
    packed = pack_signs(signs)
    assert packed.shape == (5, -(-width // 8)) and packed.dtype == torch.uint8
    assert torch.equal(unpack_signs(packed, width), signs)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_int8_is_off_by_at_most_half_a_scale(size: float) -> None:
    rows, coder = [Rows(300, 256), Rows(1, 10)], Int8()
    x = torch.randn(elements(rows)) * size
    x[256:512] = 0.0
    left, payload = x.clone(), torch.zeros(coder.size(rows), dtype=torch.uint8)
    coder.encode(left, rows, payload)
    said = torch.empty_like(x)
    coder.decode(payload, rows, said)
    for start, width in ((0, 256), (256, 256), (512, 256), (len(x) - 10, 10)):
        row = slice(start, start + width)
        bound = float(x[row].abs().max()) / 127 / 2
        assert float((x[row] - said[row]).abs().max()) <= bound * (1 + 1e-4)
    torch.testing.assert_close(said + left, x)


def test_a_bit_says_the_mean_of_its_side() -> None:
    coder, rows = Bits(), [Rows(2, 4), Rows(1, 3)]
    x = torch.tensor([1.0, 3.0, -2.0, 0.0, -1.0, -1.0, -3.0, -3.0, 5.0, 5.0, 5.0])
    left, payload, said = x.clone(), torch.zeros(coder.size(rows), dtype=torch.uint8), torch.empty(11)
    coder.encode(left, rows, payload)
    coder.decode(payload, rows, said)
    third = 4 / 3
    assert said.tolist() == pytest.approx([third, third, -2.0, third, -2.0, -2.0, -2.0, -2.0, 5.0, 5.0, 5.0])
    torch.testing.assert_close(said + left, x)
    assert coder.size(rows) == 3 * 8 + 2 + 1


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


# Laws.


def full_rank_and_density_one(rank: int) -> dict[str, float]:
    """How far a compressed run that leaves nothing out is from all-reduce."""
    gaps = {}
    for name, config, more in (
        ("powersgd", thinwire.PowerSGD(rank=1000, min_compression=0), {}),
        ("powersgd later", thinwire.PowerSGD(rank=1000, min_compression=0, start_step=2), {}),
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


@pytest.mark.parametrize("workers", [2, 3])
def test_leaving_nothing_out_equals_all_reduce(workers: int) -> None:
    for gaps in gang.run(full_rank_and_density_one, workers):
        assert all(gap < 1e-5 for gap in gaps.values()), gaps


def conservation(rank: int, group_size: int) -> list[tuple[str, list[Any]]]:
    """For each step: this group's gradient, what all applied, and what is kept before and after."""
    found = []
    for name, config in zip(NAMES, ALL, strict=True):
        config = type(config)(**{**vars(config), "group_size": group_size})
        model = net()
        optimizer = sgd(model)
        replica = thinwire.attach(model, optimizer, config)
        method = replica._method
        own: list[list[Tensor]] = []
        honest = method.exchange
        method.exchange = lambda healthy, honest=honest, own=own, method=method: (
            own.append([g.clone() for g in method.gradients]) or honest(healthy)
        )
        steps = []
        for step in range(4):
            optimizer.zero_grad()
            before = {k: t.clone() for k, t in method.own_tensors().items()}
            if name == "topk":  # whole numbers add up without rounding
                x, y = images(rank, step)
                loss = sum((p * torch.randint(-8, 9, p.shape).float()).sum() for p in model.parameters())
                (replica(x).sum() * 0 + loss).backward()
            else:
                backward(replica, rank, step)
            after = {k: t.clone() for k, t in method.own_tensors().items()}
            steps.append((own[-1], [g.clone() for g in method.gradients], before, after))
            optimizer.step()
        found.append((name, steps))
    return found


def _kept(name: str, states: list[dict[str, Tensor]], which: list[int], sizes: list[int]) -> Tensor:
    """What workers keep, weighted by group, over all coded elements."""
    if name in ("int8", "onebit"):
        padded = max(int(s["place"][1]) for s in states)
        return unsent(states, padded)[: sum(sizes[i] for i in which)]
    if name == "powersgd":
        stacked = [torch.cat([s[f"error.{i}"].flatten() for i in which]) for s in states]
        return torch.stack(stacked).mean(0)
    whole = torch.zeros(sum(sizes[i] for i in which))
    for s in states:
        if s:
            start, end, weight = s["place"].tolist()
            whole[int(start) : int(end)] += s["v"] * weight
    return whole


@pytest.mark.parametrize(("workers", "group_size"), [(2, 1), (4, 2), (3, 2)])
def test_error_feedback_conserves_what_was_to_be_sent(workers: int, group_size: int) -> None:
    """mean(applied + residual) = mean(gradient + old residual), exactly for top-k."""
    results = gang.run(conservation, workers, group_size)
    for place, name in enumerate(NAMES):
        traces = [result[place][1] for result in results]
        for step in range(4):
            gradients, applied, before, after = zip(*(trace[step] for trace in traces), strict=True)
            sizes = [g.numel() for g in gradients[0]]
            which = [i for i, g in enumerate(gradients[0]) if name == "int8" or g.dim() > 1]
            if name == "powersgd":
                which = [int(k.split(".")[1]) for k in after[0]]
                assert which, "nothing was compressed"
            flat = [torch.cat([g[i].flatten() for i in which]) for g in gradients]
            wanted = torch.stack(flat).mean(0) + _kept(name, before, which, sizes)
            found = torch.cat([applied[0][i].flatten() for i in which]) + _kept(name, after, which, sizes)
            if name == "topk" and workers != 3:
                assert torch.equal(found, wanted)
            else:
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))
            assert all(torch.equal(a, b) for other in applied for a, b in zip(other, applied[0], strict=True))


# PyTorch's own PowerSGD.


def beside_pytorch(rank: int, workers: int) -> tuple[float, int]:
    """PyTorch's hook in one bucket and ours, from the same Q: the largest relative gap of a parameter, and how many compressed."""
    start, steps = 2, 8
    ours, other = mlp(), mlp()
    optimizers = sgd(ours, momentum=0.9), sgd(other, momentum=0.9)
    replica = thinwire.attach(ours, optimizers[0], thinwire.PowerSGD(rank=2, start_step=start, min_compression=2.0))
    ddp = DistributedDataParallel(other, bucket_cap_mb=100)
    state = theirs.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=start, min_compression_rate=2.0)
    ddp.register_comm_hook(state, theirs.powerSGD_hook)
    method: Any = replica._method
    for step in range(steps):
        for wrapped, optimizer in ((ddp, optimizers[1]), (replica, optimizers[0])):
            if wrapped is replica and step == start:
                _take_their_q(method)
            optimizer.zero_grad()
            backward(wrapped, rank, step)
            optimizer.step()
    pairs = zip(ours.parameters(), other.parameters(), strict=True)
    return max(float((p - q).detach().norm() / q.detach().norm()) for p, q in pairs), len(method.errors)


def _take_their_q(method: Any) -> None:
    """PyTorch draws all its Qs from one seed, from the last parameter on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
        for i in reversed(method.errors):
            method.qs[i] = torch.randn(*method.qs[i].shape)


@pytest.mark.parametrize("workers", [2, 3])
def test_powersgd_agrees_with_pytorchs_hook(workers: int) -> None:
    for gap, compressed in gang.run(beside_pytorch, workers, workers):
        assert compressed == 4
        assert gap < 2e-5
