"""`thinwire netbench`, and the tables of its results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.base import units
from thinwire.base.errors import ConfigError
from thinwire.commands import options
from thinwire.commands.report import page_of_bench
from thinwire.commands.watch import shown
from thinwire.launch.jobs import Job, variants
from thinwire.netbench.bench import Bench, nothing_shown
from thinwire.netbench.hosts import clean, parse_rate
from thinwire.recipes import named
from thinwire.report.live import in_place
from thinwire.report.tables import fitting, simple_table, size, wide_console

_CAPTION = (
    "Bytes per host, mean over hosts. Ledger is what Thinwire counted, kernel what the interface sent; left is the "
    "kernel's count minus 66 bytes of headers per packet and the ledger's. Wire is the share of time spent waiting."
)
# Below this the remainder is shown in bytes: a percentage of very little means nothing.
_LITTLE = 100_000
_HEADINGS = ("method", "per step", "planned", "speed-\nup", "plan-\nned", "wire", "ledger", "kernel", "headers", "left")
_DISPENSABLE = ("headers", "kernel", "plan-\nned", "wire")


@click.command()
@click.argument("recipe", required=False)
@click.option("--methods", metavar="A,B", help="Comma-separated, as ab or allreduce:wire=bf16; default: all methods.")
@click.option("--hosts", type=int, default=2, show_default=True, help="Hosts to create on this machine.")
@click.option("--workers", type=click.IntRange(1), help="Total workers; default: one per host.")
@click.option("--rates", default="100Mbit", show_default=True, help="Comma-separated link rates, or unshaped.")
@click.option("--group-size", metavar="G", help='Workers per group, or "world".')
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Override the recipe's steps.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, metavar="S", help="Seed.")
@options.data
@options.settings
@click.option("--out", type=options.DIR, metavar="DIR", help="Output folder; default: under runs/.")
@options.overwrite
@click.option("--name", default="thinwire", show_default=True, help="Prefix of the hosts' names.")
@click.option("--keep", is_flag=True, help="Keep the hosts for inspection until the next start.")
@click.option("--clean", "only_clean", is_flag=True, help="Only remove leftover hosts, including kept ones.")
@click.option("--json", "as_json", is_flag=True, help="Print only the result, as JSON.")
def netbench(recipe: str | None, only_clean: bool, as_json: bool, **flags: Any) -> None:
    """Train RECIPE over slow links on this machine, and compare the ledger with the kernel's counters.

    Hosts are network namespaces on a bridge, each link shaped to a rate. Needs root. Evaluates only at the end.
    """
    if only_clean:
        click.echo("\n".join(f"removed {name}" for name in clean(include_kept=True)) or "nothing was left")
        return
    if recipe is None:
        raise click.UsageError("give a RECIPE, see `thinwire list`")
    bench = _bench(recipe, flags)
    console = Console(stderr=True)
    say = (lambda line: None) if as_json else (lambda line: console.print(line, highlight=False, markup=False))
    found = bench.run(say, partial(_during, console) if in_place(console) and not as_json else nothing_shown)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        page_of_bench(bench.base.out, silent=True)
        return
    wide = wide_console(120)
    for table in tables(found, wide.width):
        wide.print(table)
    click.echo(f"figures and runs: {bench.base.out}")
    page_of_bench(bench.base.out, silent=False)
    if flags["keep"]:
        click.echo(f"hosts kept, see ip netns exec {flags['name']}-h0 ip addr; thinwire netbench --clean removes them")


def _during(console: Console, what: str, job: Job | None = None) -> AbstractContextManager[Any]:
    """On a terminal: the panel of a job, or what is done besides jobs."""
    return console.status(Text(f"{what} …")) if job is None else shown(job, what, console, silent=False)


def _bench(recipe: str, flags: dict[str, Any]) -> Bench:
    trained = named(recipe, steps=flags["steps"])
    hosts = flags["hosts"]
    workers = flags["workers"] or hosts
    usual = Path("runs") / f"netbench-{trained.name}-{hosts}x{workers // max(1, hosts)}"
    base = Job(
        recipe=recipe,
        method="",
        out=flags["out"] or usual,
        workers=workers,
        group_size=flags["group_size"],
        steps=flags["steps"],
        seed=flags["seed"],
        data=flags["data"],
        eval_every=trained.steps,
        model=False,
        overwrite=flags["overwrite"],
    )
    chosen = variants(flags["methods"], flags["settings"], trained.scheduled)
    rates = [parse_rate(part.strip()) for part in flags["rates"].split(",") if part.strip()]
    if not rates:
        given = flags["rates"]
        raise ConfigError(f"`--rates`={given!r} has no rate; write one or more, such as 100Mbit,1Gbit,unshaped")
    return Bench(
        base=base,
        variants=chosen,
        hosts=hosts,
        rates=rates,
        name=flags["name"],
        keep=flags["keep"],
    )


def tables(found: dict[str, Any], width: int = 120) -> Iterator[Table]:
    """One table per rate, in so many characters."""
    for at in found["rates"]:
        each = found["workers"] // found["hosts"]
        link = f"{at['rate']} ({units.rate(at['probe_bits'])} of payload measured)"
        title = f"{found['recipe']}, {units.count(found['steps'], 'step')}, {found['hosts']} hosts × {each}, {link}"
        out = simple_table(title=title, caption=_CAPTION)
        lines = [line for row in at["methods"] for line in _lines(row)]
        widths = {
            name: max(map(len, (*name.split("\n"), *(cells[i] for cells, _ in lines))))
            for i, name in enumerate(_HEADINGS)
        }
        shown = fitting(widths, _DISPENSABLE, width)
        for name in shown:
            out.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
        for cells, style in lines:
            out.add_row(*(cells[_HEADINGS.index(name)] for name in shown), style=style)
        yield out


def _lines(row: dict[str, Any]) -> Iterator[tuple[list[str], str]]:
    """The rows of one method, with their style."""
    yield _cells(row), ""
    if again := row.get("planned_with_ranks"):
        planned = units.time(again["seconds_per_step"])
        yield ["  with its own ranks", "", planned, "", f"{again['speedup']:.2f}", *[""] * 5], "dim"
    for phase, part in row["phases"].items():
        yield [f"  {phase}", *[""] * 5, *_bytes(part)], "dim"


def _cells(row: dict[str, Any]) -> list[str]:
    whole, planned = row["whole"], row["planned"]
    spent = sum(phase["seconds"] for phase in row["time"].values())
    waited = sum(phase["wire"] for phase in row["time"].values())
    return [
        row["method"],
        units.time(row["step_s"]),
        units.time(planned["seconds_per_step"]),
        "–" if row["speedup"] is None else f"{row['speedup']:.2f}",
        f"{planned['speedup']:.2f}",
        f"{100 * waited / spent:.0f} %",
        *_bytes(whole),
    ]


def _bytes(part: dict[str, Any]) -> list[str]:
    ledger, left = part["ledger_bytes"], part["left_bytes"]
    share = f"{100 * left / ledger:.2f} %" if ledger > _LITTLE else size(left)
    return [size(ledger), size(part["kernel_bytes"]), size(part["headers_bytes"]), share]
