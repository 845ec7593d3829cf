"""Perplexity against bytes over 10,000 steps of the GPT of 29 M: a queue of runs on one GPU.

    python benchmarks/words/frontier.py --data PIECES_DIR --out OUT --queue QUEUE

QUEUE has one run per line, `SET/NAME SEED`, and may grow while this runs: `drop SET/NAME SEED` ends a run that is not
wanted any more, `workers N` is how many workers run at once from now on, and `stop` ends all when no run is left.

Each run reports on validation data and keeps its model, which is measured on test data as well when the
run has ended: training is the same for both, so a setting is chosen by the first and quoted by the second.

`OUT/frontier.jsonl` has one line per finished run. Finished runs are not repeated. A run that fails is tried again
without compilation. Where a GPU is shared, start `nvidia-cuda-mps-control -d` first.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from thinwire.experiments import data
from thinwire.report.records import read_records
from thinwire.train.data import Text
from thinwire.train.task import PREDICT

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "study")]
import longer
import results
from run import chosen
from setting import Setting, sets_of

from thinwire.factor.load_exported import load

SETS = sets_of("words")
PATHS = {f"{key}/{setting.name}" for key, settings in SETS.items() for setting in settings}
BATCH = 64
LAST = 300
"""Steps at the end of a run that its training loss is the mean of."""


class Run(NamedTuple):
    """One line of the queue."""

    path: str
    seed: str

    @property
    def setting(self) -> Setting:
        return chosen(SETS, self.path)[0]

    @property
    def name(self) -> str:
        return f"{self.setting.name}-seed{self.seed}"


class Queue(NamedTuple):
    """What the queue says now."""

    wanted: list[Run]
    dropped: list[Run]
    workers: int
    ends: bool

    @classmethod
    def read(cls, path: Path, workers: int) -> "Queue":
        lines = [line.split() for line in path.read_text(encoding="utf-8").split("\n")]
        return cls(
            wanted=[Run(*line) for line in lines if len(line) == 2 and line[0] in PATHS],
            dropped=[Run(*line[1:]) for line in lines if line[:1] == ["drop"] and len(line) == 3],
            workers=[workers, *(int(line[1]) for line in lines if line[:1] == ["workers"])][-1],
            ends=["stop"] in lines,
        )


def main() -> None:
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    measure, start, told = Measure(given.data), time.monotonic(), 0.0
    running: dict[Run, subprocess.Popen[bytes]] = {}
    begun, plain = set[Run](), set[Run]()
    while True:
        queue = Queue.read(given.queue, given.workers_total)
        for run in [run for run in running if run in queue.dropped]:
            os.killpg(running.pop(run).pid, signal.SIGKILL)
            say(start, f"dropped: {run.name}")
        waiting = [run for run in queue.wanted if run not in begun and run not in queue.dropped]
        while run := next((run for run in waiting if fits(run, running, queue.workers)), None):
            waiting.remove(run)
            begun.add(run)
            if not is_finished(given.out, run):
                running[run] = begin(given, run, compiled=run not in plain)
                say(start, f"begins: {run.name}")
        for run in [run for run, process in running.items() if process.poll() is not None]:
            del running[run]
            if is_finished(given.out, run):
                say(start, f"ended: {run.name}: {finish(given.out, run, measure)}")
            else:
                say(start, f"FAILED{', again without compilation' if run not in plain else ''}: {run.name}")
                begun -= {run} - plain
                plain.add(run)
        if queue.ends and not running and not waiting:
            break
        if time.monotonic() - told > given.tell_every:
            told = time.monotonic()
            say(start, "; ".join(f"{run.name} {progress(given.out / run.name)}" for run in running))
        time.sleep(0.5)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--queue", type=Path, required=True)
    parser.add_argument("--workers-total", type=int, default=16, help="most workers at once, over all runs")
    parser.add_argument("--tell-every", type=float, default=60, metavar="SECONDS")
    return parser.parse_args()


def say(start: float, what: str) -> None:
    print(f"{time.monotonic() - start:5.0f} s  {what}", flush=True)


def is_finished(out: Path, run: Run) -> bool:
    return (out / run.name / "summary.json").is_file()


def fits(run: Run, running: dict[Run, "subprocess.Popen[bytes]"], most: int) -> bool:
    return sum(other.setting.workers for other in running) + run.setting.workers <= most


def begin(given: argparse.Namespace, run: Run, *, compiled: bool) -> "subprocess.Popen[bytes]":
    words = [sys.executable, Path(results.__file__).parent / "run.py", "words", "--data", given.data]
    words += ["--out", given.out, "--set", run.path, "--seeds", run.seed, "--validate", "--workers-total", 4]
    quiet = {} if compiled else {"TORCHDYNAMO_DISABLE": "1"}
    with (given.out / "runs.log").open("a") as log:
        return subprocess.Popen(
            list(map(str, words)), stdout=log, stderr=log, env={**os.environ, **quiet}, start_new_session=True
        )


def progress(folder: Path) -> str:
    """The last step that is on record, and the last perplexity."""
    file, found = folder / "records.jsonl", ["0", "-"]
    for line in file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else ():
        record = json.loads(line)
        if record["kind"] == "step":
            found[0] = str(record["step"])
        elif record["kind"] == "evaluation":
            found[1] = f"{record['perplexity']:.2f}"
    return "/".join(found)


class Measure:
    """Perplexity of a finished model on the test part, and on the validation part `again`."""

    def __init__(self, folder: Path) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.text: Text = data.words(folder, block=longer.BLOCK).to(self.device)

    def __call__(self, folder: Path) -> dict[str, float]:
        model = load(longer.model(self.text.vocabulary, dropout=0.0), folder).to(self.device).eval()
        parts = {"test": self.text, "again": self.text.for_validation()}
        return {name: self.perplexity(model, text) for name, text in parts.items()}

    @torch.no_grad()
    def perplexity(self, model: torch.nn.Module, text: Text) -> float:
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        for piece in np.array_split(np.arange(text.heldout_size), -(-text.heldout_size // BATCH)):
            x, y = text.heldout(piece)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                totals += PREDICT.totals(model(x), y)
        return PREDICT.figures(totals)["perplexity"]


def finish(out: Path, run: Run, measure: Measure) -> str:
    """Measure the model of a run on test data, and write the rows of all runs; its figures."""
    folder = out / run.name
    try:
        (folder / "test.json").write_text(json.dumps(measure(folder / "model")), encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:  # the other runs go on
        print(f"{run.name} could not be measured: {error}", flush=True)
    rows = [row | more(out / f"{row['name']}-seed{row['seed']}") for row in results.read([out])["runs"]]
    new = out / "frontier.new"
    new.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    new.replace(out / "frontier.jsonl")
    row = next(row for row in rows if f"{row['name']}-seed{row['seed']}" == run.name)
    return f"validation {row['value']:.2f}, test {row['test']:.2f}, bytes {row['bytes']:.5f}, {row['wall_s']} s"


def more(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if (folder / "test.json").is_file():
        found = json.loads((folder / "test.json").read_text(encoding="utf-8"))
    else:
        found = {"test": math.nan, "again": math.nan}
    losses = [record["loss"] for record in read_records(folder / "records.jsonl") if record["kind"] == "step"]
    by_phase = summary["traffic"]["by_phase"]
    return {**found, "train_loss": round(fmean(losses[-LAST:]), 4), "by_phase": by_phase}


if __name__ == "__main__":
    main()
