"""A search: what is searched, in which folder, and its trials so far.

A trial is a run with certain settings, and what became of it. Its folder is that of a run, with a trial.json.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter, signature
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from thinwire.base.errors import ConfigError
from thinwire.base.files import read_json, write_json
from thinwire.base.schema import ANY, COUNT, FIGURE, NUMBER, TEXT
from thinwire.config.common import Nesterov
from thinwire.config.settings import in_force
from thinwire.launch.jobs import Job
from thinwire.plan.forecast import Links
from thinwire.recipes.names import function_named, given_arguments
from thinwire.train.run_folder import clear, locked, refuse_occupied
from thinwire.train.task import describe_optimizer
from thinwire.tuning.objective import Objective
from thinwire.tuning.space import Code, Space, Value, as_text

FILE = "search.json"
BEST, PARETO, PICTURE = "best.json", "pareto.json", "importance.png"
_FLAGS = {
    **dict.fromkeys(("lr", "weight_decay"), float),
    **dict.fromkeys(("batch_size", "epochs", "steps"), int),
    **dict.fromkeys(("optimizer", "group_size"), str),
}
"""Parameters of a space that are no fields of the method, and their types."""
RATE, ARGUMENT, SCALE = "rate.", "with.", "lr_scale"
_SAME = (("lr", SCALE), ("steps", "epochs"))
"""Parameters that say the same, so that a space has one of them."""
TRIAL_FILE = "trial.json"
ERRORS, LOG = "errors", "log.txt"
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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a search and its trials may take, in seconds."""

    search: float = math.inf
    trial: float | None = None
    """None: five times as long as the longest trial that has finished, and a minute at least."""

    def of_trial(self, ended: list[float]) -> float:
        """How long a trial may take when trials of these seconds have finished."""
        if self.trial is not None:
            return self.trial
        return max(60.0, 5 * max(ended)) if ended else math.inf


@dataclass(kw_only=True)
class Search:
    """What is searched; the same on all ranks."""

    folder: Path
    job: Job
    """A run without what the search chooses."""
    space: Space
    objective: Objective
    limits: Limits = field(default_factory=Limits)
    links: Links | None = None
    """Where `seconds` are planned for."""
    compute: float | None = None
    """Seconds of a step for that, without the wire; None measures it."""
    stops_early: bool = True
    seed: int = 0
    began: float = field(default_factory=time.monotonic)
    is_interrupted: bool = False
    """Set to end the trials that run; a resumed search continues them."""
    held: ExitStack = field(default_factory=ExitStack)
    """The lock of the folder, while this search runs."""

    @cached_property
    def metric(self) -> str:
        return self.job.trained.task.metric

    @cached_property
    def lower_is_better(self) -> bool:
        """Of the metric."""
        return self.objective.is_lower_better(self.metric)

    def check(self) -> None:
        """Raise for whatever can be found out before the first trial."""
        self.job.check()
        if "seconds" in self.objective.names and self.links is None:
            raise ConfigError("the objective has `seconds`, and no link to plan them for: give `--bandwidth`")
        if "bytes" in self.objective.names and self.job.workers == 1:
            raise ConfigError(
                "the objective has `bytes`, and one worker sends none: give `--workers-per-trial 2` or more"
            )
        _ = self.lower_is_better
        for name in self.space:
            owner, dot, _ = name.partition(".")
            if dot and f"{owner}." not in (RATE, ARGUMENT) and owner != self.job.method:
                raise ConfigError(f"the space has {name}, a setting of {owner}, and searches {self.job.method}")
        for one, other in _SAME:
            if one in self.space and other in self.space:
                raise ConfigError(f"the space has both {one} and {other}, which say the same; remove one of them")
        for name in self.space:
            parameter = self.space[name]
            given: dict[str, Value] = {}
            if (when := parameter.when) is not None:
                allowed = (choice for choice in self.space[when.name].choices if when.holds({when.name: choice}))
                given = {when.name: next(allowed)}
            for value in parameter.tested:
                try:
                    job = self.job_of({**given, name: value}, self.folder)
                    _ = job.trained, job.config
                except ConfigError as error:
                    raise ConfigError(f"the space has {name}={as_text(value)}, which cannot be: {error}") from error

    def job_of(self, values: Mapping[str, Value], folder: Path) -> Job:
        """The run that these values stand for."""
        changed: dict[str, Any] = {"out": folder}
        texts: dict[str, tuple[str, ...]] = {"settings": (), "rate": (), "arguments": ()}
        for name, value in values.items():
            text = as_text(value)
            if name == SCALE:
                changed["lr"] = float(as_text(self._usual_lr * float(value)))
            elif name in _FLAGS:
                changed[name] = _typed(name, text)
            elif name.startswith(RATE):
                texts["rate"] += (f"{name.removeprefix(RATE)}={text}",)
            elif name.startswith(ARGUMENT):
                texts["arguments"] += (f"{name.removeprefix(ARGUMENT)}={text}",)
            else:
                texts["settings"] += (f"{name}={text}",)
        for part, own in texts.items():
            changed[part] = (*getattr(self.job, part), *own)
        return dataclasses.replace(self.job, **changed)

    def usual(self) -> dict[str, Code]:
        """The codes nearest to the recipe's own settings; a search begins with them."""
        return {name: self.space[name].nearest(self._usual(name)) for name in self.space}

    def _usual(self, name: str) -> Any:
        recipe, optimizer = self.job.trained, describe_optimizer(self.job.trained.optimizer)
        known: dict[str, Any] = {SCALE: 1.0, "batch_size": recipe.batch, "epochs": recipe.epochs, "steps": recipe.steps}
        known |= {part: optimizer.get(f"optimizer.{part}") for part in ("lr", "weight_decay")}
        known["optimizer"] = optimizer["optimizer"].lower()
        if name in known:
            return known[name]
        if name.startswith(RATE):
            return getattr(recipe.rate, name.removeprefix(RATE), None)
        if name.startswith(ARGUMENT):
            return self._usual_argument(name.removeprefix(ARGUMENT))
        value = in_force(self.job.config, name)
        if isinstance(value, Nesterov):
            momentum = "" if value.momentum is None else f"/{value.momentum}"
            return f"{value.lr}{momentum}"
        return "none" if value is None else value

    def _usual_argument(self, name: str) -> Any:
        make = function_named(self.job.recipe)
        usual = {own.name: own.default for own in signature(make).parameters.values()}
        value = (usual | given_arguments(make, self.job.recipe, self.job.arguments)).get(name)
        return None if value is Parameter.empty else value

    @cached_property
    def _usual_lr(self) -> float:
        rate = describe_optimizer(self.job.trained.optimizer).get("optimizer.lr")
        if not isinstance(rate, float | int):
            raise ConfigError(
                f"`{SCALE}` multiplies the recipe's learning rate, which is {rate!r}; search `lr` instead"
            )
        return float(rate)

    # The folder.

    def described(self) -> dict[str, Any]:
        """What makes two searches the same."""
        job, names = (
            self.job,
            ("recipe", "method", "workers", "group_size", "steps", "epochs", "batch_size", "optimizer"),
        )
        about = {name: getattr(job, name) for name in names}
        about |= {"settings": list(job.settings), "rate": list(job.rate), "arguments": list(job.arguments)}
        about |= {"lr": job.lr, "weight_decay": job.weight_decay, "run_seed": job.seed, "seed": self.seed}
        about |= {"eval_every": job.eval_every, "compute": self.compute}
        about |= {"link": dataclasses.asdict(self.links) if self.links else None}
        return about | {"space": self.space.described(), "objective": self.objective.text}

    def open(self, engine: Mapping[str, Any], *, resume: bool, overwrite: bool) -> None:
        """Take the folder for this search, or continue the same search in it; by one process."""
        path, wanted = self.folder / FILE, self.described() | dict(engine)
        if path.is_file() and resume:
            self.held.enter_context(locked(self.folder))
            there = read_json(path, "give another `--out`")
            if name := next((key for key in wanted if there.get(key) != wanted[key]), None):
                raise ConfigError(
                    f"`{self.folder}` holds another search, with `{name}`={there.get(name)!r} and not "
                    f"{wanted[name]!r}; give the same settings to continue it, or another `--out`"
                )
            return
        found = [file for file in (path, *sorted(self.folder.glob("trial-*"))) if file.exists()]
        if not overwrite:
            refuse_occupied(self.folder, found, resume=path.is_file())
        self.held.enter_context(locked(self.folder))
        if overwrite:
            for written in self.folder.glob(f"trial-*/{TRIAL_FILE}"):
                remove(written.parent)
            for name in (BEST, PARETO, PICTURE):
                (self.folder / name).unlink(missing_ok=True)
        write_json(path, wanted)

    def close(self) -> None:
        """Let others use the folder."""
        self.held.close()

    def trials(self) -> list[Trial]:
        """Those that were begun."""
        return read_trials(self.folder)

    def begin(self, codes: Mapping[str, Code], island: int = 0, worker: int = 0) -> Trial:
        """A new trial, written down before it runs."""
        taken = {trial.generation for trial in self.trials() if (trial.island, trial.worker) == (island, worker)}
        generation = next(number for number in count() if number not in taken)
        folder = self.folder / f"trial-{island}-{worker}-{generation:04}"
        trial = Trial(
            folder=folder,
            codes=dict(codes),
            values=self.space.values(codes),
            island=island,
            worker=worker,
            generation=generation,
        )
        trial.write()
        return trial

    @property
    def spent(self) -> float:
        """Seconds since this call of the search began."""
        return time.monotonic() - self.began

    @property
    def is_over(self) -> bool:
        """Whether no trial may go on."""
        return self.is_interrupted or self.spent > self.limits.search

    @property
    def has_time(self) -> bool:
        """Whether another trial would end in time, if it takes as long as half of those that finished."""
        if self.limits.search == math.inf:
            return True
        finished = [trial.seconds for trial in self.trials() if trial.status == FINISHED]
        return self.spent + (median(finished) if finished else 0.0) <= self.limits.search

    def was_tried(self, codes: Mapping[str, Code]) -> bool:
        """Whether a trial with the same settings was begun: it would come to the same."""
        settings = self.space.values(codes)
        return any(trial.values == settings for trial in self.trials())


def _typed(name: str, text: str) -> Any:
    """A flag's value; raises if it is of another type."""
    try:
        return _FLAGS[name](text)
    except ValueError:
        kind = "a whole number (write `from` and `to` without a point)" if _FLAGS[name] is int else "a number"
        raise ConfigError(f"`{name}`={text} must be {kind}") from None


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
        new = self.folder / f"{TRIAL_FILE}.new"
        write_json(new, {key: value for key, value in dataclasses.asdict(self).items() if key != "folder"})
        os.replace(new, self.folder / TRIAL_FILE)


def read_trials(search: Path) -> list[Trial]:
    """All trials of a search, in the order of their names."""
    names, found = {own.name for own in dataclasses.fields(Trial)}, []
    for file in sorted(search.glob(f"trial-*/{TRIAL_FILE}")):
        written = read_json(file, "remove its folder, and the trial is made again", _SCHEMA)
        found.append(Trial(folder=file.parent, **{name: value for name, value in written.items() if name in names}))
    return found


def remove(trial: Path) -> None:
    """Delete what a trial wrote into its folder, and nothing else."""
    clear(trial)
    for path in (*(trial / ERRORS).glob("*.json"), trial / LOG, trial / TRIAL_FILE):
        path.unlink(missing_ok=True)
    for folder in (trial / ERRORS, trial):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
