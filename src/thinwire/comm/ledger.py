"""What crossed the wire: bytes, calls and seconds, by link, phase and purpose.

A ledger counts for the node its worker is on: `slow` is what left the node towards other nodes,
`fast` what the workers of its group sent one another. Who sends how much is `topology.py`'s arithmetic.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Entry:
    """Totals of one phase, purpose and link."""

    bytes: int = 0
    calls: int = 0
    seconds: float = 0.0


class Ledger:
    """Counts every collective as it is called."""

    def __init__(self) -> None:
        self.phase = "attach"
        self._entries: dict[tuple[str, str, str], Entry] = defaultdict(Entry)
        self._purpose: str | None = None

    def record(self, purpose: str, *, slow: int, fast: int, seconds: float = 0.0) -> None:
        """One collective's bytes. The seconds go to the slower link it used."""
        for link, sent in (("slow", slow), ("fast", fast)):
            if sent:
                entry = self._entries[self.phase, self._purpose or purpose, link]
                entry.bytes += sent
                entry.calls += 1
                entry.seconds += seconds
                seconds = 0.0

    @contextmanager
    def everything_is(self, purpose: str) -> Iterator[None]:
        """Book whatever is sent inside under one purpose."""
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
        """Bytes that workers of this node sent one another."""
        return self._total("fast").bytes

    @property
    def slow_calls(self) -> int:
        """Collectives that crossed to another node."""
        return self._total("slow").calls

    @property
    def by_phase(self) -> dict[str, dict[str, float]]:
        """Totals of each phase."""
        return self._by(0)

    @property
    def by_purpose(self) -> dict[str, dict[str, float]]:
        """Totals of each purpose."""
        return self._by(1)

    def rows(self) -> list[list[Any]]:
        """Every entry as plain values: phase, purpose, link, bytes, calls, seconds."""
        return [[*key, e.bytes, e.calls, e.seconds] for key, e in sorted(self._entries.items())]

    def load_rows(self, rows: list[list[Any]]) -> None:
        """Go on from what `rows` gave."""
        self._entries.clear()
        for phase, purpose, link, sent, calls, seconds in rows:
            self._entries[phase, purpose, link] = Entry(sent, calls, seconds)

    def summary(self) -> dict[str, Any]:
        """The totals that a run's summary shows."""
        return {
            "slow_bytes": self.slow_bytes,
            "fast_bytes": self.fast_bytes,
            "slow_calls": self.slow_calls,
            "by_phase": self.by_phase,
            "by_purpose": self.by_purpose,
        }

    def _total(self, link: str) -> Entry:
        total = Entry()
        for (_, _, which), entry in self._entries.items():
            if which == link:
                total.bytes += entry.bytes
                total.calls += entry.calls
        return total

    def _by(self, position: int) -> dict[str, dict[str, float]]:
        table: dict[str, dict[str, float]] = {}
        for key, entry in sorted(self._entries.items()):
            row = table.setdefault(key[position], {"slow_bytes": 0, "fast_bytes": 0, "slow_calls": 0, "seconds": 0.0})
            row[f"{key[2]}_bytes"] += entry.bytes
            row["slow_calls"] += entry.calls if key[2] == "slow" else 0
            row["seconds"] += entry.seconds
        return table


def mean_over_nodes(ledgers: list[list[list[Any]]]) -> Ledger:
    """One ledger that holds the mean of several nodes' rows."""
    total = Ledger()
    for rows in ledgers:
        for phase, purpose, link, sent, calls, seconds in rows:
            entry = total._entries[phase, purpose, link]
            entry.bytes += sent
            entry.calls += calls
            entry.seconds += seconds
    for entry in total._entries.values():
        entry.bytes = round(entry.bytes / len(ledgers))
        entry.calls = round(entry.calls / len(ledgers))
        entry.seconds /= len(ledgers)
    return total
