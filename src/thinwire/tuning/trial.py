"""One trial: a run with certain settings, and what became of it. Its folder is that of a run, with a trial.json."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.base.files import read_json, write_json
from thinwire.base.schema import ANY, COUNT, FIGURE, NUMBER, TEXT
from thinwire.tuning.space import Code, Value, as_text

FILE = "trial.json"
RUNNING, FINISHED, STOPPED = "running", "finished", "stopped early"
_SCHEMA = {
    **dict.fromkeys(("status", "reason"), TEXT),
    **dict.fromkeys(("island", "worker", "generation"), COUNT),
    "codes": {str: NUMBER},
    "values": {str: ANY},
    "figures": {str: FIGURE},
    "loss": (None, NUMBER),
    "seconds": NUMBER,
    "curve": ANY,
}


@dataclass(kw_only=True)
class Trial:
    """What was tried, by whom, and what came of it."""

    folder: Path
    codes: dict[str, Code]
    """What the search algorithm chose."""
    values: dict[str, Value]
    """What that stands for."""
    island: int = 0
    worker: int = 0
    generation: int = 0
    status: str = RUNNING
    """running, finished, stopped early, failed, diverged or out of time."""
    reason: str = ""
    """Why it did not finish."""
    figures: dict[str, float] = field(default_factory=dict)
    loss: float | None = None
    """What the search makes small; None while it runs."""
    seconds: float = 0.0
    curve: list[list[float]] = field(default_factory=list)
    """Share of the run, and the metric there."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def has_ended(self) -> bool:
        return self.loss is not None

    def settings(self) -> str:
        """What was tried, in one line."""
        return " ".join(f"{name}={as_text(value)}" for name, value in self.values.items())

    def write(self) -> None:
        """Whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / f"{FILE}.new"
        write_json(new, {key: value for key, value in dataclasses.asdict(self).items() if key != "folder"})
        os.replace(new, self.folder / FILE)


def folder_name(island: int, worker: int, generation: int) -> str:
    """Unique in a search."""
    return f"trial-{island}-{worker}-{generation:04}"


def read_trials(search: Path) -> list[Trial]:
    """All trials of a search, in the order of their names."""
    found = sorted(path.parent for path in search.glob(f"trial-*/{FILE}"))
    return [_read(folder) for folder in found]


def _read(folder: Path) -> Trial:
    remedy = "remove its folder, and the trial is made again"
    written: dict[str, Any] = read_json(folder / FILE, remedy, _SCHEMA)
    names = {own.name for own in dataclasses.fields(Trial)}
    return Trial(folder=folder, **{name: value for name, value in written.items() if name in names})
