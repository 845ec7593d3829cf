"""Workers on this machine: started through torchrun, heard out, and never left behind.

The launcher holds one end of a pipe that is every worker's standard input. However the launcher ends,
the pipe closes and the workers end too; no process survives its launcher.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from thinwire.comm.topology import place
from thinwire.errors import ConfigError, ThinwireError

_LAUNCHED = "THINWIRE_LAUNCHED"
_FAILED = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
_TORCHRUN = re.compile(r"^[WEIF]\d{4} \d\d:\d\d")
_PATIENCE_S = 15


class WorkerError(ThinwireError, RuntimeError):
    """A worker failed for a reason of its own; the message says which one and why."""


def inside_job() -> bool:
    """Whether this process is one worker of a job that torchrun or srun started."""
    return place() is not None


def launch(arguments: list[str], workers: int, say: Callable[[str], None]) -> None:
    """Run `thinwire ARGUMENTS` as `workers` workers and wait; what they print goes to `say`, line by line."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    with tempfile.TemporaryDirectory(prefix="thinwire-") as box:
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {_LAUNCHED: box}
        process = subprocess.Popen(
            [*command, "-m", "thinwire", *arguments],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which then ends the rest in order
        )
        with _ended(process):
            failed = _listen(process, say)
            code = process.wait()
        if code:
            raise _reason(Path(box), failed, code)


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Whatever happens inside, the workers are gone afterwards."""
    try:
        with _terminable():
            yield
    finally:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.terminate()
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _listen(process: subprocess.Popen[str], say: Callable[[str], None]) -> tuple[int, int] | None:
    """Pass on what workers print, until torchrun reports a failure; returns its exit code and rank."""
    failed: tuple[int, int] | None = None
    assert process.stdout is not None
    quiet = False
    for line in process.stdout:
        quiet = quiet or bool(_TORCHRUN.match(line))
        if found := _FAILED.search(line):
            failed = failed or (int(found[1]), int(found[2]))
        if not quiet and line.strip():
            say(line.rstrip())
    return failed


def _reason(box: Path, failed: tuple[int, int] | None, code: int) -> ThinwireError:
    """The first thing a worker said of its end, else what torchrun knows."""
    notes = sorted(box.glob("*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    told = [json.loads(note.read_text(encoding="utf-8")) for note in notes]
    for note in told:
        if note["kind"] == "config":
            return ConfigError(note["message"])
    for note in sorted(told, key=lambda note: note["kind"] != "known"):
        return WorkerError(note["message"])
    if failed and failed[0] < 0:
        name = signal.Signals(-failed[0]).name
        return WorkerError(f"worker {failed[1]} was ended by {name}; the other workers were stopped")
    return WorkerError(f"the workers ended with exit code {failed[0] if failed else code}")


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
    except ConfigError as error:
        _leave_note(Path(box), "config", str(error))
    except ThinwireError as error:
        _leave_note(Path(box), "known", str(error))
    except Exception as error:
        rank = os.environ.get("RANK")
        summary = f"worker {rank} failed: {type(error).__name__}: {error}"
        _leave_note(Path(box), "other", f"{summary}\n{traceback.format_exc()}")


def _leave_note(box: Path, kind: str, message: str) -> None:
    path = box / f"{os.environ['RANK']}.json"
    path.write_text(json.dumps({"kind": kind, "message": message}), encoding="utf-8")
    # Not sys.exit: leaving in order would wait for workers that may be stuck in a collective.
    os._exit(1)


def _leave_with_launcher() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
