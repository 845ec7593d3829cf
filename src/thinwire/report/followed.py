"""Runs that are followed from outside, through the files in their folders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import RenderableType

from thinwire.base.errors import ThinwireError, printable
from thinwire.base.files import read_json
from thinwire.base.schema import TEXT
from thinwire.report.folders import all_folders, last_written
from thinwire.report.panel import is_silent, panel
from thinwire.report.progress import Progress
from thinwire.report.tail import Tail

FINISHED, STOPPED = "finished", "stopped and saved"
_RUNNING = "running"
_LOOK_EVERY_S = 3.0
NEXT_S = 120.0
"""How long a folder of several runs may be idle between two of them."""


class FollowedRun:
    """A run, as its records have it so far."""

    def __init__(self, folder: Path, progress: Progress, *, from_start: bool = False) -> None:
        self.folder, self.progress = folder, progress
        self._tail = Tail(folder / "records.jsonl", from_start=from_start)

    def refresh(self) -> None:
        """Read what is new."""
        found = self._tail.read()
        if self._tail.begins_anew:
            self.progress.reset()
        for record in found:
            self.progress.update(record)

    @property
    def written(self) -> float | None:
        """When its records were last written."""
        return self._tail.written

    @property
    def is_silent(self) -> bool:
        """Whether it should have written something."""
        return self.written is not None and is_silent(self.progress, time.time() - self.written)

    @property
    def end(self) -> str | None:
        """How it ended, in words; None while it goes on, or was never heard of again."""
        if (self.folder / "summary.json").is_file():
            return FINISHED
        if (self.folder / "trial.json").is_file() and (status := self._status()) != _RUNNING:
            return status
        return STOPPED if self.progress.is_stopped else None

    def _status(self) -> str:
        try:
            return read_json(self.folder / "trial.json", "", {"status": TEXT})["status"]
        except (ThinwireError, OSError):  # it is replaced at this moment
            return _RUNNING

    def panel(self, width: int) -> RenderableType:
        """Its panel on a terminal of this width."""
        return panel(self.progress, written=self.written, width=width, end=self.end)


class Followed:
    """All runs in some folders and below, also those that begin later."""

    def __init__(self, folders: Iterable[Path], find: Callable[[Path], Iterable[Path]] = all_folders) -> None:
        self._folders, self._find = list(folders), find
        self._runs: dict[Path, FollowedRun] = {}
        self._looked = -_LOOK_EVERY_S

    def refresh(self) -> list[FollowedRun]:
        """Look for new runs, and read what is new of those that have not finished and of the newest; that is first."""
        if time.monotonic() - self._looked > _LOOK_EVERY_S:
            self._look()
        runs = sorted(self._runs.values(), key=lambda run: (-(run.written or 0.0), str(run.folder)))
        for run in runs:
            if run is runs[0] or run.end != FINISHED:
                run.refresh()
        return runs

    def _look(self) -> None:
        self._looked = time.monotonic()
        for top in self._folders:
            for folder in self._find(top):
                if folder not in self._runs:
                    self._runs[folder] = FollowedRun(folder, Progress(_name(folder, top)), from_start=True)

    def is_over(self, runs: list[FollowedRun]) -> bool:
        """Whether all runs have ended, and no other is likely to begin."""
        if not runs or any(run.end is None for run in runs):
            return False
        if [run.folder for run in runs] == self._folders:
            return True
        newest = max(last_written(run.folder) for run in runs)
        return time.time() - newest > NEXT_S or self._is_compared(newest)

    def _is_compared(self, newest: float) -> bool:
        """A comparison ends with its table."""
        tables = [folder / "comparison.json" for folder in self._folders]
        return all(table.is_file() and table.stat().st_mtime >= newest for table in tables)


def _name(folder: Path, top: Path) -> str:
    return printable(str(folder.relative_to(top)) if folder != top else folder.resolve().name)
