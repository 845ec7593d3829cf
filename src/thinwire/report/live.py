"""Follow runs through the files in their folders, and show them: in place on a terminal, in a line elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.box import ROUNDED
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from thinwire.base import units
from thinwire.base.errors import ThinwireError, printable
from thinwire.base.files import read_json
from thinwire.base.schema import FIGURE, TEXT, wrong
from thinwire.report.page.summary import percent
from thinwire.report.progress import FINISHING, Progress, Tail
from thinwire.report.runs import SUMMARY, UNDER_WAY, Run, all_folders, last_written
from thinwire.report.tables import duration, figure, size

_COLUMNS = ((9, 5), (10, 4))
"""Widths of names, and how the values beside them share what is left: on the left there is more to say."""
_WIDEST, _NARROW = 100, 64
"""Columns beyond which a panel does not grow, and below which its figures are in one column."""
_LEAST_SHARE = 1e-4
_LONG_WORK_S = 3.0
_SILENT_S, _SILENT_STEPS, _SILENT_WORK_S = 20.0, 5, 600.0


def panel(progress: Progress, *, written: float | None, width: int, end: str | None = None) -> RenderableType:
    """A panel of a run whose records were last written at this time, and of how it ended if it has."""
    quiet_s = 0.0 if written is None else max(0.0, time.time() - written)
    narrow = width < _NARROW
    phase = ("phase", end or _doing(progress, quiet_s))
    parts: list[RenderableType] = [_bar(progress, narrow=narrow), _grid([phase], 1)]
    if progress.step is not None:
        parts.append(_grid([(name, value or "–") for name, value in _figures(progress)], 1 if narrow else 2))
    if end is None and written is not None and is_silent(progress, quiet_s):
        parts.append(Text(silence(written, quiet_s), style="yellow"))
    return Panel(
        Group(*parts),
        title=Text(_title(progress)),
        title_align="left",
        box=ROUNDED,
        border_style="dim",
        width=min(width, _WIDEST),
    )


def line(progress: Progress) -> str:
    """The same in one line, for a log."""
    if progress.step is None:
        return f"{progress.title}  starting"
    parts = [progress.title, _doing(progress, 0.0), f"step {_step(progress, '/')}"]
    shown = {name: value for name, value in _figures(progress) if value}
    parts += [f"{name} {value}" for name, value in shown.items() if name not in ("speed", "samples")]
    parts += [shown[name] for name in ("speed", "samples") if name in shown]
    return "  ".join(part for part in [*parts, _left(progress)] if part)


def is_silent(progress: Progress, quiet_s: float) -> bool:
    """Whether nothing was heard for longer than the run's steps, or what it does now, explain."""
    if progress.work is not None:
        return quiet_s > _SILENT_WORK_S
    speed = progress.steps_per_s
    return quiet_s > max(_SILENT_S, _SILENT_STEPS / speed if speed else 0.0)


def silence(written: float, quiet_s: float) -> str:
    """Since when nothing was heard."""
    when = time.strftime("%H:%M:%S" if quiet_s < 43_200 else "%Y-%m-%d %H:%M", time.localtime(written))
    return f"silent since {when}, {duration(quiet_s)}: it may have ended, or wait for something"


def _grid(rows: list[tuple[str, str]], across: int) -> Table:
    grid = Table.grid(padding=(0, 2), expand=True)
    for label, ratio in _COLUMNS[:across]:
        grid.add_column(style="dim", no_wrap=True, width=label)
        grid.add_column(ratio=ratio, no_wrap=True, overflow="ellipsis")
    for first in range(0, len(rows), across):
        grid.add_row(*(Text(cell) for row in rows[first : first + across] for cell in row))
    return grid


def _figures(progress: Progress) -> list[tuple[str, str]]:
    """Names and values; those that are not known yet are empty, so that others stay in their places."""
    loss, value, sent, share = progress.loss, progress.figure, progress.sent, progress.share
    speed, samples, waiting, rank = progress.steps_per_s, progress.samples_per_s, progress.waiting, progress.mean_rank
    metric = progress.metric or "metric"
    of_usual = ""
    if share is not None:
        shown = f"less than {percent(_LEAST_SHARE)}" if 0 < share < _LEAST_SHARE else percent(share)
        of_usual = f", {shown} of fp32 DDP"
    found = [
        ("loss", "" if loss is None else f"{loss:.4f}"),
        (metric, "" if value is None else f"{figure(metric, value)} at step {progress.evaluation['step']:,}"),
        ("slow link", "" if sent is None else size(sent) + of_usual),
        ("waiting", "" if waiting is None else f"{100 * waiting:.0f} % of the time"),
        ("speed", "" if speed is None else f"{_rounded(speed)} steps/s"),
        ("samples", "" if samples is None else f"{_rounded(samples)} samples/s"),
    ]
    return found if rank is None else [*found, ("mean rank", f"{rank:.1f}")]


def _doing(progress: Progress, quiet_s: float) -> str:
    """The phase, and what is being done that is no step."""
    if progress.step is None:
        return "starting"
    if progress.is_stopped:
        return "stopped and saved"
    if (work := progress.work) is None:
        return progress.phase
    far = f", {work['done']} of {work['of']} layers" if work.get("of") else ""
    since = f", {duration(quiet_s)}" if quiet_s > _LONG_WORK_S else ""
    return f"{progress.phase}: {work['what']}{far}{since}"


def _title(progress: Progress) -> str:
    begun = progress.start
    if not begun:
        return progress.title
    workers = units.count(begun["world_size"], "worker")
    return f"{progress.title}, {begun['recipe']} on {workers}"


def _bar(progress: Progress, *, narrow: bool) -> RenderableType:
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True)
    if not narrow:
        grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    bar = ProgressBar(total=progress.steps or 1, completed=progress.step or 0, complete_style="green")
    step, left = Text(f"step {_step(progress, ' of ')}"), Text(_left(progress))
    grid.add_row(*((step, left) if narrow else (step, bar, left)))
    return grid


def _step(progress: Progress, of: str) -> str:
    steps = "" if progress.steps is None else f"{of}{progress.steps:,}"
    return f"{progress.step or 0:,}{steps}"


def _left(progress: Progress) -> str:
    if progress.phase == FINISHING or progress.is_stopped or progress.left_s is None:
        return ""
    return f"{duration(progress.left_s)} left"


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# Runs that are followed through their files.

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
                    name = str(folder.relative_to(top)) if folder != top else folder.resolve().name
                    self._runs[folder] = FollowedRun(folder, Progress(printable(name)), from_start=True)

    def is_over(self, runs: list[FollowedRun]) -> bool:
        """Whether all runs have ended, and no other is likely to begin."""
        if not runs or any(run.end is None for run in runs):
            return False
        if [run.folder for run in runs] == self._folders:
            return True
        newest = max(last_written(run.folder) for run in runs)
        tables = [folder / "comparison.json" for folder in self._folders]  # with which a comparison ends
        is_compared = all(table.is_file() and table.stat().st_mtime >= newest for table in tables)
        return is_compared or time.time() - newest > NEXT_S


# Shown while they go on.

EVERY_S = 1.0
_OFTEN_S, _SELDOM_S, _LINES_SO_FAR = 5.0, 60.0, 10
"""A log gets a line every 5 s at first, and every minute of a long run."""


def in_place(console: Console) -> bool:
    """Whether lines can be rewritten: also variables that force colours into a file make a console a terminal."""
    return console.is_terminal and not console.is_dumb_terminal and console.file.isatty()


@contextmanager
def repeated(show: Callable[[], None], every_s: float = EVERY_S) -> Iterator[None]:
    """Call `show` again and again in a thread, and once more at the end."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(every_s):
            show()
        show()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def rewritten(draw: Callable[[], RenderableType], console: Console) -> Iterator[None]:
    """Draw in place, again and again; nothing of it stays."""
    with (
        Live(draw(), console=console, auto_refresh=False, transient=True) as live,
        repeated(lambda: live.update(draw(), refresh=True)),
    ):
        yield


@contextmanager
def following(run: FollowedRun, console: Console) -> Iterator[None]:
    """Show a run: its panel on a terminal, lines elsewhere."""
    if in_place(console):

        def draw() -> RenderableType:
            run.refresh()
            return run.panel(console.width)

        with rewritten(draw, console):
            yield
    else:
        lines = Lines(run, console)
        with repeated(lines.show):
            yield


class Lines:
    """Says how far a run is when its phase changes, and otherwise in intervals that grow with the run."""

    def __init__(self, run: FollowedRun, console: Console) -> None:
        self._run, self._console = run, console
        self._began = self._last = time.monotonic()
        self._said: tuple[str, int | None] = ("", None)

    def show(self) -> None:
        """Print a line if one is due and there is something new."""
        self._run.refresh()
        progress, now = self._run.progress, time.monotonic()
        news = (progress.phase, progress.step)
        interval = min(_SELDOM_S, max(_OFTEN_S, (now - self._began) / _LINES_SO_FAR))
        due = news[0] != self._said[0] or now - self._last >= interval
        if progress.step is not None and news != self._said and due:
            self._said, self._last = news, now
            self._console.print(line(progress), highlight=False, soft_wrap=True, markup=False)


# As a page shows them: with what their records say so far in place of a summary.

_OF_START = ("recipe", "method", "config", "seed", "world_size", "metric", "split", "batch", "parameters_full")
_IF_KNOWN = ("optimizer", "lr", "weight_decay", "usual_optimizer", "usual_lr", "split_size")


def so_far(run: FollowedRun) -> Run | None:
    """The run at its last evaluation; None before the first, or if its records cannot be used."""
    start, last = run.progress.start, run.progress.evaluation
    if not start or not last or any(name not in start for name in _OF_START):
        return None
    evaluate = {"slow_bytes": last.get("evaluate_bytes", 0)}
    summary = {
        UNDER_WAY: True,
        **{name: start[name] for name in (*_OF_START, *_IF_KNOWN) if name in start},
        "steps": last["step"],
        "length": start["steps"],
        start["metric"]: last.get(start["metric"]),
        "wall_s": last.get("wall_s"),
        "time": last.get("time"),
        "traffic": {"slow_bytes": last["slow_bytes"], "by_purpose": {"evaluate": evaluate}},
        "traffic_vs_allreduce_fp32": run.progress.share,
    }
    if wrong(summary, SUMMARY | {start["metric"]: FIGURE, "config": {}}):
        return None
    return Run(folder=run.folder, summary=summary)


def in_words(run: FollowedRun) -> str:
    """How far it is, or since when nothing was heard."""
    if run.is_silent and run.written is not None:
        return f"{run.progress.title}: {silence(run.written, time.time() - run.written)}"
    return line(run.progress).replace("  ", ", ")  # a browser shows several spaces as one
