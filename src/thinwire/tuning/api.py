"""`thinwire.tune`, and what a search found: the best trial, the Pareto front, and which parameters matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from thinwire.base.checks import check_whole
from thinwire.base.errors import ConfigError, ThinwireError, unknown
from thinwire.base.files import refuse_link, write_json
from thinwire.launch.jobs import Job
from thinwire.plan.forecast import Links
from thinwire.report.plots import blank
from thinwire.tuning.by_optuna import SAMPLERS, search_by_optuna
from thinwire.tuning.by_propulate import Evolution, check_world, search_by_propulate, world
from thinwire.tuning.objective import parse_objective
from thinwire.tuning.search import BEST, FINISHED, PARETO, PICTURE, Limits, Search, Trial
from thinwire.tuning.space import Code, chosen_space, space_of

ENGINES = ("propulate", *SAMPLERS)
_BINS = 4
ENOUGH = 3 * _BINS
"""Finished trials from which on it shows which parameters matter."""


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
    execution = Execution(engine=engine, evolution=evolution, at_once=at_once, resume=resume, overwrite=overwrite)
    return run_trials(search, execution, begin(search, execution))


def search_for(job: Job, *, space: str | Mapping[str, Any] | None, objective: str | None, **more: Any) -> Search:
    """The search in a job's folder, with its seed; `more` are fields of `Search`."""
    metric = job.trained.task.metric
    return Search(
        folder=job.out,
        job=replace(job, validate=True, model=False),
        space=space_of(space) if isinstance(space, Mapping) else chosen_space(space, job.method, job.trained.steps),
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
        _write_results(search, ended)
    return Result(
        trials=trials,
        best=ended[0] if ended else None,
        config=best_config(search, ended[0]) if ended else {},
        pareto=front(ended, search.metric, lower=search.lower_is_better),
        importance=importance(search, trials),
        left=max(0, total - sum(trial.has_ended for trial in trials)),
    )


def finished(trials: Sequence[Trial]) -> list[Trial]:
    """Those with figures, the best first; of equal ones that with the fewest bytes."""
    done = (trial for trial in trials if trial.status == FINISHED)
    return sorted(done, key=lambda trial: (trial.loss, trial.figures.get("bytes", 0.0)))


def front(trials: Sequence[Trial], metric: str, *, lower: bool) -> list[Trial]:
    """Trials than which no other is as good in metric, bytes and size, and better in one; the fewest bytes first."""

    def figures(trial: Trial) -> tuple[float, float, float]:
        own = trial.figures
        return own["bytes"], own["size"], own[metric] if lower else -own[metric]

    found: list[tuple[float, float, float]] = []
    kept: list[Trial] = []
    for trial in sorted(trials, key=figures):  # what beats a trial in all three comes before it
        own = figures(trial)
        if not any(all(better <= mine for better, mine in zip(other, own, strict=True)) for other in found):
            found.append(own)
            kept.append(trial)
    return kept


def row_of(trial: Trial) -> dict[str, Any]:
    """A finished trial, for files and for programs."""
    return {"trial": trial.name, "values": trial.values, "figures": trial.figures, "loss": trial.loss}


def importance(search: Search, trials: Sequence[Trial]) -> dict[str, float]:
    """The share of the loss's variance, by ranks, that each parameter explains alone; corrected for chance.

    Trials are put into up to four bins of equal size by the parameter's code (its choices, if it has any), and the
    bins' means are compared: ε² of an analysis of variance. Trials that failed or were stopped are left out. With too
    few to fill the bins it is nothing but chance, and there is no share.
    """
    ended = finished(trials)
    if len(ended) < ENOUGH:
        return {}
    ranked = {id(trial): rank for rank, trial in enumerate(ended)}
    shares = {}
    for name in search.space:
        used = [trial for trial in ended if name in trial.values]
        pairs = [(trial.codes[name], float(ranked[id(trial)])) for trial in used]
        shares[name] = _explained(pairs, by_value=bool(search.space[name].choices))
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _explained(pairs: Sequence[tuple[Code, float]], *, by_value: bool) -> float:
    bins = _bins(pairs, by_value)
    count, groups = len(pairs), len(bins)
    if groups < 2 or count <= groups:
        return 0.0
    middle = fmean(rank for _, rank in pairs)
    whole = sum((rank - middle) ** 2 for _, rank in pairs)
    inside = sum((rank - fmean(own)) ** 2 for own in bins for rank in own)
    if not whole:
        return 0.0
    noise = inside / (count - groups)
    return max(0.0, (whole - inside - (groups - 1) * noise) / whole)


def _bins(pairs: Sequence[tuple[Code, float]], by_value: bool) -> list[list[float]]:
    ordered = sorted(pairs)
    if by_value:
        return [[rank for _, rank in own] for _, own in groupby(ordered, key=lambda pair: pair[0])]
    size = -(-len(ordered) // _BINS) if ordered else 1
    return [[rank for _, rank in ordered[at : at + size]] for at in range(0, len(ordered), size)]


def best_config(search: Search, trial: Trial) -> dict[str, Any]:
    """What `thinwire run --config` takes to train the trial's settings again, on test data."""
    job = search.job_of(trial.values, trial.folder)
    names = ("recipe", "method", "workers", "group_size", "steps", "epochs", "batch_size", "optimizer", "lr")
    found = {name: value for name in (*names, "weight_decay") if (value := getattr(job, name)) is not None}
    for name, texts in (("set", job.settings), ("rate", job.rate), ("with", job.arguments)):
        found |= {name: list(texts)} if texts else {}
    return found


def _write_results(search: Search, ended: Sequence[Trial]) -> None:
    """The best trial's config and the front, if any finished."""
    if ended:
        pareto = front(ended, search.metric, lower=search.lower_is_better)
        write_json(search.folder / BEST, best_config(search, ended[0]))
        write_json(search.folder / PARETO, [row_of(trial) for trial in pareto])


def draw_importance(search: Search, shares: dict[str, float]) -> Path:
    """A bar per parameter."""
    figure, path = blank(8, 1.2 + 0.35 * len(shares)), search.folder / PICTURE
    axes, names = figure.subplots(), list(reversed(shares))
    axes.barh(names, [100 * shares[name] for name in names])
    axes.set_xlabel(f"share of the variance of {search.objective.text} that it explains alone (%)")
    axes.set_xlim(0, 100)
    refuse_link(path)
    figure.savefig(path)
    return path
