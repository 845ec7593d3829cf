"""Learning rate and weight decay of a recipe, chosen for plain training on a part of its *training* data.

python benchmarks/tune_recipe.py digits --lr 1e-3 3e-3 --decay 0.01 0.5 1.5 3.0 --seeds 3

The held-out part that runs report on is not looked at. Prints, for each setting, the metric on the validation part
and the share of singular values above 0.15 of the largest: settings that plain training finds equally good differ in
how low the ranks of its weights fall.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rivals.validation import without_heldout
from safetensors.torch import load_file

import thinwire
from thinwire.factor.decompose import decompose
from thinwire.factor.matrix import view_of
from thinwire.recipes import named
from thinwire.train import fit


def main() -> None:
    """Every setting, every seed."""
    given = _arguments()
    torch.set_num_threads(1)
    rows = []
    for lr in given.lr:
        for decay in given.decay:
            rows.append(_measure(given, lr, decay))
            print(rows[-1], flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1))


def _measure(given: argparse.Namespace, lr: float, decay: float) -> dict[str, Any]:
    recipe = named(given.recipe, steps=given.steps, lr=lr, weight_decay=decay)
    recipe = recipe.replace(source=lambda folder: without_heldout(named(given.recipe).source(folder)))
    found, shares = [], []
    for seed in range(given.seeds):
        with tempfile.TemporaryDirectory() as out:
            summary = fit(recipe, thinwire.AllReduce(), out=out, seed=seed)
            found.append(summary[recipe.task.metric])
            shares.append(_share_above_cutoff(Path(out) / "model" / "model.safetensors"))
    spread = statistics.stdev(found) if len(found) > 1 else 0.0
    mean = statistics.mean(found)
    return {
        "lr": lr,
        "decay": decay,
        recipe.task.metric: round(mean, 5),
        "std": round(spread, 5),
        "rank": round(statistics.mean(shares), 3),
    }


def _share_above_cutoff(model: Path) -> float:
    matrices = [view_of(w).to_matrix(w) for name, w in load_file(model).items() if w.dim() > 1]
    ranks = [decompose(m, 0.15).a.shape[1] / m.shape[1] for m in matrices if m.shape[1] > 16]
    return statistics.mean(ranks)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--lr", type=float, nargs="+", required=True)
    parser.add_argument("--decay", type=float, nargs="+", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
