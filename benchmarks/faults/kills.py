"""Random groups of a run are killed and started again: do the others go on, and how much is lost?

    python benchmarks/faults/kills.py --methods localsgd,diloco,allreduce --kills 20 --pause 10 --out OUT

Four groups train digits. Every `--pause` seconds (drawn from an exponential distribution) one that is training is
killed with SIGKILL, or a worker of it if it has several, and started again; it joins. A row has the kills, the
accuracy, whether all groups ended with the same model, the steps that groups had trained alone when they were killed,
as a share of all, and the time of a step.
"""

import argparse
import random
import shutil
import time
from pathlib import Path
from typing import Any

from launch import Groups, Step, print_rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="localsgd,diloco,allreduce")
    parser.add_argument("--kills", type=int, default=20, help="at most so many for each method")
    parser.add_argument("--pause", type=float, default=10.0, help="mean seconds between two of them; 0 kills nobody")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1, help="in each group; one of them is killed, the others end")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--slow", type=float, default=0.1, help="seconds that each step takes longer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def one(method: str, given: argparse.Namespace) -> dict[str, Any]:
    """A whole run by this method; METHOD:FIELD=VALUE sets a field."""
    name, *fields = method.split(":")
    folder = given.out / f"{method.replace(':', '-')}-seed{given.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    words = ["--method", name, "--steps", str(given.steps), "--slow", str(given.slow), "--seed", str(given.seed)]
    words += [word for field in fields for word in ("--set", field)]
    groups = Groups(given.groups, folder, words, workers=given.workers)
    rng, kills, start = random.Random(given.seed), 0, time.time()
    try:
        while given.pause and kills < given.kills:
            time.sleep(max(0.5, rng.expovariate(1 / given.pause)))
            training = [group for group in groups.running if _has_joined(groups, group)]
            if groups.running != list(range(given.groups)) or _is_near_the_end(groups, given.steps):
                break
            if len(training) == given.groups:  # at most one is away at a time
                group = rng.choice(training)
                groups.kill(group, rng.randrange(given.workers))
                groups.start(group)
                kills += 1
        ended = groups.wait(600)
    finally:
        groups.close()
    found, steps = groups.results(), groups.steps()
    killed = [lines for lines in steps.values() if lines and lines[-1][0] < given.steps]
    trained, lost = sum(map(len, steps.values())), sum(map(_alone, killed))
    times = [lines[-1][1] for lines in steps.values() if lines and lines[-1][0] >= given.steps]
    row = {"method": method, "seed": given.seed, "kills": kills, "ended": ended, "finished": len(found)}
    row |= {"models": len({one["digest"] for one in found}), "accuracy": [round(one["accuracy"], 4) for one in found]}
    row |= {"trained": trained, "lost": lost, "kept": round(1 - lost / trained, 4) if trained else None}
    row["seconds per step"] = round((max(times) - start) / given.steps, 3) if times else None
    return row


def _has_joined(groups: Groups, group: int) -> bool:
    return all(groups.steps().get(f"{group}-{process.pid}") for process in groups.processes[group])


def _is_near_the_end(groups: Groups, steps: int) -> bool:
    """A group that is killed now could not join any more."""
    return any(lines and lines[-1][0] > 0.9 * steps for lines in groups.steps().values())


def _alone(lines: list[Step]) -> int:
    """Steps since the last one in which groups averaged."""
    return next((since for since, step in enumerate(reversed(lines)) if step.averages), len(lines))


if __name__ == "__main__":
    print_rows(one, arguments())
