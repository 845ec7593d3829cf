"""The runs of a study, which is a folder beside this one with a settings.py: many side by side on one GPU.

    python benchmarks/study/run.py words --data TEXT_DIR --out OUT --set headline --seeds 0,1,2 --save-every 500
    python benchmarks/study/run.py hundredfold --data CIFAR_DIR --out OUT --set search --validate
    python benchmarks/study/tables.py OUT

A run that has its summary is not repeated, and one that has a save is resumed, so a call that was cut short is
continued by calling it again. With `--limit` no run begins after that many seconds. Where a GPU is shared, start
`nvidia-cuda-mps-control -d` first; it admits 48 processes.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from setting import Setting, sets_of

from thinwire.checkpoint import saves


class Job(NamedTuple):
    """One run."""

    setting: Setting
    seed: int
    recipe: str
    epochs: int | None

    @property
    def name(self) -> str:
        return f"{self.setting.name}-seed{self.seed}"

    @property
    def length(self) -> int:
        """How long it takes, roughly: workers share the GPU, and each has its own steps to start and to average."""
        return (self.epochs or 1) * self.setting.workers


def main() -> None:
    given = arguments()
    jobs = [job for job in wanted(given) if not (given.out / job.name / "summary.json").is_file()]
    given.out.mkdir(parents=True, exist_ok=True)
    if too_wide := [job.name for job in jobs if job.setting.workers > given.workers_total]:
        sys.exit(f"--workers-total {given.workers_total} is too few for {', '.join(too_wide)}")
    start = time.monotonic()
    running: dict[Future[None], int] = {}
    with ThreadPoolExecutor(given.workers_total) as pool:
        while jobs or running:
            late = time.monotonic() - start > given.limit
            while not late and (job := next_fitting(jobs, given.workers_total - sum(running.values()))):
                jobs.remove(job)
                running[pool.submit(train, given, job, start)] = job.setting.workers
            if not running:
                break
            for ended in wait(running, return_when=FIRST_COMPLETED).done:
                del running[ended]
                ended.result()
    if jobs:
        print(f"not started within the limit: {', '.join(job.name for job in jobs)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", help="the folder's name")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", required=True, help="names in its SETS, by comma, each may be SET/NAME")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--recipe", help="another recipe for all")
    parser.add_argument("--epochs", type=int, help="another number of epochs for all")
    parser.add_argument("--validate", action="store_true")
    parser.add_argument("--save-every", type=int, metavar="STEPS")
    parser.add_argument("--workers-total", type=int, default=40, help="most workers at once, over all runs")
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS")
    given = parser.parse_args()
    if not given.data.is_dir() or not any(given.data.iterdir()):
        sys.exit(f"there is no data in {given.data}")
    return given


def wanted(given: argparse.Namespace) -> list[Job]:
    """The jobs of all seeds, each once, the longest first: the GPU is not left to a single long run at the end."""
    settings = chosen(sets_of(given.study), given.set)
    jobs = {
        (setting.name, seed): Job(setting, int(seed), given.recipe or setting.recipe, given.epochs or setting.epochs)
        for seed in given.seeds.split(",")
        for setting in settings
    }
    return sorted(jobs.values(), key=lambda job: -job.length)


def chosen(sets: dict[str, list[Setting]], names: str) -> list[Setting]:
    """Settings of whole sets, or single ones."""
    found = []
    for name in names.split(","):
        group, _, one = name.partition("/")
        settings = [s for s in sets.get(group, ()) if not one or s.name == one]
        if not settings:
            known = [s.name for s in sets[group]] if group in sets else list(sets)
            sys.exit(f"there is no {name}, choose from: {', '.join(known)}")
        found += settings
    return found


def next_fitting(jobs: Sequence[Job], free: int) -> Job | None:
    """The first job that has no more workers than are free."""
    return next((job for job in jobs if job.setting.workers <= free), None)


def train(given: argparse.Namespace, job: Job, start: float) -> None:
    """One run, from the beginning or from its last save."""
    folder, now = given.out / job.name, time.monotonic() - start
    saved = saves.find(folder / "checkpoint")
    with (given.out / f"{job.name}.log").open("a" if saved else "w") as log:
        ended = subprocess.run(
            [sys.executable, "-m", "thinwire.cli", *command(given, job, folder, resume=saved is not None)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    if (folder / "summary.json").is_file():
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)  # gigabytes, of no use any more
    took, note = time.monotonic() - start - now, "  resumed" if saved else ""
    failed = "" if ended.returncode == 0 else "  FAILED"
    print(f"{now:6.0f} s  {job.name}  {took:.0f} s{note}{failed}", flush=True)


def command(given: argparse.Namespace, job: Job, folder: Path, *, resume: bool) -> list[str]:
    """The arguments of `thinwire`."""
    setting = job.setting
    words: list[object] = ["run", job.recipe, "--method", setting.method, "--data", given.data, "--out", folder]
    words += [word for field in setting.fields for word in ("--set", field)]
    words += ["--workers", setting.workers, "--seed", job.seed]
    words += ["--epochs", job.epochs] if job.epochs else []
    words += setting.options
    words += ["--eval-every", setting.eval_every] if setting.eval_every else []
    words += ["--quiet", "--resume" if resume else "--overwrite"]
    words += [] if setting.keeps_model else ["--no-model"]
    words += ["--validate"] if given.validate else []
    words += ["--save-every", given.save_every] if given.save_every else []
    return [str(word) for word in words]


if __name__ == "__main__":
    main()
