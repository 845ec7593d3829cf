"""One group is slower than the others: what do they wait, and what does it cost to let it leave out steps?

    python benchmarks/faults/slow.py --methods localsgd:every=24,ab --seeds 0,1,2 --out OUT

Four groups train digits. Nobody is late; the last group takes twice as long for each step; or it stalls for two seconds
in one of 50 steps. Each with everybody waiting, and with `skip_after`. A row has the time of a step, the accuracy, the
seconds that the first group has waited, and the steps that the last one has left out.
"""

import argparse
import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

from launch import Groups

SLOW = 0.05
"""Seconds that each step takes longer, so that sleeping and not this machine decides."""
CASES: dict[str, tuple[str, ...]] = {
    "equal": (),
    "half as fast": ("--late", str(SLOW)),
    "stalls": ("--late", "2", "--stalls", "0.02"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="localsgd:every=24,ab")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--skip-after", type=float, default=0.2)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    for method in given.methods.split(","):
        for case, words in CASES.items():
            for skips in (False, True) if words else (False,):
                more = [*words, *(["--skip-after", str(given.skip_after)] if skips else [])]
                found = [one(method, [*more, "--seed", seed], given) for seed in given.seeds.split(",")]
                means = {name: round(fmean(row[name] for row in found), 4) for name in found[0]}
                print(json.dumps({"method": method, "case": case, "skips": skips, "runs": len(found)} | means))


def one(method: str, more: list[str], given: argparse.Namespace) -> dict[str, Any]:
    name, *fields = method.split(":")
    folder = given.out / "slow"
    shutil.rmtree(folder, ignore_errors=True)
    words = ["--method", name, "--steps", str(given.steps), "--slow", str(SLOW), "--late-group", "3", *more]
    groups = Groups(4, folder, [*words, *(word for field in fields for word in ("--set", field))])
    try:
        if not groups.wait(600):
            raise SystemExit(f"{folder} has not ended")
    finally:
        groups.close()
    first, *_, last = groups.results()
    lines = next(iter(groups.steps().values()))
    waits = first["waits"]["groups"]
    return {
        "ms per step": 1e3 * (lines[-1][1] - lines[0][1]) / (len(lines) - 1),
        "accuracy": 100 * last["accuracy"],
        "waited_s": waits[0]["waited_s"],
        "left out": waits[3].get("steps_left_out", 0),
    }


if __name__ == "__main__":
    main()
