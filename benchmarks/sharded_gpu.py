"""Groups that shard their model with FSDP2 against groups with DDP inside, by gloo on one GPU: result and memory.

    python benchmarks/sharded_gpu.py                     four processes share one GPU
    python benchmarks/sharded_gpu.py --device cpu        to see that it runs; without memory

An MLP of 4.7 M parameters, 2 groups of 2, 12 steps. Each worker prints the sum of what it holds: those of a group's two
shards add up to what a worker with the whole model has. Peaks are those of tensors on the GPU.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from workers import run_workers

import thinwire

METHODS: dict[str, Any] = {
    "allreduce": thinwire.AllReduce(group_size=2),
    "localsgd": thinwire.LocalSGD(every=3, warmup=2, group_size=2),
    "diloco": thinwire.DiLoCo(every=4, warmup=2, group_size=2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    for method in METHODS:
        for shards in (False, True):
            found = run_workers(4, 1, train, device, method, shards)
            held = ", ".join(f"{sums:.6f}" for sums, _ in found)
            peak = max(peak for _, peak in found)
            print(f"{method:10} {'FSDP2' if shards else 'DDP':6} sums {held}; peak {peak:.0f} MB", flush=True)


def train(rank: int, device: str, method: str, shards: bool) -> tuple[float, float]:
    """The sum of absolute values that this worker holds in the end, and its peak of memory in MB."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)]
    model: Any = nn.Sequential(*layers).to(device)
    if shards:
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("between", "in"))["in"]
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    replica = thinwire.attach(model, optimizer, METHODS[method])
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    chance = torch.Generator(device=device).manual_seed(rank)
    for _ in range(12):
        x = torch.randn(64, 256, device=device, generator=chance)
        y = torch.randint(0, 10, (64,), device=device, generator=chance)
        F.cross_entropy(replica(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    replica.finish()
    held = [p.to_local() if hasattr(p, "to_local") else p for p in (p.detach() for p in model.parameters())]
    peak = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else 0.0
    return sum(float(p.double().abs().sum()) for p in held), peak


if __name__ == "__main__":
    main()
