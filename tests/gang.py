"""Real gloo workers for tests: forked from a server that has torch loaded, joined by a timeout."""

import ctypes
import multiprocessing as mp
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

context = mp.get_context("forkserver")
# All that the modules of tests import: a worker that loads it itself spends more on that than on a few steps.
context.set_forkserver_preload(["thinwire.cli", "torch.distributed.optim", "torch._dynamo", "pytest"])
_CLONE_NEWNET = 0x40000000


class WorkerFailed(AssertionError):
    """A worker raised; the message has its traceback."""


def start(function: Callable[..., Any], *args: Any) -> Any:
    """One process that calls `function(*args)`, without the seconds that a fresh one spends on loading torch."""
    process = context.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def run(
    function: Callable[..., Any],
    workers: int,
    *args: Any,
    timeout: float = 300,
    patience: float = 120,
    hosts: Sequence[Any] = (),
) -> list[Any]:
    """Call `function(rank, *args)` in `workers` processes and return what each returned, by rank.

    `patience` is the process group's timeout: how long a collective waits for a missing rank. With `hosts` of
    `thinwire.netbench` an equal part of the workers is on each, and watches its link.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        gang = [
            context.Process(
                target=_worker, args=(function, rank, workers, folder, patience, hosts, args, results), daemon=True
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


def _move_to(host: Any, number: int) -> None:
    """Put this process onto a host, as torchrun and netbench would have."""
    with Path("/run/netns", host.namespace).open() as door:
        if ctypes.CDLL(None, use_errno=True).setns(door.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {host.namespace}")
    os.environ.update(GROUP_RANK=str(number), GLOO_SOCKET_IFNAME=host.interface, THINWIRE_INTERFACE=host.interface)


def _worker(
    function: Callable[..., Any],
    rank: int,
    workers: int,
    folder: str,
    patience: float,
    hosts: Sequence[Any],
    args: Any,
    results: Any,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(workers), LOCAL_RANK=str(rank))
    if hosts:
        number = rank * len(hosts) // workers
        _move_to(hosts[number], number)
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
