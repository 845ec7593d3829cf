"""Seconds, memory and size of `thinwire report` on many long runs.

    python benchmarks/report_size.py
    python benchmarks/report_size.py --runs 10 --steps 10000

Writes runs with as many records of steps, an evaluation every 1,000 of them, and ranks and stability of 24 layers.
Then the whole command runs in a process of its own: start, table, pictures and page. Needs 200 MB per million steps in
a temporary folder.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAYERS = [f"features.{i}" for i in range(24)]
METHODS = ("allreduce", "ab", "localsgd", "diloco")


def records(step: int, steps: int, sent: int) -> Iterator[dict[str, Any]]:
    """What a run writes after a step."""
    counted = {"slow_bytes": sent * step // steps, "evaluate_bytes": 0, "fast_bytes": 0, "wall_s": step / 100}
    loss = 2 / (1 + step / 1000) * random.uniform(0.8, 1.2)
    yield {"kind": "step", "step": step, "phase": "train", "loss": loss, "lr": 1e-3, **counted}
    if step % 1000 == 0:
        figures = {"accuracy": 1 - 0.5 / (1 + step / 5000), "loss": loss}
        yield {"kind": "evaluation", "step": step, "model": "world", **figures, **counted}
    if step % 5000 == 0:
        bases = {name: {"stability": random.random(), "similarity": 0.9} for name in LAYERS}
        yield {"kind": "ranks", "step": step, "ranks": dict.fromkeys(LAYERS, 64)}
        yield {"kind": "stability", "step": step, "before": step - 5000, "layers": bases}


def write_run(folder: Path, method: str, seed: int, steps: int) -> None:
    """A run as `thinwire run` leaves it."""
    folder.mkdir(parents=True)
    random.seed(f"{method}{seed}")
    sent = 10**9 if method == "allreduce" else 10**7
    with (folder / "records.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.writelines(json.dumps(record) + "\n" for record in records(step, steps, sent))
    summary = {
        **dict.fromkeys(("compression", "traffic_vs_allreduce_fp32", "traffic_vs_ideal_fp32", "wall_s"), 1.0),
        "recipe": "digits",
        "method": method,
        "config": {"wire": "fp32"},
        "seed": seed,
        "steps": steps,
        "world_size": 2,
        "metric": "accuracy",
        "accuracy": 0.98 + random.random() / 100,
        "accuracy_before_truncation": 0.98,
        "traffic": {"slow_bytes": sent, "by_purpose": {"gradients": {"slow_bytes": sent}}},
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="thinwire-report-") as place:
        for number in range(options.runs):
            method = METHODS[number % len(METHODS)]
            write_run(Path(place, f"{method}-{number}"), method, number // len(METHODS), options.steps)
        load, start = os.getloadavg()[0], time.monotonic()
        words = [sys.executable, "-m", "thinwire", "report", place, "--json"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        clock, used = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        size = Path(place, "report.html").stat().st_size
    print(
        f"{options.runs} runs of {options.steps:,} steps: {clock:.1f} s by the clock at a load of {load:.0f}, "
        f"{used.ru_utime + used.ru_stime:.1f} s of CPU, {used.ru_maxrss / 1e6:.2f} GB, page {size / 1e6:.2f} MB"
    )


if __name__ == "__main__":
    main()
