"""What a checkpoint costs training: blocks of steps with a save in each, against the same steps without one.

python benchmarks/faults/checkpoint_cost.py --folder DISK             the disk that saves go to
python benchmarks/faults/checkpoint_cost.py --quick                   to see that it runs

VGG16-BN with AdamW on gloo workers of one thread each; on a GPU one worker alone. A block is `--every` steps. It is
timed in three ways that take turns in the same processes: without a save; with one that is waited for; with one that is
written while the steps are taken, including the wait at the end of the block, should writing take longer than they do.
What a save adds is in the details, in steps, and what making the copies takes, without which there is no save.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))
from measure import Figure, Pair, alternate, arguments, figure_of_pairs, report, waiting_for
from workers import run_workers

import thinwire
from thinwire.experiments.models import VGG16BN

TARGETS = {"waited for": "", "in the background": "<= 1.05"}


def main() -> None:
    given = arguments(
        __doc__,
        folder={"type": Path, "metavar": "DIR", "help": "where to save; default: the folder for temporary files"},
        workers={"type": int, "default": 2, "help": "on a CPU"},
        every={"type": int, "default": 50, "help": "steps per save"},
        batch={"type": int, "default": 32, "help": "images per worker"},
        pairs={"type": int, "default": 10},
    )
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        report(compare(given, folder), given)


def compare(given: argparse.Namespace, folder: str) -> Iterator[Figure]:
    """Both ways to save against not saving."""
    workers, every, pairs = given.workers if given.device == "cpu" else 1, given.every, given.pairs
    if given.quick:
        every, pairs = 4, 2
    found = run_workers(workers, 1, measure, given.device, given.batch, every, pairs, f"{folder}/save")[0]
    for name, timed in found["pairs"].items():
        steps = statistics.median((saving.clock - plain.clock) * every / plain.clock for saving, plain in timed)
        detail = {
            "a save adds": f"{steps:.2f} steps",
            "a step": f"{1e3 * statistics.median(plain.clock for _, plain in timed) / every:.1f} ms",
            "copies take": f"{1e3 * found['copies']:.0f} ms",
            "a save": f"{found['bytes'] / 1e6:.0f} MB",
        }
        yield figure_of_pairs(f"a save {name} every {every} steps", timed, TARGETS[name], **detail)


def measure(rank: int, device: str, batch: int, every: int, pairs: int, folder: str) -> dict[str, Any]:
    """Times of blocks with and without a save, seconds of making the copies, bytes of a save."""
    torch.manual_seed(rank)
    x, y = torch.randn(batch, 3, 32, 32, device=device), torch.randint(10, (batch,), device=device)
    model = VGG16BN().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    replica, wait = thinwire.attach(model, optimizer, thinwire.AllReduce()), waiting_for(device)

    def steps() -> None:
        for _ in range(every):
            loss = F.cross_entropy(replica(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def waited_for() -> None:
        replica.save(folder)
        steps()

    def in_the_background() -> None:
        replica.save(folder, wait=False)
        steps()
        replica.wait_for_save()

    ways: dict[str, Callable[[], None]] = {"waited for": waited_for, "in the background": in_the_background}
    for way in ways.values():
        way()  # the first of each makes buffers
    timed: dict[str, list[Pair]] = {name: alternate(way, steps, pairs, wait) for name, way in ways.items()}
    wait()
    start = time.perf_counter()
    replica.capture()
    copies = time.perf_counter() - start
    size = sum(path.stat().st_size for path in Path(folder).iterdir())
    return {"pairs": timed, "copies": copies, "bytes": size}


if __name__ == "__main__":
    main()
