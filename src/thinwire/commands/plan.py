"""`thinwire plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from thinwire import units
from thinwire.commands import options
from thinwire.jobs import method_config, variants
from thinwire.plan import compute as computing
from thinwire.plan.forecast import Layout
from thinwire.plan.links import Links
from thinwire.plan.planner import Plan, Stopwatch, make_plan
from thinwire.plan.rehearse import Subject
from thinwire.plan.show import draw, table
from thinwire.plan.subjects import OPTIMIZERS, of_function, of_recipe
from thinwire.recipes import Recipe, named
from thinwire.train.folder import refuse_occupied

_FILES = ("plan.json", "plan.png")


@click.command()
@click.argument("recipe", required=False)
@click.option("--model", metavar="FILE.py:FUNCTION", help="Plan for this nn.Module instead; with its inputs, if given.")
@click.option("--methods", metavar="A,B", help="As ab or allreduce:wire=bf16, by commas; all methods if not given.")
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True, help="All workers.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes they are on; on one machine a group stands for a node.")
@click.option("--group-size", metavar="G", help='Workers to a group, or "world".')
@click.option("--bandwidth", default="1Gbit", show_default=True, help="Of each node's link, each way.")
@click.option("--latency", default="50us", show_default=True, help="Between nodes, one way.")
@click.option("--overhead", default="100us", show_default=True, help="Of each collective, beside its bytes.")
@click.option("--fast-bandwidth", default="100Gbit", show_default=True, help="Between workers of a node.")
@click.option("--fast-latency", default="5us", show_default=True, help="Between workers of a node.")
@click.option(
    "--allreduce", type=click.Choice(["ring", "tree"]), default="ring", show_default=True, help="How it is done."
)
@click.option("--compute", metavar="TIME", help="A full-rank step without the wire, as 120ms; else measured.")
@click.option("--ranks", type=options.DIR, metavar="RUN_DIR", help="Take the ranks that this run found.")
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Steps instead of the recipe's.")
@click.option("--epochs", type=click.IntRange(1), metavar="N", help="Epochs instead of the recipe's.")
@options.data
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", help="With --model.")
@options.settings
@click.option(
    "--out", type=options.DIR, metavar="DIR", help="Where plan.json and plan.png go; under runs/ if not given."
)
@options.overwrite
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON, and nothing else; draws nothing.")
def plan(recipe: str | None, model: str | None, as_json: bool, out: Path | None, overwrite: bool, **flags: Any) -> None:
    """What each method would send, and how long it would take, before anything runs.

    RECIPE is a name from `thinwire list` or FILE.py:FUNCTION. Bytes come from rehearsing the methods
    themselves without workers; seconds from them, the links, and a step timed here.
    """
    if (recipe is None) == (model is None):
        raise click.UsageError("give either RECIPE or --model FILE.py:FUNCTION")
    if out is not None and not (as_json or overwrite):  # a plan in its usual folder is replaced by the next one
        refuse_occupied(out, (out / name for name in _FILES if (out / name).exists()))
    length = {name: flags[name] for name in ("steps", "epochs", "workers")}
    chosen = None if recipe is None else named(recipe, **length)
    made = _plan(chosen, _subject(chosen, model, flags), flags)
    told = made.as_dict()
    if as_json:
        click.echo(json.dumps(told, indent=2))
        return
    wide = Console()
    Console(width=None if wide.is_terminal else 120).print(table(told))
    folder = out or Path("runs") / f"plan-{made.subject.name}"
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, told)
    told["curves"] = draw(made, folder / "plan.png")
    _write(folder, told)
    click.echo(f"picture and figures: {folder / 'plan.png'}, {folder / 'plan.json'}")


def _write(folder: Path, told: dict[str, Any]) -> None:
    (folder / "plan.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _subject(recipe: Recipe | None, model: str | None, flags: dict[str, Any]) -> Subject:
    if recipe is not None:
        return of_recipe(recipe, flags["workers"], flags["data"])
    assert model is not None
    if flags["data"] is not None:
        raise click.UsageError("--data is for recipes; the function of --model loads its own")
    if flags["epochs"] is not None:
        raise click.UsageError("--epochs is for recipes; give --steps with --model")
    return of_function(model, flags["steps"], flags["optimizer"])


def _plan(recipe: Recipe | None, subject: Subject, flags: dict[str, Any]) -> Plan:
    links = Links(
        bandwidth=units.bits_per_second(flags["bandwidth"]),
        latency=units.seconds(flags["latency"]),
        fast_bandwidth=units.bits_per_second(flags["fast_bandwidth"]),
        fast_latency=units.seconds(flags["fast_latency"]),
        overhead=units.seconds(flags["overhead"]),
    )
    length = {"total_steps": subject.steps, "steps_per_epoch": subject.steps / subject.epochs}
    defaults = recipe.defaults if recipe else lambda method, schedule: length
    configs = {
        v.label: method_config(v.method, v.settings, defaults, flags["group_size"])
        for v in variants(flags["methods"], flags["settings"], recipe.scheduled if recipe else ())
    }
    layout = Layout(workers=flags["workers"], nodes=flags["nodes"], algorithm=flags["allreduce"])
    for config in configs.values():
        layout.topology(0, config.group_size)
    known = computing.given(units.seconds(flags["compute"])) if flags["compute"] else None
    return make_plan(subject, configs, layout, links, stopwatch=Stopwatch(subject, known), ranks=flags["ranks"])
