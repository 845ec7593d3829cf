"""`thinwire demo`: what Thinwire does, in two minutes on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from thinwire.base import units
from thinwire.commands import options
from thinwire.launch.jobs import Job, Variant, variants
from thinwire.netbench.hosts import why_not
from thinwire.plan.forecast import Layout, Links
from thinwire.plan.planner import Stopwatch, make_plan
from thinwire.plan.workload import of_recipe

_RECIPE, _METHODS, _WORKERS = "digits", "allreduce,allreduce:wire=int8,ab", 2
_RATES = (100e6, 1e9)
_LEAST_STEPS = 14
"""AB needs a round of four steps after three quarters of them."""
_ABOUT = (
    "A small CNN learns handwritten digits on two nodes, three times: with fp32 all-reduce, which is what DDP does; "
    "with all-reduce in int8; and with AB, which trains the nodes apart and factors the weights. It takes two minutes."
)


@click.command()
@click.option("--link", default="100Mbit", show_default=True, metavar="RATE", help="Of each node.")
@click.option("--steps", type=click.IntRange(_LEAST_STEPS), metavar="N", help="Steps instead of the recipe's.")
@click.option("--out", type=options.DIR, default=Path("runs/demo"), show_default=True, help="Where to write.")
@options.overwrite
@click.pass_context
def demo(context: click.Context, link: str, steps: int | None, out: Path, overwrite: bool) -> None:
    """Train a small CNN over a slow link made on this machine, three ways, and compare them.

    The link needs root. Without it the methods are compared all the same, and a plan says how long they would take.
    """
    units.bits_per_second(link)  # an error before anything is said
    reason = why_not()
    link_is = f"this machine's memory, and not slow: {reason}" if reason else f"shaped to {link}"
    click.echo(click.wrap_text(f"{_ABOUT} The link between the nodes is {link_is}.", 100) + "\n")
    compare = context.find_root().command.get_command(context, "compare")  # type: ignore[attr-defined]
    given = {"methods": _METHODS, "workers": _WORKERS, "steps": steps, "out": out, "overwrite": overwrite}
    context.invoke(compare, recipe=_RECIPE, link=None if reason else link, **given)
    if reason:
        _print_plan(Job(recipe=_RECIPE, method="", out=out, workers=_WORKERS, steps=steps))
    click.echo(
        f"\nOpen {out / 'report.html'} in a browser. Next: README.md, or `thinwire plan --help` for your own links."
    )


def _print_plan(base: Job) -> None:
    """How long the runs would have taken over links that are slow."""
    chosen = variants(_METHODS, ())
    table = Table(title="Planned for real links", box=SIMPLE_HEAD)
    table.add_column("method")
    for rate in _RATES:
        table.add_column(units.rate(rate), justify="right")
    watch = Stopwatch(of_recipe(base.trained, _WORKERS))
    columns = [_planned(base, chosen, rate, watch) for rate in _RATES]
    for v, *seconds in zip(chosen, *columns, strict=True):
        table.add_row(v.label, *map(units.time, seconds))
    Console().print(table)


def _planned(base: Job, chosen: list[Variant], rate: float, watch: Stopwatch) -> list[float]:
    layout, links = Layout(workers=_WORKERS, nodes=_WORKERS), Links(bandwidth=rate)
    ran = base.out / "ab-seed0"  # its ranks
    configs: dict[str, Any] = {v.label: base.of(v).config for v in chosen}
    plan = make_plan(watch.workload, configs, layout, links, stopwatch=watch, ranks=ran)
    return [row["seconds_per_step"] * base.trained.steps for row in plan.as_dict()["methods"]]
