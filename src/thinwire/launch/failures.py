"""Why a job failed: workers report their errors to the launcher, which names the first cause.

Workers write one JSON file each into a folder of the launcher's (`error_dir`). What torchrun itself knows, who was
killed by a signal, is read from its log. `torch.distributed.launcher.api.elastic_launch` was tried instead: its
`ChildFailedError` also lists the workers that torchrun stopped and does not mark them, so a killed worker
looks like one that torchrun stopped; its timestamps are whole seconds, too coarse to order errors. It runs in the
launcher's process, where it replaces signal handlers for good, shares stdin and stdout with the workers, and cannot
reach a host behind a prefix. So it would need the same reports, plus a process per host, and say less.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from thinwire.base.errors import ConfigError, ConsequenceError, Stopped, ThinwireError, is_refusal, one_line
from thinwire.base.files import parse_json
from thinwire.base.schema import ANY, COUNT, TEXT, wrong
from thinwire.comm.missing import is_loss, note_uncaught, uneven_batches
from thinwire.elastic.stopping import request

ERROR_DIR = "THINWIRE_ERROR_DIR"
"""The environment variable that tells workers where to report errors; only our launcher sets it."""
_REPORT = "\x01thinwire-error "
"""Prefix of a report that a worker printed because it could not write the file."""

# Lines of torchrun's log.
_TORCHRUN = re.compile(r"^[WEIF]\d{4} \d\d:\d\d")
_NO_HOSTNAME = re.compile(r"^\[W\d{4} .*hostname of the client socket cannot be retrieved")
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_STOPPED = re.compile(r"Sending process (\d+) closing signal")
_RANK = re.compile(r"^\s*rank +: (\d+) \(local_rank")
_EXIT = re.compile(r"^\s*exitcode +: (-?\d+) \(pid: (\d+)\)")


class WorkerError(ThinwireError, RuntimeError):
    """A worker failed; the message says which one and why."""


class TorchrunLog:
    """What the output of a job's torchruns, one per host, says about how workers ended.

    torchrun polls its workers ten times a second. When one is killed, the others lose their connections and exit
    within a few hundredths of a second, so one poll finds them all gone and calls the lowest rank the root cause.
    Only the table of all failures at the end shows who was killed.
    """

    def __init__(self, workers_per_host: int) -> None:
        self.workers_per_host = workers_per_host
        self.exits: dict[int, tuple[int, int]] = {}  # rank: exit code, pid
        self.stopped: set[int] = set()  # pids that torchrun itself stopped after the first failure
        self.last_line = ""
        self.reports: list[dict[str, Any]] = []  # of workers that could not write a file
        self._torchrun_logs: set[int] = set()  # hosts whose torchrun has begun to log: no worker prints there any more
        self._rank: dict[int, int] = {}

    def read_line(self, host: int, line: str) -> bool:
        """Parse one line; returns whether it is a worker's output, to be shown to the user."""
        if line.startswith(_REPORT):
            with suppress(ValueError):
                self.reports.append(_parsed(line.removeprefix(_REPORT)))
            return False
        if _TORCHRUN.match(line):
            self._torchrun_logs.add(host)
        if found := _STOPPED.search(line):
            self.stopped.add(int(found[1]))
        elif found := _FAILED.search(line):
            self.exits.setdefault(host * self.workers_per_host + int(found[2]), (int(found[1]), int(found[3])))
        elif found := _RANK.match(line):
            self._rank[host] = int(found[1])
        elif (found := _EXIT.match(line)) and host in self._rank and host in self._torchrun_logs:
            self.exits.setdefault(self._rank[host], (int(found[1]), int(found[2])))
        self.last_line = line.strip() or self.last_line
        return host not in self._torchrun_logs and bool(line.strip()) and not _NO_HOSTNAME.match(line)

    def killed(self) -> tuple[int, str] | None:
        """A worker that was killed by a signal not sent by torchrun, and the signal's name."""
        for rank, (code, pid) in self.exits.items():
            if code < 0 and pid not in self.stopped:
                return rank, signal.Signals(-code).name
        return None


def first_cause(error_dir: Path, log: TorchrunLog, code: int) -> ThinwireError:
    """The earliest error of any worker, else what torchrun logged.

    An error that only says that another worker failed, is missing or unreachable is not a cause.
    """
    reports = sorted([*_read_reports(error_dir), *log.reports], key=lambda report: report["time"])
    if causes := [report for report in reports if report["kind"] in ("config", "cause")]:
        return (ConfigError if causes[0]["kind"] == "config" else WorkerError)(causes[0]["message"])
    if stopped := stopped_in_order(error_dir, log):
        return stopped
    if killed := log.killed():
        return WorkerError(f"worker {killed[0]} was killed by {killed[1]}; the other workers were stopped")
    if reports:  # an error that names another worker says more than a lost connection
        return WorkerError(min(reports, key=lambda report: report["kind"] == "lost")["message"])
    if log.exits:
        return WorkerError(f"the workers exited with code {next(iter(log.exits.values()))[0]}")
    return WorkerError(f"the workers exited with code {code}" + (f": {log.last_line}" if log.last_line else ""))


def stopped_in_order(error_dir: Path, log: TorchrunLog) -> Stopped | None:
    """That the workers stopped because a signal asked for it, if they did."""
    reports = [*_read_reports(error_dir), *log.reports]
    return next((Stopped(report["message"]) for report in reports if report["kind"] == "stopped"), None)


def _read_reports(error_dir: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(error_dir.glob("*.json")):
        with suppress(ValueError):  # cut off by a full disk: the worker printed it instead
            yield _parsed(path.read_bytes())


def _parsed(text: str | bytes) -> dict[str, Any]:
    report = parse_json(text)
    if what := wrong(report, {"time": COUNT, "kind": TEXT, "message": ANY}):
        raise ValueError(what)
    return report | {"message": str(report["message"])}


@contextmanager
def as_worker() -> Iterator[None]:
    """In a worker that our launcher started: exit with the launcher, and report errors to it instead of raising."""
    error_dir = os.environ.get(ERROR_DIR)
    if error_dir is None:
        yield
        return
    threading.Thread(target=_exit_with_launcher, daemon=True).start()
    try:
        yield
    except Stopped as stopped:
        report = {"time": time.time_ns(), "kind": "stopped", "message": str(stopped)}
        _report_and_exit(Path(error_dir), report, code=0)  # torchrun waits for the others then, and kills none
    except Exception as error:
        report = {"time": time.time_ns(), "kind": _kind(error), "message": _message(error)}
        note_uncaught(error)  # before this process ends, and its connections close
        _report_and_exit(Path(error_dir), report)


def _kind(error: Exception) -> str:
    if isinstance(error, ConsequenceError):
        return "consequence"
    if isinstance(error, ConfigError):
        return "config"
    if isinstance(error, ThinwireError):
        return "cause"
    return "lost" if isinstance(error, ConnectionError) or is_loss(error) else "cause"


def _message(error: Exception) -> str:
    if isinstance(error, ThinwireError):
        return str(error)
    summary = f"worker {os.environ.get('RANK')} failed: {one_line(error)}"
    if is_refusal(error):
        return summary  # the system's message and the file name are enough
    batches = f"\n{uneven}" if (uneven := uneven_batches()) else ""
    return f"{summary}{batches}\n{traceback.format_exc()}"


def _report_and_exit(error_dir: Path, report: dict[str, Any], code: int = 1) -> None:
    try:
        (error_dir / f"{os.environ['RANK']}.json").write_text(json.dumps(report), encoding="utf-8")
    except OSError:
        print(f"\n{_REPORT}{json.dumps(report)}", flush=True)
    # Not sys.exit: a regular exit would wait for workers that may be stuck in a collective.
    os._exit(code)


def _exit_with_launcher() -> None:
    """Exit as soon as standard input, a pipe that the launcher holds open, is closed.

    A byte in it is a signal that the launcher received. One of its workers reads it, and the others learn of it.
    """
    while received := os.read(0, 1):
        request(signal.Signals(received[0]).name)
    os._exit(1)
