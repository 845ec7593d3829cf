"""Accuracy against bytes for every method and composition: runs of real workers, many side by side on one GPU.

    python benchmarks/hundredfold/run.py --data CIFAR_DIR --out OUT --set headline --seeds 0,1,2
    python benchmarks/hundredfold/run.py --data CIFAR_DIR --out OUT --set search --validate
    python benchmarks/hundredfold/tables.py OUT

A run that has its summary is not repeated, so a call that was cut short is continued by calling it again. With
`--limit` no run begins after that many seconds. Where a GPU is shared, start `nvidia-cuda-mps-control -d` first.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from settings import SETS, Setting


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", required=True, help=f"names of {', '.join(SETS)}, by comma, each may be SET/NAME")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--recipe", help="another recipe for all, with its own number of epochs")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--together", type=int, default=10, help="workers that run side by side, divided by four")
    parser.add_argument("--limit", type=float, default=float("inf"))
    given = parser.parse_args()
    if not given.data.is_dir() or not any(given.data.iterdir()):
        sys.exit(f"there is no data in {given.data}")
    given.out.mkdir(parents=True, exist_ok=True)
    jobs = [(setting, int(seed)) for seed in given.seeds.split(",") for setting in chosen(given.set)]
    start = time.monotonic()
    with ThreadPoolExecutor(given.together) as pool:
        list(pool.map(lambda job: train(given, *job, start), jobs))


def chosen(names: str) -> list[Setting]:
    """Settings of whole sets, or single ones."""
    found = []
    for name in names.split(","):
        group, _, one = name.partition("/")
        found += [s for s in SETS[group] if not one or s.name == one]
    return found


def train(given: argparse.Namespace, setting: Setting, seed: int, start: float) -> None:
    """One run, unless it is there already or it is too late."""
    recipe, epochs = given.recipe or setting.recipe, setting.epochs or given.epochs
    folder = given.out / f"{setting.name}-seed{seed}"
    now = time.monotonic() - start
    if (folder / "summary.json").is_file() or now > given.limit:
        return
    settings = [word for field in setting.fields for word in ("--set", field)]
    command = [
        *("run", recipe, "--method", setting.method, *settings, "--data", given.data, "--out", folder),
        *("--workers", setting.workers, "--seed", seed, "--epochs", epochs, "--eval-every", setting.eval_every),
        *("--quiet", "--no-model", "--overwrite"),
        *(["--validate"] if given.validate else []),
    ]
    with (given.out / f"{setting.name}-seed{seed}.log").open("w") as log:
        ended = subprocess.run(
            [sys.executable, "-m", "thinwire.cli", *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    took = time.monotonic() - start - now
    print(f"{now:6.0f} s  {folder.name}  {took:.0f} s{'' if ended.returncode == 0 else '  FAILED'}", flush=True)


if __name__ == "__main__":
    main()
