"""Rounds of 48 to 384 steps on VGG16-BN: a search on held-out training images, then the best on test data.

    python benchmarks/thousandfold/rounds.py --data CIFAR_DIR --out OUT --deadline 1500

1. Each setting once on held-out images, and beside them all-reduce on test data for every seed.
2. The best settings that keep to the bytes, on test data for every seed; with `--deadline`, as many runs as fit.

`OUT/results.jsonl` has one line per finished run, and is written again whenever one ends. Finished runs are not
repeated. Where a GPU is shared, start `nvidia-cuda-mps-control -d` first.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from thinwire.report.records import read_records
from thinwire.report.runs import read_run

sys.path.append(str(Path(__file__).resolve().parents[1] / "study"))
import results
from results import Row
from setting import sets_of

STUDY = Path(results.__file__).parent
SETS = sets_of("thousandfold")
EPOCHS = SETS["allreduce"][0].epochs
SPLITS = ("validation", "test")
LAST = 60
"""Steps at the end of a run that its training loss is the mean of."""


def main() -> None:
    given, start = arguments(), time.monotonic()
    seeds = given.seeds.split(",")
    given.out.mkdir(parents=True, exist_ok=True)
    baseline = train(given, "test", "allreduce", seeds, most=1)  # one after the other, beside the rest
    wait(given, [train(given, "validation", f"allreduce,{given.set}", seeds[:1], given.workers_total)])
    runs = len(rows_in(given.out))
    names = best(given)
    print(f"{time.monotonic() - start:.0f} s: the best by validation: {', '.join(names)}", flush=True)
    wanted = [(name, seed) for name in names for seed in seeds]
    if given.deadline:
        spent = time.monotonic() - start
        wanted = wanted[: max(0, int((given.deadline - spent) / (spent / max(runs, 1))))]
    chosen = {name: [seed for other, seed in wanted if other == name] for name in names}
    tests = [train(given, "test", path(name), own, given.workers_total) for name, own in chosen.items() if own]
    wait(given, [baseline, *tests])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", default="every,variants", help="what is searched: names in SETS, or SET/NAME")
    parser.add_argument("--seeds", default="0,1,2", help="the search has the first of them")
    parser.add_argument("--best", type=int, default=2, help="settings that are tested")
    parser.add_argument("--most-bytes", type=float, default=0.001, help="as a share of fp32 all-reduce")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="when all should have ended")
    parser.add_argument("--recipe", help="another recipe for all")
    parser.add_argument("--epochs", type=int)
    parser.add_argument(
        "--workers-total", type=int, default=17, help="most at once in the search, and per tested setting"
    )
    parser.add_argument("--commit", default="", help="what the rows say of the code")
    return parser.parse_args()


def train(given: argparse.Namespace, split: str, sets: str, seeds: list[str], most: int) -> "subprocess.Popen[bytes]":
    """Start the runs of these sets, with at most so many workers at once."""
    words: list[object] = ["thousandfold", "--data", given.data, "--out", given.out / split, "--set", sets]
    words += ["--seeds", ",".join(seeds), "--workers-total", most]
    words += ["--recipe", given.recipe] if given.recipe else []
    words += ["--epochs", given.epochs] if given.epochs else []
    words += ["--validate"] if split == "validation" else []
    return subprocess.Popen([sys.executable, STUDY / "run.py", *map(str, words)])


def wait(given: argparse.Namespace, running: list["subprocess.Popen[bytes]"]) -> None:
    """Until all have ended; results.jsonl is kept up to date meanwhile."""
    known, ended = -1, False
    while not ended:
        ended = all(process.poll() is not None for process in running)
        if (count := len(list(given.out.glob("*/*/summary.json")))) != known:
            write(given)
        known = count
        time.sleep(0 if ended else 2)


def write(given: argparse.Namespace) -> None:
    """All finished runs, one line each."""
    about = {"epochs": given.epochs or EPOCHS, "commit": given.commit}
    lines = [json.dumps(row | about) + "\n" for row in rows_in(given.out)]
    new = given.out / "results.new"
    new.write_text("".join(lines), encoding="utf-8")
    new.replace(given.out / "results.jsonl")


def rows_in(out: Path) -> list[Row]:
    """The finished runs, each with its whole config and its losses."""
    folders = [out / split for split in SPLITS if any((out / split).glob("*/summary.json"))]
    found = results.read(folders)["runs"] if folders else []
    return [row | more(out / row["split"] / f"{row['name']}-seed{row['seed']}") for row in found]


def more(folder: Path) -> dict[str, Any]:
    summary, records = read_run(folder).summary, read_records(folder / "records.jsonl")
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    return {
        "config": summary["config"],
        "train_loss": round(fmean(losses[-LAST:]), 5),
        "heldout_loss": [r["loss"] for r in records if r["kind"] == "evaluation"][-1],
        "by_phase": summary["traffic"]["by_phase"],
    }


def best(given: argparse.Namespace) -> list[str]:
    """The names of the best settings by validation among those that send little enough."""
    rows = [row for row in rows_in(given.out) if row["split"] == "validation" and row["method"] != "allreduce"]
    fitting = [row for row in rows if row["bytes"] <= given.most_bytes]
    return [row["name"] for row in sorted(fitting, key=lambda row: -row["value"])[: given.best]]


def path(name: str) -> str:
    """SET/NAME of a setting."""
    return next(f"{key}/{name}" for key in SETS if any(setting.name == name for setting in SETS[key]))


if __name__ == "__main__":
    main()
