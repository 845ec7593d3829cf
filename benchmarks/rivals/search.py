"""A small search: each method over a few settings of a recipe, judged on a part of the training data.

python benchmarks/rivals/search.py digits --seeds 2 --parallel 1 --json digits.json

Prints one line a setting: the mean over seeds, and bytes against fp32 all-reduce. The setting to take is the one that
sends least among those within a tolerance of all-reduce, or the best if none is.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.jobs import Job

HERE = Path(__file__).resolve().parent
BASELINE = "allreduce wire=fp32"
TOLERANCE = {"accuracy": 0.005, "perplexity": 0.02}
"""Points of accuracy, and a share of the perplexity."""

PACES = ((4, 1), (4, 4), (8, 1), (8, 8), (16, 16), (32, 1), (32, 32))
"""DASO's B and S."""


class Setting(NamedTuple):
    """A method, its settings, and another optimizer or learning rate than the recipe's, as in `validation.py`."""

    method: str
    settings: tuple[str, ...] = ()
    optimizer: str = ""

    def __str__(self) -> str:
        return " ".join([self.method, *self.settings, *([self.optimizer] if self.optimizer else [])])


def grid() -> list[Setting]:
    """What is tried."""
    found = [Setting("allreduce", (f"wire={wire}",)) for wire in ("fp32", "bf16", "int8")]
    found += [Setting("ab-paper"), Setting("ab-paper", ("merge=trained",))]
    found += [
        Setting("oialr", (f"factor_at={d}", f"cutoff={c}"))
        for d, c in product((0.1, 0.2, 0.333), (0.05, 0.1, 0.2, 0.3))
    ]
    found += [Setting("powersgd", (f"rank={r}", f"warmup={s}")) for r, s in product((1, 2, 4, 8, 16), (0, 0.05))]
    found += [Setting("localsgd", (f"every={h}", f"warmup={w}")) for h, w in product((4, 12, 24, 48), (0, 0.05))]
    found += [
        Setting("diloco", (f"every={h}", f"outer={lr}/{m}", "warmup=0.05"))
        for h, lr, m in product((12, 24), (0.4, 0.7, 1.0), (0.5, 0.9))
    ]
    found += [
        Setting("daso", (*_pace(b, s, e), f"compensate={c}", f"plateau_patience={p}"))
        for (b, s), e, c, p in product(PACES, (4, 1), ("false", "true"), (2, "none"))
    ]
    found += [Setting("topk", (f"density={d}", f"ramp={w}")) for d, w in product((0.001, 0.01, 0.05), (0.05, 0.2))]
    found += [Setting("onebit", (f"warmup={w}",)) for w in (0, 0.05, 0.2)]
    for rate in (0.03, 0.1, 0.3):
        found += [Setting("allreduce", (), f"sgd_{rate}"), Setting("onebit", ("warmup=0.05",), f"sgd_{rate}")]
        found += [Setting("topk", (f"density={d}", "ramp=0.05"), f"sgd_{rate}") for d in (0.001, 0.01)]
    for rate in (0.001, 0.002):
        found += [Setting("onebit", ("warmup=0.05",), f"lr_{rate}")]
        found += [Setting("topk", ("density=0.05", "ramp=0.05"), f"lr_{rate}")]
    return found


def _pace(every: int, wait: int, epochs: int) -> tuple[str, ...]:
    return f"every={every}", f"overlap={wait}", f"warmup={epochs / 30:.4f}", f"cooldown={epochs / 30:.4f}"


def main() -> None:
    """Every setting, every seed."""
    given = _arguments()
    if given.one:
        _one(json.loads(given.one))
        return
    chosen = [s for s in grid() if re.search(given.only, str(s))]
    with ThreadPoolExecutor(given.parallel) as pool:
        jobs = {(s, seed): pool.submit(_run, given, s, seed) for s in chosen for seed in range(given.seeds)}
        rows = []
        for setting in chosen:
            rows.append(_row(setting, [jobs[setting, seed].result() for seed in range(given.seeds)]))
            print(rows[-1], flush=True)
            if given.json:
                Path(given.json).write_text(json.dumps(rows, indent=1))
    if any(row["setting"] == BASELINE for row in rows):
        for method, row in choose(rows).items():
            print("take", method, row["setting"])


def choose(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """For each method the setting that sends least among those near all-reduce, else the best."""
    usable = [row for row in rows if row["mean"] is not None]
    whole = next(row for row in usable if row["setting"] == BASELINE)
    metric = whole["metric"]
    better = 1 if metric == "accuracy" else -1
    margin = TOLERANCE[metric] * (1 if metric == "accuracy" else whole["mean"])
    found = {}
    for method in dict.fromkeys(row["method"] for row in usable):
        own = [row for row in usable if row["method"] == method]
        near = [row for row in own if better * (row["mean"] - whole["mean"]) >= -margin]
        found[method] = (
            min(near, key=lambda row: (row["bytes"], -better * row["mean"]))
            if near
            else max(own, key=lambda row: better * row["mean"])
        )
    return found


def _row(setting: Setting, summaries: list[dict[str, Any] | None]) -> dict[str, Any]:
    done = [s for s in summaries if s]
    row: dict[str, Any] = {"method": setting.method, "setting": str(setting), "mean": None}
    if len(done) < len(summaries):
        return row | {"failed": len(summaries) - len(done)}
    metric = done[0]["metric"]
    figures = [s[metric] for s in done]
    sent = statistics.mean(s["traffic_vs_allreduce_fp32"] for s in done)
    row |= {"metric": metric, "mean": round(statistics.mean(figures), 4), "bytes": round(sent, 4)}
    row |= {name: round(statistics.mean(s[name] for s in done), 4) for name in ("trainable_share", "compression")}
    return row | {"each": [round(f, 4) for f in figures], "wall_s": round(statistics.mean(s["wall_s"] for s in done))}


def _run(given: argparse.Namespace, setting: Setting, seed: int) -> dict[str, Any] | None:
    recipe = f"{given.recipe}_{setting.optimizer}" if setting.optimizer else given.recipe
    with tempfile.TemporaryDirectory() as out:
        about = {"recipe": f"{HERE / 'validation.py'}:{recipe}", "method": setting.method, "seed": seed, "out": out}
        about |= {"settings": setting.settings, "steps": given.steps, "workers": given.workers}
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.workers)]
        words = [sys.executable, *command, __file__, given.recipe, "--one", json.dumps(about)]
        done = subprocess.run(words, env={"OMP_NUM_THREADS": "1", **os.environ}, capture_output=True, text=True)
        summary = Path(out) / "summary.json"
        if not summary.is_file():
            print(f"{setting} failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
            return None
        return json.loads(summary.read_text(encoding="utf-8"))


def _one(about: dict[str, Any]) -> None:
    """A worker of one run."""
    about["out"], about["settings"] = Path(about["out"]), tuple(about["settings"])
    job = Job(**about, model=False)
    job.check()
    job.run(print)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=("digits", "shakespeare"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--only", default="", help="a pattern of settings to try, such as topk.*SGD")
    parser.add_argument("--parallel", type=int, default=1, help="runs side by side")
    parser.add_argument("--json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
