"""What trackers have in common: which records they show and under which names, and their run's id in the folder."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
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
_SHOWN = ("step", "evaluation", "ranks", "agreement")
"""Kinds of records whose numbers are curves."""
_OF_STEPS = {"slow_bytes", "evaluate_bytes", "fast_bytes", "wire_s", "wall_s"}
_OF_STEPS |= {"traffic_vs_allreduce_fp32", "wire_share", "mean_rank"}
"""Totals of the run, which evaluations would show a second time."""


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


_SETTINGS = {"seed", "length", "batch", "lr", "weight_decay", "usual_lr", "world_size", "stopped_at"}


def safe(name: str) -> str:
    """A name without characters that MLflow refuses."""
    return re.sub(r"[^\w\-. /:]", "_", name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
