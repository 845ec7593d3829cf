"""What `faults=` costs where nothing fails: seconds per step with it, over those without.

    python benchmarks/faults/cost.py --methods localsgd:every=24,allreduce --out OUT

Two groups train digits, once with and once without, in turn. Figures are means over a run's second half. On a machine
that others use, the ratio of processor time says more than that of the clock; and with `--slow 0.1` workers sleep in
each step, so that they do not wait for a core, and the difference in milliseconds says what a step pays.
"""

import argparse
import json
import shutil
from pathlib import Path
from statistics import median
from typing import Any

from launch import Groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="localsgd:every=24,allreduce")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--slow", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    for method in given.methods.split(","):
        pairs = [[seconds(method, given, plain=plain) for plain in (False, True)] for _ in range(given.pairs)]
        row: dict[str, Any] = {"method": method}
        for i, clock in enumerate(("clock", "processor")):
            row[f"{clock}, ms"] = [[round(1e3 * run[i], 2) for run in pair] for pair in pairs]
            row[f"{clock}, adds ms"] = round(1e3 * median(faults[i] - plain[i] for faults, plain in pairs), 2)
            row[f"{clock}, ratio"] = round(median(faults[i] / plain[i] for faults, plain in pairs), 3)
        print(json.dumps(row), flush=True)


def seconds(method: str, given: argparse.Namespace, *, plain: bool) -> tuple[float, float]:
    """A step of one run, by the clock and by processor time."""
    name, *fields = method.split(":")
    folder = given.out / f"{method.replace(':', '-')}-{'plain' if plain else 'faults'}"
    shutil.rmtree(folder, ignore_errors=True)
    words = ["--method", name, "--steps", str(given.steps), "--slow", str(given.slow), *(["--plain"] if plain else [])]
    groups = Groups(2, folder, [*words, *(word for field in fields for word in ("--set", field))])
    try:
        if not groups.wait(300):
            raise SystemExit(f"{folder} has not ended")
    finally:
        groups.close()
    lines = next(iter(groups.steps().values()))
    first, last = lines[len(lines) // 2], lines[-1]
    steps = last.number - first.number
    return (last.time - first.time) / steps, (last.processor - first.processor) / steps


if __name__ == "__main__":
    main()
