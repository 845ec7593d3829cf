"""One replica group of torchft that trains digits, for torchft_faults.py; needs torchft 0.2.0 and nothing of Thinwire.

OUT/GROUP-PID.jsonl has lines as those of group.py: step, time, whether an average was completed in it, processor time,
the number of the quorum, and how many groups took part. SIGUSR1 lets the process kill itself in its next average,
SIGUSR2 freeze itself there; OUT/GROUP-PID.fault then has the time.
"""

import argparse
import importlib.util
import itertools
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import TCPStore
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

SOURCE = Path(__file__).parents[2] / "src/thinwire"


def main() -> None:
    given = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = digits()
    model = digit_net()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=3.0)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = managed(model, optimizer, store.port, given)
    name = given.out / f"{given.group}-{os.getpid()}"
    strike_when_told(manager, len(list(model.parameters())), name.with_suffix(".fault"))
    rng, log = np.random.default_rng(given.group), name.with_suffix(".jsonl").open("w", buffering=1)
    with averaging(manager, model, optimizer, given):
        for step in range(1, given.steps + 1):
            rows, before = torch.from_numpy(rng.integers(len(x), size=16)), manager.current_step()
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            averages = manager.current_step() > before
            row = [step, time.time(), averages, time.process_time(), manager._quorum_id, manager.num_participants()]
            log.write(json.dumps(row) + "\n")
            time.sleep(given.slow)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--method", choices=("localsgd", "diloco"), default="localsgd")
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--slow", type=float, default=0.1, help="seconds that each step takes longer")
    parser.add_argument("--lighthouse", required=True)
    return parser.parse_args()


def digits() -> tuple[Tensor, Tensor]:
    found = np.load(SOURCE / "datasets/digits8x8.npz")
    return torch.from_numpy(found["x"].astype(np.float32))[:, None] / 8 - 1, torch.from_numpy(found["y"]).long()


def digit_net() -> nn.Module:
    """Return the model of the recipe `digits`, by its file alone: the rest of Thinwire is not installed here."""
    spec = importlib.util.spec_from_file_location("digits", SOURCE / "train/models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.DigitNet()


def managed(model: nn.Module, optimizer: torch.optim.Optimizer, port: int, given: argparse.Namespace) -> Manager:
    """Make a manager with torchft's defaults; DiLoCo needs a quorum that is waited for."""

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,
        use_async_quorum=given.method == "localsgd",
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=port,
        lighthouse_addr=given.lighthouse,
        replica_id=str(given.group),
    )


def averaging(manager: Manager, model: nn.Module, optimizer: torch.optim.Optimizer, given: argparse.Namespace) -> Any:
    if given.method == "localsgd":
        return LocalSGD(manager, model, optimizer, sync_every=given.every)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return DiLoCo(manager, [model], optimizer, outer, sync_every=given.every)


def strike_when_told(manager: Manager, tensors: int, path: Path) -> None:
    """Let a signal ask for a fault in the next average: at any of its tensors but the first, for which groups meet."""

    def on_signal(number: int, _: Any) -> None:
        allreduce, calls, last = manager.allreduce, itertools.count(1), random.randint(2, tensors)

        def struck(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == last:
                manager.allreduce = allreduce
                path.write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL if number == signal.SIGUSR1 else signal.SIGSTOP)
            return allreduce(*args, **kwargs)

        manager.allreduce = struck

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, on_signal)


if __name__ == "__main__":
    main()
