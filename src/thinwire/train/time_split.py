"""Where the time of a run went on one worker: parts that add up to all of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.comm.ledger import Ledger

_SUMS = ("seconds", "compute", "wire", "decomposition")


class TimeSplit:
    """Adds evaluating and finishing to what the ledger knows; waiting for the wire is always a part of its own."""

    def __init__(self, ledger: Ledger, evaluating: float = 0.0) -> None:
        self._ledger = ledger
        self.evaluating = evaluating
        """Seconds of evaluation so far."""
        self._after_steps: dict[str, float] | None = None

    @property
    def in_steps(self) -> bool:
        """Whether there are steps to come."""
        return self._after_steps is None

    @contextmanager
    def evaluates(self) -> Iterator[None]:
        """Charge what is inside to evaluation."""
        start, waited = time.perf_counter(), self._waited()
        yield
        self.evaluating += max(0.0, time.perf_counter() - start - (self._waited() - waited))

    def end_steps(self) -> None:
        """The last step is over: what follows is finishing."""
        self._after_steps = self._sums()

    def table(self) -> dict[str, float]:
        """Seconds by part, from attach until now."""
        now = self._sums()
        end = self._after_steps or now
        since = {name: now[name] - end[name] for name in now}
        parts = {
            "computing": end["compute"],
            "waiting": now["wire"],
            "method": end["decomposition"] + end["method"],
            "evaluating": now["evaluating"],
            "finishing": max(0.0, since["seconds"] - since["wire"] - since["evaluating"]),
        }
        other = max(0.0, now["seconds"] - sum(parts.values()))
        return {name: round(seconds, 3) for name, seconds in (parts | {"other": other}).items()}

    def _sums(self) -> dict[str, float]:
        rows = self._ledger.split.values()
        known = {name: sum(row[name] for row in rows) for name in _SUMS}
        return known | {"method": self._ledger.times.after_steps, "evaluating": self.evaluating}

    def _waited(self) -> float:
        self._ledger.clock.settle()
        return self._ledger.waiting
