"""Peak memory per worker of groups that shard their model with FSDP2 against groups that hold it whole, with DDP.

Two groups of two workers train an MLP of 50 M parameters with AdamW, by DiLoCo (int4, with an outer step) and by AB
with its default codes: a low-rank warm-up, an average, the decomposition, and factors. The peak is the process's
resident set above what was there before the model; on a GPU, which all workers then share, what torch's allocator
handed out. Every run has fresh processes.
"""

import os
import statistics
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from measure import Figure, arguments, figure, report
from memory import Meter, Peaks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from workers import run_workers

import thinwire

TARGET = "<= 0.6"
GROUPS, MEMBERS = 2, 2
PARTS = {"DiLoCo": ("steps", "average"), "AB": ("warm-up", "average", "decompose", "factors")}


def main() -> None:
    given = arguments(
        __doc__,
        blocks={"type": int, "default": 6, "help": "of 8.4 M parameters each"},
        pairs={"type": int, "default": 3, "help": "runs of each kind"},
    )
    # What is freed must go back at once, or the resident set would show the past.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    pairs, blocks = (1, 2) if given.quick else (given.pairs, given.blocks)
    report((compare(method, blocks, given.device, pairs) for method in PARTS), given)


def compare(method: str, blocks: int, device: str, pairs: int) -> Figure:
    """FSDP2 / DDP: of each run, the worker that holds most."""
    runs = [
        [run_workers(GROUPS * MEMBERS, 1, peaks, method, blocks, device, shards) for shards in (True, False)]
        for _ in range(pairs)
    ]
    ratios = [max(map(_highest, sharded)) / max(map(_highest, whole)) for sharded, whole in runs]
    detail = {
        part: " / ".join(_mib([worker for run in runs for worker in run[i]], part) for i in (0, 1))
        for part in PARTS[method]
    }
    return figure(f"{method}, FSDP2 in groups / DDP in groups", ratios, TARGET, **detail)


def _highest(found: Peaks) -> float:
    return max(found.values())


def _mib(workers: list[Peaks], part: str) -> str:
    return f"{statistics.median(found[part] for found in workers) / 2**20:.0f} MiB"


def peaks(rank: int, method: str, blocks: int, device: str, shards: bool) -> Peaks:
    """The peak of each part of a run."""
    meter = Meter(device)
    model = _model(blocks).to(device)
    if shards:
        mesh = init_device_mesh(device, (GROUPS, MEMBERS), mesh_dim_names=("between", "in"))["in"]
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    # Before Thinwire's own hook: what follows an update is the average and the change of shape.
    optimizer.register_step_post_hook(lambda *_: marks.append(meter.peak()) or meter.start())
    marks: list[float] = []
    replica = thinwire.attach(model, optimizer, _config(method))
    found: Peaks = dict.fromkeys(PARTS[method], 0.0)
    meter.start()
    for step, (before, after) in enumerate(_parts(method)):
        x = torch.randn(32, 1024, generator=torch.Generator().manual_seed(100 * rank + step)).to(device)
        F.mse_loss(replica(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
        found[before] = max(found[before], marks.pop())
        found[after] = max(found[after], meter.peak())
        meter.start()
    assert method != "AB" or (replica.phase == "factored" and len(replica.ranks()) == 2 * blocks - 2)
    return found


def _parts(method: str) -> Iterator[tuple[str, str]]:
    """To what each step belongs up to its update, and after it."""
    if method == "DiLoCo":
        return iter([("steps", "steps"), ("steps", "average")] * 3)
    start = [("warm-up", "warm-up")] * 2
    return iter([*start, ("average", "average"), ("average", "decompose"), *[("factors", "factors")] * 4])


def _config(method: str) -> Any:
    if method == "DiLoCo":
        return thinwire.DiLoCo(every=2, wire="int4", group_size=MEMBERS)
    return thinwire.AB(warmup=2, every=2, factor_at=4, group_size=MEMBERS)


def _model(blocks: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)) for _ in range(blocks))
    )
    with torch.no_grad():  # columns of falling size have a falling spectrum; flat ones would stay full in AB
        for p in model.parameters():
            if p.dim() > 1:
                p.div_(1 + 20 * torch.arange(p.shape[1]) / p.shape[1])
    return model


if __name__ == "__main__":
    main()
