"""What loggers cost, against the steps of the same run, by processor time.

Trains digits on one worker with each logger that is installed. Its steps are then handed to it many times
more, and the processor time of that, with all threads that a tracker has started, is divided by that of the steps. The
share of the clock that its calls and the replica's numbers took of the run is beside it. Processes that wandb starts
are in neither.
"""

import os
import statistics
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
from thinwire.replica.replica import Replica
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
        blocks={"type": int, "default": 7, "help": "blocks of steps that a figure is the median of"},
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
            run = _run(batch, 12 if given.quick else steps, name, given.every, folder)
            blocks = _processor_seconds(name, given.every, run["records"], 2 if given.quick else given.blocks)
            yield figure(
                f"digits, batch {batch}: {name}, every {given.every}",
                [(spent + run["numbers"]) / run["processor"] for spent in blocks],
                TARGET,
                **{
                    "per step": f"{1e6 * statistics.median(blocks) / run['steps']:.0f} µs",
                    "and the replica's numbers": f"{1e6 * run['numbers'] / run['steps']:.0f} µs",
                    "of": f"{1000 * run['processor'] / run['steps']:.1f} ms",
                    "share by the clock": f"{run['clock']:.4f}",
                    "begin and end": f"{run['outside']:.1f} s",
                },
            )


def _run(batch: int, steps: int, name: str, every: int, folder: Path) -> dict[str, Any]:
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
        "records": timed.records,
        "steps": len(marks) - 1,
        "processor": processor,
        "numbers": numbers.processor,
        "clock": (timed.seconds + numbers.clock) / clock,
        "outside": timed.outside,
    }


def _processor_seconds(name: str, every: int, records: list[dict[str, Any]], blocks: int) -> list[float]:
    """Of this process, all threads, for the steps of a run; they are handed over many times, so that it shows."""
    first, *between, last = records
    steps = [record for record in between if record["kind"] == "step"]
    loggers, spent, done = Loggers(chosen([name], every)), [], 0
    loggers.write(first)
    for _ in range(1 + blocks):
        start = time.process_time()
        for record in TIMES * steps:
            done += 1
            loggers.write(record | {"step": done})
        time.sleep(SETTLE_S)
        spent.append((time.process_time() - start) / TIMES)
    loggers.write(last)
    return spent[1:]  # the first one warms up


class _TimedNumbers:
    """The seconds that `replica.numbers()` takes inside, by the clock and of the processor."""

    clock = processor = 0.0

    def __enter__(self) -> None:
        self.before = Replica.numbers

        def numbers(replica: Replica) -> dict[str, float]:
            clock, processor = time.perf_counter(), time.thread_time()
            found = self.before(replica)
            self.clock += time.perf_counter() - clock
            self.processor += time.thread_time() - processor
            return found

        Replica.numbers = numbers  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        Replica.numbers = self.before  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
