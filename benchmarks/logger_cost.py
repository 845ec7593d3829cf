"""What loggers cost, against the steps of the same run, by processor time.

Trains digits on one worker with each logger that is installed. Its steps are then handed to it again, and the
processor time of this process, with all threads that a tracker has started, is divided by that of the steps. The
time by the clock that its calls and the replica's numbers held up the run is beside it. Processes that wandb starts
are in neither.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import Figure, arguments, figure, report

import thinwire
from thinwire.loggers import NAMES, Loggers, chosen
from thinwire.recipes import named
from thinwire.replica import Replica
from thinwire.train import fit

TARGET = "<= 0.01"
BATCHES = {64: 60, 256: 30}
"""Examples per step, the recipe's own first, and steps."""

TIMES, SETTLE_S = 30, 2.0
"""How often steps are handed over again, and what is left then to a tracker's threads."""


class Timed:
    """A logger, and the seconds that its calls took; beginning and ending are apart."""

    def __init__(self, logger: Any) -> None:
        self.logger, self.seconds, self.outside = logger, 0.0, 0.0
        self.records: list[dict[str, Any]] = []

    def __call__(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        start = time.perf_counter()
        self.logger(record)
        spent = time.perf_counter() - start
        if record["kind"] in ("begin", "end"):
            self.outside += spent
        else:
            self.seconds += spent


def main() -> None:
    given = arguments(
        __doc__,
        every={"type": int, "default": 10, "help": "steps between two that are shown"},
        runs={"type": int, "default": 3, "help": "runs of each logger and recipe"},
        only={"default": ",".join(NAMES), "help": "names of loggers, separated by commas"},
    )
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"WANDB_DIR": folder, "TRACKIO_DIR": f"{folder}/trackio"}
        os.environ |= {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
        report(_figures(given, Path(folder)), given)


def _figures(given: Any, folder: Path) -> Iterator[Figure]:
    torch.set_num_threads(1)  # a step's processor time is then that of one thread
    for batch, steps in BATCHES.items():
        for name in given.only.split(","):
            try:
                chosen([name])
            except thinwire.ConfigError as error:
                print(error)
                continue
            count = 2 if given.quick else given.runs
            runs = [_run(batch, 30 if given.quick else steps, name, given.every, folder) for _ in range(count)]
            yield figure(
                f"digits, batch {batch}: {name}, every {given.every}",
                [run["processor"] for run in runs],
                TARGET,
                **{
                    "by the clock": f"{_mean(runs, 'clock'):.4f}",
                    "of which numbers": f"{_mean(runs, 'numbers'):.4f}",
                    "a step": f"{1000 * _mean(runs, 'step'):.1f} ms of the processor",
                    "begin and end": f"{_mean(runs, 'outside'):.1f} s",
                },
            )


def _mean(runs: list[dict[str, float]], name: str) -> float:
    return sum(run[name] for run in runs) / len(runs)


def _run(batch: int, steps: int, name: str, every: int, folder: Path) -> dict[str, float]:
    (logger,) = chosen([name], every)
    timed, numbers, marks = Timed(logger), _TimedNumbers(), list[tuple[float, float]]()

    def mark(record: dict[str, Any]) -> None:
        if record["kind"] == "step":
            marks.append((time.perf_counter(), time.thread_time()))

    recipe, out = named("digits", steps=steps, batch_size=batch, eval_every=steps), Path(tempfile.mkdtemp(dir=folder))
    with numbers:
        fit(recipe, thinwire.LocalSGD(every=8), out=out, model=False, loggers=[timed, mark])
    clock, processor = (last - first for first, last in zip(marks[0], marks[-1], strict=True))
    return {
        "clock": (timed.seconds + numbers.seconds) / clock,
        "numbers": numbers.seconds / clock,
        "processor": (_processor_seconds(name, every, timed.records) + numbers.seconds) / processor,
        "step": processor / (steps - 1),
        "outside": timed.outside,
    }


def _processor_seconds(name: str, every: int, records: list[dict[str, Any]]) -> float:
    """Of this process, all threads, for the steps of a run; they are handed over many times, so that it shows."""
    first, *between, last = records
    steps = [record for record in between if record["kind"] == "step"]
    loggers = Loggers(chosen([name], every))
    loggers.write(first)
    start = time.process_time()
    for number in range(TIMES):
        for record in steps:
            loggers.write(record | {"step": record["step"] + number * len(steps)})
    time.sleep(SETTLE_S)
    spent = time.process_time() - start
    loggers.write(last)
    return spent / TIMES


class _TimedNumbers:
    """The seconds that `replica.numbers()` takes inside."""

    seconds = 0.0

    def __enter__(self) -> None:
        self.before = Replica.numbers

        def numbers(replica: Replica) -> dict[str, float]:
            start = time.perf_counter()
            found = self.before(replica)
            self.seconds += time.perf_counter() - start
            return found

        Replica.numbers = numbers  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        Replica.numbers = self.before  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
