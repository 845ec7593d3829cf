"""The loggers of a run, from its beginning to its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from thinwire.loggers import Logger, Loggers
from thinwire.loggers.log import begin
from thinwire.train.run import Run


@contextmanager
def logged(run: Run, given: Sequence[Logger]) -> Iterator[dict[str, Any]]:
    """On rank 0, let loggers see all records made inside; what the block adds to the dict is the run's summary."""
    summary: dict[str, Any] = {}
    if run.replica.topology.rank != 0 or not given:
        yield summary
        return
    loggers = run.recorder.loggers = Loggers(given)
    config = run.identity | {"world_size": run.replica.topology.world_size}
    start = time.monotonic()
    begin(loggers, run.replica, run.out, config, resumed=run.resumed)
    run.started += time.monotonic() - start  # seconds for some trackers, and not the run's
    try:
        yield summary
    finally:
        try:
            run.recorder.close()  # its last record comes before the end
        finally:
            status = "failed" if not summary else "stopped" if "stopped_at" in summary else "finished"
            loggers.end(status, summary)
