"""Groups with a launcher each, and the store at which they meet; on this machine or on virtual hosts.

On this machine workers are forked from a process that has imported everything, so that one that was killed is back
within a second.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from thinwire.netbench.links import Host

SCRIPT = Path(__file__).parent / "group.py"
PORT = 29431
"""On virtual hosts, where no other process listens."""
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SCRIPT.parent), os.environ.get("PYTHONPATH")]))
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["group"])


def print_rows(one: Callable[[str, argparse.Namespace], dict[str, Any]], given: argparse.Namespace) -> None:
    """A line of JSON for each method, as soon as it is there."""
    for method in given.methods.split(","):
        print(json.dumps(one(method, given)), flush=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process(Protocol):
    """What a process here and one on a virtual host have in common."""

    pid: int

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


class Forked:
    """A worker that needs no time to import."""

    def __init__(self, environment: dict[str, str], words: Sequence[str], log: Path) -> None:
        self.process = _forks.Process(target=_train, args=(environment, words, log))
        self.process.start()
        self.pid = self.process.pid or 0

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def wait(self) -> int:
        self.process.join()
        return self.process.exitcode or 0


def _train(environment: dict[str, str], words: Sequence[str], log: Path) -> None:
    """In a new process: what group.py does."""
    os.environ.update(environment)
    with log.open("ab") as file:
        for output in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), output.fileno())
    sys.argv = [str(SCRIPT), *words]
    importlib.import_module("group").main()


class Groups:
    """So many groups, each of which may be killed and started again."""

    def __init__(
        self, count: int, out: Path, words: Iterable[str], hosts: Sequence[Host] = (), *, workers: int = 1
    ) -> None:
        """With `hosts` group i is on the i-th, and the store on the last."""
        self.count, self.out, self.words, self.hosts, self.workers = count, out, list(words), hosts, workers
        self.processes: dict[int, list[Process]] = {}
        out.mkdir(parents=True)
        address, port = (hosts[-1].address, PORT) if hosts else ("127.0.0.1", _free_port())
        self.environment = {**os.environ, "THINWIRE_STORE": f"{address}:{port}", "THINWIRE_GROUPS": str(count)}
        self.environment |= {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
        self.environment["GLOO_SOCKET_IFNAME"] = hosts[0].interface if hosts else "lo"
        self.store = self._process(hosts[-1:], "store", ["-m", "thinwire.cli", "store", "--port", str(port)], {})
        for group in range(count):
            self.start(group)

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
                process = Forked(self.environment | seat, words, self.out / f"{group}.log")
            self.processes[group].append(process)

    def kill(self, group: int, worker: int = 0) -> None:
        """Kill one of its workers; the others, as their launcher would, a little later."""
        for process in sorted(self.processes[group], key=lambda process: process is not self.processes[group][worker]):
            process.kill()
            process.wait()
            time.sleep(0.2)

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
        for process in (*(process for own in self.processes.values() for process in own), self.store):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def results(self) -> list[dict[str, Any]]:
        """Of the groups that came to the end."""
        return [json.loads(path.read_text()) for path in sorted(self.out.glob("*.json"))]

    def steps(self) -> dict[str, list[tuple[int, float, bool, float]]]:
        """What each process has written for its steps: number, time, whether something was sent, processor time."""
        return {
            path.stem: [tuple(json.loads(line)) for line in path.read_text().splitlines() if line.endswith("]")]
            for path in sorted(self.out.glob("*.jsonl"))
        }

    def said(self, group: int) -> str:
        """The last line of a group's log."""
        lines = (self.out / f"{group}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _process(
        self, host: Sequence[Host], name: str, words: Sequence[str], more: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        """One that writes to OUT/NAME.log."""
        command = [sys.executable, *words]
        with (self.out / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                host[0].command(command) if host else command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment | more,
            )
