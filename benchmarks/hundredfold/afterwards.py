"""A small model after training: finished models cut by `thinwire.compress`, and cut and then trained on.

    python benchmarks/hundredfold/afterwards.py OUT/allreduce-seed* --data CIFAR_DIR --out afterwards.json

Each folder is a finished run with its model. Training goes on in this process, with the recipe's optimizer, batch,
augmentation, smoothing and clipping, over the batches that would have come next.
"""

import argparse
import copy
import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import thinwire
from thinwire.base.errors import ThinwireError
from thinwire.commands.sources import finished, recipe_of
from thinwire.recipes import Recipe
from thinwire.report.runs import read_run
from thinwire.train.batcher import Batcher
from thinwire.train.run import own_device
from thinwire.train.schedule import Cosine, scheduled

TARGETS = (2.7, 4, 5, 5.6, 6)
CUTOFFS = (0.1, 0.15, 0.2)
RATES = (3e-4, 1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--recipe", help="FILE.py:FUNCTION, for runs of a recipe that is not installed")
    parser.add_argument("--target", type=float, default=5.6, help="how many times smaller before training goes on")
    parser.add_argument("--steps", type=int, default=488)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    rows: list[dict[str, Any]] = []
    for folder in given.runs:
        rows += of_run(folder, given)
        given.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def of_run(folder: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Every way to a small model, for one run."""
    summary, found = read_run(folder).summary, finished(folder, given.recipe, given.data)
    assert found.evaluate is not None
    recipe = recipe_of(summary, given.recipe).replace(batch=summary["batch"])
    batcher = Batcher(recipe, recipe.source(given.data), own_device(), seed=summary["seed"])
    about = {"name": re.sub(r"-seed\d+$", "", folder.name), "seed": summary["seed"], "split": summary["split"]}
    ways = {f"{kind} {value}": {kind: value} for kind, value in by_kind(target=TARGETS, cutoff=CUTOFFS)}
    rows = [measured(about | {"way": "as trained"}, lambda: found.model, found.evaluate)]
    for name, how in ways.items():
        rows.append(measured(about | {"way": name}, partial(cut, found.model, found.example, **how), found.evaluate))
    for rate in RATES:
        way = {"way": f"target {given.target:g}, then {given.steps} steps at {rate:g}"}

        def make(rate: float = rate) -> nn.Module:
            small = cut(found.model, found.example, target=given.target)
            return train_on(small, recipe, batcher, range(summary["steps"], summary["steps"] + given.steps), rate)

        rows.append(measured(about | way, make, found.evaluate))
    full = rows[0]["parameters"]
    return [row | {"compression": full / row["parameters"]} if "parameters" in row else row for row in rows]


def by_kind(**kinds: tuple[float, ...]) -> list[tuple[str, float]]:
    return [(kind, value) for kind, values in kinds.items() for value in values]


def measured(about: dict[str, Any], make: Callable[[], nn.Module], evaluate: Callable[[nn.Module], float]) -> Any:
    """A row with the accuracy and the size of a model; with the reason if there is no such model."""
    start = time.monotonic()
    try:
        model = make()
    except ThinwireError as error:
        row = about | {"error": str(error)}
    else:
        with torch.no_grad():
            accuracy = evaluate(model.eval())
        row = about | {"accuracy": accuracy, "parameters": sum(p.numel() for p in model.parameters())}
    print(json.dumps(row | {"seconds": round(time.monotonic() - start, 1)}), flush=True)
    return row


def cut(model: nn.Module, example: Any, **how: float) -> nn.Module:
    return thinwire.compress(model, example=example, **how).model


def train_on(small: nn.Module, recipe: Recipe, batcher: Batcher, steps: range, rate: float) -> nn.Module:
    """The model after so many more steps, from this learning rate along a cosine to zero."""
    model = copy.deepcopy(small).train()
    optimizer = recipe.with_optimizer(lr=rate).optimizer(model.parameters())
    cosine = scheduled(optimizer, Cosine(warmup=0.05, floor=0.0), steps=len(steps), epochs=1)
    with batcher.steps(steps) as batches:
        for x, y in batches:
            with recipe.precision(own_device()):
                loss = recipe.task.loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            cosine.step()
    return model


if __name__ == "__main__":
    main()
