"""torch's TCPStore, with a deadline where it would wait for ever."""

import socket
import threading
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from thinwire.base.errors import ConfigError
from thinwire.comm.connections import is_hung_up, limit_waits


class Connection(NamedTuple):
    """A client, and the connections that it has."""

    client: Any
    lines: list[tuple[int, str]]

    @property
    def is_closed(self) -> bool:
        """Whether the store has gone: torch would say so in a page of C++."""
        return any(is_hung_up(*line) for line in self.lines)


def connect(host: str, port: int, seconds: float) -> Connection:
    """A client, each of whose answers is awaited for so long; so is the store itself, which may be frozen."""
    socket.create_connection((host, port), timeout=seconds).close()  # torch prints a page of C++ if nobody listens
    made: list[Any] = []

    def make() -> None:
        try:
            made.append(dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=seconds)))
        except RuntimeError as error:
            made.append(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(seconds)
    if not made:
        raise TimeoutError(f"no answer for {seconds:g} s")
    if isinstance(made[0], Exception):
        raise made[0]
    return Connection(made[0], limit_waits(port, seconds))


def inside(prefix: str, client: Any) -> Any:
    """The same store for keys under a prefix."""
    return dist.PrefixStore(prefix, client)


def serve(host: str, port: int) -> Any:
    """A store that listens there; 0 is a free port."""
    try:
        return dist.TCPStore(host, port, None, True, wait_for_workers=False)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"cannot listen on {host}:{port} ({why}); give another `--port`") from error
