"""Peak memory around AB's group phase against full-rank training: VGG16-BN with AdamW.

AB's peak runs from the end of the warm-up's last backward pass to the end of the merge: the decomposition,
the group's steps and the merge. Full-rank training is the bare loop with one worker, and
DistributedDataParallel with two (each worker is a group: one trains A, the other B). On a GPU it is what
torch's allocator handed out, on a CPU the process's resident set, both above what was there before the model.
Every run has fresh processes.
"""

import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import Figure, arguments, figure, report
from models import give_decaying_spectra
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workers import run_workers

import thinwire
from thinwire.experiments.models import VGG16BN

TARGET = "<= 1"
WARMUP, GROUP_STEPS = 3, 3
Peaks = dict[str, float]


def main() -> None:
    given = arguments(
        __doc__,
        batches={"type": int, "nargs": "+", "default": [8, 64], "help": "images a worker and step"},
        pairs={"type": int, "default": 3, "help": "runs of each kind"},
    )
    # What is freed must go back at once, or the resident set would show the past.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    torch.set_num_threads(1)
    pairs = 1 if given.quick or given.device == "cuda" else given.pairs
    batches = given.batches[:1] if given.quick else given.batches
    report((f for b in batches for w in (1, 2) for f in compare(w, b, given.device, pairs)), given)


def compare(workers: int, batch: int, device: str, pairs: int) -> Iterator[Figure]:
    """AB / full rank, one figure for each worker."""
    runs = [
        (
            run_workers(workers, 1, peaks_of_ab, device, batch),
            run_workers(workers, 1, peaks_of_full, device, batch),
        )
        for _ in range(pairs)
    ]
    for rank in range(workers):
        ab, full = [r[0][rank] for r in runs], [r[1][rank] for r in runs]
        ratios = [max(a.values()) / f["steps"] for a, f in zip(ab, full, strict=True)]
        detail = {"full": _mib(full, "steps")} | {part: _mib(ab, part) for part in ("decompose", "steps", "merge")}
        trains = "A" if workers == 2 and rank == 0 else "B"
        against = "bare loop" if workers == 1 else "DDP"
        title = f"AB trains {trains} / {against}, workers {workers}, batch {batch}"
        yield figure(title, ratios, TARGET, **detail)


def _mib(runs: list[Peaks], part: str) -> str:
    return f"{statistics.median(run[part] for run in runs) / 2**20:.0f} MiB"


def peaks_of_full(rank: int, device: str, batch: int) -> Peaks:
    """Peak of ordinary training."""
    meter = Meter(device)
    model, optimizer, x, y = _task(device, batch)
    trained = DistributedDataParallel(model) if torch.distributed.is_initialized() else model
    meter.start()
    for _ in range(WARMUP + GROUP_STEPS):
        _backward(trained, optimizer, x, y)
        optimizer.step()
    return {"steps": meter.peak()}


def peaks_of_ab(rank: int, device: str, batch: int) -> Peaks:
    """Peaks of the decomposition, of the group's steps and of the merge."""
    meter = Meter(device)
    model, optimizer, x, y = _task(device, batch)
    alone = not torch.distributed.is_initialized()
    steps = {
        "total_steps": WARMUP + GROUP_STEPS + 1,
        "warmup": WARMUP,
        "every": GROUP_STEPS,
        "rebound": 1,
    }
    config = thinwire.AB.paper(**steps, group_size="world" if alone else 1)
    # Before Thinwire's own hook: the update belongs to the phase it ends, only what follows to the change of shape.
    optimizer.register_step_post_hook(lambda *_: meter.start())
    replica = thinwire.attach(model, optimizer, config)
    peaks: Peaks = {}

    def step(part: str | None) -> None:
        optimizer.step()
        if part:
            peaks[part] = meter.peak()

    for i in range(WARMUP):
        _backward(replica, optimizer, x, y)
        step("decompose" if i == WARMUP - 1 else None)
    assert replica.phase == "groups" and len(replica.ranks()) > 10, "nothing was factored"
    peaks["steps"] = _group_steps(meter, lambda: _backward(replica, optimizer, x, y), optimizer)
    step("merge")
    assert replica.phase == "rebound", replica.phase
    return peaks


def _group_steps(meter: "Meter", backward: Callable[[], None], optimizer: torch.optim.Optimizer) -> float:
    """The peak of a group phase up to its last update, which is where the merge happens."""
    meter.start()
    for _ in range(GROUP_STEPS - 1):
        backward()
        optimizer.step()
    backward()
    return meter.peak()


def _task(device: str, batch: int) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    torch.manual_seed(0)
    model = VGG16BN()
    give_decaying_spectra(model)
    model = model.to(device)
    x, y = torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5), x, y


def _backward(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> None:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()


class Meter:
    """Peak memory since `start`, above what there was when the meter was made."""

    def __init__(self, device: str) -> None:
        self.device = device
        _warm_up_libraries(device)
        self.before = torch.cuda.memory_allocated() if device == "cuda" else _resident("VmRSS")

    def start(self) -> None:
        """Forget earlier peaks."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> float:
        """Bytes."""
        return (torch.cuda.max_memory_allocated() if self.device == "cuda" else _resident("VmHWM")) - self.before


def _warm_up_libraries(device: str) -> None:
    """Code and workspaces that the first convolution, product and eigenvectors bring in are nobody's peak."""
    conv = nn.Conv2d(3, 3, 3).to(device)
    conv(torch.randn(1, 3, 8, 8, device=device)).sum().backward()
    square = torch.randn(64, 64, device=device, dtype=torch.float64)
    torch.linalg.eigh(square @ square.t())


def _resident(field: str) -> int:
    """Bytes, from Linux's own account of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"{field} is not in /proc/self/status: memory on a CPU is measured on Linux only")


if __name__ == "__main__":
    main()
