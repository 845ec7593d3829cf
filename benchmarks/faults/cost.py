"""What `faults=` costs where nothing fails: seconds per step with it, over those without.

    python benchmarks/faults/cost.py --methods localsgd:every=24,allreduce --out OUT

Two groups train digits, once with and once without, in turn. Figures are means over a run's second half.
"""

import argparse
import json
import shutil
from pathlib import Path
from statistics import median

from launch import Groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="localsgd:every=24,allreduce")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    for method in given.methods.split(","):
        pairs = [[seconds(method, given, plain=plain) for plain in (False, True)] for _ in range(given.pairs)]
        row = {"method": method, "steps in ms": [[round(1e3 * s, 2) for s in pair] for pair in pairs]}
        print(json.dumps(row | {"ratio": round(median(a / b for a, b in pairs), 3)}), flush=True)


def seconds(method: str, given: argparse.Namespace, *, plain: bool) -> float:
    """A step of one run."""
    name, *fields = method.split(":")
    folder = given.out / f"{method.replace(':', '-')}-{'plain' if plain else 'faults'}"
    shutil.rmtree(folder, ignore_errors=True)
    words = ["--method", name, "--steps", str(given.steps), *(["--plain"] if plain else [])]
    groups = Groups(2, folder, [*words, *(word for field in fields for word in ("--set", field))])
    try:
        if not groups.wait(300):
            raise SystemExit(f"{folder} has not ended")
    finally:
        groups.close()
    lines = next(iter(groups.steps().values()))
    half = lines[len(lines) // 2 :]
    return (half[-1][1] - half[0][1]) / (half[-1][0] - half[0][0])


if __name__ == "__main__":
    main()
