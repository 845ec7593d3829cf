"""Connections: those that process groups have opened, to hang them up, and those that must not wait for ever.

gloo cannot cancel a collective: it waits for its timeout, and its connections stay open as long as anything holds the
group. Whoever waits for a worker that has given up would wait just as long. So the sockets themselves are shut down:
both ends then get an error at once.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

_OPEN = Path("/proc/self/fd")
"""Linux has it; elsewhere nothing is known of sockets, and workers wait for the timeout."""


class Connections:
    """Sockets that were opened while process groups were made: within this worker's own group, and between groups."""

    def __init__(self) -> None:
        self._within: dict[int, str] = {}
        self._between: dict[int, str] = {}
        self._before: dict[int, str] | None = None  # those that were there when the first began to be opened

    @contextlib.contextmanager
    def noted(self, *, within: bool = False) -> Iterator[None]:
        """Note those that are opened inside."""
        before, outermost = _sockets(), self._before is None
        if outermost:
            self._before = before
        try:
            yield
        finally:
            if outermost:
                self._before = None
            opened = {number: name for number, name in _sockets().items() if before.get(number) != name}
            if within:
                self._within |= opened
            else:
                self._between |= {n: name for n, name in opened.items() if self._within.get(n) != name}

    def hang_up(self, *, within: bool = False) -> None:
        """Shut down those between groups, or all.

        A healthy group may be in a backward pass whose gradients it averages itself: that must not fail because
        another group is gone.
        """
        noted, self._between = self._between, {}
        if within:
            noted, self._within = noted | self._within, {}
        _shut_down(noted)

    def interrupt_opening(self) -> None:
        """Shut down what has been opened so far, if more is being opened: whoever waits for it there gets an error."""
        before = self._before
        if before is not None:
            _shut_down({number: name for number, name in _sockets().items() if before.get(number) != name})


def _shut_down(noted: Mapping[int, str]) -> None:
    """Those that are still open; not those that listen, without which gloo aborts."""
    now = _sockets()
    for number, name in noted.items():
        if now.get(number) == name:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)


def limit_waits(port: int, seconds: float) -> list[tuple[int, str]]:
    """Let this process's new connections to a port fail when the other side has been silent for so long; return them.

    A store's client would wait for an answer for a quarter of an hour if the link is cut, and for ever if the store's
    process is frozen, whose kernel still answers.
    """
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    found = []
    for number, name in _sockets().items():
        with contextlib.suppress(OSError, AttributeError), socket.socket(fileno=os.dup(number)) as connection:
            is_limited = any(connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, len(limit)))
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and connection.getpeername()[1] == port and not is_limited:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))
                found.append((number, name))
    return found


def _sockets() -> dict[int, str]:
    """This process's sockets: a file descriptor may be another's by the time it is looked at, its name not."""
    found = {}
    for entry in _OPEN.iterdir() if _OPEN.is_dir() else ():
        with contextlib.suppress(OSError):
            if (name := os.readlink(entry)).startswith("socket:"):
                found[int(entry.name)] = name
    return found


def connection_to(port: int) -> tuple[int, str] | None:
    """One of this process's connections to a port; None if there is none, or that is not known."""
    for number, name in _sockets().items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            over_ip = connection.family in (socket.AF_INET, socket.AF_INET6)
            if over_ip and connection.getpeername()[1] == port:
                return number, name
    return None


def is_hung_up(number: int, name: str) -> bool:
    """Whether the other side has closed a connection; takes nothing out of it."""
    if _sockets().get(number) != name:
        return False  # this side has closed it
    try:
        with socket.socket(fileno=os.dup(number)) as connection:
            return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except OSError as error:
        return not isinstance(error, BlockingIOError)
