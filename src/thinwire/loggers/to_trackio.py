"""Trackio."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Any

from thinwire.loggers.tracker import PROJECT, Record, Tracker, results, settings


class Trackio(Tracker):
    """A run in the project `place`; on this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set."""

    name = "trackio"
    _run: Any

    def begin(self, record: Record) -> None:
        import trackio

        # Runs are found again by their names, so these have the group's in them.
        earlier = self.earlier(record)
        name = earlier or "/".join(part for part in (record["group"], record["name"]) if part)
        with redirect_stdout(sys.stderr):  # what the command prints is for other programs too
            self._run = trackio.init(
                project=self.place or PROJECT,
                name=name,
                group=record["group"] or None,
                config=settings(record),
                resume="allow" if earlier else "never",
                embed=False,
            )
        self.remember(record, self._run.name)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def end(self, record: Record) -> None:
        if found := results(record):
            self.write(record["step"], found)
        with redirect_stdout(sys.stderr):
            self._run.finish()
