"""Time of a step with `attach(model, optimizer, AllReduce())` against bare DistributedDataParallel.

Two gloo workers of one thread each train VGG16-BN both ways in the same processes, in alternating blocks
of steps. Same first values and same batches: at the end both models must be equal bit for bit on a CPU.
"""

import argparse
import copy
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import Figure, Pair, alternate, arguments, figure_of_pairs, median_clock, report, waiting_for
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import run_workers

import thinwire
from thinwire.experiments.models import VGG16BN

TARGET = "<= 1.03"
WORKERS = 2


def main() -> None:
    given = arguments(
        __doc__,
        batch={"type": int, "default": 8, "help": "images a worker and step"},
        steps={"type": int, "default": 3, "help": "steps a block"},
        pairs={"type": int, "default": 20, "help": "pairs of blocks"},
        control={"action": "store_true", "help": "bare DDP on both sides: what noise alone gives"},
    )
    report(compare(given), given)


def compare(given: argparse.Namespace) -> Iterator[Figure]:
    """Thinwire / DDP."""
    pairs = 4 if given.quick else given.pairs
    options = (given.device, given.batch, given.steps, pairs, given.control)
    timed, differ = run_workers(WORKERS, 1, measure_overhead, *options)[0]
    torch.set_num_threads(1)  # as in the workers, for the report
    name = "control, DDP / DDP" if given.control else "attach(AllReduce) / DDP"
    step = median_clock(bare for _, bare in timed) / given.steps
    detail = {"DDP step": f"{step:.3f} s", "batch": given.batch, "tensors that differ at the end": differ}
    yield figure_of_pairs(f"{name}, VGG16-BN, {WORKERS} workers", timed, TARGET, **detail)


def measure_overhead(
    rank: int, device: str, batch: int, steps: int, pairs: int, control: bool
) -> tuple[list[Pair], int]:
    """The times of each pair of blocks (Thinwire, DDP), and how many tensors differ at the end."""
    torch.manual_seed(rank)
    x, y = torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)
    torch.manual_seed(0)
    bare = VGG16BN().to(device)
    ours = copy.deepcopy(bare)
    block_of_bare = _block(*_ddp(bare), x, y, steps)
    block_of_ours = _block(*(_ddp(ours) if control else _attached(ours)), x, y, steps)
    wait_for_device = waiting_for(device)

    def wait() -> None:
        wait_for_device()
        dist.barrier()

    alternate(block_of_ours, block_of_bare, 1, wait)  # buckets are rebuilt after the first step
    return alternate(block_of_ours, block_of_bare, pairs, wait), _differing(bare, ours)


def _ddp(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return DistributedDataParallel(model), _optimizer(model)


def _attached(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = _optimizer(model)
    return thinwire.attach(model, optimizer, thinwire.AllReduce()), optimizer


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _block(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(steps):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


def _differing(one: nn.Module, other: nn.Module) -> int:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return sum(not torch.equal(a, b) for a, b in pairs)


if __name__ == "__main__":
    main()
