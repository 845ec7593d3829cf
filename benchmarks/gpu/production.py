"""A production run in small: two machines with some workers each, nccl inside and between, a slow link in between.

VGG16-BN on CIFAR-10 and a GPT of 124 M on text, by DDP as people start it, and by Thinwire's methods: steps per second,
the share of time spent waiting, bytes by the kernel, and the loss over time. Machines are hosts of `thinwire.netbench`,
as root; how several workers share one GPU is in backends.py. Each method has `--seconds`, and no fewer steps than it
needs between two averages.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import wait_for
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.comm.backends import INTERFACE
from thinwire.comm.ledger import Interface
from thinwire.comm.topology import join
from thinwire.experiments.models import VGG16BN
from thinwire.netbench.hosts import Hosts, parse_rate

PORT, NODES = 29541, 2
EVERY = 24
METHODS: dict[str, tuple[Any, int]] = {
    "DDP": (None, 1),
    "AllReduce": (thinwire.AllReduce(), 1),
    "int8": (thinwire.AllReduce(wire="int8"), 1),
    f"DiLoCo, int2, every {EVERY}": (thinwire.DiLoCo(warmup=0, every=EVERY, wire="int2"), EVERY),
    f"AB, int2, every {EVERY}": (thinwire.AB(warmup=0, every=EVERY, wire="int2", factor_at=EVERY), EVERY),
}
"""By name: the config, and a multiple of which the steps are."""


def main() -> None:
    """All rates and models; prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="vgg16bn,gpt")
    parser.add_argument("--rates", default="100Mbit,1Gbit", help="none is unlimited")
    parser.add_argument("--workers", type=int, default=2, help="on each machine")
    parser.add_argument("--methods", default=",".join(name.split(",")[0] for name in METHODS))
    parser.add_argument(
        "--images", type=Path, help="part of CIFAR-10 as an .npz with d (3, n, 32, 32) and y; else noise"
    )
    parser.add_argument("--text", type=Path, help="a text file, read as bytes; else noise")
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--small", action="store_true", help="small models, where there is no GPU")
    parser.add_argument("--wait", type=float, default=300.0, help="seconds for a model at a rate, all methods together")
    parser.add_argument("--out", type=Path, default=Path("production.jsonl"))
    parser.add_argument("--worker", metavar="RANK", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        work(given.worker, given)
        return
    with Hosts(NODES, name="gpu-production") as lab:
        for rate in given.rates.split(","):
            lab.shape(None if rate == "none" else parse_rate(rate))
            for model in given.models.split(","):
                launched(lab, given, model, rate)
    for row in map(json.loads, given.out.read_text().splitlines()):
        shown = {name: value for name, value in row.items() if name != "losses"}
        print(*(f"{value:>9.4g}" if isinstance(value, float) else f"{value!s:<12}" for value in shown.values()))


def launched(lab: Hosts, given: argparse.Namespace, model: str, rate: str) -> None:
    """One gang of workers."""
    workers, each = [], given.workers
    for rank in range(NODES * each):
        host = lab.hosts[rank // each]
        place = {"GROUP_RANK": rank // each, "NCCL_HOSTID": f"host{rank // each}", "LOCAL_RANK": rank % each}
        place |= {"MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": PORT, "RANK": rank, INTERFACE: host.interface}
        place |= {"WORLD_SIZE": NODES * each, "LOCAL_WORLD_SIZE": each, "OMP_NUM_THREADS": 1}
        words = [sys.executable, __file__, "--worker", str(rank), "--models", model, "--rates", rate]
        words += ["--seconds", str(given.seconds), "--out", str(given.out), "--methods", given.methods]
        words += ["--images", str(given.images)] * bool(given.images) + ["--text", str(given.text)] * bool(given.text)
        words += ["--small"] * given.small
        environment = os.environ | {name: str(value) for name, value in place.items()}
        workers.append(subprocess.Popen(host.command(words), env=environment, start_new_session=True))
    wait_for(workers, given.wait, f"{model} at {rate}")


def work(rank: int, given: argparse.Namespace) -> None:
    """What one worker does: all methods, one after the other."""
    join()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    interface = Interface(os.environ[INTERFACE])
    for name, (config, multiple) in METHODS.items():
        if name.split(",")[0] not in given.methods.split(","):
            continue
        row = trained(rank, given, device, interface, config, multiple)
        if rank == 0:
            about = {"workers": dist.get_world_size(), "model": given.models, "rate": given.rates, "method": name}
            with given.out.open("a") as file:
                file.write(json.dumps(about | row) + "\n")
    dist.barrier()
    os._exit(0)


def trained(
    rank: int, given: argparse.Namespace, device: torch.device, interface: Interface, config: Any, multiple: int
) -> dict[str, Any]:
    """Some steps by one method."""
    torch.manual_seed(0)
    model = (gpt if given.models == "gpt" else vgg)(given.small).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=device.type == "cuda")
    batches = (texts if given.models == "gpt" else images)(rank, given, device)
    called = DistributedDataParallel(model) if config is None else thinwire.attach(model, optimizer, config)
    losses: list[tuple[float, Tensor]] = []

    def steps(count: int) -> float:
        """Take so many; seconds of the slowest worker."""
        settle(device)
        begun = time.monotonic()
        for _ in range(count):
            with torch.autocast(device.type, torch.bfloat16):
                x, y = next(batches)
                out = called(x)
                loss = F.cross_entropy(out.flatten(0, -2).float(), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append((time.monotonic(), loss.detach()))
        if device.type == "cuda":
            torch.cuda.synchronize()
        return slowest(time.monotonic() - begun)

    first = steps(1)  # compiles, connects
    first = min(first, steps(1))
    count = max(1, round(given.seconds / first / multiple)) * multiple
    count = min(count, 20 * multiple if multiple > 1 else 400)
    ledger = None if config is None else called.traffic
    if ledger is not None:
        ledger.clock.settle()  # what was waited for until here
    settle(device)
    before, sent, waited = interface.read(), ledger.slow_bytes if ledger else 0, ledger.waiting if ledger else 0.0
    losses.clear()
    begun = time.monotonic()
    seconds = steps(count)
    settle(device)
    now = interface.read()
    if ledger is not None:
        ledger.clock.settle()
    found = {
        "steps": count,
        "steps/s": count / seconds,
        "waiting": (ledger.waiting - waited) / seconds if ledger else float("nan"),
        "MB by the kernel": (now.bytes - before.bytes) / count / 1e6,
        "MB by the ledger": (ledger.slow_bytes - sent) / count / 1e6 if ledger else float("nan"),
        "GB of the GPU": torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0,
        "losses": [(round(at - begun, 3), round(float(loss), 4)) for at, loss in losses],
    }
    with contextlib.suppress(AttributeError):
        called.detach()
    torch.cuda.reset_peak_memory_stats() if device.type == "cuda" else None
    return found


def settle(device: torch.device) -> None:
    """All workers are at the same place."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1))
    time.sleep(0.02)


def slowest(seconds: float) -> float:
    """The longest of all workers'."""
    found = torch.tensor(seconds)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def vgg(small: bool) -> nn.Module:
    return (
        nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 10))
        if small
        else VGG16BN()
    )


class Gpt(nn.Module):
    """GPT-2's smallest, as a function of tokens."""

    def __init__(self, small: bool) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        size = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256} if small else {}
        size |= {"bos_token_id": 0, "eos_token_id": 0}
        config = GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **size)
        self.net = GPT2LMHeadModel(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).logits


def gpt(small: bool) -> nn.Module:
    return Gpt(small)


def images(rank: int, given: argparse.Namespace, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of 128, drawn by each worker for itself."""
    if given.images:
        held = np.load(given.images)
        x, y = torch.from_numpy(held["d"].transpose(1, 0, 2, 3).copy()), torch.from_numpy(held["y"]).long()
    else:
        x, y = torch.randint(256, (2000, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (2000,))
    x, y = x.to(device), y.to(device)
    rng = torch.Generator(device).manual_seed(rank)
    while True:
        chosen = torch.randint(len(x), (8 if given.small else 128,), generator=rng, device=device)
        yield (x[chosen].float() - 120) / 64, y[chosen]


def texts(rank: int, given: argparse.Namespace, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Bytes: four pieces of 512, drawn by each worker for itself."""
    whole = given.text.read_bytes() if given.text else os.urandom(1 << 20)
    held = torch.frombuffer(bytearray(whole), dtype=torch.uint8).to(device)
    rng = torch.Generator(device).manual_seed(rank)
    count, length = (2, 32) if given.small else (4, 512)
    places = torch.arange(length + 1, device=device)
    while True:
        starts = torch.randint(len(held) - length - 1, (count, 1), generator=rng, device=device)
        piece = held[starts + places].long()
        yield piece[:, :-1], piece[:, 1:]


if __name__ == "__main__":
    main()
