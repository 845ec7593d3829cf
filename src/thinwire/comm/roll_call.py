"""Workers that say who they are before any of them opens a process group: it works where gloo cannot connect yet."""

import contextlib
import json
import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinwire.base.errors import ConfigError, MissingRankError, ThinwireError
from thinwire.comm import process_groups
from thinwire.comm.topology import complete_environment, place

_KEY = "thinwire/roll-call"


class ConnectError(ThinwireError, RuntimeError):
    """Workers found the job's store, but gloo could not connect them."""


class RollCall:
    """The job's store, as torchrun or srun place it; every worker of the job opens one."""

    def __init__(self, timeout: float) -> None:
        here = place()
        assert here is not None, "a roll call is for the workers of a job"
        complete_environment(here)
        self.rank, self.world_size, self._timeout = here.rank, here.world_size, timedelta(seconds=timeout)
        self._rounds = 0
        if self.rank > 0:
            _reach_first(timeout)
        try:
            self._store, *_ = next(dist.rendezvous("env://", self.rank, self.world_size, timeout=self._timeout))
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"{self.world_size} workers did not meet at {_first()} within {timeout:.0f} s "
                f"({str(error).splitlines()[0].rstrip('.')}); start all of them, or give --timeout"
            ) from error
        self._store.set_timeout(self._timeout)

    def answers(self, mine: Any) -> list[Any]:
        """What each rank says, as plain values; collective."""
        self._rounds += 1
        keys = [f"{_KEY}/{self._rounds}/{rank}" for rank in range(self.world_size)]
        try:
            self._store.set(keys[self.rank], json.dumps(mine))
            self._wait(keys)
            return [json.loads(self._store.get(key)) for key in keys]
        except RuntimeError as error:
            if isinstance(error, ThinwireError):
                raise
            raise MissingRankError("rank 0, which keeps the job's store, has left; see what it printed") from error

    def close(self) -> None:
        """Leave; rank 0, with whom the store goes, waits until the others have read what they need."""
        keys = [f"{_KEY}/left/{rank}" for rank in range(self.world_size)]
        with contextlib.suppress(RuntimeError):
            self._store.set(keys[self.rank], "")
            if self.rank == 0:
                self._wait(keys)

    def _wait(self, keys: list[str]) -> None:
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                raise MissingRankError(
                    f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))} of {self.world_size} did not "
                    f"answer within {self._timeout.total_seconds():.0f} s; see what they printed, or give --timeout"
                )
            time.sleep(0.05)

    def connect(self) -> None:
        """Open the world's process group on gloo; collective."""
        store = dist.PrefixStore(_KEY, self._store)
        patience = self._timeout / 5  # gloo waits five times as long for a connection
        try:
            dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=patience)
            dist.barrier()
        except RuntimeError as error:
            raise ConnectError(str(error).splitlines()[0].rpartition("] ")[2]) from error
        process_groups.mark_initialized()
        process_groups.set_timeout(self._timeout.total_seconds())


def _first() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _reach_first(timeout: float) -> None:
    """Wait until rank 0 listens; torch, which would do the same, prints a page of C++ if it does not."""
    host, _, port = _first().rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=max(1.0, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"rank 0 cannot be reached at {_first()} within {timeout:.0f} s ({error.strerror or error}); is it "
                    "started, and is the port open? MASTER_ADDR, or torchrun's --master-addr, says where it is"
                ) from error
            time.sleep(0.1)
