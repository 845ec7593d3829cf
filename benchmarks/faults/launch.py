"""Groups with a launcher each, and the store at which they meet; on this machine or on virtual hosts."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from thinwire.netbench.links import Host

SCRIPT = Path(__file__).parent / "group.py"
PORT = 29431


def print_rows(one: Callable[[str, argparse.Namespace], dict[str, Any]], given: argparse.Namespace) -> None:
    """A line of JSON for each method, as soon as it is there."""
    for method in given.methods.split(","):
        print(json.dumps(one(method, given)), flush=True)


class Groups:
    """So many groups of one worker, each in a process that may be killed and started again."""

    def __init__(self, count: int, out: Path, words: Iterable[str], hosts: Sequence[Host] = ()) -> None:
        """With `hosts` group i is on the i-th, and the store on the last."""
        self.count, self.out, self.words, self.hosts = count, out, list(words), hosts
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        out.mkdir(parents=True)
        address = hosts[-1].address if hosts else "127.0.0.1"
        self.environment = {**os.environ, "THINWIRE_STORE": f"{address}:{PORT}", "THINWIRE_GROUPS": str(count)}
        self.environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        self.environment["GLOO_SOCKET_IFNAME"] = hosts[0].interface if hosts else "lo"
        self.store = self._process(hosts[-1:], "store", ["-m", "thinwire.cli", "store", "--port", str(PORT)], {})
        for group in range(count):
            self.start(group)

    def start(self, group: int) -> None:
        """Start a group, or start it again."""
        words = [str(SCRIPT), "--out", str(self.out), *self.words]
        here = self.hosts[group : group + 1]
        self.processes[group] = self._process(here, f"{group}", words, {"THINWIRE_GROUP": str(group)})

    def kill(self, group: int) -> None:
        self.processes[group].send_signal(signal.SIGKILL)
        self.processes[group].wait()

    @property
    def running(self) -> list[int]:
        return [group for group, process in self.processes.items() if process.poll() is None]

    def wait(self, timeout: float) -> bool:
        """Until all groups have ended; False if they have not within the time."""
        end = time.monotonic() + timeout
        while self.running and time.monotonic() < end:
            time.sleep(0.1)
        return not self.running

    def close(self) -> None:
        for process in (*self.processes.values(), self.store):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()

    def results(self) -> list[dict[str, Any]]:
        """Of the groups that came to the end."""
        return [json.loads(path.read_text()) for path in sorted(self.out.glob("*.json"))]

    def steps(self) -> dict[str, list[tuple[int, float, bool]]]:
        """What each process has written for its steps: number, time, and whether something was sent."""
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
