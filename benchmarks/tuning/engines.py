"""Propulate beside Optuna's TPE and random search, with equal trials, on digits.

    python benchmarks/tuning/engines.py --out OUT --searches 5 --generations 12

Each search has two islands, or two trials at once; all have the same space, objective and early stopping. A row has the
best objective after a number of ended trials, over the searches.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from thinwire.tuning.search import read_trials

HERE = Path(__file__).parent
ENGINES = ("propulate", "optuna", "random")
OBJECTIVE = "max:accuracy-2*bytes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--searches", type=int, default=5)
    parser.add_argument("--generations", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=1, help="searches side by side")
    parser.add_argument("--json", type=Path, help="where to write the losses of all trials")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    runs = [(engine, seed) for seed in range(given.searches) for engine in ENGINES]
    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(lambda run: search(*run, given), runs))
    found = {engine: [losses(given.out / f"{engine}-{seed}") for seed in range(given.searches)] for engine in ENGINES}
    if given.json:
        given.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    for engine, searches in found.items():
        whole = [one for one in searches if one]
        for share in (0.25, 0.5, 1.0):
            best = [-min(one[: max(1, round(share * len(one)))]) for one in whole]
            print(
                f"{engine:10} {share:4.0%} of trials: median {median(best):.4f}  {[f'{b:.4f}' for b in sorted(best)]}"
            )


def search(engine: str, seed: int, given: argparse.Namespace) -> None:
    """One search, unless it is there."""
    folder = given.out / f"{engine}-{seed}"
    if (folder / "best.json").is_file():
        return
    words = ["tune", "digits", "--method", "ab", "--engine", engine, "--seed", seed, "--objective", OBJECTIVE]
    words += ["--space", HERE / "digits.toml", "--steps", given.steps, "--eval-every", given.steps // 8]
    words += ["--generations", given.generations, "--out", folder, "--resume", "--quiet"]
    with (given.out / f"{engine}-{seed}.log").open("w") as log:
        subprocess.run(
            [sys.executable, "-m", "thinwire", *map(str, words)],
            stdout=log,
            stderr=log,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )


def losses(folder: Path) -> list[float]:
    """Of a search's trials, in the order in which they ended; one that failed counts as the worst."""
    ended = sorted(
        (t for t in read_trials(folder) if t.has_ended), key=lambda t: (t.folder / "trial.json").stat().st_mtime
    )
    return [min(trial.loss or 0.0, 1.0) if trial.status == "finished" else 1.0 for trial in ended]


if __name__ == "__main__":
    main()
