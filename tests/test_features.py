"""What people use on GPUs, with every method: each cell is two pretended machines of two workers, tried to the end.

On the CPU a few methods stand for all, over gloo. `make test-gpu` tries all of them on a GPU, over nccl inside and
between machines where it can; THINWIRE_FEATURES=FILE keeps a line of JSON for each cell, for the table in docs/gpus.md.
"""

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import gang
import small
import thinwire
from device import BACKEND, DEVICE
from every_method import STEPS, WAYS

pytestmark = pytest.mark.slow

ON_GPU = DEVICE.type == "cuda"
WORKERS, GROUP = 4, 2
ALL = ("allreduce", "allreduce int8", "localsgd", "diloco", "diloco streaming", "ab", "ab-paper", "oialr", "daso")
ALL = (*ALL, "powersgd", "topk", "onebit")
TRIED = ALL if ON_GPU else ("allreduce int8", "ab")


class Started(NamedTuple):
    """What one cell trains with."""

    replica: Any
    optimizer: Any
    scaler: Any = None
    autocast: AbstractContextManager[Any] = nullcontext()
    after: Callable[[], None] = lambda: None


class Checkpointed(nn.Module):
    """A net whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small.net(smooth=True)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=False)


def adamw(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, **more)


def attached(way: str, model: nn.Module | None = None, how: dict[str, Any] | None = None, **more: Any) -> Started:
    """The usual net, attached; `how` is for its optimizer, the rest for attach()."""
    model = small.net(smooth=True) if model is None else model
    optimizer = adamw(model, **(how or {}))
    return Started(thinwire.attach(model, optimizer, WAYS[way].config(group_size=GROUP), **more), optimizer)


def autocast(dtype: torch.dtype) -> AbstractContextManager[Any]:
    return torch.autocast(DEVICE.type, dtype=dtype)


def scaled(way: str) -> Started:
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10)
    low = torch.float16 if ON_GPU else torch.bfloat16
    return attached(way, scaler=scaler)._replace(scaler=scaler, autocast=autocast(low))


def averaged(way: str) -> Started:
    started = attached(way)
    ema = thinwire.EMA(started.replica, 0.9)
    return started._replace(after=lambda: ema.update_parameters(started.replica))


def sharded(way: str) -> Started:
    mesh = init_device_mesh(DEVICE.type, (WORKERS // GROUP, GROUP), mesh_dim_names=("between", "in"))["in"]
    model = small.net(smooth=True)
    for layer in (model.conv, model.middle):
        fully_shard(layer, mesh=mesh)
    return attached(way, fully_shard(model, mesh=mesh))


FEATURES: dict[str, Callable[[str], Started]] = {
    "fp32": attached,
    "bf16 autocast": lambda way: attached(way)._replace(autocast=autocast(torch.bfloat16)),
    "fp16 and GradScaler": scaled,
    "activation checkpoints": lambda way: attached(way, Checkpointed()),
    "foreach AdamW": functools.partial(attached, how={"foreach": True}),
    "fused AdamW": functools.partial(attached, how={"fused": True}),
    "EMA": averaged,
    "FSDP2 in groups": sharded,
}
GPU_ONLY: dict[str, Callable[[str], Started]] = {
    "compile=": functools.partial(attached, compile={}),
    "compile=, CUDA graphs": functools.partial(attached, compile={"mode": "reduce-overhead"}),
    "SyncBatchNorm": lambda way: attached(way, nn.SyncBatchNorm.convert_sync_batchnorm(small.net(smooth=True))),
    "gloo between machines": functools.partial(attached, slow_backend="gloo"),
}
OF_A_PROCESS = ("FSDP2 in groups",)
"""What leaves something behind in a process."""
if ON_GPU:
    FEATURES |= GPU_ONLY


def train(rank: int, feature: str) -> dict[str, dict[str, Any]]:
    """Every method with a feature: what this worker ends with."""
    with pretended_machine(rank):
        found = {way: cell(rank, feature, way) for way in TRIED}
    return found


@contextlib.contextmanager
def pretended_machine(rank: int) -> Iterator[None]:
    """To Thinwire and to nccl two workers are one machine."""
    names = {"GROUP_RANK": str(rank // GROUP), "NCCL_HOSTID": f"machine{rank // GROUP}"}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def cell(rank: int, feature: str, way: str) -> dict[str, Any]:
    begun = time.monotonic()
    torch._dynamo.reset()
    started = FEATURES[feature](way)
    replica, losses = started.replica, []
    for number in range(STEPS):
        losses.append(step(started, rank, number))
    sent, compiled = replica.traffic.slow_bytes, replica.recompilations
    model = replica.finish()
    return {
        "losses": [float(loss) for loss in losses],
        "bits": small.model_bits(model)[:16],
        "sent": sent,
        "recompiled": compiled,
        "seconds": round(time.monotonic() - begun, 2),
    }


def step(started: Started, rank: int, number: int) -> Tensor:
    """One step as people write it."""
    x, y = small.batch(rank, number)
    replica, optimizer, scaler = started.replica, started.optimizer, started.scaler
    with started.autocast:
        loss = F.cross_entropy(replica(x), y)
    optimizer.zero_grad()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    started.after()
    return loss.detach()


@functools.cache
def found(feature: str) -> list[dict[str, dict[str, Any]]]:
    """By rank and method; processes of their own, for what a process has one of."""
    return gang.run(train, WORKERS, feature, timeout=400, fresh=ON_GPU or feature in OF_A_PROCESS)


def keep(feature: str, way: str, row: dict[str, Any]) -> None:
    if file := os.environ.get("THINWIRE_FEATURES"):
        with Path(file).open("a") as lines:
            lines.write(json.dumps({"feature": feature, "way": way, "backend": BACKEND, **row}) + "\n")


@pytest.mark.parametrize("way", TRIED)
@pytest.mark.parametrize("feature", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in FEATURES])
def test_it_trains_and_all_end_with_one_model(feature: str, way: str) -> None:
    try:
        workers = [worker[way] for worker in found(feature)]
    except gang.WorkerFailed as error:
        workers = [{"failed": str(error).strip().splitlines()[-1]}]
        raise
    finally:
        keep(feature, way, workers[0])
    assert len({worker["bits"] for worker in workers}) == 1
    for worker in workers:
        assert all(0 < loss < 10 for loss in worker["losses"])
