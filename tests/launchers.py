"""Groups of real workers that may die, each with a launcher of its own; all meet at a store."""

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import gang

TIMEOUT = 30.0
"""What a test gives as `Faults(timeout=…)`, and more than any wait here should take."""


class Launchers:
    """Some groups, started side by side; a group whose worker dies is killed whole, as torchrun does."""

    def __init__(self, function: Callable[..., Any], groups: int, workers: int, *args: Any) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self.function, self.count, self.workers, self.args = function, groups, workers, args
        self.processes: dict[int, list[Any]] = {}
        # A queue would be locked for good by a worker that is killed while it writes.
        self.results: dict[tuple[int, int], Any] = {}
        for group in range(groups):
            self.start(group)

    def start(self, group: int) -> None:
        """Start a group, or start it again."""
        self.processes[group] = []
        for worker in range(self.workers):
            self.results[group, worker], sender = gang.context.Pipe(duplex=False)
            seat = self.store.port, group, self.count, worker, self.workers
            process = gang.context.Process(target=_worker, args=(self.function, seat, self.args, sender), daemon=True)
            process.start()
            self.processes[group].append(process)

    def kill(self, group: int, how: int = signal.SIGKILL) -> None:
        for process in self.processes[group]:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                if process.is_alive():
                    os.kill(process.pid, how)

    def wait_for(self, key: str, timeout: float = 300) -> None:
        """Wait until a worker has set this key in the store."""
        end = time.monotonic() + timeout
        while not self.store.check([key]):
            assert time.monotonic() < end, f"after {timeout} s nobody has set {key}"
            self._reap()
            time.sleep(0.05)

    def collect(self, timeout: float = 300) -> dict[tuple[int, int], Any]:
        """What workers returned, by group and worker; those that were killed returned nothing."""
        found: dict[tuple[int, int], Any] = {}
        end = time.monotonic() + timeout
        try:
            while time.monotonic() < end and not self._all_over(found):
                for seat, receiver in self.results.items():
                    if seat not in found and receiver.poll():
                        with contextlib.suppress(EOFError):  # killed
                            found[seat] = receiver.recv()
                self._reap()
                time.sleep(0.05)
            assert self._all_over(found), f"after {timeout} s only {sorted(found)} are over"
            return found
        finally:
            for group in self.processes:
                self.kill(group)

    def _reap(self) -> None:
        for group, processes in self.processes.items():
            if any(process.exitcode not in (None, 0) for process in processes):
                self.kill(group)

    def _all_over(self, found: dict[tuple[int, int], Any]) -> bool:
        return all(
            (group, worker) in found or process.exitcode not in (None, 0)
            for group, processes in self.processes.items()
            for worker, process in enumerate(processes)
        )


def note(replica: Any, what: str) -> None:
    """In a worker: say that its group has come so far."""
    membership = replica._recovery.membership
    membership.store.set(f"{what}/{membership.seat.group}", "")


def held(replica: Any) -> None:
    """In a worker: say that its group waits here, and go on when all groups are in or another one wants in."""
    note(replica, "held")
    membership = replica._recovery.membership
    while membership.heartbeat.wanted <= membership.generation and len(membership.groups) < membership._expected:
        time.sleep(0.05)


def _worker(
    function: Callable[..., Any], seat: tuple[int, int, int, int, int], args: tuple[Any, ...], sender: Any
) -> None:
    port, group, groups, worker, workers = seat
    os.environ.update(THINWIRE_STORE=f"127.0.0.1:{port}", THINWIRE_GROUP=str(group), THINWIRE_GROUPS=str(groups))
    os.environ.update(RANK=str(worker), WORLD_SIZE=str(workers), LOCAL_RANK=str(worker), LOCAL_WORLD_SIZE=str(workers))
    try:
        value: Any = function(group, worker, *args)
    except Exception as error:
        value = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    sender.send(value)
    os._exit(0)
