"""Groups on a busy machine: is one given up that only waits for a core?

    python benchmarks/faults/alarms.py --methods localsgd:every=8,allreduce --busy 20 --out OUT

Four groups train digits with `Faults()` as it is, beside processes that do nothing but compute. A row has the steps,
the seconds, the load, and how often groups changed, which should be never.
"""

import argparse
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

from launch import Groups, print_rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="localsgd:every=8,allreduce")
    parser.add_argument("--busy", type=int, default=20, help="processes that compute beside the groups")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def one(method: str, given: argparse.Namespace) -> dict[str, Any]:
    """A run beside busy processes."""
    name, *fields = method.split(":")
    folder = given.out / method.replace(":", "-")
    shutil.rmtree(folder, ignore_errors=True)
    words = ["--method", name, "--steps", str(given.steps), "--slow", "0.05", "--defaults"]
    words += [word for field in fields for word in ("--set", field)]
    busy = [multiprocessing.Process(target=_compute, daemon=True) for _ in range(given.busy)]
    for process in busy:
        process.start()
    groups, began = Groups(4, folder, words), time.monotonic()
    try:
        ended = groups.wait(1800)
        load = os.getloadavg()[0]
    finally:
        groups.close()
        for process in busy:
            process.kill()
    found = groups.results()
    row = {"method": method, "busy": given.busy, "load": round(load, 1), "ended": ended, "finished": len(found)}
    row |= {"steps": given.steps, "seconds": round(time.monotonic() - began)}
    return row | {"changes of groups": [len(each["events"]) for each in found]}


def _compute() -> None:
    while True:
        sum(range(100_000))


if __name__ == "__main__":
    print_rows(one, arguments())
