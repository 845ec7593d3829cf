"""What methods cost a step on a GPU beside the wire's own time, and where the host waits for the GPU.

One process in a world of two whose collectives send nothing (torch's fake backend), so that only what a worker does
itself is left; DDP's reducer cannot do without an answer. Variants are attached in the same process and take turns,
block by block. "Waits" are the calls of CUDA's runtime in a step in which the host waits for the GPU, by torch's
profiler. Without a GPU it only shows that it works.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import thinwire
from thinwire.comm import process_groups
from thinwire.comm.collectives import ProcessGroupWire
from thinwire.experiments.models import VGG16BN

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
Step = Callable[[], Any]

METHODS: dict[str, Any] = {
    "AllReduce, int8": thinwire.AllReduce(wire="int8"),
    "AllReduce, int2": thinwire.AllReduce(wire="int2"),
    "AllReduce, lowrank:4": thinwire.AllReduce(wire="lowrank:4"),
    "LocalSGD between averages": thinwire.LocalSGD(every=10**9),
    "DiLoCo, int2, every 8": thinwire.DiLoCo(every=8, warmup=0, wire="int2"),
    "AB between averages": thinwire.AB(warmup=0, every=10**9, factor_at=None),
}


def main() -> None:
    """One table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="vgg16bn,gpt")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block", type=int, default=8, help="steps in a row")
    parser.add_argument("--small", action="store_true", help="small batches, where there is no GPU")
    parser.add_argument("--out", type=Path, default=Path("cost.jsonl"))
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    send_nothing()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    for name in given.models.split(","):
        for row in table(name, device, given):
            print(*(f"{value:.4g}" if isinstance(value, float) else value for value in row.values()), sep="  ")
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


def send_nothing() -> None:
    """A world of two workers of which the other one is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    process_groups.control_group = lambda: dist.group.WORLD
    process_groups.timeout_of = lambda group: timedelta(minutes=1)
    ProcessGroupWire.barrier = lambda *_: None  # type: ignore[method-assign]
    dist.all_to_all_single = lambda out, given, *_, **__: answered(out, given)
    dist.all_gather = lambda out, given, *_, **__: answered(out, given)


def answered(out: Sequence[Tensor], given: Tensor) -> "Done":
    """The other worker has the same settings and counters, and zeros in every code."""
    is_code = given.dtype == torch.uint8
    for i, each in enumerate(out):
        if is_code and i:
            each.zero_()
        else:
            each.copy_(given[0] if given.dim() == each.dim() + 1 else given)
    return Done()


class Done:
    """A collective that is over."""

    def wait(self) -> None:
        """Nothing is waited for."""


def table(name: str, device: torch.device, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a step of each variant, over those of the bare one in the same round."""
    steps: dict[str, Step] = {"bare": prepared(name, device, given.small, lambda model, optimizer: model)}
    for method, config in METHODS.items():
        steps[method] = prepared(name, device, given.small, attached(config))
    for step in steps.values():
        for _ in range(2 * given.block):
            step()
    seconds: dict[str, list[float]] = {variant: [] for variant in steps}
    for _ in range(given.rounds):
        for variant, step in steps.items():
            seconds[variant].append(timed(step, given.block, device))
    rows = []
    for variant, step in steps.items():
        ratios = [a / b for a, b in zip(seconds[variant], seconds["bare"], strict=True)]
        quartiles = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "model": name,
                "variant": variant,
                "ms": 1e3 * statistics.median(seconds[variant]),
                "ratio": quartiles[1],
                "from": quartiles[0],
                "to": quartiles[2],
                "waits": waits(step, given.block, device),
            }
        )
    return rows


def attached(config: Any) -> Callable[[nn.Module, Any], nn.Module]:
    return lambda model, optimizer: thinwire.attach(model, optimizer, config)


def prepared(name: str, device: torch.device, small: bool, wrap: Callable[[nn.Module, Any], nn.Module]) -> Step:
    """A model with its batch and its optimizer, and a step of it."""
    torch.manual_seed(0)
    model, x, y = gpt(device, small) if name == "gpt" else vgg(device, small)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=device.type == "cuda")
    called = wrap(model, optimizer)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = called(x, labels=y)[0] if name == "gpt" else F.cross_entropy(called(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def vgg(device: torch.device, small: bool) -> tuple[nn.Module, Tensor, Tensor]:
    count = 8 if small else 128
    x, y = torch.randn(count, 3, 32, 32, device=device), torch.randint(10, (count,), device=device)
    return VGG16BN().to(device), x, y


def gpt(device: torch.device, small: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """GPT-2's smallest."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 500} if small else {}
    config = GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **settings)
    x = torch.randint(config.vocab_size, (2, 64) if small else (8, 1024), device=device)
    return GPT2LMHeadModel(config).to(device), x, x


def timed(step: Step, count: int, device: torch.device) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / count


def waits(step: Step, count: int, device: torch.device) -> float:
    """How often the host waits for the GPU in a step."""
    if device.type == "cpu":
        return 0.0
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        for _ in range(count):
            step()
    found = [event for event in profile.key_averages() if event.key in WAITS]
    return sum(event.count for event in found) / count


if __name__ == "__main__":
    main()
