"""Workers on this machine or on several: started through torchrun, heard out, and never left behind.

The launcher holds one end of a pipe that is every worker's standard input. However the launcher ends,
the pipe closes and the workers end too; no process survives its launcher.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO

from thinwire.comm.missing import uneven_batches
from thinwire.comm.topology import place
from thinwire.errors import ConfigError, ConsequenceError, ThinwireError, is_refusal, one_line

_LAUNCHED = "THINWIRE_LAUNCHED"
_PATIENCE_S = 15
_OTHERS_REPORT_S = 5
_RENDEZVOUS_S = 300  # torchrun itself does not watch the pipe: this ends one that waits for hosts that never come

# What torchrun writes.
_TORCHRUN = re.compile(r"^[WEIF]\d{4} \d\d:\d\d")
_NAMELESS = re.compile(r"^\[W\d{4} .*hostname of the client socket cannot be retrieved")
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_STOPPED = re.compile(r"Sending process (\d+) closing signal")
_RANK = re.compile(r"^\s*rank +: (\d+) \(local_rank")
_EXIT = re.compile(r"^\s*exitcode +: (-?\d+) \(pid: (\d+)\)")

# How gloo, nccl and torch's store say that another worker is gone, or does not come.
_LOST = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused|aborted)|broken pipe|remote process exited|timed out waiting",
    re.IGNORECASE,
)
_NOTE = "\x01thinwire-note "
"""Before a note that could not be written to a file, in what a worker prints."""


class WorkerError(ThinwireError, RuntimeError):
    """A worker failed for a reason of its own; the message says which one and why."""


@dataclass(frozen=True)
class Seat:
    """Where one torchrun of a job runs: this machine, or a host that a prefix reaches and that sees the same files."""

    prefix: tuple[str, ...] = ()
    """Words before the command, such as ip netns exec NAME; environment and folder must pass through it."""
    address: str | None = None
    """How other hosts reach it."""
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """More variables for its workers."""


def inside_job() -> bool:
    """Whether this process is one worker of a job that torchrun or srun started."""
    return place() is not None


def launch(arguments: list[str], workers: int, say: Callable[[str], None], seats: Sequence[Seat] = (Seat(),)) -> None:
    """Run `thinwire ARGUMENTS` as `workers` workers, evenly over `seats`, and wait; what they print goes to `say`."""
    commands = _commands(workers, seats)
    running: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="thinwire-") as box:
        heard = _Heard(share(workers, seats))
        with _ended(running):
            for seat, command in zip(seats, commands, strict=True):
                with _undisturbed():
                    running.append(_start([*command, "-m", "thinwire", *arguments], seat, box))
            code = _listen(running, heard, say)
        if code:
            raise _reason(Path(box), heard, code)


def share(workers: int, seats: Sequence[Seat]) -> int:
    """Workers to a seat."""
    if not seats:
        raise ConfigError(f"{workers} workers have no host to run on; give at least one")
    if workers % len(seats):
        raise ConfigError(
            f"{workers} workers cannot be divided evenly over {len(seats)} hosts; use a multiple of {len(seats)}"
        )
    return workers // len(seats)


def _commands(workers: int, seats: Sequence[Seat]) -> list[list[str]]:
    """Each seat's torchrun, up to what it shall run; torchrun's node number is the seat's."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={share(workers, seats)}"]
    first = seats[0].address
    if len(seats) == 1 and first is None:
        return [[*seats[0].prefix, *torchrun, "--standalone"]]
    if first is None:
        raise ConfigError(f"the first of {len(seats)} hosts has no address; give the one at which the others reach it")
    # By numbers alone: torchrun's own rendezvous would look up this machine's name, which means nothing elsewhere.
    meet = [f"--nnodes={len(seats)}", f"--master-addr={first}", f"--master-port={_free_port()}"]
    meet.append(f"--rdzv-conf=timeout={_RENDEZVOUS_S}")
    return [[*seat.prefix, *torchrun, *meet, f"--node-rank={number}"] for number, seat in enumerate(seats)]


def _free_port() -> int:
    """A port that is free here; on the first host it is almost surely free too."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        return taken.getsockname()[1]


def _start(command: list[str], seat: Seat, box: str) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            env={"OMP_NUM_THREADS": "1"} | os.environ | dict(seat.environment) | {_LAUNCHED: box},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which then ends the rest in order
        )
    except OSError as error:
        raise ConfigError(f"a host cannot be reached by `{' '.join(seat.prefix)}`: {error}") from error


@contextmanager
def _ended(running: list[subprocess.Popen[str]]) -> Iterator[None]:
    """Whatever happens inside, the workers are gone afterwards."""
    try:
        with terminable():
            yield
    finally:
        for process in running:
            assert process.stdin is not None
            process.stdin.close()
            process.terminate()
        deadline = time.monotonic() + _PATIENCE_S
        for process in running:
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Let signals wait: a process that is running already, and not yet in the list, would be left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda n, _: came.append(n)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Heard:
    """What the torchruns of a job said of its end.

    torchrun looks at its workers ten times a second. When one is killed the others lose their connections and
    leave within a few hundredths, so one look finds them all gone and calls the lowest rank the root cause.
    Only the table of all failures at the end tells who was killed.
    """

    def __init__(self, each: int) -> None:
        self.each = each
        self.ends: dict[int, tuple[int, int]] = {}  # rank: exit code, process
        self.stopped: set[int] = set()  # processes that torchrun ended, after the first failure
        self.last = ""  # the last line of all
        self.notes: list[dict[str, Any]] = []  # of workers that had no room for a file
        self._quiet: set[int] = set()
        self._rank: dict[int, int] = {}

    def take(self, seat: int, line: str) -> bool:
        """Remember what a line tells; returns whether it is a worker's own, to be passed on."""
        if line.startswith(_NOTE):
            with suppress(ValueError):
                self.notes.append(json.loads(line.removeprefix(_NOTE)))
            return False
        if _TORCHRUN.match(line):
            self._quiet.add(seat)
        if found := _STOPPED.search(line):
            self.stopped.add(int(found[1]))
        elif found := _FAILED.search(line):
            self.ends.setdefault(seat * self.each + int(found[2]), (int(found[1]), int(found[3])))
        elif found := _RANK.match(line):
            self._rank[seat] = int(found[1])
        elif (found := _EXIT.match(line)) and seat in self._rank and seat in self._quiet:
            self.ends.setdefault(self._rank[seat], (int(found[1]), int(found[2])))
        self.last = line.strip() or self.last
        return seat not in self._quiet and bool(line.strip()) and not _NAMELESS.match(line)

    def signalled(self) -> tuple[int, str] | None:
        """A worker that a signal ended, not torchrun's own, and the signal's name."""
        for rank, (code, process) in self.ends.items():
            if code < 0 and process not in self.stopped:
                return rank, signal.Signals(-code).name
        return None


def _listen(running: list[subprocess.Popen[str]], heard: _Heard, say: Callable[[str], None]) -> int:
    """Pass on what workers print until all have ended, or one and the rest had time to say why; its exit code."""
    lines: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
    for seat, process in enumerate(running):
        assert process.stdout is not None
        threading.Thread(target=_read, args=(seat, process.stdout, lines), daemon=True).start()
    talking, code, deadline = len(running), 0, float("inf")
    while talking and time.monotonic() < deadline:
        if not code and (code := _failure(running)):
            deadline = time.monotonic() + _OTHERS_REPORT_S
        try:
            seat, line = lines.get(timeout=0.2)
        except Empty:
            continue
        if line is None:
            talking -= 1
        elif heard.take(seat, line):
            say(line.rstrip())
    if not code and not talking:
        for process in running:
            process.wait()
    return code or _failure(running)


def _read(seat: int, source: TextIO, lines: SimpleQueue[tuple[int, str | None]]) -> None:
    with source:
        for line in source:
            lines.put((seat, line))
    lines.put((seat, None))


def _failure(running: list[subprocess.Popen[str]]) -> int:
    return next((code for process in running if (code := process.poll())), 0)


def _reason(box: Path, heard: _Heard, code: int) -> ThinwireError:
    """The first thing that went wrong on any worker, else what torchrun knows.

    That another worker failed, did not come or cannot be reached any more is nobody's reason.
    """
    notes = sorted([*_notes(box), *heard.notes], key=lambda note: note["time"])
    if causes := [note for note in notes if note["kind"] in ("config", "cause")]:
        return (ConfigError if causes[0]["kind"] == "config" else WorkerError)(causes[0]["message"])
    if found := heard.signalled():
        return WorkerError(f"worker {found[0]} was ended by {found[1]}; the other workers were stopped")
    if notes:  # who names another worker knows more than who lost a connection
        return WorkerError(min(notes, key=lambda note: note["kind"] == "lost")["message"])
    if heard.ends:
        return WorkerError(f"the workers ended with exit code {next(iter(heard.ends.values()))[0]}")
    return WorkerError(f"the workers ended with exit code {code}" + (f": {heard.last}" if heard.last else ""))


def _notes(box: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(box.glob("*.json")):
        with suppress(ValueError):  # the disk was full: its worker has printed it instead
            yield json.loads(path.read_text(encoding="utf-8"))


@contextmanager
def as_worker() -> Iterator[None]:
    """Run a worker's part: leave with the launcher, and hand errors to it instead of printing them."""
    box = os.environ.get(_LAUNCHED)
    if box is None:
        yield
        return
    threading.Thread(target=_leave_with_launcher, daemon=True).start()
    try:
        yield
    except Exception as error:
        _leave_note(Path(box), {"time": time.time_ns(), "kind": _kind(error), "message": _told(error)})


def _kind(error: Exception) -> str:
    if isinstance(error, ConsequenceError):
        return "consequence"
    if isinstance(error, ConfigError):
        return "config"
    if isinstance(error, ThinwireError):
        return "cause"
    return "lost" if isinstance(error, ConnectionError) or _LOST.search(str(error)) else "cause"


def _told(error: Exception) -> str:
    if isinstance(error, ThinwireError):
        return str(error)
    summary = f"worker {os.environ.get('RANK')} failed: {one_line(error)}"
    if is_refusal(error):
        return summary  # the system's own words and the file say it all
    batches = f"\n{told}" if (told := uneven_batches()) else ""
    return f"{summary}{batches}\n{traceback.format_exc()}"


def _leave_note(box: Path, note: dict[str, Any]) -> None:
    """Leave it for the launcher, and the process."""
    try:
        (box / f"{os.environ['RANK']}.json").write_text(json.dumps(note), encoding="utf-8")
    except OSError:
        print(f"\n{_NOTE}{json.dumps(note)}", flush=True)
    # Not sys.exit: leaving in order would wait for workers that may be stuck in a collective.
    os._exit(1)


def _leave_with_launcher() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
