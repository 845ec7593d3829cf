"""A communicator for Propulate that never waits for a busy receiver.

Propulate sends with MPI's blocking `send`, which may wait until the receiver calls MPI itself. Open MPI 5 does so over
shared memory, inside a node, however small the message is; and the receiver calls MPI after its trial. So islands would
wait for each other's trials.
"""

from __future__ import annotations

import time
from typing import Any

_PAUSE = 0.02
"""Seconds between looks. MPI itself looks without a pause, on a core that a trial needs."""


class NonBlocking:
    """A communicator of mpi4py whose `send` returns at once, and whose `barrier` leaves the core to others."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._sent: list[Any] = []
        """Requests hold what they send, so they are kept until it has been received."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def send(self, value: Any, dest: int, tag: int = 0) -> None:
        """Send without waiting for the receiver."""
        self._forget_received()
        self._sent.append(self._comm.isend(value, dest=dest, tag=tag))

    def barrier(self) -> None:
        """Wait for all."""
        reached = self._comm.Ibarrier()
        while not reached.Test():
            time.sleep(_PAUSE)

    def finish(self) -> None:
        """Take what nobody asked for any more, until everything is received; called by all."""
        reached = None
        while reached is None or not reached.Test():
            while self._comm.iprobe():
                self._comm.recv()
            self._forget_received()
            if reached is None and not self._sent:
                reached = self._comm.Ibarrier()
            time.sleep(_PAUSE)

    def _forget_received(self) -> None:
        self._sent = [request for request in self._sent if not request.test()[0]]


def unblock(propulator: Any) -> list[NonBlocking]:
    """Make no worker wait for another's trial; returns the communicators, none where a rank only helps in trials."""
    if propulator.propulate_comm is None:
        return []
    propulator.propulate_comm = NonBlocking(propulator.propulate_comm)
    propulator.island_comm = NonBlocking(propulator.island_comm)
    return [propulator.propulate_comm, propulator.island_comm]
