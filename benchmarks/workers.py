"""Fresh processes that are gloo workers of one job on this machine."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_workers(count: int, threads: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(rank, *args)` in `count` processes; what each returned, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (count, threads, Path(folder), work, args), nprocs=count)
        return [torch.load(Path(folder) / f"result{rank}", weights_only=False) for rank in range(count)]


def _worker(rank: int, count: int, threads: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(threads)
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if count > 1:
        # nccl refuses two workers on one GPU; gloo carries CUDA tensors too.
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    torch.save(work(rank, *args), folder / f"result{rank}")
    if count > 1:
        dist.barrier()
        dist.destroy_process_group()
