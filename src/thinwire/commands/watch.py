"""What commands show while they work, what a run shows and ends with, and `thinwire watch`."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from thinwire.base.errors import printable
from thinwire.launch.jobs import Job
from thinwire.report.live import EVERY_S, Followed, FollowedRun, Lines, following, in_place, silence
from thinwire.report.page.summary import percent
from thinwire.report.progress import Progress
from thinwire.report.runs import look
from thinwire.report.tables import best_epoch, duration, examples, figure, ratio, size

_MOST_PANELS = 4
_PANEL_LINES = 8
_NONE_YET = "no run yet; waiting for one, Ctrl-C ends"
_PARTS = {
    "computing": "computing",
    "waiting": "waiting for the wire",
    "method": "the method's own work",
    "evaluating": "evaluating",
    "finishing": "finishing",
    "other": "other",
}


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
        print_line(console, _ending(run))


def _in_place(followed: Followed, console: Console) -> list[FollowedRun]:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while not followed.is_over(runs := followed.refresh()):
            live.update(_panels(runs, console), refresh=True)
            time.sleep(EVERY_S)
    return runs


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
    while not followed.is_over(runs := followed.refresh()):
        if not runs and not waits:
            waits = True
            print_line(console, _NONE_YET)
        for run in [run for run in runs if run.end is None][:1]:
            lines.setdefault(run.folder, Lines(run, console)).show()
            if run.is_silent and run.folder not in silent and run.written is not None:
                print_line(console, f"{run.progress.title}  {silence(run.written, time.time() - run.written)}")
            silent = (silent | {run.folder}) if run.is_silent else (silent - {run.folder})
        time.sleep(EVERY_S)
    return runs


def _ending(run: FollowedRun) -> str:
    title, found = run.progress.title, look(run.folder)
    if found.run is not None:
        return closing_line(title, found.run.summary)
    at = "" if found.last_step is None else f" after step {found.last_step:,}"
    return f"{title}: {run.end}{at}" + (f"; {printable(found.note)}" if found.note else "")


def print_line(console: Console, text: str) -> None:
    """Print a text as it is, whatever is in it."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def shown(job: Job, title: str, console: Console, *, silent: bool) -> AbstractContextManager[None]:
    """Show the job while it runs: rank 0's records are read, so it makes no difference which process runs it."""
    if silent or (job.resume and (job.out / "summary.json").is_file()):
        return nullcontext()
    progress = Progress(title, job.trained.steps, job.trained.task.metric)
    return following(FollowedRun(job.out, progress), console)


def print_summary(summary: dict[str, Any], folder: Path) -> None:
    """The result of a run, in a few lines."""
    if "stopped_at" in summary:
        click.echo(
            f"saved after step {summary['stopped_at']} of {summary['steps']} in {folder}; continue with --resume"
        )
        return
    metric = summary["metric"]
    before = figure(metric, summary[f"{metric}_before_truncation"])
    share = ratio(summary["traffic_vs_allreduce_fp32"])
    lines = [
        f"{metric} {figure(metric, summary[metric])} on {examples(summary)} ({before} before truncation)",
        *best_epoch(summary),
        f"slow link {size(_sent(summary))} without evaluation, {share} of all-reduce fp32",
        f"model {summary['parameters_final']:,} of {summary['parameters_full']:,} parameters, "
        f"{100 * summary['trainable_share']:.1f} % of the full ones trained at the end",
        *_spent(summary),
        f"records.jsonl, summary.json{' and model/' if (folder / 'model').is_dir() else ''} are in {folder}",
    ]
    click.echo("\n".join(lines))


def closing_line(title: str, summary: dict[str, Any]) -> str:
    """One run of several, when it is over."""
    if "stopped_at" in summary:
        return f"{title}: saved after step {summary['stopped_at']} of {summary['steps']}"
    metric, share = summary["metric"], summary.get("traffic_vs_allreduce_fp32")
    of_usual = "" if share is None else f", {percent(share)} of fp32 DDP"
    seconds = summary.get("wall_s")  # as in the table: without finishing
    lasted = "" if seconds is None else f", {duration(seconds)}"
    return f"{title}: {metric} {figure(metric, summary[metric])}, slow link {size(_sent(summary))}{of_usual}{lasted}"


def _spent(summary: dict[str, Any]) -> list[str]:
    """Where the time went; summaries of earlier versions do not say."""
    if not (parts := summary.get("spent")) or not (whole := sum(parts.values())):
        return []
    shares = ", ".join(f"{_PARTS[name]} {100 * parts[name] / whole:.0f} %" for name in _PARTS if name in parts)
    return [f"time {duration(whole)}: {shares}"]


def _sent(summary: dict[str, Any]) -> float:
    traffic = summary["traffic"]
    return traffic["slow_bytes"] - traffic["by_purpose"].get("evaluate", {}).get("slow_bytes", 0)


class Doing:
    """One changing line on a terminal, single lines on stderr elsewhere."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._status = console.status("") if in_place(console) and not quiet else None
        self._said = ""

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self, what: str, done: int = 0, of: int = 0) -> None:
        """Show what is being done, and how far it is; how far it is does not make a new line."""
        if self._status is not None:
            self._status.update(Text(f"{what}{f', {done + 1} of {of}' if of else ''} …"))
        elif not self._quiet and what != self._said:
            click.echo(f"{what} …", err=True)
        self._said = what
