"""One run as described on the command line: checked first, then trained here or by new workers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from thinwire.base.errors import ConfigError, Stopped, unknown
from thinwire.base.files import read_json
from thinwire.checkpoint import saves
from thinwire.comm.process_groups import leave
from thinwire.comm.topology import arrange, place
from thinwire.config.faults import Faults
from thinwire.config.settings import from_strings
from thinwire.elastic.stopping import on_signals
from thinwire.elastic.store import launched
from thinwire.launch.failures import as_worker
from thinwire.launch.launcher import HostSpec, inside_job, launch, workers_per_host
from thinwire.loggers import chosen
from thinwire.methods.registry import METHODS
from thinwire.recipes import Recipe, model_without_values, named
from thinwire.recipes.names import pair
from thinwire.report.runs import read_run
from thinwire.train import checkpoint, fit
from thinwire.train.data import check_share
from thinwire.train.first_step import FIRST_STEP, first_step
from thinwire.train.loop import refuse_with_faults
from thinwire.train.run_folder import CHECKPOINTS, of_a_run, refuse_locked, refuse_occupied

Defaults = Callable[[str, str | None], Mapping[str, Any]]
"""Maps a method's name and a schedule's name to config fields, as `Recipe.defaults` does."""
_SCHEDULE = "schedule"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to run; names and settings are checked by `check`, before any worker starts."""

    recipe: str
    """Name of the recipe, or FILE.py:FUNCTION."""
    method: str
    """Name of the method."""
    out: Path
    """The run's folder."""
    workers: int = 1
    """Workers to start, unless this process is a worker already."""
    group_size: str | None = None
    """Workers per group, a number or "world"."""
    steps: int | None = None
    """Overrides the recipe's steps."""
    epochs: int | None = None
    """Overrides the recipe's epochs."""
    seed: int = 0
    """The run's seed."""
    data: Path | None = None
    """Folder to read data from instead of the package."""
    settings: tuple[str, ...] = ()
    """FIELD=VALUE for the method's config; METHOD.FIELD=VALUE is for that method alone."""
    resume: bool = False
    """Resume from the last save, or return the summary of a finished run."""
    overwrite: bool = False
    """Replace an existing run in the folder."""
    save_every: int | None = None
    """Steps between saves."""
    keep: int = 2
    """Saves that are kept."""
    until: int | None = None
    """Save and stop after this many of the recipe's steps."""
    eval_every: int | None = None
    """Steps between evaluations; overrides the recipe's."""
    batch_size: int | None = None
    """Examples per step, over all workers, instead of the recipe's."""
    optimizer: str | None = None
    """Name of an optimizer to use instead of the recipe's."""
    lr: float | None = None
    """Highest learning rate instead of the recipe's."""
    weight_decay: float | None = None
    """Weight decay instead of the recipe's."""
    rate: tuple[str, ...] = ()
    """FIELD=VALUE of the learning rate schedule."""
    arguments: tuple[str, ...] = ()
    """NAME=VALUE for the recipe's function."""
    validate: bool = False
    """Report on validation data instead of test data."""
    model: bool = True
    """Whether to write the finished model."""
    stability: int | None = None
    """Steps between measurements of the bases."""
    stability_back: int = 1
    """Measurements between the two states that are compared."""
    spectra: bool = False
    """Whether to record singular values at each evaluation."""
    log: tuple[str, ...] = ()
    """Trackers that show the run, as NAME or NAME:PLACE."""
    log_every: int | None = None
    """Steps between two that trackers show."""
    first_step: bool = False
    """Take only the first step, and write its measurements to `out`."""
    faults: tuple[str, ...] = ()
    """FIELD=VALUE of Faults, or empty texts; with any the run goes on without groups that die."""
    hosts: tuple[HostSpec, ...] = (HostSpec(),)
    """The hosts, with an equal number of workers each."""

    @cached_property
    def trained(self) -> Recipe:
        """The recipe over this job's steps, with its settings for the method."""
        here = place()
        workers = here.world_size if here else self.workers
        names = ["steps", "epochs", "eval_every", "batch_size", "optimizer", "lr", "weight_decay"]
        names += ["rate", "arguments", "validate"]
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        return named(self.recipe, **given, workers=workers).suited_to(self.method)

    @cached_property
    def config(self) -> Any:
        """The method's config."""
        return method_config(self.method, self.settings, self.trained.defaults, self.group_size)

    @cached_property
    def surviving(self) -> Faults | None:
        """What the run does about groups that die, if anything."""
        if not self.faults:
            return None
        return from_strings(Faults, dict(pair(text, "--faults") for text in self.faults if text))

    def of(self, variant: Variant, **fields: Any) -> Job:
        """The same job with another method and its settings."""
        return dataclasses.replace(self, method=variant.method, settings=variant.settings, **fields)

    def refuse_occupied(self) -> None:
        """Raise if another run would be overwritten or disturbed; before any data is read."""
        if self.resume and self.overwrite:
            raise ConfigError("`--resume` continues a run and `--overwrite` replaces it; give one of them")
        if self.faults:  # the run may be under way, with this group to join it
            return
        if not inside_job():  # where rank 0 may have taken it already
            refuse_locked(self.out)
        if not (self.resume or self.overwrite):
            refuse_occupied(self.out, of_a_run(self.out), resume=True)

    def check(self, *, data: bool = True) -> None:
        """Raise for anything invalid that one process can detect; without `data` the data folder is not read."""
        _ = self.trained, self.config, chosen(self.log)
        if self.surviving is not None:
            self._check_faults()
        elif not inside_job():
            each = workers_per_host(self.workers, self.hosts)
            arrange(0, [rank // each for rank in range(self.workers)], self.config.group_size)
            check_share(self.trained.batch, self.workers)
            if data:
                model_without_values(self.trained, self.trained.source(self.data))
        if self.stability and self.stability * self.stability_back > self.trained.steps:
            raise ConfigError(
                f"`--stability {self.stability} --stability-back {self.stability_back}` leaves nothing to compare "
                f"in a run of {self.trained.steps} steps; measure more often"
            )
        if self.resume:
            identity = checkpoint.identity(self.trained, self.config, self.seed)
            checkpoint.position_found(self.out / CHECKPOINTS, identity)

    def _check_faults(self) -> None:
        """Before the store is asked for: what each group can see by itself."""
        launched()
        refuse_with_faults(self.trained, self.stability)
        if self.group_size is not None:
            raise ConfigError(
                f"`--group-size {self.group_size}` with `--faults`: there each launcher's workers are a group; leave "
                "it out"
            )
        if self.workers > 1 and not inside_job():
            raise ConfigError(
                f"`--workers {self.workers}` with `--faults`: one launcher would end all of its workers when one dies; "
                f"start each group by itself, by `torchrun --nproc-per-node {self.workers} -m thinwire run …` or as "
                "one process, and leave `--workers` out"
            )

    def run(self, on_line: Callable[[str], None]) -> dict[str, Any]:
        """Train and return the summary: in this process if it is a worker or the only one, else in new workers.

        Raises `Stopped` if a signal asked for a stop, after a save.
        """
        if self.resume and (finished := self.finished()):
            return finished
        if (self.workers > 1 or self.hosts != (HostSpec(),)) and not inside_job():
            launch(self.words(), self.workers, on_line, self.hosts, stops_in_order=not self.first_step)
            result = self.out / (FIRST_STEP if self.first_step else "summary.json")
            if self.until and not result.is_file() and (saved := saves.find(self.out / CHECKPOINTS)):
                position = read_json(saved / "position.json", schema=checkpoint.POSITION)
                return {"stopped_at": position["step"], "steps": self.trained.steps}
            return read_json(result)
        with nullcontext() if self.first_step else on_signals(), as_worker():
            summary = self._train()
            if inside_job() or self.faults:
                leave()
            if "stopped_by" in summary:
                raise Stopped(
                    f"stopped by {summary['stopped_by']} and saved after step {summary['stopped_at']} of "
                    f"{summary['steps']} in {self.out}; continue with --resume"
                )
            return summary

    def _train(self) -> dict[str, Any]:
        if self.first_step:
            return first_step(self.trained, self.config, out=self.out, seed=self.seed, data=self.data)
        return fit(
            self.trained,
            self.config,
            out=self.out,
            seed=self.seed,
            data=self.data,
            resume=self.resume,
            overwrite=self.overwrite,
            save_every=self.save_every,
            keep=self.keep,
            until=self.until,
            model=self.model,
            stability=self.stability,
            stability_back=self.stability_back,
            spectra=self.spectra,
            command=self.description(),
            loggers=chosen(self.log, self.log_every),
            faults=self.surviving,
        )

    def finished(self) -> dict[str, Any] | None:
        """The summary if this run has finished already; raises if the folder holds a different run."""
        path = self.out / "summary.json"
        if not path.is_file():
            return None
        summary = read_run(self.out).summary
        wanted = checkpoint.identity(self.trained, self.config, self.seed)
        there = summary.get("identity", {})
        if not (inside_job() or self.faults):
            wanted, there = wanted | {"world_size": self.workers}, there | {"world_size": summary["world_size"]}
        if name := checkpoint.differing(there, wanted):
            raise ConfigError(
                f"`{self.out}` holds a finished run with `{name}`={there.get(name)!r}, not {wanted[name]!r}; "
                "give another `--out`, or `--overwrite` instead of `--resume` to start over"
            )
        return summary

    def words(self) -> list[str]:
        """The command line of one worker."""
        more = {
            "--out": self.out,
            "--save-every": self.save_every,
            "--keep": self.keep,
            "--until": self.until,
            "--log-every": self.log_every,
            "--log-to": self.log,
            "--resume": self.resume,
            "--overwrite": self.overwrite,
            "--no-model": not self.model,
            "--first-step": self.first_step,
            "--quiet": True,
        }
        return [*self.description(), *_words(more)]

    def description(self) -> list[str]:
        """The command line without how many workers there are, where they write, and how often they save."""
        options = {
            "--method": self.method,
            "--seed": self.seed,
            "--steps": self.steps,
            "--epochs": self.epochs,
            "--group-size": self.group_size,
            "--data": self.data,
            "--eval-every": self.eval_every,
            "--batch-size": self.batch_size,
            "--optimizer": self.optimizer,
            "--lr": self.lr,
            "--weight-decay": self.weight_decay,
            "--stability": self.stability,
            "--stability-back": self.stability_back if self.stability else None,
            "--set": self.settings,
            "--rate": self.rate,
            "--with": self.arguments,
            "--validate": self.validate,
            "--spectra": self.spectra,
        }
        return ["run", self.recipe, *_words(options)]


def _words(options: Mapping[str, Any]) -> list[str]:
    """Options as words: none for None and False, the flag alone for True, the flag again for each text of several."""
    words = []
    for flag, value in options.items():
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            for each in value if isinstance(value, tuple) else (value,):
                words += [flag, str(each)]
    return words


def method_config(method: str, settings: Iterable[str], defaults: Defaults, group_size: str | None) -> Any:
    """A method's config from command-line settings, which override `defaults`, such as a recipe's."""
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    given = dict(_setting(text, method) for text in settings if _applies_to(text, method))
    base = defaults(method, given.pop(_SCHEDULE, None))
    typed = {} if group_size is None else {"group_size": _group_size(group_size)}
    return from_strings(METHODS[method].config, given, **{**base, **typed})


class Variant(NamedTuple):
    """A method with its settings, and a label to show it under."""

    label: str
    method: str
    settings: tuple[str, ...]

    @property
    def folder(self) -> str:
        """The label as a folder's name."""
        return self.label.replace(":", "-").replace("=", "-")


def variant(method: str, settings: tuple[str, ...], scheduled: Container[str] = ()) -> Variant:
    """One method, as METHOD or METHOD:FIELD=VALUE."""
    if "," in method:
        raise ConfigError(f"`--method`={method!r} must be one method; `thinwire compare --methods` takes several")
    (only,) = variants(method or ",", settings, scheduled)
    return only


def variants(methods: str | None, settings: tuple[str, ...], scheduled: Container[str] = ()) -> list[Variant]:
    """Comma-separated methods, optionally with settings, as METHOD:FIELD=VALUE; all methods if None.

    A bare FIELD=VALUE of `settings` applies to every method that has the field, `schedule` to those in `scheduled`.
    """
    labels = [label.strip() for label in methods.split(",") if label.strip()] if methods else list(METHODS)
    if not labels:
        raise ConfigError(f"`--methods`={methods!r} names no method, choose from: {', '.join(METHODS)}")
    chosen = {label: Variant(label, *_parts(label)) for label in labels}
    assigned: dict[str, tuple[str, ...]] = dict.fromkeys(chosen, ())
    for text in settings:
        field = text.partition("=")[0]
        targets = [v for v in chosen.values() if "." in field or _has_field(v.method, field, scheduled)]
        # A field that no method has goes to all, so that the check lists the valid fields.
        for v in targets or chosen.values():
            assigned[v.label] += (text,)
    return [v._replace(settings=(*assigned[v.label], *v.settings)) for v in chosen.values()]


def _parts(label: str) -> tuple[str, tuple[str, ...]]:
    """METHOD:FIELD=VALUE:…; a value may have a colon itself, as lowrank:16 does."""
    method, _, own = label.partition(":")
    return method, tuple(re.split(r":(?=[^:=]+=)", own)) if own else ()


def _has_field(method: str, field: str, scheduled: Container[str]) -> bool:
    if method not in METHODS:
        return True  # the check lists the known ones
    if field == _SCHEDULE:
        return method in scheduled
    return field in {own.name for own in dataclasses.fields(METHODS[method].config)}


def _group_size(text: str) -> int | str:
    if text == "world":
        return text
    if not text.isdecimal():
        raise ConfigError(f'`--group-size`={text!r} must be a whole number of workers, or "world"')
    return int(text)


def _applies_to(text: str, method: str) -> bool:
    owner, dot, _ = text.partition("=")[0].rpartition(".")
    if dot and owner not in METHODS:
        raise unknown("method", owner, METHODS)
    return not dot or owner == method


def _setting(text: str, method: str) -> tuple[str, str]:
    field, equals, value = text.partition("=")
    if not equals or not field:
        raise ConfigError(f"`--set {text}` must be FIELD=VALUE, such as --set wire=bf16")
    return field.removeprefix(f"{method}."), value
