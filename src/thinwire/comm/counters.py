"""The kernel's own count of what an interface sent, to compare with the ledger.

`THINWIRE_INTERFACE=eth0` makes every run read it at each change of phase. It counts everything that leaves by that
interface, including headers, acknowledgements and other programs' packets: use an interface dedicated to the job.
"""

import os
from pathlib import Path
from typing import NamedTuple

from thinwire.base.errors import ConfigError

VARIABLE = "THINWIRE_INTERFACE"
LINK = "THINWIRE_LINK"
"""The rate of each node's link, such as 100 Mbit/s, if somebody knows it: for the run's summary."""
HEADERS = 66
"""Bytes of a full TCP packet that are not payload: Ethernet 14, IPv4 20, TCP 20 and its timestamps 12."""

# Of the network namespace this process is in.
_TABLE, _PROTOCOLS = Path("/proc/net/dev"), Path("/proc/net/snmp")
_SENT_BYTES, _SENT_PACKETS = 8, 9


class Counted(NamedTuple):
    """What an interface has sent so far."""

    bytes: int = 0
    packets: int = 0
    resent: int = 0
    """Packets among them that TCP sent again, over all interfaces: some were lost, or answered late."""


class Interface:
    """One network interface of this machine."""

    def __init__(self, name: str) -> None:
        self.name = name
        if name not in (known := _rows()):
            raise ConfigError(
                f"`{VARIABLE}`={name!r}: there is no such interface, choose from: {', '.join(sorted(known))}"
            )

    def read(self) -> Counted:
        """The kernel's counters now."""
        row = _rows()[self.name]
        return Counted(int(row[_SENT_BYTES]), int(row[_SENT_PACKETS]), _resent())


def sent_by_interface() -> dict[str, int]:
    """Bytes that each interface has sent so far; empty where the kernel does not say."""
    return {name: int(row[_SENT_BYTES]) for name, row in _rows().items()} if _TABLE.is_file() else {}


def mean_counted(states: list[dict[str, list[int]]]) -> dict[str, list[int]]:
    """The mean of several nodes' counts, by phase."""
    mean = {}
    for name in dict.fromkeys(name for state in states for name in state):
        rows = [state[name] for state in states if name in state]
        mean[name] = [round(sum(column) / len(states)) for column in zip(*rows, strict=True)]
    return mean


def watched() -> Interface | None:
    """The interface that the environment names, if it names one."""
    name = os.environ.get(VARIABLE)
    return Interface(name) if name else None


def _rows() -> dict[str, list[str]]:
    if not _TABLE.is_file():
        raise ConfigError(f"`{VARIABLE}` is set, but there is no {_TABLE} here: counters are read on Linux only")
    lines = _TABLE.read_text(encoding="utf-8").splitlines()[2:]
    return {name.strip(): values.split() for name, _, values in (line.partition(":") for line in lines)}


def _resent() -> int:
    """How many TCP segments were sent again; 0 where the kernel does not say."""
    if not _PROTOCOLS.is_file():
        return 0
    rows = [line.split() for line in _PROTOCOLS.read_text(encoding="utf-8").splitlines() if line.startswith("Tcp:")]
    return int(dict(zip(*rows, strict=True))["RetransSegs"])
