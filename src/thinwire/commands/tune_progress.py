"""What a search shows while it goes on: a line for each trial that ends, and on a terminal how the others stand."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from thinwire.base import units
from thinwire.report.followed import FollowedRun
from thinwire.report.live import in_place, repeated, rewritten
from thinwire.report.progress import Progress
from thinwire.report.tables import duration, figure
from thinwire.tuning.api import finished
from thinwire.tuning.search import Search, Trial


def search_shown(search: Search, total: int) -> AbstractContextManager[None]:
    """Show the search, whichever ranks run its trials."""
    console = Console(stderr=True)
    progress = _SearchProgress(search, total, console)
    progress.begin()
    return rewritten(progress.draw, console) if in_place(console) else repeated(progress.say_new)


class _SearchProgress:
    def __init__(self, search: Search, total: int, console: Console) -> None:
        self._search, self._total, self._console = search, total, console
        self._known = {trial.name for trial in search.trials() if trial.has_ended}
        self._start, self._before = time.monotonic(), len(self._known)
        self._trials: list[Trial] = []
        self._running: dict[Path, FollowedRun] = {}

    def begin(self) -> None:
        job, done = self._search.job, len(self._known)
        workers = f"{job.workers} worker{'s' * (job.workers > 1)}"
        self._say(
            f"{units.count(self._total, 'trial')} of {job.recipe} with {job.method}, {workers} each, for "
            f"{self._search.objective.text}, in {self._search.folder}" + (f"; {done} are done" if done else "")
        )

    def say_new(self) -> None:
        """A line for each trial that has ended since."""
        self._trials = self._search.trials()
        for trial in self._trials:
            if trial.has_ended and trial.name not in self._known:
                self._known.add(trial.name)
                text = f"{len(self._known)}/{self._total} {_line(self._search, trial)}"
                self._say(text + self._best() + self._others() + self._left())

    def draw(self) -> RenderableType:
        """How far the search is, and how far its running trials are."""
        self.say_new()
        going = [trial for trial in self._trials if not trial.has_ended]
        self._running = {
            trial.folder: self._running.get(trial.folder)
            or FollowedRun(trial.folder, Progress(trial.name), from_start=True)
            for trial in going
        }
        parts = [f"{len(self._known)} of {self._total} trials{self._best()}{self._left()}"]
        for run in self._running.values():
            run.refresh()
            parts.append(_stand(run))
        return Text("\n".join(parts), no_wrap=True, overflow="ellipsis")

    def _best(self) -> str:
        ended = finished(self._trials)
        return f"; best {figures(self._search, ended[0])}" if ended else ""

    def _others(self) -> str:
        running = sum(not trial.has_ended for trial in self._trials)
        return f"; {running} running" if running else ""

    def _left(self) -> str:
        done = len(self._known)
        if done >= self._total or done == self._before:
            return ""
        each = (time.monotonic() - self._start) / (done - self._before)
        return f"; {duration(each * (self._total - done))} left"

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _stand(run: FollowedRun) -> str:
    """One running trial in a line."""
    progress = run.progress
    if progress.step is None:
        return f"{progress.title} starting"
    value, metric = progress.figure, progress.metric or ""
    reached = "" if value is None else f", {metric} {figure(metric, value)}"
    return f"{progress.title} step {progress.step:,} of {progress.steps or 0:,}, {progress.phase}{reached}"


def _line(search: Search, trial: Trial) -> str:
    if trial.status != "finished":
        return f"{trial.name} {trial.status}: {trial.reason} ({trial.settings()})"
    return f"{trial.name} {figures(search, trial)} ({trial.settings()})"


def figures(search: Search, trial: Trial) -> str:
    """What a finished trial reached."""
    shown = [f"{search.metric} {figure(search.metric, trial.figures[search.metric])}"]
    shown.append(f"bytes {trial.figures['bytes']:.4f}")
    shown += [f"seconds {trial.figures['seconds']:.0f}"] if "seconds" in trial.figures else []
    return ", ".join(shown) + ("" if search.objective.is_met(trial.loss or 0.0) else ", outside the limits")
