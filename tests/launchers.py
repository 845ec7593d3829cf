"""Groups of real workers that may die, each with a launcher of its own; all meet at a store."""

import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist

import gang
from patience import until
from thinwire import Faults
from thinwire.comm.tcp_store import serve

TIMEOUT = 30.0
"""What a test gives as `Faults(timeout=…)`, and more than any wait here should take."""


class Launchers:
    """Some groups, started side by side; a group whose worker dies is killed whole, as torchrun does."""

    def __init__(
        self, function: Callable[..., Any], groups: int, workers: int, *args: Any, port: int | None = None
    ) -> None:
        """With a `port` the store is a process of its own that listens there, `self.server`."""
        self.server = start_store(port) if port else None
        self.store = dist.TCPStore("127.0.0.1", port or 0, None, not port, wait_for_workers=False)
        self.function, self.count, self.workers, self.args = function, groups, workers, args
        self.silence = gang.patient(Faults().silence)
        self.processes: dict[int, list[Any]] = {}
        # A queue would be locked for good by a worker that is killed while it writes.
        self.results: dict[tuple[int, int], Any] = {}
        for group in range(groups):
            self.start(group)

    def restart(self, group: int) -> None:
        """Start a group again that dies by itself: others may be further by then."""
        until(lambda: all(process.exitcode is not None for process in self.processes[group]), f"group {group}'s end")
        self.start(group)

    def start(self, group: int) -> None:
        """Start a group, or start it again."""
        self.processes[group] = []
        for worker in range(self.workers):
            self.results[group, worker], sender = gang.context.Pipe(duplex=False)
            seat = self.store.port, group, self.count, worker, self.workers
            process = gang.start(_worker, self.function, seat, self.silence, self.args, sender)
            self.processes[group].append(process)

    def kill(self, group: int, how: int = signal.SIGKILL) -> None:
        for process in self.processes[group]:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                if process.is_alive():
                    os.kill(process.pid, how)

    def wait_for(self, key: str, timeout: float = 300) -> None:
        """Wait until a worker has set this key in the store."""
        end = time.monotonic() + timeout
        while not self.store.check([f"/{key}"]):
            assert time.monotonic() < end, f"after {timeout} s nobody has set {key}"
            self._reap()
            time.sleep(0.05)

    def freeze(self, group: int) -> None:
        self.kill(group, signal.SIGSTOP)

    def thaw(self, group: int) -> None:
        self.kill(group, signal.SIGCONT)

    def collect(
        self, timeout: float = 300, may_wait: Collection[int] = (), frozen: Collection[int] = ()
    ) -> dict[tuple[int, int], Any]:
        """What workers returned, by group and worker; those that were killed returned nothing.

        Groups that `may_wait` are given some seconds when the others are over: they may wait for another run. Those
        that are `frozen` are not waited for.
        """
        found: dict[tuple[int, int], Any] = {}
        end = time.monotonic() + timeout
        try:
            while time.monotonic() < end and not self._all_over(found, but=frozen):
                if may_wait and self._all_over(found, but=may_wait):
                    end, may_wait = time.monotonic() + 15, ()
                    timeout = 0
                for seat, receiver in self.results.items():
                    if seat not in found and receiver.poll():
                        with contextlib.suppress(EOFError):  # killed
                            found[seat] = receiver.recv()
                self._reap()
                time.sleep(0.05)
            assert not timeout or self._all_over(found, but=frozen), f"after {timeout} s only {sorted(found)} are over"
            for group, worker in found:
                self.processes[group][worker].join(5)
            return found
        finally:
            self.close()

    def close(self) -> None:
        """Kill all that is left."""
        for group in self.processes:
            self.kill(group)
        if self.server is not None:
            self.server.kill()

    def _reap(self) -> None:
        for group, processes in self.processes.items():
            if any(process.exitcode not in (None, 0) for process in processes):
                self.kill(group)

    def _all_over(self, found: dict[tuple[int, int], Any], but: Collection[int] = ()) -> bool:
        return all(
            (group, worker) in found or process.exitcode not in (None, 0)
            for group, processes in self.processes.items()
            for worker, process in enumerate(processes)
            if group not in but
        )


def start_store(port: int) -> Any:
    """A store in a process of its own, which may be killed or frozen."""
    process = gang.start(_serve, port)
    until(lambda: _listens(port), "the store")
    return process


def _serve(port: int) -> None:
    server = serve("127.0.0.1", port)  # kept: the store lives as long as it is referenced
    threading.Event().wait()
    del server


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def note(replica: Any, what: str) -> None:
    """In a worker: say that its group has come so far."""
    membership = replica._recovery.membership
    membership.store.set(f"{what}/{membership.slot.group}", "")


def held(replica: Any) -> None:
    """In a worker: say that its group waits here, and go on when all groups are in or another one wants in."""
    note(replica, "held")
    membership = replica._recovery.membership
    while membership.wanted <= membership.generation and len(membership.groups) < membership._expected:
        time.sleep(0.05)


def _worker(
    function: Callable[..., Any],
    seat: tuple[int, int, int, int, int],
    silence: float,
    args: tuple[Any, ...],
    sender: Any,
) -> None:
    port, group, groups, worker, workers = seat
    Faults.silence = property(lambda self: min(silence, self.timeout))  # a worker may get no core for seconds here
    os.environ.update(THINWIRE_STORE=f"127.0.0.1:{port}", THINWIRE_GROUP=str(group), THINWIRE_GROUPS=str(groups))
    os.environ.update(RANK=str(worker), WORLD_SIZE=str(workers), LOCAL_RANK=str(worker), LOCAL_WORLD_SIZE=str(workers))
    try:
        value: Any = function(group, worker, *args)
    except Exception as error:
        value = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    sender.send(value)
    os._exit(0)
