"""Real gloo workers for tests: forked from a server that has torch loaded, joined by a timeout."""

import multiprocessing as mp
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

context = mp.get_context("forkserver")
context.set_forkserver_preload(["thinwire", "torch.distributed", "torch._dynamo"])


class WorkerFailed(AssertionError):
    """A worker raised; the message has its traceback."""


def run(
    function: Callable[..., Any], workers: int, *args: Any, timeout: float = 120, patience: float = 60
) -> list[Any]:
    """Call `function(rank, *args)` in `workers` processes and return what each returned, by rank.

    `patience` is the process group's timeout: how long a collective waits for a missing rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        gang = [
            context.Process(
                target=_worker, args=(function, rank, workers, folder, patience, args, results), daemon=True
            )
            for rank in range(workers)
        ]
        for process in gang:
            process.start()
        try:
            return _collect(gang, results, timeout)
        finally:
            for process in gang:
                process.kill()
                process.join()


def _collect(gang: list[Any], results: Any, timeout: float) -> list[Any]:
    found: dict[int, Any] = {}
    for _ in gang:
        rank, value, error = results.get(timeout=timeout)
        if error:
            raise WorkerFailed(f"rank {rank}:\n{error}")
        found[rank] = pickle.loads(value)
    return [found[rank] for rank in range(len(gang))]


def _worker(
    function: Callable[..., Any], rank: int, workers: int, folder: str, patience: float, args: Any, results: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(workers), LOCAL_RANK=str(rank))
    try:
        if workers > 1:
            store = dist.FileStore(str(Path(folder) / "store"), workers)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=workers, timeout=timedelta(seconds=patience)
            )
        # By value: a tensor shared through a file descriptor dies with its worker.
        results.put((rank, pickle.dumps(function(rank, *args)), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
