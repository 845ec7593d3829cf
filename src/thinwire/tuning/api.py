"""`thinwire.tune`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from thinwire.base.checks import check_whole
from thinwire.base.errors import ConfigError, ThinwireError, unknown
from thinwire.launch.jobs import Job
from thinwire.plan.links import Links
from thinwire.tuning.by_optuna import SAMPLERS, search_by_optuna
from thinwire.tuning.by_propulate import Evolution, check_world, search_by_propulate, world
from thinwire.tuning.objective import parse_objective
from thinwire.tuning.presets import chosen_space
from thinwire.tuning.results import best_config, finished, front, importance, write_results
from thinwire.tuning.search import Limits, Search
from thinwire.tuning.space import space_of
from thinwire.tuning.trial import Trial

ENGINES = ("propulate", *SAMPLERS)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a search is run, besides what is searched."""

    engine: str = "propulate"
    evolution: Evolution = field(default_factory=Evolution)
    at_once: int = 1
    """Trials side by side, per island; under MPI as many as the ranks allow."""
    resume: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        check_whole(self, "at_once", 1)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a search found."""

    trials: list[Trial]
    """All of them, also those that failed."""
    best: Trial | None
    """The best that finished."""
    config: dict[str, Any]
    """The best settings, as `thinwire run --config` takes them; also in best.json."""
    pareto: list[Trial]
    """Trials than which no other is as good in metric, bytes and size, and better in one."""
    importance: dict[str, float]
    """The share of the objective's variance that each parameter explains alone; nothing if trials are too few."""
    left: int
    """Trials for which there was no time; a resumed search runs them."""


def tune(
    recipe: str,
    method: str,
    *,
    out: str | Path,
    space: str | Mapping[str, Any] | None = None,
    objective: str | None = None,
    engine: str = "propulate",
    workers_per_trial: int = 2,
    islands: int = 2,
    at_once: int = 1,
    generations: int = 10,
    migration: float = 0.9,
    pollination: bool = True,
    time_limit: float | None = None,
    trial_limit: float | None = None,
    early_stopping: bool = True,
    links: Links | None = None,
    compute: float | None = None,
    seed: int = 0,
    resume: bool = False,
    overwrite: bool = False,
    **run: Any,
) -> Result:
    """Search the settings of a recipe with a method; each trial is a run, judged on validation data.

    `space` is a preset's name, a TOML file, or a dict as such a file holds. Limits are in seconds. `run` are fields of
    `thinwire.launch.jobs.Job`, such as steps=200 or settings=("wire=int2",). With Propulate, all ranks of an MPI world
    call this. The options of `thinwire tune` say more.
    """
    search = search_for(
        Job(recipe=recipe, method=method, out=Path(out), workers=workers_per_trial, seed=seed, **run),
        space=space,
        objective=objective,
        limits=Limits(search=float("inf") if time_limit is None else time_limit, trial=trial_limit),
        links=links,
        compute=compute,
        stops_early=early_stopping,
    )
    evolution = Evolution(islands=islands, generations=generations, migration=migration, pollination=pollination)
    return perform(
        search, Execution(engine=engine, evolution=evolution, at_once=at_once, resume=resume, overwrite=overwrite)
    )


def search_for(job: Job, *, space: str | Mapping[str, Any] | None, objective: str | None, **more: Any) -> Search:
    """The search in a job's folder, with its seed; `more` are fields of `Search`."""
    metric = job.trained.task.metric
    return Search(
        folder=job.out,
        job=replace(job, validate=True, model=False),
        space=chosen_space(space, job.method, job.trained.steps)
        if space is None or isinstance(space, str)
        else space_of(space),
        objective=parse_objective(objective or metric, metric),
        seed=job.seed,
        **more,
    )


def begin(search: Search, execution: Execution) -> int:
    """Check all, take the folder, and return the number of trials; called by all ranks, and done by the first."""
    if execution.engine not in ENGINES:
        raise unknown("engine", execution.engine, ENGINES)
    if execution.resume and execution.overwrite:
        raise ConfigError("`resume` continues a search and `overwrite` replaces it; give one of them")
    comm = world() if execution.engine == "propulate" else None
    if comm is None:
        at_once, about = execution.evolution.islands * execution.at_once, {"engine": execution.engine}
    else:
        at_once = check_world(comm, execution.evolution, search.job.workers)
        about = execution.evolution.described(at_once)
    error_text: str | None = None
    if comm is None or comm.rank == 0:
        try:
            search.check()
            search.open(about, resume=execution.resume, overwrite=execution.overwrite)
        except (ThinwireError, OSError) as error:  # on all ranks, or the others would wait
            search.close()
            error_text = str(error)
    if comm is not None:
        error_text = comm.bcast(error_text, root=0)
    if error_text is not None:
        raise ConfigError(error_text)
    return execution.evolution.generations * at_once


def perform(search: Search, execution: Execution) -> Result:
    """Run a whole search, or the rest of one."""
    total = begin(search, execution)
    return run_trials(search, execution, total)


def run_trials(search: Search, execution: Execution, total: int) -> Result:
    """The trials of a search that has begun, and what they say."""
    try:
        if execution.engine == "propulate":
            search_by_propulate(search, execution.evolution)
        else:
            search_by_optuna(search, execution.engine, total, execution.evolution.islands * execution.at_once)
    finally:
        search.close()
    trials = search.trials()
    ended = finished(trials)
    if execution.engine != "propulate" or world().rank == 0:
        write_results(search, trials)
    return Result(
        trials=trials,
        best=ended[0] if ended else None,
        config=best_config(search, ended[0]) if ended else {},
        pareto=front(ended, search.metric, lower=search.lower_is_better),
        importance=importance(search, trials),
        left=max(0, total - sum(trial.has_ended for trial in trials)),
    )
