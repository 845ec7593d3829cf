"""The results of a run, as plain values, and how they are written."""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from thinwire.base.errors import SaveError, one_line
from thinwire.base.files import on_file, refuse_link
from thinwire.comm.ledger import LINK, Ledger
from thinwire.factor import export
from thinwire.replica.replica import Replica
from thinwire.train.run_folder import MODEL, remove_model
from thinwire.train.task import Recipe, describe_optimizer

BACKWARD_SHARE = 0.54
"""Fraction of the time spent in the backward pass, as measured in the dissertation for Eq. 5.9."""
ASSUMED_FULL = 0.25
"""Fraction of training at full rank that its Eq. 5.10 assumes where it is not known."""


@dataclass
class Counts:
    """Steps by the model's size. A step counts with the size it started with."""

    steps: int = 0
    """All steps."""
    full_steps: int = 0
    """Steps of all workers together, with every layer at full rank."""
    apart_steps: int = 0
    """Steps in which groups trained alone."""
    synchronised: int = 0
    """Trainable parameters, summed over the steps of all workers together."""
    trainable: int = 0
    """Trainable parameters now."""
    total: int = 0
    """All parameters now, also frozen ones."""

    @classmethod
    def of(cls, state: dict[str, int]) -> Counts:
        """Counts from a state; those of other versions may have other names."""
        return cls(**{name: state.get(name, 0) for name in asdict(cls())})

    def update(self, replica: Replica) -> None:
        """Read the model's present size."""
        parameters = list(replica.parameters())
        self.total = sum(p.numel() for p in parameters)
        self.trainable = sum(p.numel() for p in parameters if p.requires_grad)

    def count(self, *, together: bool, full: bool) -> None:
        """Count one step at that size."""
        self.steps += 1
        self.full_steps += full and together
        self.apart_steps += not together
        self.synchronised += self.trainable * together

    def state(self) -> dict[str, int]:
        return asdict(self)


def counted_figures(
    counts: Counts, *, trainable_full: int, full: int, final: int, wall_s: float, factored: bool
) -> dict[str, Any]:
    """The figures of a finished run, whose model has `final` parameters instead of `full`.

    The equations have no term for occasional averages: groups that train alone have no estimate without factors.
    """
    steps = max(1, counts.steps)
    known = factored or not counts.apart_steps
    share = counts.trainable / trainable_full if trainable_full else 1.0
    # Published figures count what is sent: trainable parameters where bases are frozen, else the final size.
    compressed = min(share, final / full)
    # In whole steps, so that nothing is left over where all of them are accounted for.
    low = steps - counts.apart_steps - counts.full_steps
    ecr = {
        "full": counts.full_steps / steps,
        "compressed": low / steps,
        "fraction": compressed,
        "ecr": (counts.apart_steps + low * (1 - compressed)) / steps,
        "ecr_assumed": (1 - ASSUMED_FULL) * (1 - compressed),
    }
    scaled = {
        "bytes_per_s": 4 * counts.synchronised / max(wall_s, 1e-9) / BACKWARD_SHARE,
        "vs_full": counts.synchronised / (trainable_full * steps) if trainable_full else None,
    }
    return {
        "trainable_full": trainable_full,
        "trainable_final": counts.trainable,
        "trainable_share": share,
        "parameters_in_training": counts.total,
        "ecr": ecr if known else None,
        "scaled_traffic": scaled if known else None,
    }


def summarise(
    recipe: Recipe,
    replica: Replica,
    *,
    identity: dict[str, Any],
    figures: dict[str, float],
    wall_s: float,
    counts: Counts,
    ledger: Ledger,
    split_size: int,
) -> dict[str, Any]:
    """The summary of a finished run, with the `ledger` of a node. Ratios do not count what evaluation sent.

    `identity` is the same as in a checkpoint, so that a finished run is recognised. `figures` are of `split_size`
    examples.
    """
    about, baseline = replica.describe(), replica.baseline()
    traffic = ledger.summary()
    evaluation = traffic["by_purpose"].get("evaluate", {}).get("slow_bytes", 0)
    counted = traffic["slow_bytes"] - evaluation
    full = {layer["layer"] for layer in about["kept_full"]}
    return {
        "recipe": recipe.name,
        "method": about["method"],
        "config": about["config"],
        **describe_optimizers(recipe),
        "seed": identity["seed"],
        "world_size": replica.topology.world_size,
        "groups": about["groups"],
        "nodes": about["nodes"],
        "steps": replica.step,
        "length": recipe.steps,
        "batch": recipe.batch,
        "metric": recipe.task.metric,
        "split": recipe.split,
        "split_size": split_size,
        **figures,
        "wall_s": round(wall_s, 3),
        "link": os.environ.get(LINK),
        "time": ledger.split,
        "traffic": traffic,
        "traffic_vs_allreduce_fp32": _ratio(counted, baseline["allreduce_fp32"]),
        "traffic_vs_ideal_fp32": _ratio(counted, baseline["ideal_fp32"]),
        "baseline": baseline,
        "parameters_full": about["parameters_full"],
        "parameters_final": about["parameters"],
        "compression": _ratio(about["parameters_full"], about["parameters"]),
        **counted_figures(
            counts,
            trainable_full=about["trainable_full"],
            full=about["parameters_full"],
            final=about["parameters"],
            wall_s=wall_s,
            factored=replica.decompositions > 0,
        ),
        "ranks": {label: rank for label, rank in replica.found_ranks.items() if not full & {label, f"{label}.weight"}},
        "kept_full": about["kept_full"],
        "events": about["events"],
        "agreement": about["agreement"],
        "waits": about["waits"],
        "identity": identity,
        "versions": _versions(),
    }


def write_result(out: Path, summary: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Write the finished model, by `write`, which may change the summary, and then the summary.

    If `out` refuses them they go to a temporary folder; the error says where they are, and has the main figure.
    """
    try:
        _write_result(out, summary, write)
    except OSError as error:
        with suppress(OSError):
            remove_model(out / MODEL)  # half a model
            (out / "summary.new").unlink(missing_ok=True)
        metric = summary["metric"]
        raise SaveError(
            f"the result of the run, {metric} {summary[metric]:.4g}, could not be written: {one_line(error)}; "
            f"{_elsewhere(summary, write)}"
        ) from error


def _write_result(out: Path, summary: dict[str, Any], write: Callable[[Path], None]) -> None:
    write(out / MODEL)
    write_summary(out / "summary.json", summary)


def _elsewhere(summary: dict[str, Any], write: Callable[[Path], None]) -> str:
    place = None
    try:
        place = Path(tempfile.mkdtemp(prefix="thinwire-result-"))
        _write_result(place, summary, write)
    except OSError as error:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)
        return f"nor to a temporary folder: {one_line(error)}; make space, and continue the run with --resume"
    return f"it is in `{place}`: keep that folder, or make space and continue the run with --resume"


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write it completely or not at all: its presence means that the run is finished."""
    new = path.with_suffix(".new")
    refuse_link(new)
    with on_file(new):
        new.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    os.replace(new, path)


def write_model(model: nn.Module, folder: Path, example: Tensor, transform: str | None = None) -> None:
    """The finished model in plain layers, loadable without this library; `transform` describes its inputs."""
    training = model.training
    export.write(model.eval(), folder, example_input=example, views=transform)
    model.train(training)


def describe_optimizers(recipe: Recipe) -> dict[str, Any]:
    """The optimizer of this run, and the recipe's own for methods without overrides."""
    own = describe_optimizer(recipe.optimizer)
    usual = describe_optimizer(recipe.usual_optimizer or recipe.optimizer)
    return {
        "optimizer": own["optimizer"],
        "lr": own.get("optimizer.lr"),
        "weight_decay": own.get("optimizer.weight_decay"),
        "usual_optimizer": usual["optimizer"],
        "usual_lr": usual.get("optimizer.lr"),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _versions() -> dict[str, str]:
    try:
        own = metadata.version("thinwire")
    except metadata.PackageNotFoundError:
        own = "from source"
    return {
        "thinwire": own,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
