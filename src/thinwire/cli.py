"""The `thinwire` command."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class
from rich.console import Console
from rich.table import Table

from thinwire.base.errors import ConfigError, Stopped, ThinwireError, is_refusal, one_line, printable
from thinwire.comm.process_groups import failed
from thinwire.comm.tcp_store import serve
from thinwire.comm.topology import place
from thinwire.commands import options
from thinwire.commands.demo import demo
from thinwire.commands.doctor import doctor
from thinwire.commands.dry_run import dry_run as take_one_step
from thinwire.commands.export import export
from thinwire.commands.netbench import netbench
from thinwire.commands.options import WithFields
from thinwire.commands.plan import plan
from thinwire.commands.report import draw_stabilities, page, plot, report, runs, write_report
from thinwire.commands.stability import stability
from thinwire.commands.tune import tune
from thinwire.commands.watch import closing_line, print_line, print_summary, shown, watch
from thinwire.config.settings import describe
from thinwire.elastic import stopping
from thinwire.elastic.store import RUN
from thinwire.launch.group import Group
from thinwire.launch.jobs import Job, variant, variants
from thinwire.launch.launcher import HostSpec, inside_job
from thinwire.methods.registry import METHODS, load_installed
from thinwire.netbench.hosts import linked, nodes_for
from thinwire.recipes import installed, named
from thinwire.report import read_run
from thinwire.report.page.content import Content
from thinwire.train.run_folder import locked, refuse_locked, refuse_occupied

_COMPARISON = ("comparison.json", "comparison.png")


class _Commands(click.Group):
    """Thinwire's own errors, and those of the operating system, are printed as one sentence without a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        stopping.forget()
        try:
            return super().invoke(ctx)
        except Stopped as stopped:
            if _prints():
                click.echo(f"thinwire: {stopped}", err=True)
            ctx.exit(stopping.exit_code())
        except ThinwireError as error:
            code = 2 if isinstance(error, ConfigError) else 1
            failed(code)
            click.echo(f"thinwire: {printable(str(error))}", err=True)
            ctx.exit(code)
        except OSError as error:
            if not is_refusal(error):
                raise
            failed(1)
            click.echo(f"thinwire: {one_line(error)}", err=True)
            ctx.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="thinwire")
def main() -> None:
    """Train PyTorch models over slow networks, and count every byte."""
    # The launcher and its workers check the same things; one notice is enough.
    level = logging.INFO if inside_job() and _prints() else logging.WARNING
    logging.basicConfig(format="thinwire: %(message)s", level=level)
    load_installed()


_shared = options.all_of(
    [
        click.option("--workers", type=click.IntRange(1), default=2, show_default=True, help="Workers to start."),
        *options.of_training,
        click.option("--validate", is_flag=True, help="Report on validation data, not on the test data."),
        click.option("--out", type=options.DIR, metavar="DIR", help="Where to write; under runs/ if not given."),
        click.option("--resume", is_flag=True, help="Continue from the last save."),
        options.overwrite,
        click.option("--save-every", type=click.IntRange(1), metavar="N", help="Save every N steps."),
        click.option("--keep", type=click.IntRange(1), metavar="K", help="Keep the last K saves; default: 2."),
        click.option("--no-model", "model", flag_value=False, default=True, help="Do not write the finished model."),
        click.option("--eval-every", type=click.IntRange(1), metavar="N", help="Evaluate every N steps."),
        click.option("--stability", type=click.IntRange(1), metavar="N", help="Compare the bases every N steps."),
        click.option(
            "--stability-back", type=click.IntRange(1), metavar="K", help="Compare with K comparisons before, not one."
        ),
        click.option("--spectra", is_flag=True, help="Record singular values of all layers at each evaluation."),
        click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else."),
        click.option("--quiet", is_flag=True, help="Do not show how far it is."),
    ]
)
"""The flags that `run` and `compare` have in common."""


@main.command("list")
def list_() -> None:
    """Installed recipes, and methods."""
    out = Table(show_header=False, box=None)
    for name in installed():
        try:
            summary = named(name).summary
        except ThinwireError as error:  # one broken package should not hide the others
            summary = str(error)
        out.add_row("recipe", name, summary)
    for name, entry in METHODS.items():
        out.add_row("method", name, entry.summary)
    Console().print(out)


@main.command(cls=WithFields)
@click.argument("recipe")
@options.config
@click.option("--method", required=True, metavar="METHOD", help="METHOD or METHOD:FIELD=VALUE; see `thinwire list`.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, metavar="S", help="Seed.")
@click.option("--dry-run", is_flag=True, help="Take one real step, describe the run, and keep nothing.")
@click.option("--until", type=click.IntRange(1), metavar="N", help="Save and stop after step N; --resume continues.")
@click.option(
    "--faults",
    multiple=True,
    is_flag=False,
    flag_value="",
    metavar="[FIELD=VALUE]",
    help="Go on without groups that die; a field of thinwire.Faults, such as timeout=60. After RECIPE.",
)
@options.of_a_group(required=False)
@click.option("--first-step", is_flag=True, hidden=True)
@_shared
def run(
    recipe: str,
    method: str,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    out: Path | None,
    store: str | None,
    groups: int | None,
    group: int | None,
    **flags: Any,
) -> None:
    """Train RECIPE with one method.

    RECIPE is a name from `thinwire list`, or FILE.py:FUNCTION, a function of yours that returns a
    `thinwire.recipes.Recipe`.
    """
    if store is not None or groups is not None or group is not None:
        os.environ.update(options.place_of_group(store, groups, group))
        flags["faults"] = flags["faults"] or ("",)
    if flags["faults"]:
        _alone_unless_asked(flags)
        if dry_run:
            raise ConfigError("`--dry-run` takes its step without other groups: leave `--faults` out")
    known = named(recipe, arguments=flags["arguments"])
    chosen = variant(method, flags.pop("settings"), known.scheduled)
    folder = out or Path("runs") / f"{known.name}-{chosen.folder}-seed{flags['seed']}"
    job = Job(recipe=recipe, method=chosen.method, settings=chosen.settings, out=folder, **_as_fields(flags))
    if not dry_run:
        job.refuse_occupied()
    job.check()
    if dry_run:
        take_one_step(job, prints=_prints(), as_json=as_json, quiet=quiet)
        return
    summary = _execute(job, f"{chosen.label} seed {job.seed}", quiet=quiet or as_json)
    if as_json and _prints():
        click.echo(json.dumps(summary, indent=2))
    elif not quiet and _prints():
        print_summary(summary, folder)
    if "stopped_at" in summary:
        return
    # The launcher draws pictures and the page, not its workers.
    with ExitStack() as held:
        if _prints() and not (quiet and inside_job()) and _draws(job, held):
            found = [read_run(folder)]
            if job.stability:
                draw_stabilities(found, silent=quiet or as_json)
            page(Content(found), folder, silent=quiet or as_json)


@main.command()
@click.argument("recipe")
@click.option("--methods", metavar="A,B", help="METHOD or METHOD:FIELD=VALUE, separated by commas; default: all.")
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Seeds 0 to N−1.")
@click.option("--link", metavar="RATE", help="Nodes are hosts on this machine with links of 100Mbit, say; needs root.")
@_shared
def compare(
    recipe: str,
    methods: str | None,
    seeds: int,
    link: str | None,
    as_json: bool,
    quiet: bool,
    out: Path | None,
    **flags: Any,
) -> None:
    """Train RECIPE with several methods and seeds, and compare them.

    RECIPE is a name from `thinwire list`, or FILE.py:FUNCTION, a function of yours that returns a
    `thinwire.recipes.Recipe`. A method may be given several times, with different settings.
    """
    folder = out or Path("runs") / f"compare-{named(recipe, arguments=flags['arguments']).name}"
    nodes = nodes_for(flags["workers"], flags["group_size"]) if link else 1
    base = Job(recipe=recipe, method="", out=folder, hosts=(HostSpec(),) * nodes, **_as_fields(flags))
    jobs = [
        (v.label, base.of(v, seed=seed, out=folder / f"{v.folder}-seed{seed}"))
        for v in variants(methods, base.settings, base.trained.scheduled)
        for seed in range(seeds)
    ]
    _refuse_occupied(folder, [job for _, job in jobs])
    _check_all(jobs)
    silent = quiet or as_json
    with ExitStack() as held:
        hosts = held.enter_context(linked(link, nodes, base.workers) if link else nullcontext(base.hosts))
        if _prints():
            held.enter_context(locked(folder))
        for number, (label, job) in enumerate(jobs, start=1):
            name = f"{label} seed {job.seed}"
            if (signal := stopping.requested()) is not None:
                raise Stopped(f"stopped by {signal} before {name}; continue with --resume")
            summary = _execute(replace(job, hosts=hosts), f"{name} ({number} of {len(jobs)})", quiet=silent)
            if not silent and _prints():
                click.echo(closing_line(f"{name} ({number} of {len(jobs)})", summary), err=True)
        if _prints():
            write_report(folder, Content([read_run(job.out) for _, job in jobs]), as_json=as_json)


def _alone_unless_asked(flags: dict[str, Any]) -> None:
    """A group is one process, unless a launcher made it; `--workers` is then refused if it was given."""
    source = click.get_current_context().get_parameter_source("workers")
    if source is click.core.ParameterSource.DEFAULT:
        flags["workers"] = 1


def _draws(job: Job, held: ExitStack) -> bool:
    """Whether to draw pictures and the page here: with `--faults` one group at a time, once the result is there."""
    if not job.faults:
        return True
    try:
        held.enter_context(locked(job.out))
    except ConfigError:
        return False
    return (job.out / "summary.json").is_file()


def _as_fields(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _refuse_occupied(folder: Path, jobs: list[Job]) -> None:
    """Refuse to overwrite a comparison or any of its runs."""
    for job in jobs:
        job.refuse_occupied()
    if not inside_job():
        refuse_locked(folder)
    if not (jobs[0].resume or jobs[0].overwrite):
        refuse_occupied(folder, (folder / name for name in _COMPARISON if (folder / name).exists()), resume=True)


def _check_all(jobs: list[tuple[str, Job]]) -> None:
    """Check each job, and that no two of them are the same run."""
    seen: dict[tuple[str, int], str] = {}
    for label, job in jobs:
        job.check(data=not seen)  # all read the same folder
        first = seen.setdefault((repr((type(job.config), describe(job.config))), job.seed), label)
        if first != label:
            raise ConfigError(f"`{first}` and `{label}` have the same settings; leave one of them out")


def _execute(job: Job, title: str, *, quiet: bool) -> dict[str, Any]:
    console = Console(stderr=True)
    with shown(job, title, console, silent=quiet or not _prints()):
        return job.run(partial(print_line, console))


def _prints() -> bool:
    """Whether this process prints: the launcher, a single process, or rank 0 of a job."""
    here = place()
    return here is None or here.rank == 0


@main.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print a script that completes commands and options: source it in your shell's startup file.

    For bash: thinwire completion bash > ~/.thinwire-complete, and `source ~/.thinwire-complete` in ~/.bashrc.
    """
    made = get_completion_class(shell)
    assert made is not None
    click.echo(made(main, {}, "thinwire", "_THINWIRE_COMPLETE").source())


@main.command()
@click.option("--host", default="0.0.0.0", show_default=True, help="Address to listen on.")
@click.option("--port", default=29400, show_default=True, help="Port to listen on; 0 takes a free one.")
def store(host: str, port: int) -> None:
    """Keep the store at which groups of a fault-tolerant run meet, until it is interrupted.

    It holds a few kilobytes and never a model. Start it where it will not be killed, such as a login node; a run goes
    on without it for a while, and finds it again at the same address. It serves one run after another, and several at
    once if their launchers set different names in THINWIRE_RUN.
    """
    server = serve(host, port)
    click.echo(f"listening on {host}:{server.port}: start the groups with THINWIRE_STORE=HOST:{server.port}")
    threading.Event().wait()


@main.command("group", context_settings={"ignore_unknown_options": True})
@options.of_a_group(required=True)
@click.option("--run", "name", default="", metavar="NAME", help="For several runs at once on one store.")
@click.option(
    "--restarts",
    type=click.IntRange(0),
    default=5,
    show_default=True,
    metavar="N",
    help="Deaths in a row, each within a minute of its start, after which to give up.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def group_(store: str, groups: int, group: int, name: str, restarts: int, command: tuple[str, ...]) -> None:
    """Start one group of a run with `faults=`, and start it again when it dies.

    COMMAND is what starts its workers, after `--`:

    \b
      thinwire group --store 10.0.0.1:29400 --groups 2 --group 1 -- torchrun --nproc-per-node 8 train.py

    A signal is passed on to the workers. A group that has finished, was asked to stop or was refused stays ended.
    """
    environment = options.place_of_group(store, groups, group) | ({RUN: name} if name else {})
    click.get_current_context().exit(Group(command, environment, restarts).run())


for command in (demo, doctor, export, netbench, plan, plot, report, runs, stability, tune, watch):
    main.add_command(command)


if __name__ == "__main__":
    sys.exit(main())
