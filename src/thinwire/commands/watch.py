"""`thinwire watch`."""

from __future__ import annotations

import time
from pathlib import Path

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from thinwire.base.errors import printable
from thinwire.commands.showing import closing_line
from thinwire.report.live import EVERY_S, Followed, FollowedRun, Lines, in_place, silence
from thinwire.report.runs import look

_MOST_PANELS = 4
_PANEL_LINES = 8
_NONE_YET = "no run yet; waiting for one, Ctrl-C ends"


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path, exists=True, file_okay=False))
def watch(folder: Path) -> None:
    """Follow the run in DIR, or the newest of the runs below it, from another terminal.

    It reads the runs' own records and does not touch them. It ends when all runs have ended; Ctrl-C ends it at any
    time, and the runs go on.
    """
    console, followed = Console(), Followed([folder])
    try:
        runs = _in_place(followed, console) if in_place(console) else _in_lines(followed, console)
    except KeyboardInterrupt:
        return
    for run in reversed(runs[:_MOST_PANELS]):
        _say(console, _ending(run))


def _in_place(followed: Followed, console: Console) -> list[FollowedRun]:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            runs = followed.refresh()
            if followed.is_over(runs):
                return runs
            live.update(_panels(runs, console), refresh=True)
            time.sleep(EVERY_S)


def _panels(runs: list[FollowedRun], console: Console) -> RenderableType:
    """As many as fit: those that go on, or the newest one."""
    if not runs:
        return Text(_NONE_YET)
    going = [run for run in runs if run.end is None and not run.is_silent]
    most = max(1, min(_MOST_PANELS, (console.height - 1) // _PANEL_LINES))
    shown = (going or runs[:1])[:most]
    parts: list[RenderableType] = [run.panel(console.width) for run in shown]
    rest = [_others([run for run in runs if run not in shown])]
    if all(run.end for run in runs):
        rest.append("all runs have ended; waiting for another one, Ctrl-C ends")
    parts += [Text(text, style="dim", no_wrap=True, overflow="ellipsis") for text in rest if text]
    return Group(*parts)


def _others(runs: list[FollowedRun]) -> str:
    """How many others there are, by how they stand."""
    states = [run.end or ("silent" if run.is_silent else "running") for run in runs]
    counts = {state: states.count(state) for state in dict.fromkeys(states)}
    return "besides: " + ", ".join(f"{count} {state}" for state, count in counts.items()) if counts else ""


def _in_lines(followed: Followed, console: Console) -> list[FollowedRun]:
    """Lines of the newest run that goes on; one when it falls silent."""
    lines: dict[Path, Lines] = {}
    silent: set[Path] = set()
    waits = False
    while True:
        runs = followed.refresh()
        if followed.is_over(runs):
            return runs
        if not runs and not waits:
            waits = True
            _say(console, _NONE_YET)
        for run in [run for run in runs if run.end is None][:1]:
            lines.setdefault(run.folder, Lines(run, console)).show()
            if run.is_silent and run.folder not in silent and run.written is not None:
                _say(console, f"{run.progress.title}  {silence(run.written, time.time() - run.written)}")
            silent = (silent | {run.folder}) if run.is_silent else (silent - {run.folder})
        time.sleep(EVERY_S)


def _ending(run: FollowedRun) -> str:
    title, found = run.progress.title, look(run.folder)
    if found.run is not None:
        return closing_line(title, found.run.summary)
    at = "" if found.last_step is None else f" after step {found.last_step:,}"
    return f"{title}: {run.end}{at}" + (f"; {printable(found.note)}" if found.note else "")


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
