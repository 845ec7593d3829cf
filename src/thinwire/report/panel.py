"""How far a run is, for people: a panel on a terminal, one line elsewhere."""

from __future__ import annotations

import time

from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from thinwire.base import units
from thinwire.report.page.summary import percent
from thinwire.report.progress import FINISHING, Progress
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
    of_usual = "" if share is None else f", {_percent(share)} of fp32 DDP"
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


def _percent(share: float) -> str:
    return percent(share) if share >= _LEAST_SHARE or share == 0 else f"less than {percent(_LEAST_SHARE)}"
