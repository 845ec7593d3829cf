"""Every code of `wire` and `warmup_wire` in every method: agreement, resuming, error feedback, residuals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gang
import small
import thinwire
from selection import first_of
from thinwire import AB, DASO, OIALR, AllReduce, ConfigError, DiLoCo, LocalSGD, Nesterov, OneBit, PowerSGD, TopK

CODES = ("int4", "int2", "bit", "lowrank:2", "topk:0.1")
STEPS, STOP = 12, 7


def every_method(code: str, warmup_code: str) -> dict[str, Any]:
    """All methods that have these fields, with a phase of each kind in a few steps."""
    both = {"wire": code, "warmup_wire": warmup_code}
    groups = {"every": 3, "warmup": 2, "group_size": 2}
    warmed = {"warmup": 4, "warmup_wire": warmup_code, "group_size": 2}
    cycle = {"total_steps": STEPS, "warmup": 3, "every": 5, "rebound": 2, "cutoff": 0.6}
    return {
        "allreduce": AllReduce(wire=code, group_size=2),
        "localsgd": LocalSGD(**groups, **both),
        "diloco": DiLoCo(**{**groups, "every": 4}, fragments=2, overlap=2, **both),
        "daso": DASO(total_steps=STEPS, warmup=2, cooldown=2, every=3, overlap=2, group_size=2, **both),
        "ab-paper": AB.paper(**cycle, group_size=2, **both),
        "oialr": OIALR(total_steps=STEPS, factor_at=4, redecompose=4, cutoff=0.3, group_size=2, **both),
        "powersgd": PowerSGD(rank=2, **warmed),
        "topk": TopK(density=0.1, **warmed),
        "onebit": OneBit(**warmed),
    }


def build(config: Any, seed: int) -> tuple[Any, Any]:
    model = small.mlp(seed)
    optimizer = small.sgd(model)
    return thinwire.attach(model, optimizer, config), optimizer


def go(replica: Any, optimizer: Any, rank: int, steps: int) -> list[tuple[bool, str]]:
    """After each step: whether workers must agree, and what this one holds."""
    seen = []
    for number in range(replica.step, steps):
        small.step(replica, optimizer, rank, number)
        if (number + 1) % 4 == 0 and replica.describe()["method"] == "daso":
            replica.epoch_end(1.0)
        seen.append((replica.in_sync, small.model_bits(replica.module)))
    return seen


def journeys(rank: int, folder: str, offsets: tuple[int, ...]) -> dict[str, tuple[list[Any], bool]]:
    """What each step left, and whether a run that resumed in the middle ended with the same bits."""
    found = {}
    for i, name in enumerate(every_method("fp32", "fp32")):
        for offset in offsets:  # another code for each method, so that few cases have all of them
            code, warmup_code = CODES[(i + offset) % 5], CODES[(i + offset + 2) % 5]
            config = every_method(code, warmup_code)[name]
            place = Path(folder) / f"{name}-{code}"
            replica, optimizer = build(config, seed=rank)
            seen = go(replica, optimizer, rank, STOP)
            replica.save(place)
            seen += go(replica, optimizer, rank, STEPS)
            with replica.merged():
                seen.append((True, small.model_bits(replica.module)))
            again, its_optimizer = build(config, seed=5)
            again.load(place)
            go(again, its_optimizer, rank, STEPS)
            same = small.model_bits(again.module) == small.model_bits(replica.module)
            seen.append((True, small.model_bits(replica.finish())))
            found[f"{name} {code} after {warmup_code}"] = seen, same
    return found


@pytest.mark.slow
@pytest.mark.parametrize("offsets", first_of([((0,),), ((1, 2, 3, 4),)]))
def test_workers_agree_and_resume_bit_for_bit_in_every_code(offsets: tuple[int, ...], tmp_path: Path) -> None:
    """Two groups, of two workers and of one."""
    everyone = gang.run(journeys, 3, str(tmp_path), offsets)
    assert len(everyone[0]) == len(offsets) * 9
    for name in everyone[0]:
        for step, seen in enumerate(zip(*(mine[name][0] for mine in everyone), strict=True), start=1):
            agrees = seen[0][0]
            assert not agrees or len({bits for _, bits in seen}) == 1, (name, step)
        assert all(mine[name][1] for mine in everyone), f"{name}: resumed otherwise"


class Constant(nn.Module):
    """A matrix and a bias whose gradients are the input, whatever they are."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.bias = nn.Parameter(torch.zeros(24, 20)), nn.Parameter(torch.zeros(20))

    def forward(self, x: Tensor) -> Tensor:
        return (self.matrix * x[:24]).sum() + (self.bias * x[24]).sum()


def pull(rank: int) -> Tensor:
    return torch.randn(25, 20, generator=torch.Generator().manual_seed(rank))


def drift(rank: int) -> dict[str, list[float]]:
    """How far the mean step of 16, and of 64, is from minus the mean gradient, as a share of it."""
    apart = {"every": 2}
    configs = {
        **{f"allreduce {code}": AllReduce(wire=code) for code in CODES},
        **{f"localsgd {code}": LocalSGD(**apart, wire=code) for code in ("int2", "lowrank:2")},
        "diloco topk": DiLoCo(**apart, wire="topk:0.1", outer=Nesterov(1.0, 0.0)),
        "daso int4": DASO(total_steps=1000, warmup=0, overlap=0, **apart, wire="int4"),
    }
    mean, found = (pull(0) + pull(1)) / 2, {}
    for name, config in configs.items():
        model = Constant()
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        replica, gaps = thinwire.attach(model, optimizer, config), []
        for number in range(1, 65):
            optimizer.zero_grad()
            replica(pull(rank)).backward()
            optimizer.step()
            if number in (16, 64):
                gaps.append(float((model.matrix.detach() / -number - mean[:24]).norm() / mean[:24].norm()))
        torch.testing.assert_close(model.bias.detach() / -64, mean[24], rtol=1e-4, atol=1e-4)
        found[name] = gaps
    return found


@pytest.mark.slow
def test_what_a_code_leaves_out_comes_later() -> None:
    """The error of the mean over T steps falls as 1/T: what is left out stays bounded."""
    for found in gang.run(drift, 2):
        for name, (early, late) in found.items():
            assert late < max(0.6 * early, 1e-6) and late < 0.2, (name, early, late)


def after_a_warm_up(rank: int) -> dict[str, Any]:
    """Residuals before and after the end of the warm-up, and bytes of gradients since."""
    found = {}
    for name, config in every_method("fp32", "bit").items():
        if name in ("allreduce", "daso"):
            continue
        replica, optimizer = build(config, seed=0)
        left, sent = [], []
        for number in range(config.warmup_length + 1):
            small.step(replica, optimizer, rank, number)
            buckets = replica._method.gradients.buckets
            left.append([float(t.abs().max()) for bucket in buckets for t in bucket.residuals() if t.numel()])
            sent.append(replica.traffic.slow_bytes_for("gradients"))
        found[name] = left, sent[-1] - sent[-2]
    return found


def test_the_residual_of_a_warm_up_is_dropped_at_its_end() -> None:
    for found in gang.run(after_a_warm_up, 3):
        for name, (left, sent) in found.items():
            *_, before, at_the_end, _ = left
            assert max(before, default=1.0) > 0, name  # the second member of a group here carries nothing
            assert not any(at_the_end), name
            assert (sent == 0) == (name in ("localsgd", "diloco", "ab-paper")), (
                name
            )  # groups that train apart send none


def test_momentum_that_would_be_applied_twice_is_refused_before_the_warm_up() -> None:
    assert all("twice" in said for said in gang.run(refused_at_attach, 2))


def refused_at_attach(rank: int) -> str:
    with pytest.raises(ConfigError) as caught:
        build(TopK(momentum=0.9, warmup=5), seed=0)
    return str(caught.value)


# Fields.


@pytest.mark.parametrize(
    "code", ["", "int3", "bits", "lowrank", "lowrank:0", "lowrank:1.5", "topk:0", "topk:2", "int8:4"]
)
@pytest.mark.parametrize("field", ["wire", "warmup_wire"])
def test_a_code_that_nobody_knows_is_refused(field: str, code: str) -> None:
    with pytest.raises(ConfigError, match=f"`{field}`='{code}' is not a code for the wire, choose from: fp32, bf16"):
        LocalSGD(**{field: code})
