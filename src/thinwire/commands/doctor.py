"""`thinwire doctor`."""

from __future__ import annotations

import json
from typing import Any

import click

from thinwire.base import units
from thinwire.base.errors import ConfigError, ThinwireError
from thinwire.comm.process_groups import leave
from thinwire.comm.roll_call import ConnectError, RollCall
from thinwire.comm.topology import place
from thinwire.commands import options
from thinwire.commands.plan import configs_of, workload_of
from thinwire.doctor import interfaces, links, machine, show
from thinwire.launch.failures import as_worker
from thinwire.plan import compute as computing
from thinwire.plan.forecast import Layout
from thinwire.plan.planner import Plan, Stopwatch, make_plan
from thinwire.plan.workload import Workload
from thinwire.plan.workloads import OPTIMIZERS
from thinwire.recipes import Recipe, named


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
            report = visit.alone()
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

    def alone(self) -> dict[str, Any]:
        """This machine only."""
        return self._report([machine.facts()])

    def together(self, timeout: float) -> dict[str, Any]:
        """The whole job; collective. Only rank 0's report is of use."""
        self.say("waiting for all workers")
        call = RollCall(timeout)
        everyone = call.answers(machine.facts())
        report = self._report(everyone)
        self.say("measuring links")
        try:
            if interfaces.blocked(report["nodes"]):
                raise ConnectError("others could not reach it")
            call.connect()
        except ConnectError as error:
            call.close()
            if call.rank == 0:  # the others leave the word to it
                click.echo(show.text(report) + "\n")
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
            click.echo(show.text(report))
        if report["links"] and self.advises:
            plan = self._plan(report)
            report["advice"] = {"links": vars(plan.links), **plan.recommendation.as_dict()}
        if as_json:
            click.echo(json.dumps(report, indent=2))
        elif report["links"] and self.advises:
            step = plan.stopwatch(plan.baseline.simulations[0], next(iter(plan.baseline.simulations[0].steps))).seconds
            about = f"{plan.workload.name}, {units.time(step)} of compute per step"
            click.echo("\n" + show.advice([*plan.recommendation.lines(), *self._how(plan)], about))
        else:
            click.echo("\n" + show.advice([_ask(report)], "a model"))

    def _report(self, everyone: list[dict[str, Any]]) -> dict[str, Any]:
        nodes = machine.nodes(everyone)
        return {
            "workers": len(everyone),
            "nodes": nodes,
            "differences": machine.differences(everyone),
            "hints": interfaces.hints(nodes),
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
            raise ConfigError(f"{show.rank_names(wrong)} cannot time a step: {answers[wrong[0]]['error']}")
        self.step_s = max(answer.get("seconds", 0.0) for answer in answers)

    def _workload(self, workers: int) -> tuple[Recipe | None, Workload]:
        length = {name: self.flags[name] for name in ("steps", "epochs")}
        chosen = None if self.recipe is None else named(self.recipe, **length, workers=workers)
        return chosen, workload_of(chosen, self.model, {**self.flags, "workers": workers})

    def _plan(self, report: dict[str, Any]) -> Plan:
        recipe, workload = self._workload(report["workers"])
        configs = configs_of(recipe, workload, self.flags)
        nodes = len(report["nodes"])
        return make_plan(
            workload,
            configs,
            Layout(workers=report["workers"], nodes=nodes if nodes > 1 else None),
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

    def _how(self, plan: Plan) -> list[str]:
        best = plan.recommendation.best.method
        return [f"Try it, started like this: thinwire run {self.recipe} --method {best}"] if self.recipe else []


def _ask(report: dict[str, Any]) -> str:
    if report["links"] is None:
        return "first measure the links; for a link that you know: thinwire plan RECIPE --bandwidth 1Gbit"
    return "name one to get advice for these links: thinwire doctor RECIPE, or --model FILE.py:FUNCTION --steps N"


def _unconnected(error: ConnectError, report: dict[str, Any]) -> str:
    both = f"{interfaces.GLOO} and {interfaces.NCCL}"
    remedy = f"set {both} to the interface that leads to the other nodes, and open all ports between them"
    return f"gloo cannot connect the workers ({error}); {'see the hint above' if report['hints'] else remedy}"
