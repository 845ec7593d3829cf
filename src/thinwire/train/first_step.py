"""The first step of a run, as `fit` takes it: its cost and its loss. The run then ends.

On a CPU two things are cheaper than in the run: a large batch is cut, and large weights that would start orthogonal
are only nearly orthogonal. Models and batches of ordinary size take the run's own first step.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.topology import join
from thinwire.factor.convert import OrderOfUse
from thinwire.train.batcher import Batch
from thinwire.train.initial import rough_values
from thinwire.train.loop import train_step
from thinwire.train.run import Run, passes, prepare
from thinwire.train.summary import write_summary
from thinwire.train.task import Recipe

FIRST_STEP = "first_step.json"
"""The file in a run's folder that rank 0 writes."""
_MOST = 64
"""Most examples per worker on a CPU: more show nothing new, take minutes and may not fit into memory."""


def first_step(recipe: Recipe, config: Any, *, out: Path, seed: int = 0, data: Path | None = None) -> dict[str, Any]:
    """Take the step and write its figures to `out`, a folder without a run; collective."""
    join()
    with ExitStack() as held:
        with rough_values():
            run = prepare(recipe, config, out, seed, data, resume=False, held=held)
        held.enter_context(closing(run.recorder))
        usage = OrderOfUse(run.replica.module)
        usage.watch()
        steps = run.replica.wire.all_gather_object(_taken(run))
        usage.stop()
    about, source = run.replica.describe(), run.batcher.source
    found = {
        **_together(steps),
        "device": _device(run.device),
        "data": {part: getattr(source, f"{part}_size", None) for part in ("train", "validation", "heldout")},
        "passes": passes(recipe, source),
        "order": usage.order,
        **{name: about[name] for name in ("groups", "nodes", "parameters_full", "trainable_full")},
    }
    if run.replica.topology.rank == 0:
        write_summary(out / FIRST_STEP, found)
    return found


def _taken(run: Run) -> dict[str, Any]:
    """The step on this worker."""
    updates: list[float] = []
    hook = run.optimizer.register_step_pre_hook(lambda *_: updates.append(_now(run.device)))
    if run.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(run.device)
    start = _now(run.device)
    with run.batcher.steps(range(1)) as batches, kept_for_backward(run.replica.module) as kept:
        batch = next(iter(batches))
        read = _now(run.device)
        taken = _cut(batch, run.device)
        loss = train_step(run, taken).item()
    end = _now(run.device)
    hook.remove()
    update = updates[0]
    return {
        "loss": loss,
        "examples": len(batch[0]),
        "taken": len(taken[0]),
        "seconds": {"data": read - start, "forward and backward": update - read, "optimizer": end - update},
        "activations": sum(kept.values()) * len(batch[0]) // len(taken[0]),
        "peak": torch.cuda.max_memory_allocated(run.device) if run.device.type == "cuda" else None,
        "device": _device_id(run.device),
    }


def _cut(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cuda" or len(batch[0]) <= _MOST:
        return batch
    x, y = batch
    return x[:_MOST].clone(), y[:_MOST].clone()  # a view would keep the whole batch in memory, and it would be counted


def _together(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The steps of all workers as one: the longest times, the largest sizes, every loss."""
    parts = steps[0]["seconds"]
    devices = Counter(step["device"] for step in steps)
    return {
        "losses": [step["loss"] for step in steps],
        "examples": [step["examples"] for step in steps],
        "taken": [step["taken"] for step in steps],
        "seconds": {part: max(step["seconds"][part] for step in steps) for part in parts},
        "activations": max(step["activations"] for step in steps),
        "peaks": [step["peak"] for step in steps],
        "workers_per_device": max(devices.values()) if None not in devices else None,
    }


@contextmanager
def kept_for_backward(model: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of every storage that autograd keeps in this block, except the parameters' own."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def see(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(see, lambda t: t):
        yield kept


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _device_id(device: torch.device) -> str | None:
    """Identifies a GPU among those of all machines."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"kind": device.type, "name": "CPU", "threads": torch.get_num_threads()}
    about = torch.cuda.get_device_properties(device)
    return {"kind": device.type, "name": about.name, "bytes": about.total_memory}
