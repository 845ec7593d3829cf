"""Where groups meet: the store, and each worker's seat, as launchers give them by environment variables."""

import os
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from thinwire.comm.connections import given_up_after
from thinwire.comm.topology import place
from thinwire.config.faults import Faults
from thinwire.errors import ConfigError

STORE, GROUP, GROUPS = "THINWIRE_STORE", "THINWIRE_GROUP", "THINWIRE_GROUPS"
"""Environment variables: the store's host:port, this group's number from 0 on, and how many groups there are."""


class Seat(NamedTuple):
    """A worker's place in its group, as its launcher gave it."""

    group: int
    worker: int
    workers: int


class Meeting(NamedTuple):
    """Where this worker meets the others, and how many groups there are."""

    store: Any
    seat: Seat
    groups: int


def meeting(faults: Faults) -> Meeting:
    """Find the store and this worker's seat; every launcher sets the same store and its own group."""
    missing = [name for name in (STORE, GROUP, GROUPS) if name not in os.environ]
    if missing:
        raise ConfigError(
            f"faults=… needs {', '.join(missing)} in the environment: start `thinwire store` on one machine, and "
            f"one launcher per group with {STORE}=host:port, {GROUP}=0, 1, … and {GROUPS}=their number"
        )
    address, group, groups = (os.environ[name] for name in (STORE, GROUP, GROUPS))
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit() and group.isdigit() and groups.isdigit() and int(group) < int(groups)):
        raise ConfigError(
            f"{STORE}={address!r}, {GROUP}={group!r}, {GROUPS}={groups!r}: give host:port, a number from 0 on, and "
            "how many groups there are"
        )
    if dist.is_initialized():
        raise ConfigError("faults=… starts torch.distributed itself: leave out init_process_group()")
    here = place()
    seat = Seat(int(group), here.rank if here else 0, here.world_size if here else 1)
    return Meeting(_connected(host, int(port), faults), seat, int(groups))


def serve(host: str, port: int) -> Any:
    """A store that listens there; 0 is a free port."""
    try:
        return dist.TCPStore(host, port, None, True, wait_for_workers=False)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"cannot listen on {host}:{port} ({why}); give another `--port`") from error


def _connected(host: str, port: int, faults: Faults) -> Any:
    try:
        with given_up_after(faults.timeout):
            return dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=faults.timeout))
    except RuntimeError as error:
        raise ConfigError(
            f"there is no store at {host}:{port} ({error}); start `thinwire store` there, and check that the port is "
            "reachable from this machine"
        ) from error
