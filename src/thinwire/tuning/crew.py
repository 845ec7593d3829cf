"""The worker processes of a trial, each started by the rank that it belongs to, and what those ranks tell each other.

A trial runs in processes of its own: one that runs out of memory, hangs or dies takes nothing else with it. Workers
hold a pipe from the rank that started them and exit with it, as they do with `launcher.py`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from thinwire.launch.failures import ERROR_DIR, TorchrunLog, first_cause

ERRORS, LOG = "errors", "log.txt"
_SHUTDOWN_S = 5
_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "TORCHELASTIC_", "THINWIRE_STORE", "THINWIRE_GROUP")
"""What the search's own launcher has set: a worker that reads it would think that it was started by that."""


class Ranks(Protocol):
    """The ranks of one trial, as seen from one of them."""

    rank: int
    workers: int
    """Of the trial."""

    def gather(self, value: Any) -> list[Any]:
        """What every rank gives, on all ranks."""
        ...

    def share(self, value: Any) -> Any:
        """What the first rank gives, on all ranks."""
        ...

    def places(self) -> list[dict[str, str]]:
        """The environment of each worker that this rank starts."""
        ...


class OneRank:
    """This process alone starts all workers of a trial."""

    rank = 0

    def __init__(self, workers: int, devices: Sequence[int] = ()) -> None:
        self.workers, self.devices = workers, devices

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def share(self, value: Any) -> Any:
        return value

    def places(self) -> list[dict[str, str]]:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [address | place(i, self.workers, i, self.workers, self.devices) for i in range(self.workers)]


def place(rank: int, world: int, local: int, local_world: int, devices: Sequence[int] = ()) -> dict[str, str]:
    """The variables that torchrun would set for a worker; with `devices`, those GPUs of its node are the trial's."""
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": local_world}
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}
    return {name: str(value) for name, value in variables.items()} | shown


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def devices_for(local_ranks: Sequence[int]) -> list[int]:
    """The GPUs of a node that ranks with these numbers there share; none without GPUs."""
    count = torch.cuda.device_count()
    return sorted({rank % count for rank in local_ranks}) if count else []


class Crew:
    """The workers of a trial that this rank has started."""

    def __init__(self, words: Sequence[str], places: Sequence[dict[str, str]], folder: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        self.processes: list[subprocess.Popen[bytes]] = []
        with (folder / LOG).open("ab") as log:
            for environment in places:
                own = {**environment, ERROR_DIR: str((folder / ERRORS).absolute())}
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "thinwire", *words],
                        env={"OMP_NUM_THREADS": "1"} | kept | own,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def codes(self) -> list[int | None]:
        """Exit codes; None for a worker that runs."""
        return [process.poll() for process in self.processes]

    def stop(self) -> None:
        """End those that run."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
            process.terminate()
        for process in self.processes:
            try:
                process.wait(_SHUTDOWN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def why(folder: Path, codes: Sequence[int | None]) -> str:
    """What ended a trial whose workers have these exit codes, in one line."""
    killed = next(((rank, -code) for rank, code in enumerate(codes) if code is not None and code < 0), None)
    failed = next((code for code in codes if code), 1)
    reason = str(first_cause(folder / ERRORS, TorchrunLog(len(codes)), failed or 1))
    if reason.startswith("the workers exited") and killed:
        name = signal.Signals(killed[1]).name
        reason = f"worker {killed[0]} was killed by {name}{', as by a system without memory' * (name == 'SIGKILL')}"
    elif reason.startswith("the workers exited") and (last := _last_line(folder / LOG)):
        reason = last
    return reason.splitlines()[0] if reason.strip() else "it ended without saying why"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.is_file() else []
    return lines[-1] if lines else ""
