"""TensorBoard, Weights & Biases, Trackio and MLflow: what they show of a run, and under which names."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from abc import ABC, abstractmethod
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

from thinwire.base.errors import ConfigError
from thinwire.base.files import read_json, refuse_link, write_json
from thinwire.base.schema import TEXT

Record = dict[str, Any]
"""What happened: its kind, and values by name."""
EVERY = 10
"""Steps between two that are shown: one in ten costs less than 1 % of a step of 25 ms (benchmarks/README.md)."""
PROJECT = "thinwire"
FILE = "trackers.json"
"""In a run's folder: the run's id in each tracker."""
SUFFIX = ".thinwire"
"""Of TensorBoard's files that are ours: others are left alone."""
_FLUSH_S = 10
_SHOWN = ("step", "evaluation", "ranks", "agreement")
"""Kinds of records whose numbers are curves."""
_OF_STEPS = {
    *("slow_bytes", "evaluate_bytes", "fast_bytes", "wire_s", "wall_s"),
    *("traffic_vs_allreduce_fp32", "wire_share", "mean_rank"),
}
"""Totals of the run, which evaluations would show a second time."""
_SETTINGS = {"seed", "length", "batch", "lr", "weight_decay", "usual_lr", "world_size", "stopped_at"}
"""Numbers in a summary that are no results."""


class Tracker(ABC):
    """A logger for one of the usual tools. Their packages are imported when the run begins."""

    name: ClassVar[str]
    """On the command line, of the package to import, and of the extra that installs it."""

    def __init__(self, place: str | None = None, *, every: int = EVERY) -> None:
        """`place` is where it goes, see `thinwire.loggers.NAMES`; of steps, every `every`-th is shown."""
        if not (isinstance(every, int) and every >= 1):
            raise ConfigError(f"`every`={every!r} must be a whole number of steps from 1 on")
        self.place, self.every = place, every
        self._has_step = False

    def __call__(self, record: Record) -> None:
        kind = record["kind"]
        if kind == "begin":
            self._has_step = False
            self.begin(record)
        elif kind == "end":
            self.end(record)
        elif (kind != "step" or self._is_due(record["step"])) and (values := shown(record)):
            self.write(record["step"], values)

    def _is_due(self, step: int) -> bool:
        """Also the first, so that something is to be seen soon."""
        first, self._has_step = not self._has_step, True
        return first or step % self.every == 0

    @abstractmethod
    def begin(self, record: Record) -> None:
        """Begin a run in the tracker, or continue the one that is being resumed."""

    @abstractmethod
    def write(self, step: int, values: dict[str, float]) -> None:
        """Show numbers."""

    @abstractmethod
    def end(self, record: Record) -> None:
        """Show the summary and end the tracker's run."""

    def earlier(self, begin: Record) -> str | None:
        """The id that the run had in this tracker before it was resumed."""
        path = Path(begin["out"]) / FILE
        if not (begin["resumed"] and path.is_file()):
            return None
        return read_json(path, "remove it, and trackers begin a new run", {str: TEXT}).get(self.name)

    def remember(self, begin: Record, identity: str) -> None:
        """Keep the id for a resumed run."""
        path = Path(begin["out"]) / FILE
        refuse_link(path)
        known = read_json(path, "remove it", {str: TEXT}) if path.is_file() else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, known | {self.name: identity})


def shown(record: Record) -> dict[str, float]:
    """The numbers of a record as trackers name them: train/loss, evaluation/accuracy, wire/slow_bytes, ranks/LAYER."""
    kind = record["kind"]
    if kind not in _SHOWN:
        return {}
    if kind == "ranks":
        return {f"ranks/{label}": rank for label, rank in record["ranks"].items()}
    numbers = {name: value for name, value in record.items() if name != "step" and _is_number(value)}
    if kind == "step":
        return {f"{'wire' if name in _OF_STEPS else 'train'}/{name}": value for name, value in numbers.items()}
    return {f"{kind}/{name}": value for name, value in numbers.items() if name not in _OF_STEPS}


def settings(begin: Record) -> dict[str, str | int | float | bool]:
    """The run's settings as single values, which is all that some trackers take."""
    named = {"phases": ", ".join(begin["phases"])}
    plain = {n: v if isinstance(v, str | int | float) else json.dumps(v) for n, v in begin["config"].items()}
    return plain | named


def results(end: Record) -> dict[str, float]:
    """The numbers of the summary that say what came of the run; not its settings."""
    summary = end["summary"]
    found = {name: value for name, value in summary.items() if _is_number(value) and name not in _SETTINGS}
    found |= {"slow_bytes": summary["traffic"]["slow_bytes"]} if "traffic" in summary else {}
    return {f"summary/{name}": value for name, value in found.items()}


def safe(name: str) -> str:
    """A name without characters that MLflow refuses."""
    return re.sub(r"[^\w\-. /:]", "_", name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class TensorBoard(Tracker):
    """Writes to the run's folder, or to DIR/GROUP/NAME if `place` is a folder DIR."""

    name = "tensorboard"
    _writer: Any

    def begin(self, record: Record) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(self.place) / record["group"] / record["name"] if self.place else Path(record["out"])
        # What was written there for later steps is hidden, in a new run for all.
        purge = record["step"] + 1 if record["resumed"] else 0
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=_FLUSH_S, filename_suffix=SUFFIX)
        self._settings = settings(record)

    def write(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all of them: a call of `add_scalar` for each takes several times as long.
        parts = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.file_writer.add_summary(Summary(value=parts), step)

    def end(self, record: Record) -> None:
        from torch.utils.tensorboard.summary import hparams

        if found := results(record):
            self.write(record["step"], found)
            # For the page HParams, in the same file: `add_hparams` would make a run of its own for them.
            for part in hparams(self._settings, found):
                self._writer.file_writer.add_summary(part)
        self._writer.close()


class WandB(Tracker):
    """A run in the project `place`; offline where WANDB_MODE=offline."""

    name = "wandb"
    _run: Any

    def begin(self, record: Record) -> None:
        import wandb

        identity = self.earlier(record) or secrets.token_hex(4)
        self._run = wandb.init(
            project=self.place or os.environ.get("WANDB_PROJECT") or PROJECT,
            name=record["name"],
            group=record["group"] or None,
            config=settings(record),
            id=identity,
            resume="allow",
            reinit="create_new",  # a run that the user's own code has open is left alone
            settings=wandb.Settings(console="off"),
        )
        # Its own counter only grows, and a resumed run goes back to its last save.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.remember(record, identity)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values | {"step": step})

    def end(self, record: Record) -> None:
        self._run.summary.update(results(record))
        self._run.finish(exit_code=int(record["status"] == "failed"))


class Trackio(Tracker):
    """A run in the project `place`; on this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set."""

    name = "trackio"
    _run: Any

    def begin(self, record: Record) -> None:
        import trackio

        # Runs are found again by their names, so these have the group's in them.
        earlier = self.earlier(record)
        name = earlier or "/".join(part for part in (record["group"], record["name"]) if part)
        with redirect_stdout(sys.stderr):  # what the command prints is for other programs too
            self._run = trackio.init(
                project=self.place or PROJECT,
                name=name,
                group=record["group"] or None,
                config=settings(record),
                resume="allow" if earlier else "never",
                embed=False,
            )
        self.remember(record, self._run.name)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def end(self, record: Record) -> None:
        if found := results(record):
            self.write(record["step"], found)
        with redirect_stdout(sys.stderr):
            self._run.finish()


_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_AT_ONCE = 1000
"""Numbers that MLflow takes in one call."""
_WAIT_S = 5.0
"""A call to its database takes some 15 ms of the processor, however little it writes."""
_LONGEST = 6000


class MLflow(Tracker):
    """A run in the experiment `place`, where MLFLOW_TRACKING_URI says. Numbers go there in batches."""

    name = "mlflow"
    _client: Any
    _run_id: str

    def begin(self, record: Record) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        self._waiting: list[Any] = []
        self._sent: list[Any] = []
        self._sent_at = time.monotonic()
        if earlier := self.earlier(record):
            self._run_id = earlier
            self._client.update_run(earlier, status="RUNNING")
            return
        tags = {"group": record["group"]} if record["group"] else {}
        self._run_id = self._client.create_run(self._experiment(), run_name=record["name"], tags=tags).info.run_id
        params = [Param(safe(name), str(value)[:_LONGEST]) for name, value in settings(record).items()]
        self._client.log_batch(self._run_id, params=params)
        self.remember(record, self._run_id)

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = self.place or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(name)
        try:
            return found.experiment_id if found else self._client.create_experiment(name)
        except MlflowException:  # another process has just made it
            return self._client.get_experiment_by_name(name).experiment_id

    def write(self, step: int, values: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._waiting += [Metric(safe(name), float(value), now, step) for name, value in values.items()]
        if len(self._waiting) >= _AT_ONCE or time.monotonic() - self._sent_at > _WAIT_S:
            self._send()

    def _send(self) -> None:
        """In MLflow's own thread: a server may be far away."""
        while self._waiting:
            part, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
            self._sent.append(self._client.log_batch(self._run_id, metrics=part, synchronous=False))
        self._sent_at = time.monotonic()

    def end(self, record: Record) -> None:
        if found := results(record):
            self.write(record["step"], found)
        self._send()
        for operation in self._sent:
            operation.wait()
        self._client.set_terminated(self._run_id, _STATUS[record["status"]])
