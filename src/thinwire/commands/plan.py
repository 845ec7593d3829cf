"""`thinwire plan`: a plan as a table, and as a picture over bandwidth and over nodes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console, JustifyMethod
from rich.table import Table

from thinwire.base import units
from thinwire.base.errors import ConfigError
from thinwire.commands import options
from thinwire.commands.watch import Doing
from thinwire.launch.jobs import method_config, variants
from thinwire.plan import compute as computing
from thinwire.plan.forecast import Layout, Links
from thinwire.plan.planner import Plan, Row, Stopwatch, make_plan, over_nodes
from thinwire.plan.recommend import every_method, methods_for
from thinwire.plan.workload import OPTIMIZERS, Workload, of_function, of_recipe
from thinwire.recipes import Recipe, named
from thinwire.report.plots import colours, dress, two_panels
from thinwire.report.tables import fitting, ratio, simple_table, size, wide_console
from thinwire.train.run_folder import refuse_occupied

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_FILES = ("plan.json", "plan.png")
BANDWIDTHS = np.geomspace(1e8, 4e11, 48)
_TICKS = (0.1, 0.2, 0.5, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500)
NODES = tuple(2**i for i in range(1, 11))
_COLUMNS = {
    "slow link\nper step": 9,
    "slow link\ntotal": 9,
    "vs all-\nreduce": 7,
    "time\nper step": 9,
    "time\ntotal": 9,
    "speed-\nup": 6,
    "pays\nbelow": 12,
    "memory /\nworker": 9,
}
"""Headings, and the width of the widest figure below each."""
_DISPENSABLE = ("pays\nbelow", "memory /\nworker", "slow link\ntotal", "time\ntotal")
"""Columns that a narrow console leaves out, in this order."""
_LONGEST = 26
"""Of the labels of methods in the table; more settings than fit are left to the caption."""


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
@click.option(
    "--allreduce",
    type=click.Choice(["ring", "tree"]),
    default="ring",
    show_default=True,
    help="As by gloo, or by nccl.",
)
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
        result = made.as_dict()
        progress.rows.end(result, made.recommendation.lines())
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


class Progress(Doing):
    """Shows what is being done, and the table as far as it is known."""

    def __init__(self, *, quiet: bool) -> None:
        self.console = wide_console(132)
        super().__init__(self.console, quiet=quiet)
        self.methods: list[str] = []

    def expect(self, methods: Iterable[str]) -> None:
        self.methods = list(methods)
        self.rows = Rows(self.console, self.methods)
        self.update("planning fp32 all-reduce, the baseline")

    def begin(self, method: str) -> None:
        self.update(f"planning {method} ({self.methods.index(method) + 1} of {len(self.methods)})")

    def add(self, plan: Plan, row: Row) -> None:
        if row is plan.rows[0]:
            self.rows.begin(plan)
        self.rows.add(plan.row_as_dict(row))


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


class Rows:
    """A plan's table, printed one method at a time; so every column has a fixed width."""

    def __init__(self, console: Console, methods: Iterable[str]) -> None:
        self._console = console
        self._names = _short(methods)
        self._widths = {"method": max(map(len, ("method", *self._names.values()))), **_COLUMNS}
        self._shown = fitting(self._widths, _DISPENSABLE, console.width)

    def begin(self, plan: Plan) -> None:
        """The title and the columns' names."""
        links = plan.links
        where = f"{units.count(plan.layout.workers, 'worker')} on {units.count(plan.baseline.nodes, 'node')}"
        title = (
            f"{plan.workload.name}, {units.count(plan.workload.steps, 'step')}, {where}, "
            f"{units.rate(links.bandwidth)} and {units.time(links.latency)} between them"
        )
        self._console.print(title, style="italic", highlight=False)
        self._console.print(self._table(with_names=True))

    def add(self, row: dict[str, Any]) -> None:
        """One method, and its range of bytes where they depend on ranks."""
        out = self._table(with_names=False)
        cells = dict(zip(self._widths, (self._names[row["method"]], *_cells(row)), strict=True))
        out.add_row(*(cells[heading] for heading in self._shown))
        self._console.print(out)
        if row["slow_bytes_range"]:
            low, high = row["slow_bytes_range"]
            self._console.print(f"   {size(low)} to {size(high)} in total", style="dim", highlight=False)

    def end(self, plan: dict[str, Any], advice: Iterable[str]) -> None:
        """The caption, and what to use."""
        self._console.print()
        left_out = [" ".join(heading.split()) for heading in self._widths if heading not in self._shown]
        more = f" Left out of this narrow table: {', '.join(left_out)}." if left_out else ""
        self._console.print(caption(plan) + more, style="italic", highlight=False)
        self._console.print()
        for line in advice:
            self._console.print(line, highlight=False, markup=False)

    def _table(self, *, with_names: bool) -> Table:
        out = simple_table(show_header=with_names)
        for heading in self._shown:
            justify: JustifyMethod = "left" if heading == "method" else "right"
            out.add_column(heading, justify=justify, no_wrap=True, width=self._widths[heading])
        return out


def caption(plan: dict[str, Any]) -> str:
    """What the figures of a plan are based on, in sentences."""
    names = _short([row["method"] for row in plan["methods"]])
    text = [f"{short} is {name}." for name, short in names.items() if short != name]
    text.append("Bytes per node without evaluation. Speed-up over fp32 all-reduce.")
    if plan["ranks"]:
        text.append(f"Ranks of {plan['ranks']}.")
    elif any(row["slow_bytes_range"] for row in plan["methods"]):
        text.append("Ranks of a typical run; below, rank 1 to full rank. For a run's own ranks: --ranks DIR.")
    assumed: dict[str, list[str]] = {}
    for row in plan["methods"]:
        assumed.setdefault(row["assumes"], []).append(names[row["method"]])
    text += [f"{', '.join(methods)}: if {what}." for what, methods in assumed.items() if what]
    held: dict[str, list[str]] = {}
    for row in plan["methods"]:
        held.setdefault(beside(row["memory_by_phase"]), []).append(names[row["method"]])
    if parts := "; ".join(f"{', '.join(methods)} {what}" for what, methods in held.items() if what):
        text.append(f"Held beside model and optimizer: {parts}.")
    if plan["allreduce"] == "tree":
        text.append("All-reduce by a tree over nodes, as nccl does it between machines.")
    if plan["compute_measured"]:
        text.append("Compute measured here, activations counted.")
    else:
        text.append("Compute as given, in every phase; decompositions and activations left out.")
    return " ".join(text)


def _short(methods: Iterable[str]) -> dict[str, str]:
    """Labels with their first settings, as many as fit; the whole label where two would be alike."""
    found = {}
    for name in methods:
        found[name] = name
        while len(found[name]) > _LONGEST + 1 and ":" in found[name]:
            found[name] = found[name].rstrip("…").rpartition(":")[0] + "…"
    alike = Counter(found.values())
    return {name: short if alike[short] == 1 else name for name, short in found.items()}


def beside(phases: dict[str, dict[str, Any]]) -> str:
    """What a method holds beside model and optimizer, when it holds most, in words; nothing if it holds nothing."""
    most = max(phases.values(), key=lambda memory: memory["method_bytes"], default=None)
    if most is None or not most["method_bytes"]:
        return ""
    parts = ", ".join(f"{name} {size(part)}" for name, part in most["method"].items() if name != "other")
    text = size(most["method_bytes"]) + (f" ({parts})" if parts else "")
    if most["offloaded_bytes"]:
        text += f", {size(most['offloaded_bytes'])} of it on the CPU between averages: without activations the device "
        text += f"has {size(most['step_bytes'])} in a step and {size(most['average_bytes'])} in an average"
    return text


def _cells(row: dict[str, Any]) -> list[str]:
    pays = row["pays_below_bits"]
    return [
        size(row["slow_bytes_per_step"]),
        size(row["slow_bytes"]),
        ratio(row["traffic_vs_allreduce_fp32"]),
        units.time(row["seconds_per_step"]),
        units.time(row["seconds"]),
        f"{row['speedup']:.2f}",
        "any" if pays is None else "–" if pays == 0 else units.rate(float(f"{pays:.2g}")),
        size(row["memory_bytes"]),
    ]


def draw(plan: Plan, path: Path) -> dict[str, Any]:
    """Write the picture as PNG; returns its curves as plain values."""
    figure, (over_bandwidth, over_count) = two_panels()
    at_rates = [Links(**{**vars(plan.links), "bandwidth": float(rate)}) for rate in BANDWIDTHS]
    by_rate = {row.method: [row.speedup(plan.baseline, links) for links in at_rates] for row in plan.rows}
    by_count = over_nodes(plan, NODES)
    counts = list(by_count)
    for colour, row in zip(colours(len(plan.rows)), plan.rows, strict=False):
        name = row.method
        over_bandwidth.plot(BANDWIDTHS / 1e9, by_rate[name], color=colour, linewidth=2, label=name)
        over_count.plot(
            counts, [by_count[n][name] for n in counts], color=colour, linewidth=2, marker="o", markersize=3
        )
    dress(over_bandwidth, "bandwidth between nodes (Gbit/s)", "speed-up over fp32 all-reduce")
    dress(over_count, f"nodes, at {units.rate(plan.links.bandwidth)}", "")
    over_count.set_xscale("log", base=2)
    _logarithmic(over_bandwidth)
    _logarithmic(over_count)
    figure.suptitle(f"{plan.workload.name}: time to the same number of steps, planned")
    figure.savefig(path)
    return {
        "bandwidth_bits": BANDWIDTHS.tolist(),
        "speedup_over_bandwidth": by_rate,
        "nodes": counts,
        "speedup_over_nodes": {row.method: [by_count[n][row.method] for n in counts] for row in plan.rows},
    }


def _logarithmic(axes: Axes) -> None:
    """Factors are seen best on a logarithmic axis, read best as plain numbers."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if axes.get_xscale() == "linear":
        axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in _TICKS if low <= tick <= high])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.axhline(1.0, color="#999999", linewidth=0.8)
