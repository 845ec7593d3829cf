"""Start workers through torchrun, on this machine or on several, show their output, and leave none behind.

Every worker's standard input is a pipe held open by the launcher. However the launcher ends, the pipe closes and the
workers exit; no process outlives its launcher.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO

from thinwire.base.errors import ConfigError
from thinwire.comm.topology import place
from thinwire.elastic.stopping import request
from thinwire.launch.failures import ERROR_DIR, TorchrunLog, first_cause, stopped_in_order

_SHUTDOWN_S = 15
_OTHERS_REPORT_S = 5
_RENDEZVOUS_S = 300  # torchrun does not watch the pipe: this ends one that waits for hosts that never join


@dataclass(frozen=True)
class HostSpec:
    """A host that runs one torchrun of a job: this machine, or one behind a prefix that sees the same files."""

    prefix: tuple[str, ...] = ()
    """Words before the command, such as ip netns exec NAME; must keep environment and working directory."""
    address: str | None = None
    """The address at which other hosts reach it."""
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Additional environment variables for its workers."""


def inside_job() -> bool:
    """Whether this process is a worker that torchrun or srun started."""
    return place() is not None


def launch(
    arguments: list[str],
    workers: int,
    on_line: Callable[[str], None],
    hosts: Sequence[HostSpec] = (HostSpec(),),
    *,
    stops_in_order: bool = True,
) -> None:
    """Run `thinwire ARGUMENTS` as `workers` workers, evenly over `hosts`, and wait; their output goes to `on_line`.

    A first SIGTERM or SIGINT is passed on to workers that stop in order, and then raises `Stopped`; a second one ends
    everything at once.
    """
    commands = _torchrun_commands(workers, hosts)
    running: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="thinwire-") as error_dir:
        log = TorchrunLog(workers_per_host(workers, hosts))
        with _stopped_at_exit(running), _first_signals(stops_in_order) as signals:
            for host, command in zip(hosts, commands, strict=True):
                with _signals_deferred():
                    running.append(_start([*command, "-m", "thinwire", *arguments], host, error_dir))
            code = _relay_output(running, log, on_line, signals)
        if code:
            raise first_cause(Path(error_dir), log, code)
        if stopped := stopped_in_order(Path(error_dir), log):
            raise stopped
        if signals:
            request(signal.Signals(signals[0]).name)  # too late for this run, but there may be another after it


def workers_per_host(workers: int, hosts: Sequence[HostSpec]) -> int:
    """How many workers each host runs; raises if they cannot be divided evenly."""
    if not hosts:
        raise ConfigError(f"{workers} workers have no host to run on; give at least one")
    if workers % len(hosts):
        raise ConfigError(
            f"{workers} workers cannot be divided evenly over {len(hosts)} hosts; use a multiple of {len(hosts)}"
        )
    return workers // len(hosts)


def _torchrun_commands(workers: int, hosts: Sequence[HostSpec]) -> list[list[str]]:
    """One torchrun command per host, up to the module to run; hosts are numbered in their order."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={workers_per_host(workers, hosts)}"]
    first = hosts[0].address
    if len(hosts) == 1 and first is None:
        return [[*hosts[0].prefix, *torchrun, "--standalone"]]
    if first is None:
        raise ConfigError(f"the first of {len(hosts)} hosts has no address; give the one at which the others reach it")
    # A static rendezvous: the dynamic one would look up this machine's name, which other hosts may not resolve.
    rendezvous = [f"--nnodes={len(hosts)}", f"--master-addr={first}", f"--master-port={free_port()}"]
    rendezvous.append(f"--rdzv-conf=timeout={_RENDEZVOUS_S}")
    return [[*host.prefix, *torchrun, *rendezvous, f"--node-rank={number}"] for number, host in enumerate(hosts)]


def free_port() -> int:
    """A port that is free here, and most likely on the first host too."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def _start(command: list[str], host: HostSpec, error_dir: str) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            env={"OMP_NUM_THREADS": "1"} | os.environ | dict(host.environment) | {ERROR_DIR: error_dir},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the launcher only, which then stops the workers in order
        )
    except OSError as error:
        raise ConfigError(f"a host cannot be reached by `{' '.join(host.prefix)}`: {error}") from error


@contextmanager
def _stopped_at_exit(running: list[subprocess.Popen[str]]) -> Iterator[None]:
    """Stop all these processes on the way out, whatever happens inside."""
    try:
        with sigterm_exits():
            yield
    finally:
        end(running, _SHUTDOWN_S)


def end(running: Sequence[subprocess.Popen[Any]], seconds: float) -> None:
    """Terminate processes, and kill those that still run after so many seconds."""
    for process in running:
        assert process.stdin is not None
        process.stdin.close()
        process.terminate()
    deadline = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _first_signals(collect: bool) -> Iterator[list[int]]:
    """Collect the first signal; the second one ends this process, and all that it started."""
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) > 1:
            sys.exit(128 + number)

    with _signal_handler(handle, signal.SIGTERM, signal.SIGINT) if collect else nullcontext():
        yield received


def _pass_on(number: int, running: list[subprocess.Popen[str]]) -> None:
    """Not as a signal: torchrun would end the workers 30 s later, and they would hear it twice."""
    for process in running:
        assert process.stdin is not None
        with suppress(OSError):  # it has ended
            os.write(process.stdin.fileno(), bytes([number]))


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Handle signals afterwards: one that came between starting a process and listing it would leave it behind."""
    received: list[int] = []
    try:
        with _signal_handler(lambda number, _: received.append(number), signal.SIGTERM, signal.SIGINT):
            yield
    finally:
        if received:
            signal.raise_signal(received[0])


def sigterm_exits() -> AbstractContextManager[None]:
    """Let SIGTERM raise SystemExit, so that cleanup runs as it does after Ctrl-C."""
    return _signal_handler(lambda number, _: sys.exit(128 + number), signal.SIGTERM)


@contextmanager
def _signal_handler(handler: Callable[[int, Any], Any], *numbers: int) -> Iterator[None]:
    """Use this handler inside; only the main thread can set one, others leave signals alone."""
    in_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in numbers if in_main}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _relay_output(
    running: list[subprocess.Popen[str]], log: TorchrunLog, on_line: Callable[[str], None], signals: list[int]
) -> int:
    """Pass on workers' output until all hosts are done, or until one failed and the others had time to report.

    Pass on the first of `signals` to the workers.

    Returns the exit code of the first host that failed, or 0.
    """
    lines: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
    for host, process in enumerate(running):
        assert process.stdout is not None
        threading.Thread(target=_read, args=(host, process.stdout, lines), daemon=True).start()
    still_open, code, deadline = len(running), 0, float("inf")
    passed_on = False
    while still_open and time.monotonic() < deadline:
        if signals and not passed_on:
            passed_on = True
            _pass_on(signals[0], running)
            on_line("thinwire: stopping after this step, with a save; a second signal ends at once")
        if not code and (code := _failed_code(running)):
            deadline = time.monotonic() + _OTHERS_REPORT_S
        try:
            host, line = lines.get(timeout=0.2)
        except Empty:
            continue
        if line is None:
            still_open -= 1
        elif log.read_line(host, line):
            on_line(line.rstrip())
    if not code and not still_open:
        for process in running:
            process.wait()
    return code or _failed_code(running)


def _read(host: int, source: TextIO, lines: SimpleQueue[tuple[int, str | None]]) -> None:
    with source:
        for line in source:
            lines.put((host, line))
    lines.put((host, None))


def _failed_code(running: list[subprocess.Popen[str]]) -> int:
    return next((code for process in running if (code := process.poll())), 0)
