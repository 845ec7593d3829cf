"""`thinwire plan`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import click

from thinwire.base import units
from thinwire.base.errors import ConfigError
from thinwire.commands import options
from thinwire.commands.watch import Doing
from thinwire.launch.jobs import method_config, variants
from thinwire.plan import compute as computing
from thinwire.plan.forecast import Layout, Links
from thinwire.plan.planner import Plan, Row, Stopwatch, make_plan
from thinwire.plan.recommend import every_method, methods_for
from thinwire.plan.show import NODES, Rows, draw
from thinwire.plan.workload import OPTIMIZERS, Workload, of_function, of_recipe
from thinwire.recipes import Recipe, named
from thinwire.report.tables import wide_console
from thinwire.train.folder import refuse_occupied

_FILES = ("plan.json", "plan.png")


@click.command()
@click.argument("recipe", required=False)
@click.option(
    "--model", metavar="FILE.py:FUNCTION", help="Plan for this nn.Module instead, and its inputs if returned."
)
@click.option("--methods", metavar="A,B", help="As ab or allreduce:wire=bf16, or all; default: those of the README.")
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True, help="Total workers.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes they are on; on one machine a group stands for a node.")
@click.option("--group-size", metavar="G", help='Workers per group, or "world".')
@click.option("--bandwidth", default="1Gbit", show_default=True, help="Of each node's link, each way.")
@click.option("--latency", default="50us", show_default=True, help="Between nodes, one way.")
@click.option("--overhead", default="100us", show_default=True, help="Of each collective, besides its bytes.")
@click.option("--fast-bandwidth", default="100Gbit", show_default=True, help="Between workers of a node.")
@click.option("--fast-latency", default="5us", show_default=True, help="Between workers of a node.")
@click.option("--allreduce", type=click.Choice(["ring", "tree"]), default="ring", show_default=True, help="Algorithm.")
@click.option("--compute", metavar="TIME", help="A full-rank step without the wire, such as 120ms; default: measured.")
@click.option("--ranks", type=options.DIR, metavar="RUN_DIR", help="Use the ranks that this run found.")
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Steps instead of the recipe's.")
@click.option("--epochs", type=click.IntRange(1), metavar="N", help="Epochs instead of the recipe's.")
@options.data
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", help="With --model.")
@options.settings
@click.option(
    "--out", type=options.DIR, metavar="DIR", help="Output folder for plan.json and plan.png; default: under runs/."
)
@options.overwrite
@click.option("--json", "as_json", is_flag=True, help="Print only the plan, as JSON, and draw nothing.")
@click.option("--quiet", is_flag=True, help="No progress line.")
def plan(
    recipe: str | None, model: str | None, as_json: bool, quiet: bool, out: Path | None, overwrite: bool, **flags: Any
) -> None:
    """What each method would send, and how long it would take, before anything runs.

    RECIPE is a name from `thinwire list` or FILE.py:FUNCTION. Bytes come from simulating the methods
    themselves without workers; seconds from them, the links, and a step timed here.
    """
    if (recipe is None) == (model is None):
        raise click.UsageError("give either RECIPE or --model FILE.py:FUNCTION")
    if out is not None and not (as_json or overwrite):  # a plan in its usual folder is replaced by the next one
        refuse_occupied(out, (out / name for name in _FILES if (out / name).exists()))
    length = {name: flags[name] for name in ("steps", "epochs", "workers")}
    chosen = None if recipe is None else named(recipe, **length)
    if as_json:
        made = _plan(chosen, workload_of(chosen, model, flags), flags)
        click.echo(json.dumps(made.as_dict(), indent=2))
        return
    with Progress(quiet=quiet) as progress:
        progress.update("building the model")
        made = _plan(chosen, workload_of(chosen, model, flags), flags, progress)
        result = progress.end(made)
        folder = out or Path("runs") / f"plan-{made.workload.name}"
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, result)
        progress.update("drawing")
        missing = _draw(made, result, folder)
    click.echo(missing or f"picture and figures: {folder / 'plan.png'}, {folder / 'plan.json'}")


def _draw(made: Plan, result: dict[str, Any], folder: Path) -> str | None:
    """Draw the picture and add its curves to the file; returns a message if matplotlib is missing."""
    try:
        result["curves"] = draw(made, folder / "plan.png")
    except ConfigError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        return f"figures: {folder / 'plan.json'}; no picture: {error}"
    _write(folder, result)
    return None


class Progress:
    """Shows what is being done, and the table as far as it is known."""

    def __init__(self, *, quiet: bool) -> None:
        self.console = wide_console(132)
        self._doing = Doing(self.console, quiet=quiet)
        self._rows: Rows | None = None
        self._methods: list[str] = []

    def __enter__(self) -> Progress:
        self._doing.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self._doing.__exit__()

    def update(self, what: str) -> None:
        """Show what is being done."""
        self._doing.update(what)

    def expect(self, methods: Iterable[str]) -> None:
        self._methods = list(methods)
        self._rows = Rows(self.console, self._methods)
        self.update("planning fp32 all-reduce, the baseline")

    def begin(self, method: str) -> None:
        self.update(f"planning {method} ({self._methods.index(method) + 1} of {len(self._methods)})")

    def add(self, plan: Plan, row: Row) -> None:
        assert self._rows is not None
        if row is plan.rows[0]:
            self._rows.begin(plan)
        self._rows.add(plan.row_as_dict(row))

    def end(self, plan: Plan) -> dict[str, Any]:
        """Print the caption and what to use; returns the plan as plain values."""
        assert self._rows is not None
        result = plan.as_dict()
        self._rows.end(result, plan.recommendation.lines())
        return result


def _write(folder: Path, result: dict[str, Any]) -> None:
    (folder / "plan.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def workload_of(recipe: Recipe | None, model: str | None, flags: dict[str, Any]) -> Workload:
    """What to plan for, as the flags describe it."""
    if recipe is not None:
        return of_recipe(recipe, flags["workers"], flags["data"])
    assert model is not None
    if flags["data"] is not None:
        raise click.UsageError("--data is for recipes; the function of --model loads its own")
    if flags["epochs"] is not None:
        raise click.UsageError("--epochs is for recipes; give --steps with --model")
    return of_function(model, flags["steps"], flags["optimizer"], values=flags["compute"] is None)


def _plan(recipe: Recipe | None, workload: Workload, flags: dict[str, Any], progress: Progress | None = None) -> Plan:
    links = Links(
        bandwidth=units.bits_per_second(flags["bandwidth"]),
        latency=units.seconds(flags["latency"]),
        fast_bandwidth=units.bits_per_second(flags["fast_bandwidth"]),
        fast_latency=units.seconds(flags["fast_latency"]),
        overhead=units.seconds(flags["overhead"]),
    )
    configs = configs_of(recipe, workload, flags)
    layout = Layout(workers=flags["workers"], nodes=flags["nodes"], algorithm=flags["allreduce"])
    for config in configs.values():
        layout.topology(0, config.group_size)
    known = computing.given(units.seconds(flags["compute"])) if flags["compute"] else None
    make = partial(
        make_plan, workload, configs, layout, links, stopwatch=Stopwatch(workload, known), ranks=flags["ranks"]
    )
    if progress is None:
        return make()
    progress.expect(configs)
    return make(counts=NODES, before=progress.begin, after=progress.add)


def configs_of(recipe: Recipe | None, workload: Workload, flags: dict[str, Any]) -> dict[str, Any]:
    """The methods to plan, by display name; by default those of the README."""
    methods = flags["methods"] or methods_for(workload)
    methods = every_method() if methods == "all" else methods
    length = {"total_steps": workload.steps}
    defaults = recipe.defaults if recipe else lambda method, schedule: length
    found = {}
    for v in variants(methods, flags["settings"], recipe.scheduled if recipe else ()):
        try:
            found[v.label] = method_config(v.method, v.settings, defaults, flags["group_size"])
        except ConfigError as error:
            if flags["methods"] not in (None, "", "all") or flags["settings"]:
                raise
            click.echo(f"{v.label} is left out: {error}", err=True)  # of all methods, one that the run is too short for
    return found
