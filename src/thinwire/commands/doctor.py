"""`thinwire doctor`, and its report as text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from thinwire.base import units
from thinwire.base.errors import ConfigError, ThinwireError
from thinwire.comm.process_groups import leave
from thinwire.comm.roll_call import ConnectError, RollCall
from thinwire.comm.topology import place
from thinwire.commands import options
from thinwire.commands.plan import configs_of, workload_of
from thinwire.doctor import links, machine
from thinwire.doctor.links import slow_links
from thinwire.doctor.machine import GLOO, NCCL, blocked, hints
from thinwire.launch.failures import as_worker
from thinwire.plan import compute as computing
from thinwire.plan.forecast import Layout
from thinwire.plan.planner import Plan, Stopwatch, make_plan
from thinwire.plan.workload import OPTIMIZERS, Workload
from thinwire.recipes import Recipe, named

_MOST_ROWS = 8
_WIDTH = 100
_START = (
    "  srun thinwire doctor",
    "  torchrun --nnodes 2 --node-rank 0 --master-addr HOST --master-port 29500 -m thinwire doctor",
)


@click.command()
@click.argument("recipe", required=False)
@click.option("--model", metavar="FILE.py:FUNCTION", help="Advise for this nn.Module, as `thinwire plan` takes it.")
@click.option("--methods", metavar="A,B", help="Methods to choose from, or all; default: those of the README.")
@click.option("--group-size", metavar="G", help='Workers per group, or "world".')
@click.option("--compute", metavar="TIME", help="A full-rank step without the wire, such as 120ms; default: measured.")
@click.option("--steps", type=click.IntRange(1), metavar="N", help="Steps instead of the recipe's.")
@click.option("--epochs", type=click.IntRange(1), metavar="N", help="Epochs instead of the recipe's.")
@options.data
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", help="With --model.")
@options.settings
@click.option("--timeout", type=click.FloatRange(1), default=60, show_default=True, help="Seconds to wait for others.")
@click.option("--json", "as_json", is_flag=True, help="Print only the report, as JSON.")
@click.option("--quiet", is_flag=True, help="No progress lines.")
def doctor(recipe: str | None, model: str | None, as_json: bool, quiet: bool, timeout: float, **flags: Any) -> None:
    """Check the machine, measure the links of a job, and say which method to use on them.

    Started on all nodes by torchrun or srun it measures the links inside nodes and between them, and compares versions
    and settings of all workers; where these differ, the exit code is 1. With RECIPE or --model it says which
    method is fastest for it on these links. Alone it checks this machine.
    """
    if recipe is not None and model is not None:
        raise click.UsageError("give RECIPE or --model FILE.py:FUNCTION, not both")
    if model is not None and flags["steps"] is None:
        raise click.UsageError("advice for a model needs the steps of a run; give --steps N")
    if recipe is not None:
        named(recipe)  # an unknown one is refused before anybody waits
    here = place()
    visit = _Visit(recipe, model, flags, quiet=quiet or as_json or (here is not None and here.rank > 0))
    with as_worker():
        if here is None or here.world_size == 1:
            report = visit.report([machine.facts()])
        else:
            report = visit.together(timeout)
            if here.rank > 0:
                return
    visit.finish(report, as_json)
    if report["differences"]:
        click.get_current_context().exit(1)


class _Visit:
    """One run of the doctor, on one worker."""

    def __init__(self, recipe: str | None, model: str | None, flags: dict[str, Any], *, quiet: bool) -> None:
        self.recipe, self.model, self.quiet = recipe, model, quiet
        self.flags = flags
        self.step_s: float | None = None
        """Seconds of a step on the slowest worker, while all compute."""

    @property
    def advises(self) -> bool:
        return self.recipe is not None or self.model is not None

    def say(self, what: str) -> None:
        if not self.quiet:
            click.echo(f"{what} …", err=True)

    def together(self, timeout: float) -> dict[str, Any]:
        """The whole job; collective. Only rank 0's report is of use."""
        self.say("waiting for all workers")
        call = RollCall(timeout)
        everyone = call.answers(machine.facts())
        report = self.report(everyone)
        self.say("measuring links")
        try:
            if blocked(report["nodes"]):
                raise ConnectError("others could not reach it")
            call.connect()
        except ConnectError as error:
            call.close()
            if call.rank == 0:  # the others leave the word to it
                click.echo(report_text(report) + "\n")
                raise ThinwireError(_unconnected(error, report)) from error
            return report
        report["links"] = links.measured(call, report["nodes"])
        if self.advises and self.flags["compute"] is None:
            self.say("timing a step on all workers")
            self._time_steps(call)
        call.close()
        leave()
        return report

    def finish(self, report: dict[str, Any], as_json: bool) -> None:
        """Print the report, plan, and print the advice."""
        if not as_json:
            click.echo(report_text(report))
        if report["links"] and self.advises:
            plan = self._plan(report)
            report["advice"] = {"links": vars(plan.links), **plan.recommendation.as_dict()}
        if as_json:
            click.echo(json.dumps(report, indent=2))
        elif report["links"] and self.advises:
            step = plan.stopwatch(plan.baseline.simulations[0], next(iter(plan.baseline.simulations[0].steps))).seconds
            about = f"{plan.workload.name}, {units.time(step)} of compute per step"
            lines = plan.recommendation.lines()
            if self.recipe:
                best = plan.recommendation.best.method
                lines.append(f"Try it, started like this: thinwire run {self.recipe} --method {best}")
            click.echo("\n" + _advice(lines, about))
        else:
            click.echo("\n" + _advice([_ask(report)], "a model"))

    def report(self, everyone: list[dict[str, Any]]) -> dict[str, Any]:
        """What the workers know, before any link is measured."""
        nodes = machine.nodes(everyone)
        return {
            "workers": len(everyone),
            "nodes": nodes,
            "differences": machine.differences(everyone),
            "hints": hints(nodes),
            "links": None,
            "advice": None,
        }

    def _time_steps(self, call: RollCall) -> None:
        """Time a step while every worker computes: they may share cores, and the slowest one counts."""
        try:
            mine: dict[str, Any] = {"seconds": computing.measure(self._workload(call.world_size)[1]).seconds}
        except ConfigError as error:
            mine = {"error": str(error)}
        answers = call.answers(mine)
        wrong = [rank for rank, answer in enumerate(answers) if "error" in answer]
        if wrong and call.rank == 0:
            raise ConfigError(f"{rank_names(wrong)} cannot time a step: {answers[wrong[0]]['error']}")
        self.step_s = max(answer.get("seconds", 0.0) for answer in answers)

    def _workload(self, workers: int) -> tuple[Recipe | None, Workload]:
        length = {name: self.flags[name] for name in ("steps", "epochs")}
        chosen = None if self.recipe is None else named(self.recipe, **length, workers=workers)
        return chosen, workload_of(chosen, self.model, {**self.flags, "workers": workers})

    def _plan(self, report: dict[str, Any]) -> Plan:
        recipe, workload = self._workload(report["workers"])
        configs, nodes = configs_of(recipe, workload, self.flags), len(report["nodes"])
        by_nccl = nodes > 1 and all("nccl" in node["backend"] for node in report["nodes"])
        return make_plan(
            workload,
            configs,
            Layout(
                workers=report["workers"],
                nodes=nodes if nodes > 1 else None,
                algorithm="tree" if by_nccl else "ring",
            ),
            links.for_plan(report["links"]),
            stopwatch=self._stopwatch(workload),
            bounds=False,
            before=lambda name: self.say(f"planning {name} ({list(configs).index(name) + 1} of {len(configs)})"),
        )

    def _stopwatch(self, workload: Workload) -> Stopwatch:
        """This worker's times, as much slower as the slowest worker is beside the others."""
        if self.flags["compute"]:
            return Stopwatch(workload, computing.given(units.seconds(self.flags["compute"])))
        assert self.step_s is not None
        return Stopwatch(workload, slowdown=max(1.0, self.step_s / computing.measure(workload).seconds))


def _ask(report: dict[str, Any]) -> str:
    if report["links"] is None:
        return "first measure the links; for a link that you know: thinwire plan RECIPE --bandwidth 1Gbit"
    return "name one to get advice for these links: thinwire doctor RECIPE, or --model FILE.py:FUNCTION --steps N"


def _unconnected(error: ConnectError, report: dict[str, Any]) -> str:
    both = f"{GLOO} and {NCCL}"
    remedy = f"set {both} to the interface that leads to the other nodes, and open all ports between them"
    return f"gloo cannot connect the workers ({error}); {'see the hint above' if report['hints'] else remedy}"


def report_text(report: Mapping[str, Any]) -> str:
    """All sections but the advice."""
    parts = [_title(report), _section("Machine", _machines(report["nodes"]))]
    if report["workers"] > 1:
        parts.append(_section("Workers", [*_agreement(report)]))
    parts.append(_section("Links", [*_link_lines(report), *(f"hint: {hint}" for hint in report["hints"])]))
    return "\n\n".join(parts)


def _advice(lines: Sequence[str], about: str) -> str:
    """The last section."""
    return _section(f"What to use for {about}", lines)


def rank_names(ranks: Sequence[int]) -> str:
    """Ranks in words: rank 3, ranks 0 to 4 and 7."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else " and ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(part for line in lines for part in _wrapped(line))])


def _wrapped(line: str) -> list[str]:
    """Indented, and broken where it is long; a command is left whole, to be copied."""
    if line.startswith(" ") or len(line) <= _WIDTH:
        return [f"  {line}"]
    return textwrap.wrap(line, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _title(report: Mapping[str, Any]) -> str:
    version = report["nodes"][0]["versions"]["thinwire"] or "(not installed)"
    workers, nodes = report["workers"], len(report["nodes"])
    where = f"{workers} workers on {units.count(nodes, 'node')}" if workers > 1 else "one process"
    return f"Thinwire {version}, {where}"


def _machines(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per fact; where nodes differ, each value with its nodes."""
    hosts = list(dict.fromkeys(node["host"] for node in nodes))
    rows = [("hosts" if len(nodes) > 1 else "host", ", ".join(hosts[:_MOST_ROWS]) + ", …" * (len(hosts) > _MOST_ROWS))]
    facts = [_facts(node, alone=len(nodes) == 1) for node in nodes]
    for name in facts[0]:
        by_value: dict[str, list[str]] = {}
        for number, own in enumerate(facts):
            by_value.setdefault(own[name], []).append(str(number))
        each = [f"{value} on node{'s' * (len(own) > 1)} {', '.join(own)}" for value, own in by_value.items()]
        rows.append((name, "; ".join(each if len(each) > 1 else by_value)))
    return _aligned(rows)


def _facts(node: Mapping[str, Any], *, alone: bool) -> dict[str, str]:
    versions, gpus = node["versions"], node["gpus"]
    kinds = {name: gpus.count(name) for name in gpus}
    bench = "can make slow links here" if node["netbench"] is None else f"not here: {node['netbench']}"
    found = {
        "cores": str(node["cores"]),
        "GPUs": ", ".join(f"{count} × {name}" for name, count in kinds.items()) or "none",
        "Python": versions["Python"],
        "torch": versions["torch"] + (f", CUDA {versions['CUDA']}" if versions["CUDA"] else ""),
        "backends": _backends(node),
        "bf16": {"GPU": "yes, on the GPU", "CPU": "yes, on the CPU"}.get(
            node["bf16"], "emulated: works as a code, slow to compute in"
        ),
    }
    return found | ({"netbench": bench} if alone else {})


def _backends(node: Mapping[str, Any]) -> str:
    there = node["backends"]
    if not there:
        return "none: this torch has no gloo; install one that has"
    return ", ".join(there) + ("" if "nccl" in there else "; no nccl in this torch, which is for GPUs only")


def _agreement(report: Mapping[str, Any]) -> Iterator[str]:
    if not report["differences"]:
        yield f"versions, backends and settings are the same on all {report['workers']}"
        return
    yield "these differ; make them the same on every node:"
    for difference in report["differences"]:
        values = [f"{own['value'] or 'not set'} on {rank_names(own['ranks'])}" for own in difference["values"]]
        yield f"  {difference['what']}: {'; '.join(values)}"


def _link_lines(report: Mapping[str, Any]) -> list[str]:
    if report["workers"] == 1:
        return ["not measured: one process has none. Start the doctor on every node, by one of these:", *_START]
    found = report["links"]
    if found is None:
        return ["not measured: gloo cannot connect the workers"]
    node_of = {rank: node["node"] for node in report["nodes"] for rank in node["ranks"]}
    rows: list[tuple[str, ...]] = []
    if found["between"] or found["inside"]:
        rows.append(("", "rate", "round trip", "interface"))
    rows += _rows(found["between"], lambda rank: f"node {node_of[rank]}")
    if found["inside"]:
        slowest = min(found["inside"], key=lambda link: link["bits_per_second"])
        rows.append(("inside a node" + (", slowest" if len(found["inside"]) > 2 else ""), *_figures(slowest)))
    lines = _aligned(rows, right=(1, 2))
    if any("nccl" in node["backend"] for node in report["nodes"]):
        lines.append("measured with gloo over TCP; nccl may be faster")
    if not found["between"]:
        lines.append("all workers are on one machine: there is no link between nodes")
    return [*lines, *_slow(found["between"], node_of)]


def _rows(links: Sequence[Mapping[str, Any]], name: Any) -> Iterator[tuple[str, ...]]:
    ordered = sorted(links, key=lambda link: link["bits_per_second"])
    shown = links if len(links) <= _MOST_ROWS else ordered[:_MOST_ROWS]
    for link in shown:
        yield (f"{name(link['source'])} → {name(link['target'])}", *_figures(link))
    if len(links) > _MOST_ROWS:
        yield f"{len(links) - _MOST_ROWS} others, up to", *_figures(ordered[-1])


def _figures(link: Mapping[str, Any]) -> tuple[str, str, str]:
    rate = units.rate(float(f"{link['bits_per_second']:.3g}"))
    return rate, units.time(float(f"{link['round_trip_s']:.2g}")), link["interface"] or "?"


def _slow(links: Sequence[Mapping[str, Any]], node_of: Mapping[int, int]) -> Iterator[str]:
    below = slow_links(list(map(dict, links)))
    if not below:
        return
    slowest = below[0]
    factor = max(link["bits_per_second"] for link in links) / slowest["bits_per_second"]
    ends = [{node_of[link["source"]], node_of[link["target"]]} for link in below]
    common = set.intersection(*ends)
    yield (
        f"slow: node {node_of[slowest['source']]} → node {node_of[slowest['target']]}, {factor:.2g} times slower than "
        "the fastest link"
    )
    if len(common) == 1 and len(below) > 1:
        yield f"      node {common.pop()} is at the end of every slow link: look at its cable, port or interface"


def _aligned(rows: Sequence[tuple[str, ...]], right: Sequence[int] = ()) -> list[str]:
    """Columns under one another."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return [
        "  ".join(cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        .rstrip()
        for row in rows
    ]  # fmt: skip
