"""What crossed the wire: bytes, calls and seconds, by link, phase and purpose.

A ledger counts for the node its worker is on: `slow` is what left the node towards other nodes,
`fast` what the workers of its group sent one another. `topology.py` computes who sends how much.
It also holds the time each phase took, and the kernel's own count where an interface is watched:
`THINWIRE_INTERFACE=eth0` makes every run read it at each change of phase. That counts everything that leaves by the
interface, including headers, acknowledgements and other programs' packets: use one that is dedicated to the job.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.base import units
from thinwire.base.errors import ConfigError
from thinwire.comm.backends import INTERFACE
from thinwire.comm.times import Clock, Mark, Times, mean_times
from thinwire.comm.topology import Sent

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
                f"`{INTERFACE}`={name!r}: there is no such interface, choose from: {', '.join(sorted(known))}"
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
    name = os.environ.get(INTERFACE)
    return Interface(name) if name else None


def _rows() -> dict[str, list[str]]:
    if not _TABLE.is_file():
        raise ConfigError(f"`{INTERFACE}` is set, but there is no {_TABLE} here: counters are read on Linux only")
    lines = _TABLE.read_text(encoding="utf-8").splitlines()[2:]
    return {name.strip(): values.split() for name, _, values in (line.partition(":") for line in lines)}


def _resent() -> int:
    """How many TCP segments were sent again; 0 where the kernel does not say."""
    if not _PROTOCOLS.is_file():
        return 0
    rows = [line.split() for line in _PROTOCOLS.read_text(encoding="utf-8").splitlines() if line.startswith("Tcp:")]
    return int(dict(zip(*rows, strict=True))["RetransSegs"])


@dataclass
class Entry:
    """Totals of one phase, purpose and link."""

    bytes: int = 0
    calls: int = 0
    seconds: float = 0.0


class Ledger:
    """Counts every collective as it is called."""

    def __init__(self, clock: Clock | None = None, interface: Interface | None = None) -> None:
        self.clock = clock or Clock()
        self.times = Times(self.clock)
        self._entries: dict[tuple[str, str, str], Entry] = defaultdict(Entry)
        self._purpose: str | None = None
        self._interface = interface
        self._kernel: dict[str, Counted] = {}
        self._kernel_before = interface.read() if interface else Counted()
        self._phase = "attach"
        self.times.enter(self._phase)

    @property
    def phase(self) -> str:
        """The current phase."""
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        self._read_kernel()
        self.times.enter(name)
        self._phase = name

    def record(self, purpose: str, sent: Sent, calls: int = 1, times: int = 1) -> None:
        """Add what a collective sends, made of `calls` calls, `times` times."""
        for link, size in (("slow", sent.slow), ("fast", sent.fast)):
            if size:
                entry = self._entry(purpose, link)
                entry.bytes += size * times
                entry.calls += calls * times

    def waited(self, purpose: str, sent: Sent, start: Mark, end: Mark) -> None:
        """Add the time a worker waited for a collective, to the slower link it used."""
        if sent.slow_queue or sent.fast_queue:
            self.times.waited(start, end, self._entry(purpose, "slow" if sent.slow_queue else "fast"))

    @contextmanager
    def booked_under(self, purpose: str) -> Iterator[None]:
        """Record everything sent inside under one purpose."""
        before, self._purpose = self._purpose, purpose
        try:
            yield
        finally:
            self._purpose = before

    @property
    def slow_bytes(self) -> int:
        """Bytes that left this worker's node."""
        return self._total("slow").bytes

    @property
    def fast_bytes(self) -> int:
        """Bytes sent between workers of this node."""
        return self._total("fast").bytes

    def slow_bytes_for(self, purpose: str) -> int:
        """Bytes that left this worker's node for one purpose."""
        return sum(e.bytes for (_, what, link), e in self._entries.items() if what == purpose and link == "slow")

    @property
    def waiting(self) -> float:
        """Seconds this worker has waited for collectives, as far as they are known now: it does not wait for a GPU."""
        return sum(entry.seconds for entry in self._entries.values())

    @property
    def slow_calls(self) -> int:
        """Collectives that crossed to another node."""
        return self._total("slow").calls

    @property
    def wire_share(self) -> float:
        """The share of the time so far in which this worker waited for the wire; a GPU's last steps may be missing."""
        return self.waiting / elapsed if (elapsed := self.times.elapsed) else 0.0

    @property
    def by_phase(self) -> dict[str, dict[str, float]]:
        """Totals of each phase, and the kernel's where an interface is watched."""
        table = self._by(0)
        for phase, counted in self.kernel.items():
            row = table.setdefault(phase, _row())
            row["kernel_bytes"], row["kernel_packets"], row["kernel_resent"] = counted
        return table

    @property
    def by_purpose(self) -> dict[str, dict[str, float]]:
        """Totals of each purpose."""
        return self._by(1)

    @property
    def kernel(self) -> dict[str, Counted]:
        """What the watched interface sent in each phase."""
        self._read_kernel()
        return dict(self._kernel)

    @property
    def split(self) -> dict[str, dict[str, float]]:
        """For each phase: steps, seconds, and what they were spent on."""
        self.clock.settle()
        waiting: dict[str, float] = defaultdict(float)
        for (phase, _, _), entry in self._entries.items():
            waiting[phase] += entry.seconds
        return self.times.split(waiting)

    def state(self) -> dict[str, Any]:
        """Everything as plain values: rows are phase, purpose, link, bytes, calls, seconds."""
        self.clock.settle()
        rows = [[*key, e.bytes, e.calls, e.seconds] for key, e in sorted(self._entries.items())]
        return {"rows": rows, "times": self.times.state(), "kernel": {k: list(v) for k, v in self.kernel.items()}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        self._entries.clear()
        for phase, purpose, link, sent, calls, seconds in state["rows"]:
            self._entries[phase, purpose, link] = Entry(sent, calls, seconds)
        self.times.load_state(state["times"])
        if self._interface is not None:
            self._kernel = {phase: Counted(*counted) for phase, counted in state["kernel"].items()}
            self._kernel_before = self._interface.read()

    def summary(self) -> dict[str, Any]:
        """The totals that a run's summary shows."""
        return {
            "slow_bytes": self.slow_bytes,
            "fast_bytes": self.fast_bytes,
            "slow_calls": self.slow_calls,
            "by_phase": self.by_phase,
            "by_purpose": self.by_purpose,
        }

    def __str__(self) -> str:
        """A table of what each phase and purpose sent over which link."""
        head = ["phase", "purpose", "slow link", "fast link", "calls"]
        cells: dict[tuple[str, str], dict[str, Entry]] = defaultdict(dict)
        for (phase, purpose, link), entry in sorted(self._entries.items()):
            cells[phase, purpose][link] = entry
        rows = [[*key, *_cells(links)] for key, links in cells.items()]
        rows.append(["all", "", *_cells({link: self._total(link) for link in ("slow", "fast")})])
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
        return "\n".join(line.rstrip() for line in lines)

    def __repr__(self) -> str:
        return f"<Ledger: {units.size(self.slow_bytes)} left the node, {units.size(self.fast_bytes)} stayed inside>"

    def booked_as(self, purpose: str) -> str:
        """The purpose to record under now."""
        return self._purpose or purpose

    def _entry(self, purpose: str, link: str) -> Entry:
        return self._entries[self._phase, self.booked_as(purpose), link]

    def _read_kernel(self) -> None:
        """Add what the interface sent since the last reading to the current phase."""
        if self._interface is None:
            return
        now, so_far = self._interface.read(), self._kernel.get(self._phase, Counted())
        new = (n - b for n, b in zip(now, self._kernel_before, strict=True))
        self._kernel[self._phase] = Counted(*(total + more for total, more in zip(so_far, new, strict=True)))
        self._kernel_before = now

    def _total(self, link: str) -> Entry:
        total = Entry()
        for (_, _, which), entry in self._entries.items():
            if which == link:
                total.bytes += entry.bytes
                total.calls += entry.calls
        return total

    def _by(self, position: int) -> dict[str, dict[str, float]]:
        self.clock.settle()
        table: dict[str, dict[str, float]] = {}
        for key, entry in sorted(self._entries.items()):
            row = table.setdefault(key[position], _row())
            row[f"{key[2]}_bytes"] += entry.bytes
            row["slow_calls"] += entry.calls if key[2] == "slow" else 0
            row["seconds"] += entry.seconds
        return table


def _cells(links: dict[str, Entry]) -> list[str]:
    """A row's sizes and calls; a call that used both links is one."""
    none = Entry()
    slow, fast = links.get("slow", none), links.get("fast", none)
    return [units.size(slow.bytes), units.size(fast.bytes), f"{max(slow.calls, fast.calls):,}"]


def _row() -> dict[str, float]:
    return {"slow_bytes": 0, "fast_bytes": 0, "slow_calls": 0, "seconds": 0.0}


def mean_over_nodes(states: list[dict[str, Any]]) -> Ledger:
    """One ledger with the mean of several nodes' ledgers, given as states."""
    rows: dict[tuple[str, str, str], list[list[float]]] = defaultdict(list)
    for state in states:
        for *key, sent, calls, seconds in state["rows"]:
            rows[tuple(key)].append([sent, calls, seconds])
    count, total = len(states), Ledger()
    total.phase = ""  # its own time does not count
    means = [[*key, *(sum(column) / count for column in zip(*values, strict=True))] for key, values in rows.items()]
    total.load_state(
        {
            "rows": [[*key, round(sent), round(calls), seconds] for *key, sent, calls, seconds in means],
            "times": mean_times([state["times"] for state in states]),
            "kernel": {},
        }
    )
    kernel = mean_counted([state["kernel"] for state in states])
    total._kernel = {phase: Counted(*counted) for phase, counted in kernel.items()}
    return total
