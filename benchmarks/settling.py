"""Do bases settle early, or when the learning rate falls? Stability over a run with a cosine and with a constant rate.

python benchmarks/settling.py digits --json FILE
python benchmarks/settling.py shakespeare --json FILE

Plain training in one process. Prints, for each fifth of the run, how far bases and mixing matrices move between two
looks: the mean over layers of 1 − stability (Eq. 4.6) and 1 − similarity (Eq. 4.7).
"""

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import thinwire
from thinwire.recipes import named
from thinwire.train.data import Batches
from thinwire.train.schedule import Cosine, scheduled

PARTS = 5


def main() -> None:
    """Both schedules."""
    options = _options()
    torch.set_num_threads(1)
    found = {rate: _looks(options, rate) for rate in ("cosine", "constant")}
    for rate, records in found.items():
        for measure in ("stability", "similarity"):
            print(f"{options.recipe} {rate:8} 1 - {measure:10}", *(f"{x:.4f}" for x in _by_part(records, measure)))
    if options.json:
        Path(options.json).write_text(json.dumps(found))


def _looks(options: argparse.Namespace, rate: str) -> list[dict[str, Any]]:
    recipe = named(options.recipe, steps=options.steps)
    source = recipe.source(None)
    torch.manual_seed(options.seed)
    model = recipe.model(source)
    optimizer = recipe.optimizer(model.parameters())
    rising = recipe.steps // 20
    course = Cosine(warmup=rising / recipe.steps)
    scheduler = scheduled(optimizer, course, steps=recipe.steps, epochs=recipe.epochs)
    if rate == "constant":
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / rising))
    batches = Batches(size=source.train_size, batch=recipe.batch, seed=options.seed)
    watch, records = thinwire.Stability(model, max(1, recipe.steps // 40)), []
    for step in range(recipe.steps):
        x, y = source.train(batches.indices(step))
        optimizer.zero_grad()
        recipe.task.loss(model(x), y).backward()
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        scheduler.step()
        records.append(watch.update(step + 1))
    return [record for record in records if record]


def _by_part(records: list[dict[str, Any]], measure: str) -> list[float]:
    """Means over the layers and the looks of each part of the run."""
    moved = [1 - fmean(layer[measure] for layer in record["layers"].values()) for record in records]
    size = len(moved) / PARTS
    return [fmean(moved[round(i * size) : round((i + 1) * size)]) for i in range(PARTS)]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=("digits", "shakespeare"))
    parser.add_argument("--steps", type=int, help="instead of the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
