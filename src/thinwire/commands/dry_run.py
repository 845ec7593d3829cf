"""`thinwire run … --dry-run`: one real step in a temporary folder, and a description of the run."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch
from rich.console import Console
from torch import nn

from thinwire.base.files import read_json
from thinwire.checkpoint import saves
from thinwire.comm.topology import place
from thinwire.commands.dry_run_tables import show
from thinwire.config.settings import describe
from thinwire.factor.convert import find_layers
from thinwire.factor.matrix import view_of
from thinwire.factor.optimizers import Optimizers
from thinwire.launch.jobs import Job
from thinwire.methods.factoring import Factoring
from thinwire.methods.registry import METHODS
from thinwire.plan.compute import given
from thinwire.plan.forecast import EVALUATION, Forecast, Layout
from thinwire.plan.links import Links
from thinwire.plan.planner import Row, Stopwatch, make_plan
from thinwire.plan.workload import Workload
from thinwire.plan.workloads import of_recipe
from thinwire.train import Recipe, checkpoint
from thinwire.train.run_folder import CHECKPOINTS, of_a_run
from thinwire.train.task import describe_optimizer


def dry_run(job: Job, *, prints: bool, as_json: bool, quiet: bool) -> None:
    """Take the step and, if `prints`, print a report; a loss that is not finite exits with code 1."""
    console = Console(stderr=True)
    if prints and not (as_json or quiet):
        console.print("taking one step, and planning the others …", highlight=False)
    before = _before(job)
    step = _take(job, console)
    if prints:
        logging.getLogger("thinwire").setLevel(logging.WARNING)  # the step has logged its layout already
        report = _report(job, step) | {"out": {"folder": str(job.out), "then": before}}
        click.echo(json.dumps(report, indent=2)) if as_json else show(report)
    if not _finite(step):
        sys.exit(1)


def _take(job: Job, console: Console) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="thinwire-dry-run-") as folder:
        alone = dataclasses.replace(job, out=Path(folder), first_step=True, resume=False, stability=None)
        return alone.run(lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True))


def _before(job: Job) -> str:
    """What a real run would find in its folder, and what it would do."""
    if job.resume and job.finished():
        return "holds this run, finished: nothing would be trained"
    if saves.find(job.out / CHECKPOINTS):
        if not job.resume:
            return _refused(job, "--resume continues it")
        checkpoint.position_found(job.out / CHECKPOINTS, checkpoint.identity(job.trained, job.config, job.seed))
        sound = saves.find_sound(job.out / CHECKPOINTS)
        return f"would continue from step {read_json(sound / 'position.json')['step']:,}"
    return _refused(job, "--overwrite replaces it") if of_a_run(job.out) and not job.resume else "new"


def _refused(job: Job, remedy: str) -> str:
    """For a folder that holds a run, without `--resume`."""
    return "holds a run that would be overwritten" if job.overwrite else f"holds a run and would be refused; {remedy}"


def _report(job: Job, step: dict[str, Any]) -> dict[str, Any]:
    """The report as plain values."""
    workload = of_recipe(job.trained, len(step["losses"]), job.data)
    traffic, by_phase = _traffic(job, workload, len(step["losses"]))
    peaks = [peak for peak in step["peaks"] if peak is not None]
    return {
        "run": _run(job, step),
        "layers": _layers(workload, job, step["order"]),
        "traffic": traffic,
        "memory": {
            "planned_bytes": max(_peak(memory, step["activations"]) for memory in by_phase.values()),
            "state_bytes": max(memory["held_bytes"] for memory in by_phase.values()),
            "by_phase": by_phase,
            "activation_bytes": step["activations"],
            "peak_bytes": max(peaks, default=None),
            "device_bytes": step["device"].get("bytes"),
        },
        "step": {
            "finite": _finite(step),
            "loss": fmean(step["losses"]) if _finite(step) else None,
            "losses": [loss if math.isfinite(loss) else None for loss in step["losses"]],
            "examples": step["taken"],
            "seconds": step["seconds"],
        },
    }


def _run(job: Job, step: dict[str, Any]) -> dict[str, Any]:
    recipe, device = job.trained, step["device"]
    return {
        "recipe": recipe.name,
        "summary": recipe.summary,
        "method": job.method,
        "settings": _unusual(job.config),
        "config": describe(job.config),
        "workers": len(step["losses"]),
        "groups": step["groups"],
        "nodes": step["nodes"],
        "steps": recipe.steps,
        "epochs": recipe.epochs,
        "passes": step["passes"],
        "seed": job.seed,
        "batch": recipe.batch,
        "batch_per_worker": sorted({min(step["examples"]), max(step["examples"])}),
        "data": step["data"],
        **describe_optimizer(recipe.optimizer),
        "optimizer_of_method": recipe.usual_optimizer is not None,
        "clip": recipe.clip,
        "rate": _rate(recipe),
        "precision": recipe.precision_name(torch.device(device["kind"])),
        "autocast_on_gpu": recipe.autocast,
        "device": device,
        "workers_per_device": step["workers_per_device"],
    }


def _unusual(config: Any) -> dict[str, Any]:
    """Fields without a default, or with a different value."""
    usual = {field.name: field.default for field in dataclasses.fields(config)}
    return {name: value for name, value in describe(config).items() if getattr(config, name) != usual[name]}


def _rate(recipe: Recipe) -> dict[str, Any]:
    """The learning rate schedule by its first, highest and last multiple of the optimizer's rate."""
    shares = [recipe.rate.factor(step, recipe.steps, recipe.epochs) for step in range(recipe.steps)]
    highest = max(range(recipe.steps), key=shares.__getitem__)
    return {
        "name": type(recipe.rate).__name__,
        "first": shares[0],
        "highest": shares[highest],
        "highest_at": highest + 1,
        "last": shares[-1],
    }


def _layers(workload: Workload, job: Job, order: list[str]) -> dict[str, Any]:
    """Every weight of two dimensions or more, and whether it is factored."""
    fate = _fates(workload, job.config, order) if issubclass(METHODS[job.method].method, Factoring) else {}
    weights: list[dict[str, Any]] = [
        {
            "layer": name.removesuffix(".weight"),
            "shape": list(p.shape),
            "matrix": list(view_of(p).tall),
            "parameters": p.numel(),
            "becomes": fate.get(name),
        }
        for name, p in workload.model.named_parameters()
        if p.dim() >= 2
    ]
    total = sum(p.numel() for p in workload.model.parameters())
    return {"weights": weights, "others": total - sum(w["parameters"] for w in weights), "parameters": total}


def _fates(workload: Workload, config: Any, order: list[str]) -> dict[str, str]:
    """By the weight's name: "factored", or why it stays full."""
    model: nn.Module = workload.model
    factored, kept = find_layers(
        model,
        trained=Optimizers(workload.optimizer(model.parameters())).parameters,
        order=order,
        keep_first=config.keep_first,
        keep_last=config.keep_last,
        keep=config.keep,
    )
    return {layer.key: "factored" for layer in factored} | {each.name: f"full: {each.why}" for each in kept}


def _peak(memory: dict[str, Any], activations: int) -> int:
    """Of a phase: in a step, or in an average, when activations are gone."""
    return max(memory["step_bytes"] + activations, memory["average_bytes"])


def _traffic(job: Job, workload: Workload, workers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the whole run would send, as in `thinwire plan`, and what a worker holds in each phase."""
    # Only bytes are used, so a step may take any time.
    layout, watch = Layout(workers=workers, nodes=_nodes()), Stopwatch(workload, given(1.0))
    plan = make_plan(workload, {job.method: job.config}, layout, Links(), stopwatch=watch)
    (row,) = plan.as_dict()["methods"]
    usual = plan.baseline.slow_bytes / workload.steps
    names = ("slow_bytes", "slow_bytes_range", "slow_bytes_per_step", "traffic_vs_allreduce_fp32", "assumes")
    totals = {name: row[name] for name in names}
    known = METHODS[job.method].method.phases
    steps = {phase: row["steps_by_phase"][phase] for phase in known if phase in row["steps_by_phase"]}
    return {**totals, "phases": _phases(plan.rows[0], steps, usual)}, row["memory_by_phase"]


def _nodes() -> int | None:
    """The number of machines in this process's job; None for one."""
    here = place()
    machines = here.world_size // here.local_size if here else 1
    return machines if machines > 1 else None


def _phases(row: Row, steps: dict[str, int], usual: float) -> list[dict[str, Any]]:
    """What each phase sends, starting with attach; `usual` is one step of fp32 all-reduce."""
    sent = _by_phase(row.forecast)
    bounds = [_by_phase(f) for f in (row.lowest, row.highest) if f]
    table = []
    for phase in dict.fromkeys(["attach", *steps, *sent]):
        count, size = steps.get(phase, 0), sent.get(phase, 0)
        if count or size:
            ends = sorted(each.get(phase, 0) for each in bounds)
            table.append(
                {
                    "phase": phase,
                    "steps": count,
                    "slow_bytes": size,
                    "slow_bytes_range": ends if ends and ends[0] != ends[-1] else None,
                    "slow_bytes_per_step": size / count if count else None,
                    "traffic_vs_allreduce_fp32": size / (count * usual) if count and usual else None,
                }
            )
    return table


def _by_phase(forecast: Forecast) -> dict[str, int]:
    """Slow-link bytes without evaluation."""
    sent: dict[str, int] = {}
    for phase, purpose, link, size, *_ in forecast.ledger.state()["rows"]:
        if link == "slow" and purpose != EVALUATION:
            sent[phase] = sent.get(phase, 0) + size
    return sent


def _finite(step: dict[str, Any]) -> bool:
    return all(math.isfinite(loss) for loss in step["losses"])
