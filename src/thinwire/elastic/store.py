"""The store where groups meet, and each worker's slot, as launchers give them by environment variables.

A store may be killed, frozen or cut off, and come back empty. So every call has a deadline, and is repeated on a new
connection until then; and what the store holds is soft state: those who need it write it again.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from thinwire.base.errors import ConfigError, LostError
from thinwire.comm import process_groups, tcp_store
from thinwire.comm.topology import place

STORE, GROUP, GROUPS, RUN = "THINWIRE_STORE", "THINWIRE_GROUP", "THINWIRE_GROUPS", "THINWIRE_RUN"
"""Environment variables: the store's host:port, this group's number from 0 on, how many groups there are, and, where
several runs share a store at the same time, a name for each."""
_PAUSE_S = 0.1


class Slot(NamedTuple):
    """A worker's place in its group, as its launcher gave it."""

    group: int
    worker: int
    workers: int


class StoreLostError(LostError):
    """The store has not answered for as long as this worker waits."""


class Store:
    """A client of the store; threads that must not wait for each other have one each."""

    def __init__(self, host: str, port: int, *, name: str = "", timeout: float, patience: float | None = None) -> None:
        """A call is given up after `patience` seconds, by default `timeout`; one answer is awaited for a part of it."""
        self.host, self.port, self._name, self._timeout = host, port, name, timeout
        self._patience = timeout if patience is None else patience
        self._answer_s = min(5.0, max(1.0, timeout / 4))
        self._connection: tcp_store.Connection | None = None
        self._lock = threading.Lock()

    def another(self, inside: str = "", *, patience: float | None = None) -> "Store":
        """The same for another thread, with other patience, or for keys `inside` a name."""
        return Store(self.host, self.port, name=self._name + inside, timeout=self._timeout, patience=patience)

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._call(lambda client: client.set(self._name + key, value))

    def first(self, key: str, value: str, instead_of: str = "") -> str:
        """Write a value if there is none yet, or only `instead_of`; return the one that is there then."""
        return self._call(lambda client: client.compare_set(self._name + key, instead_of, value)).decode()

    def get(self, key: str) -> str | None:
        """Read a value; None if there is none."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[str | None]:
        """Read several values."""
        names = [self._name + key for key in keys]
        return self._call(lambda client: _read(client, names)) if names else []

    def delete(self, key: str) -> None:
        """Forget a value."""
        self._call(lambda client: client.delete_key(self._name + key))

    def for_torch(self, prefix: str, timeout: float) -> Any:
        """A connection of its own for process groups to meet by."""
        return tcp_store.inside(self._name + prefix, tcp_store.connect(self.host, self.port, timeout).client)

    def _call(self, work: Callable[[Any], Any]) -> Any:
        end = time.monotonic() + self._patience
        while True:
            try:
                with self._lock:
                    if self._connection is None or self._connection.is_closed:
                        self._connection = tcp_store.connect(self.host, self.port, self._answer_s)
                    return work(self._connection.client)
            except (RuntimeError, OSError) as error:
                self._connection = None  # an answer that comes late would be taken for that of the next call
                if time.monotonic() >= end:
                    raise StoreLostError(
                        f"the store at {self.host}:{self.port} has not answered for {self._patience:g} s ({error}), so "
                        "nobody can say who goes on; this worker stops. If others go on, start its group again to join "
                        "them; else start the store and all groups again, and resume from a save"
                    ) from None
                time.sleep(_PAUSE_S)


def _read(client: Any, keys: Sequence[str]) -> list[str | None]:
    if client.check(list(keys)):
        return [value.decode() for value in client.multi_get(list(keys))]
    return [client.get(key).decode() if client.check([key]) else None for key in keys]


class Meeting(NamedTuple):
    """Where this worker meets the others, and how many groups there are."""

    store: Store
    slot: Slot
    groups: int


class Launched(NamedTuple):
    """What a launcher of a group says."""

    host: str
    port: int
    group: int
    groups: int


def launched(environment: Mapping[str, str] = os.environ) -> Launched:
    """The store and this group's number; every launcher sets the same store and its own group."""
    missing = [name for name in (STORE, GROUP, GROUPS) if name not in environment]
    if missing:
        raise ConfigError(
            f"faults=… needs {', '.join(missing)} in the environment: start `thinwire store` on one machine, and on "
            "each group's `thinwire group --store HOST:PORT --groups N --group I -- COMMAND`, which sets them"
        )
    address, group, groups = (environment[name] for name in (STORE, GROUP, GROUPS))
    host, _, port = address.rpartition(":")
    numbers = all(text.isascii() and text.isdigit() for text in (port, group, groups))
    if not (host and numbers and 0 < int(port) < 65536 and int(group) < int(groups)):
        raise ConfigError(
            f"{STORE}={address!r}, {GROUP}={group!r}, {GROUPS}={groups!r}: give host:port, a number from 0 on, and "
            "how many groups there are"
        )
    return Launched(host, int(port), int(group), int(groups))


def meeting(timeout: float) -> Meeting:
    """Find the store and this worker's slot."""
    host, port, group, groups = launched()
    if process_groups.world_size():
        raise ConfigError("faults=… starts torch.distributed itself: leave out init_process_group()")
    here = place()
    slot = Slot(group, here.rank if here else 0, here.world_size if here else 1)
    store = Store(host, port, name=f"{os.environ.get(RUN, '')}/", timeout=timeout)
    try:
        store.get("run")
    except StoreLostError as error:
        raise ConfigError(
            f"there is no store at {host}:{port} ({error.__class__.__name__} after {timeout:g} s); start `thinwire "
            "store` there, and check that the port is reachable from this machine"
        ) from None
    return Meeting(store, slot, groups)
