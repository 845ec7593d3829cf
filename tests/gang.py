"""Real gloo workers for tests, forked from a server that has torch loaded.

Workers stay from case to case: the first steps of a fresh process take longer than most cases. Each case has a world of
its own, and what it leaves behind in a worker fails it. Tests of processes themselves start their own.
"""

import ctypes
import functools
import gc
import multiprocessing as mp
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

context = mp.get_context("forkserver")
LOADED = ("thinwire.cli", "torch.distributed.fsdp", "torch.distributed.optim", "torch._dynamo", "pytest")
"""All that cases import: a worker that loads it itself spends more on that than on a few steps."""
context.set_forkserver_preload([*LOADED])
_CLONE_NEWNET = 0x40000000
PATIENCE_S = 120
_LINGERS_S = 5
"""How long a thread or a process that was told to end may take."""


class WorkerFailed(AssertionError):
    """A worker raised, died or left something behind; the message has its traceback."""


class Case(NamedTuple):
    """What a worker is asked to do."""

    function: Callable[..., Any]
    rank: int
    workers: int
    args: tuple[Any, ...]
    folder: str
    patience: float
    hosts: Sequence[Any]
    fresh: bool


class Files:
    """Files of this process that a new one takes for its own: its input is 0, its output 1, its errors are 2."""

    def __init__(self, files: dict[int, int]) -> None:
        self.files = files

    def __getstate__(self) -> dict[int, Any]:
        return {number: DupFd(file) for number, file in self.files.items()}

    def __setstate__(self, files: dict[int, Any]) -> None:
        self.files = {number: file.detach() for number, file in files.items()}

    def take(self) -> None:
        for number, file in self.files.items():
            os.dup2(file, number)
            os.close(file)


SAID = Files({1: 1, 2: 2})
"""pytest shows with a test that fails what its processes said; their server belongs to all tests."""


class Worker:
    """A process that does one case after the other."""

    def __init__(self) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, SAID), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, case: Case) -> None:
        """Begin a case."""
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        self.pipe.send_bytes(pickle.dumps((sys.path, str(Path.cwd()), test, pickle.dumps(case))))

    def answer(self) -> Any:
        """What the case returned."""
        try:
            value, error = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join()
            raise WorkerFailed(f"the worker died with exit code {self.process.exitcode}") from None
        if error:
            raise WorkerFailed(error)
        return value

    def end(self, *, idle: bool = False) -> None:
        """Whatever it does; one that waits for a case ends by itself."""
        if idle:
            self.pipe.close()
            self.process.join(_LINGERS_S)
        self.process.kill()
        self.process.join()
        self.pipe.close()


_idle: list[Worker] = []
_QUIET_S = 0.0025
"""What a step of `_pace` takes two workers where nothing else runs."""
_AT_MOST = 10.0


def patient(seconds: float) -> float:
    """A deadline that follows the machine: longer where, right now, a step takes longer than on two quiet cores.

    For waits that a test is about and has to sit through. What should never run out is long anyway.
    """
    return seconds * min(max(max(run(_pace, 2)) / _QUIET_S, 1.0), _AT_MOST)


def _pace(rank: int) -> float:
    """Seconds to a step: some work, and an exchange."""
    import torch
    import torch.distributed as dist

    weight, begun, steps = torch.ones(50, 50), time.monotonic(), 25
    for _ in range(steps):
        for _ in range(20):
            weight = (weight @ weight).clamp(0, 1)
        dist.all_reduce(weight)
    return (time.monotonic() - begun) / steps


def start(function: Callable[..., Any], *args: Any) -> Any:
    """One process that calls `function(*args)`, without the seconds that a fresh one spends on loading torch."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    process = context.Process(target=_begin, args=(test, SAID, function, args), daemon=True)
    process.start()
    return process


def _begin(test: str, files: Files, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    files.take()
    os.environ["PYTEST_CURRENT_TEST"] = test  # that of the server is another one's
    _called(function, args)


def _called(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def run(
    function: Callable[..., Any],
    workers: int,
    *args: Any,
    timeout: float = 300,
    patience: float = PATIENCE_S,
    hosts: Sequence[Any] = (),
    fresh: bool = False,
) -> list[Any]:
    """Call `function(rank, *args)` in `workers` processes and return what each returned, by rank.

    `patience` is the process group's timeout: how long a collective waits for a missing rank; below the default it
    follows the machine. With `hosts` of
    `thinwire.netbench` an equal part of the workers is on each, and watches its link. `fresh` ones have done nothing
    before: for what happens once in a process, and for what a process may keep.
    """
    patience = patience if patience >= PATIENCE_S else patient(patience)
    fresh = fresh or bool(hosts)  # a process never leaves its host
    gang = [Worker() if fresh or not _idle else _idle.pop() for _ in range(workers)]
    done = False
    try:
        with tempfile.TemporaryDirectory() as folder:
            for rank, worker in enumerate(gang):
                worker.ask(Case(function, rank, workers, args, folder, patience, hosts, fresh))
            found = _collect(gang, timeout)
        done = True
        return found
    finally:
        if done and not fresh:
            _idle.extend(gang)
        else:
            for worker in gang:
                worker.end(idle=done)


def end_all() -> None:
    """After the last case."""
    while _idle:
        _idle.pop().end(idle=True)


def _collect(gang: list[Worker], timeout: float) -> list[Any]:
    deadline, found = time.monotonic() + timeout, {}
    ranks = {worker.pipe: rank for rank, worker in enumerate(gang)}
    while len(found) < len(gang):
        ready = wait([pipe for pipe, rank in ranks.items() if rank not in found], deadline - time.monotonic())
        if not ready:
            raise WorkerFailed(f"ranks {sorted(set(ranks.values()) - set(found))} have not ended after {timeout} s")
        for pipe in ready:
            rank = ranks[pipe]
            try:
                found[rank] = gang[rank].answer()
            except WorkerFailed as error:
                raise WorkerFailed(f"rank {rank}:\n{error}") from None
    return [found[rank] for rank in range(len(gang))]


def _serve(pipe: Any, files: Files) -> None:
    import torch

    files.take()
    torch.set_num_threads(1)
    seed = torch.initial_seed()
    gc.freeze()  # a collection after a case then looks at that case alone
    while True:
        try:
            path, folder, test, case = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        sys.path[:] = path
        os.chdir(folder)
        os.environ["PYTEST_CURRENT_TEST"] = test
        torch.manual_seed(seed)
        random.seed(seed)
        pipe.send_bytes(_outcome(case))


def _outcome(case: bytes) -> bytes:
    """What a case returned, or why there is nothing; by value: a tensor shared through a file dies with its worker."""
    try:
        asked = Case(*pickle.loads(case))
        if asked.hosts:
            number = asked.rank * len(asked.hosts) // asked.workers
            _move_to(asked.hosts[number], number)
        before = _held()
        with warnings.catch_warnings():
            value = pickle.dumps(_in_a_world(asked))
        if not asked.fresh and (left := _left(before)):
            return pickle.dumps((None, f"{asked.function.__name__} left behind: {left}"))
        return pickle.dumps((pickle.loads(value), None))
    except BaseException:
        return pickle.dumps((None, traceback.format_exc()))


def _in_a_world(case: Case) -> Any:
    import torch.distributed as dist

    import device
    from thinwire.comm import process_groups

    ours = {"RANK": str(case.rank), "WORLD_SIZE": str(case.workers), "LOCAL_RANK": str(case.rank)}
    os.environ.update(ours)
    hook = sys.excepthook
    device.take(case.rank)
    try:
        if case.workers > 1:
            store = dist.FileStore(str(Path(case.folder) / "store"), case.workers)
            dist.init_process_group(
                device.BACKEND,
                store=store,
                rank=case.rank,
                world_size=case.workers,
                timeout=timedelta(seconds=case.patience),
            )
            # Whoever has nothing to do would otherwise close its sockets while the others still connect.
            dist.barrier()
        return case.function(case.rank, *case.args)
    finally:
        process_groups.release_groups()
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = hook  # torch adds one for each world
        for name in ours:
            os.environ.pop(name, None)


def _held() -> dict[str, Any]:
    """What a process has one of, and a case must leave as it was."""
    import torch
    from torch.distributed import distributed_c10d
    from torch.nn.modules import module
    from torch.optim import optimizer

    from thinwire.elastic import stopping
    from thinwire.methods.registry import METHODS

    # Thinwire's own are for good: they look up what is attached.
    hooks = {
        name: [hook for hook in held.values() if not hook.__module__.startswith("thinwire.")]
        for where in (module, optimizer)
        for name, held in vars(where).items()
        if name.startswith("_global_") and name.endswith("_hooks")
    }
    switches = {
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "process groups": len(distributed_c10d._world.pg_map),
        "global hooks": hooks,
        "registered methods": sorted(METHODS),
        "environment": dict(os.environ),
        "switches of torch": switches,
        "signal handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "requested stop": stopping.requested(),
        "exception hook": sys.excepthook,
        "folder": str(Path.cwd()),
        "changed": _definitions(),
    }


def _definitions() -> dict[str, dict[str, int]]:
    """Constants and functions of Thinwire's modules, by identity; a case may change them for itself alone."""
    ours = [(module, vars(held)) for module, held in list(sys.modules.items()) if module.startswith("thinwire.")]
    return {module: {name: id(held.get(name)) for name in _defined(module)} for module, held in ours}


@functools.cache
def _defined(module: str) -> list[str]:
    held = vars(sys.modules[module])
    return [name for name, value in held.items() if name.isupper() or isinstance(value, FunctionType)]


def _left(before: dict[str, Any]) -> str:
    """How that differs now."""
    deadline = time.monotonic() + _LINGERS_S
    while threading.active_count() > len(before["threads"]) and time.monotonic() < deadline:
        gc.collect()  # a replica's threads end with it
        time.sleep(0.01)
    now = _held()
    now["changed"] = {name: now["changed"].get(name) for name in before["changed"]}  # more may have been imported
    changed = (f"{name}: {_difference(before[name], now[name])}" for name in before if before[name] != now[name])
    return "; ".join(changed)


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, dict):
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return ", ".join(f"{name} {_difference(before.get(name), now.get(name))}" for name in names)
    return f"was {before}, is {now}"


def _move_to(host: Any, number: int) -> None:
    """Put this process onto a host, as torchrun and netbench would have."""
    with Path("/run/netns", host.namespace).open() as door:
        if ctypes.CDLL(None, use_errno=True).setns(door.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {host.namespace}")
    os.environ.update(GROUP_RANK=str(number), GLOO_SOCKET_IFNAME=host.interface, THINWIRE_INTERFACE=host.interface)
