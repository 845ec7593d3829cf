"""Groups with a launcher each, and the store at which they meet; on this machine or on virtual hosts.

On this machine workers and the store are forked from a process that has imported everything, so that one that was
killed is back within a second. They end when that process does, so none outlives the benchmark.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from thinwire.netbench.namespaces import Host

SCRIPT = Path(__file__).parent / "group.py"
PORT = 29431
"""On virtual hosts, where no other process listens."""
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SCRIPT.parent), os.environ.get("PYTHONPATH")]))
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    ["tethered", "group", "thinwire.cli", "torch._dynamo"]
)  # the last is loaded by optimizers
_END_S = 10.0
"""Seconds in which a process that was killed is gone."""


class Step(NamedTuple):
    """A line of group.py's log."""

    number: int
    time: float
    averages: bool
    processor: float
    changes: int
    """How often groups have changed so far."""
    phase: str


def print_rows(one: Callable[[str, argparse.Namespace], dict[str, Any]], given: argparse.Namespace) -> None:
    """A line of JSON for each method, as soon as it is there."""
    for method in given.methods.split(","):
        print(json.dumps(one(method, given)), flush=True)


def _free_port() -> int:
    """Return a port below those that connections are given: while a store is down, none of them takes its place."""
    for _ in range(100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
            return int(probe.getsockname()[1])
    raise SystemExit("no port from 20000 to 32000 is free")


class Process(Protocol):
    """What a process here and one on a virtual host have in common."""

    pid: int

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class Forked:
    """A process that needs no time to import."""

    def __init__(self, script: str, environment: dict[str, str], words: Sequence[str], log: Path) -> None:
        self.process = _forks.Process(target=_call_main, args=(script, environment, words, log))
        self.process.start()
        self.pid = self.process.pid or 0

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        return self.process.exitcode or 0


def _call_main(script: str, environment: dict[str, str], words: Sequence[str], log: Path) -> None:
    """In a new process, do what the script does."""
    importlib.import_module("tethered").tether()
    os.environ.update(environment)
    with log.open("ab") as file:
        for output in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), output.fileno())
    sys.argv = [script, *words]
    importlib.import_module(script).main()


class Groups:
    """So many groups and a store, each of which may be killed or frozen, and started again."""

    def __init__(
        self, count: int, out: Path, words: Iterable[str], hosts: Sequence[Host] = (), *, workers: int = 1
    ) -> None:
        """With `hosts` group i is on the i-th, and the store on the last."""
        self.count, self.out, self.words, self.hosts, self.workers = count, out, list(words), hosts, workers
        self.processes: dict[int, list[Process]] = {}
        out.mkdir(parents=True)
        address, self.port = (hosts[-1].address, PORT) if hosts else ("127.0.0.1", _free_port())
        self.environment = {**os.environ, "THINWIRE_STORE": f"{address}:{self.port}", "THINWIRE_GROUPS": str(count)}
        self.environment |= {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
        self.environment["GLOO_SOCKET_IFNAME"] = hosts[0].interface if hosts else "lo"
        self._read: dict[Path, tuple[int, list[Step]]] = {}
        self.start_store()
        self.start_all()

    def start(self, group: int) -> None:
        """Start a group, or start it again."""
        words = ["--out", str(self.out), *self.words]
        here = self.hosts[group : group + 1]
        self.processes[group] = []
        for rank in range(self.workers):
            seat = {"THINWIRE_GROUP": str(group), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process: Process
            if here:
                process = self._process(here, f"{group}", [str(SCRIPT), *words], seat)
            else:
                process = Forked("group", self.environment | seat, words, self.out / f"{group}.log")
            self.processes[group].append(process)

    def start_all(self) -> None:
        for group in range(self.count):
            self.start(group)

    def start_store(self) -> None:
        """Start the store, or start it again on the same port."""
        words, last = ["store", "--port", str(self.port)], self.hosts[-1:]
        self.store: Process
        if last:
            self.store = self._process(last, "store", ["-m", "thinwire.cli", *words], {})
        else:
            self.store = Forked("thinwire.cli", self.environment, words, self.out / "store.log")

    def kill(self, group: int, worker: int = 0) -> None:
        """Kill one of its workers; the others, as their launcher would, a little later."""
        for process in sorted(self.processes[group], key=lambda process: process is not self.processes[group][worker]):
            process.kill()
            process.wait(_END_S)
            time.sleep(0.2)

    def kill_store(self) -> None:
        _end([self.store])

    def kill_all(self, *, store: bool = False) -> None:
        """Kill all groups at once, and the store with them."""
        _end([*self._workers, *([self.store] if store else [])])

    def signal(self, group: int, number: int) -> None:
        """Send a signal to all workers of a group: SIGSTOP freezes it, SIGCONT lets it go on."""
        for process in self.processes[group]:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    @property
    def running(self) -> list[int]:
        return [group for group, own in self.processes.items() if all(process.poll() is None for process in own)]

    def wait(self, timeout: float) -> bool:
        """Until all groups have ended; False if they have not within the time."""
        end = time.monotonic() + timeout
        while self.running and time.monotonic() < end:
            time.sleep(0.1)
        return not self.running

    def close(self) -> None:
        self.kill_all(store=True)

    def results(self) -> list[dict[str, Any]]:
        """Of the groups that came to the end."""
        return [json.loads(path.read_text()) for path in sorted(self.out.glob("*.json"))]

    def steps(self) -> dict[str, list[Step]]:
        """What each process has written for its steps, by GROUP-PID; only what is new is read."""
        for path in sorted(self.out.glob("*.jsonl")):
            begin, lines = self._read.get(path, (0, []))
            with path.open("rb") as file:
                file.seek(begin)
                text, _, _ = file.read().rpartition(b"\n")  # the last line may be half there
            lines += [Step(*json.loads(line)) for line in text.splitlines()]
            self._read[path] = (begin + len(text) + bool(text), lines)
        return {path.stem: lines for path, (_, lines) in self._read.items()}

    @property
    def _workers(self) -> list[Process]:
        return [process for own in self.processes.values() for process in own]

    def said(self, group: int) -> str:
        """The last line of a group's log."""
        lines = (self.out / f"{group}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _process(
        self, host: Sequence[Host], name: str, words: Sequence[str], more: dict[str, str], program: str = sys.executable
    ) -> subprocess.Popen[bytes]:
        """Start one that writes to OUT/NAME.log."""
        command = [program, *words]
        with (self.out / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                host[0].command(command) if host else command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment | more,
            )


def _end(processes: Sequence[Process]) -> None:
    """Kill all of them before the first is waited for."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
