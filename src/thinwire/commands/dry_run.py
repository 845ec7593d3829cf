"""`thinwire run … --dry-run`: one real step in a temporary folder, and a description of the run in tables."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn

from thinwire.base import units
from thinwire.base.files import read_json
from thinwire.checkpoint import saves
from thinwire.comm.topology import place
from thinwire.commands.plan import beside
from thinwire.commands.watch import print_line
from thinwire.config.common import Factored
from thinwire.config.settings import describe
from thinwire.factor.convert import find_layers
from thinwire.factor.matrix import view_of
from thinwire.factor.optimizers import Optimizers
from thinwire.launch.jobs import Job
from thinwire.methods.registry import phases_of
from thinwire.plan.compute import given
from thinwire.plan.forecast import EVALUATION, Forecast, Layout, Links
from thinwire.plan.planner import Row, Stopwatch, make_plan
from thinwire.plan.workload import Workload, of_recipe
from thinwire.report.tables import ratio, size, wide_console
from thinwire.train import Recipe, checkpoint
from thinwire.train.run_folder import CHECKPOINTS, of_a_run
from thinwire.train.task import describe_optimizer

# With more weights than _MOST, only the first and the last are shown.
_MOST, _FIRST, _LAST = 30, 24, 4
_OPTIMIZER = ("momentum", "betas", "weight_decay")


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
    if not all(map(math.isfinite, step["losses"])):
        sys.exit(1)


def _take(job: Job, console: Console) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="thinwire-dry-run-") as folder:
        alone = dataclasses.replace(job, out=Path(folder), first_step=True, resume=False, stability=None)
        return alone.run(partial(print_line, console))


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
    finite = all(map(math.isfinite, step["losses"]))
    return {
        "run": _run(job, step),
        "layers": _layers(workload, job, step["order"]),
        "traffic": traffic,
        "memory": {
            # In a step, or in an average, when activations are gone.
            "planned_bytes": max(
                max(memory["step_bytes"] + step["activations"], memory["average_bytes"]) for memory in by_phase.values()
            ),
            "state_bytes": max(memory["held_bytes"] for memory in by_phase.values()),
            "by_phase": by_phase,
            "activation_bytes": step["activations"],
            "peak_bytes": max(peaks, default=None),
            "device_bytes": step["device"].get("bytes"),
        },
        "step": {
            "finite": finite,
            "loss": fmean(step["losses"]) if finite else None,
            "losses": [loss if math.isfinite(loss) else None for loss in step["losses"]],
            "examples": step["taken"],
            "seconds": step["seconds"],
        },
    }


def _run(job: Job, step: dict[str, Any]) -> dict[str, Any]:
    recipe, device, config = job.trained, step["device"], describe(job.config)
    usual = {field.name: field.default for field in dataclasses.fields(job.config)}
    return {
        "recipe": recipe.name,
        "summary": recipe.summary,
        "method": job.method,
        "settings": {name: value for name, value in config.items() if getattr(job.config, name) != usual[name]},
        "config": config,
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
    fate = _fates(workload, job.config, order) if isinstance(job.config, Factored) else {}
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


def _traffic(job: Job, workload: Workload, workers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the whole run would send, as in `thinwire plan`, and what a worker holds in each phase."""
    here = place()
    machines = here.world_size // here.local_size if here else 1
    # Only bytes are used, so a step may take any time.
    layout, watch = Layout(workers=workers, nodes=machines if machines > 1 else None), Stopwatch(workload, given(1.0))
    plan = make_plan(workload, {job.method: job.config}, layout, Links(), stopwatch=watch)
    (row,) = plan.as_dict()["methods"]
    usual = plan.baseline.slow_bytes / workload.steps
    names = ("slow_bytes", "slow_bytes_range", "slow_bytes_per_step", "traffic_vs_allreduce_fp32", "assumes")
    totals = {name: row[name] for name in names}
    known = phases_of(job.config)
    steps = {phase: row["steps_by_phase"][phase] for phase in known if phase in row["steps_by_phase"]}
    return {**totals, "phases": _phases(plan.rows[0], steps, usual)}, row["memory_by_phase"]


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
    for phase, purpose, link, count, *_ in forecast.ledger.state()["rows"]:
        if link == "slow" and purpose != EVALUATION:
            sent[phase] = sent.get(phase, 0) + count
    return sent


def show(report: dict[str, Any]) -> None:
    console = wide_console(highlight=False)
    for part in (_run_table(report), _layers_table(report["layers"]), _traffic_table(report), _step_table(report)):
        console.print(part)
        if part.caption:
            console.print()
    step = report["step"]
    if not step["finite"]:
        lost = [str(rank) for rank, loss in enumerate(step["losses"]) if loss is None]
        console.print(f"[bold red]THE LOSS IS NOT FINITE[/] on worker {', '.join(lost)}: this run would not train.")
    else:
        console.print(f"The step worked; nothing was kept, and {report['out']['folder']} was not touched.")


def _pairs(title: str) -> Table:
    out = Table(title=title, box=SIMPLE_HEAD, show_header=False, title_justify="left")
    out.add_column(no_wrap=True, style="bold")
    out.add_column(overflow="fold")
    return out


def _run_table(report: dict[str, Any]) -> Table:
    run = report["run"]
    out = _pairs("The run")
    out.add_row("recipe", f"{run['recipe']}: {run['summary']}")
    settings = ", ".join(f"{name}={_plain(value)}" for name, value in run["settings"].items())
    out.add_row("method", f"{run['method']}: {settings}" if settings else f"{run['method']}, with its defaults")
    out.add_row("workers", _workers(run))
    out.add_row("batch", f"{run['batch']:,} examples, {_range(run['batch_per_worker'])} per worker")
    length = f"{units.count(run['steps'], 'step')} in {units.count(run['epochs'], 'epoch')}"
    length += f", {run['passes']:.3g} passes over this data"
    out.add_row("length", f"{length}, seed {run['seed']}")
    parts = {"train": "to train on", "validation": "to validate on", "heldout": "held out"}
    sizes = run["data"]
    out.add_row("data", ", ".join(f"{sizes[part]:,} {name}" for part, name in parts.items() if sizes[part]))
    out.add_row("optimizer", _optimizer(run))
    out.add_row("rate", _rate_text(run))
    only_gpu = run["autocast_on_gpu"] and run["precision"] == "fp32"
    out.add_row("precision", run["precision"] + (", as on every CPU; bf16 autocast on a GPU" if only_gpu else ""))
    out.add_row("device", _device(run))
    out.add_row("folder", f"{report['out']['folder']} ({report['out']['then']})")
    return out


def _workers(run: dict[str, Any]) -> str:
    if run["workers"] == 1:
        return "1, so nothing is sent"
    groups, nodes = run["groups"], run["nodes"]
    parts = [_parts(nodes, "node")] if groups == nodes else [_parts(nodes, "node"), _parts(groups, "group")]
    same = ", each a group" if groups == nodes else ""
    return f"{run['workers']:,} on {' and in '.join(parts)}{same}"


def _parts(parts: list[list[int]], what: str) -> str:
    lengths = sorted({len(part) for part in parts})
    return f"{len(parts):,} {what}{'' if len(parts) == 1 else 's'} of {_range(lengths)}"


def _range(ends: list[int]) -> str:
    return " to ".join(f"{end:,}" for end in dict.fromkeys((ends[0], ends[-1])))


def _optimizer(run: dict[str, Any]) -> str:
    known = {name: run.get(f"optimizer.{name}") for name in ("lr", *_OPTIMIZER)}
    words = [f"{name} {_plain(value)}" for name, value in known.items() if value]
    clip = [] if run["clip"] is None else [f"gradients clipped to {run['clip']:g}"]
    own = ["chosen for this method"] if run["optimizer_of_method"] else []
    return ", ".join([run["optimizer"], *words, *clip, *own])


def _rate_text(run: dict[str, Any]) -> str:
    rate, lr = run["rate"], run.get("optimizer.lr")
    first, highest, last = (
        f"{lr * share:.3g}" if isinstance(lr, float) else f"{share:.3g} of it"
        for share in (rate["first"], rate["highest"], rate["last"])
    )
    return f"{rate['name']}: {first} first, {highest} highest (step {rate['highest_at']:,}), {last} last"


def _device(run: dict[str, Any]) -> str:
    device, sharers = run["device"], run["workers_per_device"]
    if device["kind"] != "cuda":
        threads = device["threads"]
        return f"{device['name']}, {threads} thread{'' if threads == 1 else 's'} per worker"
    if sharers == 1:
        return f"{device['name']}, one per worker"
    return (
        f"{device['name']}, shared by {sharers} workers: gloo sends through the host, and they take turns on the "
        "GPU. Bytes and accuracy are as on separate GPUs, seconds are not."
    )


def _layers_table(layers: dict[str, Any]) -> Table:
    weights = layers["weights"]
    factors = any(w["becomes"] for w in weights)
    out = Table(title="Layers", caption=_of_factored(layers) if factors else None, box=SIMPLE_HEAD)
    out.title_justify = out.caption_justify = "left"
    out.add_column("layer", overflow="fold")
    for heading in ("shape", "as matrix", "parameters"):
        out.add_column(heading, justify="right", no_wrap=True)
    if factors:
        out.add_column("becomes", overflow="fold")
    cut = len(weights) > _MOST
    for w in weights[:_FIRST] if cut else weights:
        out.add_row(*_weight(w, factors))
    if cut:
        out.add_row(*_left_out(weights[_FIRST:-_LAST], factors), style="dim")
        for w in weights[-_LAST:]:
            out.add_row(*_weight(w, factors))
    out.add_row("biases, norms and other vectors", "", "", f"{layers['others']:,}", *["full"][: int(factors)])
    out.add_section()
    out.add_row("all", "", "", f"{layers['parameters']:,}", style="bold")
    return out


def _weight(w: dict[str, Any], factors: bool) -> list[str]:
    shape, matrix = "×".join(map(str, w["shape"])), " × ".join(map(str, w["matrix"]))
    return [w["layer"], shape, matrix, f"{w['parameters']:,}", *[str(w["becomes"])][: int(factors)]]


def _left_out(weights: list[dict[str, Any]], factors: bool) -> list[str]:
    count = sum(w["becomes"] == "factored" for w in weights)
    summary = f"{count} factored, {len(weights) - count} full"
    return [f"… {len(weights)} more", "", "", f"{sum(w['parameters'] for w in weights):,}", *[summary][: int(factors)]]


def _of_factored(layers: dict[str, Any]) -> str:
    factored = [w for w in layers["weights"] if w["becomes"] == "factored"]
    share = sum(w["parameters"] for w in factored) / layers["parameters"]
    return (
        f"{len(factored)} of {len(layers['weights'])} weights, {100 * share:.1f} % of the parameters, become factors "
        "where those are smaller."
    )


def _traffic_table(report: dict[str, Any]) -> Table:
    traffic = report["traffic"]
    ranged = bool(traffic["slow_bytes_range"])
    out = Table(title="Over the slow link", caption=_of_traffic(traffic), box=SIMPLE_HEAD)
    out.title_justify = out.caption_justify = "left"
    out.add_column("phase", no_wrap=True)
    for heading in ("steps", "per step", "total", *["rank 1 to full rank"][: int(ranged)], "vs all-reduce"):
        out.add_column(heading, justify="right", no_wrap=True)
    for row in traffic["phases"]:
        out.add_row(row["phase"], f"{row['steps']:,}", *_sent(row, ranged))
    out.add_section()
    out.add_row("all", f"{report['run']['steps']:,}", *_sent(traffic, ranged), style="bold")
    return out


def _sent(row: dict[str, Any], ranged: bool) -> list[str]:
    each, ends = row["slow_bytes_per_step"], row["slow_bytes_range"]
    span = ["" if ends is None else f"{size(ends[0])} to {size(ends[1])}"][: int(ranged)]
    share = row["traffic_vs_allreduce_fp32"]
    compared = "< 0.001" if share and share < 0.0005 else ratio(share)
    return ["–" if each is None else size(each), size(row["slow_bytes"]), *span, compared]


def _of_traffic(traffic: dict[str, Any]) -> str:
    lines = ["Bytes per node without evaluation, as planned."]
    if traffic["slow_bytes_range"]:
        lines.append("Ranks of a typical run.")
    if traffic["assumes"]:
        lines.append(f"If {traffic['assumes']}.")
    return " ".join(lines)


def _step_table(report: dict[str, Any]) -> Table:
    memory, step, run = report["memory"], report["step"], report["run"]
    out = _pairs("Memory, and the step that was taken")
    held = f"{size(memory['state_bytes'])} of state at most, {size(memory['activation_bytes'])} of activations"
    out.add_row("planned", f"{size(memory['planned_bytes'])} per worker: {held}")
    if parts := beside(memory["by_phase"]):
        out.add_row("of the method", f"beside model and optimizer {parts}")
    if memory["peak_bytes"] is not None:
        out.add_row("peak", _peak_text(memory, run["workers_per_device"]))
    out.add_row("loss", f"{step['loss']:.4f}" if step["finite"] else "NOT FINITE")
    parts = ", ".join(f"{name} {units.time(seconds)}" for name, seconds in step["seconds"].items())
    out.add_row("seconds", f"{parts} (a first step is slow)")
    if (most := max(step["examples"])) < max(run["batch_per_worker"]):
        whole = f"{max(run['batch_per_worker']):,} examples per worker"
        out.add_row("taken", f"{most:,} of {whole}, enough on a CPU; activations are scaled to all")
    return out


def _peak_text(memory: dict[str, Any], sharers: int | None) -> str:
    times = f", times {sharers} on the GPU" if sharers and sharers > 1 else ""
    has = f"the GPU has {size(memory['device_bytes'])}"
    return f"{size(memory['peak_bytes'])} per worker in this step, including data on the GPU{times}; {has}"


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(_plain(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
