"""The report of `--dry-run` as tables."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from thinwire.base import units
from thinwire.plan.show import beside
from thinwire.report.tables import ratio, size, wide_console

# With more weights than _MOST, only the first and the last are shown.
_MOST, _FIRST, _LAST = 30, 24, 4
_OPTIMIZER = ("momentum", "betas", "weight_decay")


def show(report: dict[str, Any]) -> None:
    console = wide_console(highlight=False)
    for part in (_run(report), _layers(report["layers"]), _traffic(report), _step(report)):
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


def _run(report: dict[str, Any]) -> Table:
    run = report["run"]
    out = _pairs("The run")
    out.add_row("recipe", f"{run['recipe']}: {run['summary']}")
    out.add_row("method", _method(run))
    out.add_row("workers", _workers(run))
    out.add_row("batch", f"{run['batch']:,} examples, {_range(run['batch_per_worker'])} per worker")
    length = f"{units.count(run['steps'], 'step')} in {units.count(run['epochs'], 'epoch')}"
    length += f", {run['passes']:.3g} passes over this data"
    out.add_row("length", f"{length}, seed {run['seed']}")
    out.add_row("data", _data(run["data"]))
    out.add_row("optimizer", _optimizer(run))
    out.add_row("rate", _rate(run))
    out.add_row("precision", _precision(run))
    out.add_row("device", _device(run))
    out.add_row("folder", f"{report['out']['folder']} ({report['out']['then']})")
    return out


def _method(run: dict[str, Any]) -> str:
    settings = ", ".join(f"{name}={_plain(value)}" for name, value in run["settings"].items())
    return f"{run['method']}: {settings}" if settings else f"{run['method']}, with its defaults"


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


def _data(sizes: dict[str, int | None]) -> str:
    names = {"train": "to train on", "validation": "to validate on", "heldout": "held out"}
    return ", ".join(f"{sizes[part]:,} {name}" for part, name in names.items() if sizes[part])


def _optimizer(run: dict[str, Any]) -> str:
    known = {name: run.get(f"optimizer.{name}") for name in ("lr", *_OPTIMIZER)}
    words = [f"{name} {_plain(value)}" for name, value in known.items() if value]
    clip = [] if run["clip"] is None else [f"gradients clipped to {run['clip']:g}"]
    own = ["chosen for this method"] if run["optimizer_of_method"] else []
    return ", ".join([run["optimizer"], *words, *clip, *own])


def _rate(run: dict[str, Any]) -> str:
    rate, lr = run["rate"], run.get("optimizer.lr")
    first, highest, last = (
        f"{lr * share:.3g}" if isinstance(lr, float) else f"{share:.3g} of it"
        for share in (rate["first"], rate["highest"], rate["last"])
    )
    return f"{rate['name']}: {first} first, {highest} highest (step {rate['highest_at']:,}), {last} last"


def _precision(run: dict[str, Any]) -> str:
    only_gpu = run["autocast_on_gpu"] and run["precision"] == "fp32"
    return run["precision"] + (", as on every CPU; bf16 autocast on a GPU" if only_gpu else "")


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


def _layers(layers: dict[str, Any]) -> Table:
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


def _traffic(report: dict[str, Any]) -> Table:
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
    return ["–" if each is None else size(each), size(row["slow_bytes"]), *span, _share(row)]


def _share(row: dict[str, Any]) -> str:
    share = row["traffic_vs_allreduce_fp32"]
    return "< 0.001" if share and share < 0.0005 else ratio(share)


def _of_traffic(traffic: dict[str, Any]) -> str:
    lines = ["Bytes per node without evaluation, as planned."]
    if traffic["slow_bytes_range"]:
        lines.append("Ranks of a typical run.")
    if traffic["assumes"]:
        lines.append(f"If {traffic['assumes']}.")
    return " ".join(lines)


def _step(report: dict[str, Any]) -> Table:
    memory, step, run = report["memory"], report["step"], report["run"]
    out = _pairs("Memory, and the step that was taken")
    held = f"{size(memory['state_bytes'])} of state at most, {size(memory['activation_bytes'])} of activations"
    out.add_row("planned", f"{size(memory['planned_bytes'])} per worker: {held}")
    if parts := beside(memory["by_phase"]):
        out.add_row("of the method", f"beside model and optimizer {parts}")
    if memory["peak_bytes"] is not None:
        out.add_row("peak", _peak(memory, run["workers_per_device"]))
    out.add_row("loss", f"{step['loss']:.4f}" if step["finite"] else "NOT FINITE")
    parts = ", ".join(f"{name} {units.time(seconds)}" for name, seconds in step["seconds"].items())
    out.add_row("seconds", f"{parts} (a first step is slow)")
    if (most := max(step["examples"])) < max(run["batch_per_worker"]):
        whole = f"{max(run['batch_per_worker']):,} examples per worker"
        out.add_row("taken", f"{most:,} of {whole}, enough on a CPU; activations are scaled to all")
    return out


def _peak(memory: dict[str, Any], sharers: int | None) -> str:
    times = f", times {sharers} on the GPU" if sharers and sharers > 1 else ""
    has = f"the GPU has {size(memory['device_bytes'])}"
    return f"{size(memory['peak_bytes'])} per worker in this step, including data on the GPU{times}; {has}"


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(_plain(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
