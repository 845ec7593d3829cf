"""What a step costs where no link is slow: Thinwire's methods against DDP, two workers on one machine.

`torchrun --nproc-per-node 2 benchmarks/gpu/near.py`. All variants are attached in the same processes and take turns,
block by block; the two workers are one group, so methods that average between groups only are between averages.
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cost import Step, attached, prepared, timed
from torch.nn.parallel import DistributedDataParallel

import thinwire
from thinwire.comm.topology import join

METHODS: dict[str, Any] = {
    "AllReduce": thinwire.AllReduce(),
    "LocalSGD": thinwire.LocalSGD(every=10**9, group_size=2),
    "AB before it factors": thinwire.AB(warmup=0, every=10**9, factor_at=None, group_size=2),
}


def main() -> None:
    """Milliseconds of a step of each variant, over those of DDP in the same round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="vgg16bn,gpt")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--block", type=int, default=8, help="steps in a row")
    parser.add_argument("--small", action="store_true", help="small batches, where there is no GPU")
    parser.add_argument("--out", type=Path, default=Path("near.jsonl"))
    given = parser.parse_args()
    join()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for name in given.models.split(","):
        steps = {"DDP": prepared(name, device, given.small, lambda model, _: DistributedDataParallel(model))}
        steps |= {method: prepared(name, device, given.small, attached(config)) for method, config in METHODS.items()}
        for row in compared(steps, given, device):
            if dist.get_rank() == 0:
                print(name, *(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()))
                with given.out.open("a") as file:
                    file.write(json.dumps({"model": name} | row) + "\n")
    dist.barrier()
    os._exit(0)


def compared(steps: dict[str, Step], given: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """One row for each variant."""
    for step in steps.values():
        timed(step, 2 * given.block, device)
    seconds: dict[str, list[float]] = {variant: [] for variant in steps}
    for number in range(given.rounds):
        for variant in list(steps) if number % 2 else list(steps)[::-1]:
            dist.all_reduce(torch.zeros(1))
            seconds[variant].append(timed(steps[variant], given.block, device))
    rows = []
    for variant, taken in seconds.items():
        ratios = statistics.quantiles([a / b for a, b in zip(taken, seconds["DDP"], strict=True)], n=4)
        spread = {"ratio": ratios[1], "from": ratios[0], "to": ratios[2]}
        rows.append({"variant": variant, "ms": 1e3 * statistics.median(taken), **spread})
    return rows


if __name__ == "__main__":
    main()
