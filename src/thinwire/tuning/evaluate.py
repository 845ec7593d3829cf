"""Run one trial: start its workers, watch them, and say what became of it. Called by all ranks of the trial."""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from thinwire.base.errors import ThinwireError
from thinwire.checkpoint import saves
from thinwire.plan import compute as computing
from thinwire.plan.forecast import Layout
from thinwire.plan.planner import Stopwatch, make_plan
from thinwire.plan.workloads import of_recipe
from thinwire.report.records import read_records
from thinwire.report.runs import read_run
from thinwire.train.run_folder import CHECKPOINTS
from thinwire.tuning.crew import ERRORS, Crew, Ranks, why
from thinwire.tuning.early import curve_of, reason_to_stop
from thinwire.tuning.objective import FAILED
from thinwire.tuning.search import Search
from thinwire.tuning.trial import FINISHED, RUNNING, STOPPED, Trial

_POLL_S, _LOOK_S = 0.1, 1.0
_CLASH = "address already in use"
_DIVERGED = ("not finite", "diverged", "NaN")


def evaluate(search: Search, trial: Trial, ranks: Ranks) -> float:
    """The trial's loss; the first rank writes that, its status and its figures.

    A trial that is cut off by the end of the search stays a running one: a resumed search continues it.
    """
    start = time.monotonic()
    status, reason = ranks.share(_impossible(search, trial)) or _trained(search, trial, ranks)
    if _CLASH in reason.lower():  # another process took the port between our asking and using it
        status, reason = _trained(search, trial, ranks)
    if ranks.rank == 0:
        shutil.rmtree(trial.folder / ERRORS, ignore_errors=True)
        if status != RUNNING:
            trial.seconds = round(time.monotonic() - start, 3)
            _judge(search, trial, status, reason)
            trial.write()
    return float(ranks.share(FAILED if trial.loss is None else trial.loss))


def _impossible(search: Search, trial: Trial) -> tuple[str, str] | None:
    """That its settings do not fit together, if so; each may be possible by itself."""
    job = search.job_of(trial.values, trial.folder)
    try:
        _ = job.trained, job.config
    except ThinwireError as error:
        return "failed", _one_line(str(error))
    return None


def _trained(search: Search, trial: Trial, ranks: Ranks) -> tuple[str, str]:
    """Its status and the reason; collective."""
    if ranks.rank == 0:
        shutil.rmtree(trial.folder / ERRORS, ignore_errors=True)
        (trial.folder / ERRORS).mkdir(parents=True)
    places = ranks.places()
    job = search.job_of(trial.values, trial.folder)
    saved = ranks.share(saves.find(trial.folder / CHECKPOINTS) is not None)
    job = dataclasses.replace(job, resume=saved, overwrite=not saved)
    crew = Crew(job.words(), places, trial.folder)
    try:
        return _watched(search, trial, ranks, crew)
    finally:
        crew.stop()


def _watched(search: Search, trial: Trial, ranks: Ranks, crew: Crew) -> tuple[str, str]:
    start, looked = time.monotonic(), 0.0
    limit, others = (_limit(search), _others(search, trial)) if ranks.rank == 0 else (math.inf, [])
    verdict: tuple[str, str] | None = None
    while True:
        codes: list[int | None] = [code for part in ranks.gather(crew.codes()) for code in part]
        if ranks.rank == 0:
            seconds = time.monotonic() - start
            if all(code == 0 for code in codes):
                verdict = (FINISHED, "")
            elif any(codes):
                verdict = _failure(trial.folder, codes)
            elif search.is_over:
                verdict = (RUNNING, "")
            elif seconds > limit:
                verdict = ("out of time", f"it had not finished after {seconds:.0f} s")
            elif others and seconds - looked > _LOOK_S:
                looked = seconds
                if poor := reason_to_stop(_curve(search, trial), others, search.lower_is_better):
                    verdict = (STOPPED, poor)
        verdict = ranks.share(verdict)
        if verdict is not None:
            return verdict
        time.sleep(_POLL_S)


def _limit(search: Search) -> float:
    """Seconds that a trial may take."""
    return search.limits.of_trial([other.seconds for other in search.trials() if other.status == FINISHED])


def _others(search: Search, trial: Trial) -> list[list[list[float]]]:
    """Curves that a poor one is compared with: of trials within the limits, since those outside have it easier."""
    if not search.stops_early or not search.objective.follows(search.metric):
        return []
    ended = [other for other in search.trials() if other.loss is not None and other.name != trial.name]
    if search.objective.limits:
        ended = [other for other in ended if other.status == FINISHED and search.objective.is_met(other.loss or 0.0)]
    return [other.curve for other in ended if other.curve]


def _failure(folder: Path, codes: Sequence[int | None]) -> tuple[str, str]:
    time.sleep(1.0)  # the others report too, and the earliest error is the cause
    reason = _one_line(why(folder, codes))
    return ("diverged" if any(word in reason for word in _DIVERGED) else "failed"), reason


def _one_line(text: str) -> str:
    """What a file may hold: no escape sequences, and not a whole traceback."""
    return "".join(c if c.isprintable() else " " for c in text.strip().partition("\n")[0])[:500]


def _curve(search: Search, trial: Trial) -> list[list[float]]:
    """Of a trial that runs or has run; nothing if its records cannot be read or it could not begin."""
    with suppress(ThinwireError):
        return curve_of(trial.folder, search.metric, search.job_of(trial.values, trial.folder).trained.steps)
    return []


def _judge(search: Search, trial: Trial, status: str, reason: str) -> None:
    """Figures and loss."""
    trial.status, trial.reason, trial.loss, trial.figures = status, reason, FAILED, {}
    trial.curve = _curve(search, trial)
    if status == STOPPED and trial.curve:
        trial.figures = {search.metric: float(trial.curve[-1][1])}
        trial.loss = search.objective.loss_if_stopped(search.metric, trial.figures[search.metric])
    if status != FINISHED:
        return
    try:
        trial.figures = _figures(search, trial)
    except ThinwireError as error:
        trial.status, trial.reason = "failed", _one_line(str(error))
        return
    if not math.isfinite(trial.figures[search.metric]):
        trial.status, trial.reason = "diverged", f"{search.metric} is {trial.figures[search.metric]}"
        trial.figures = {name: value for name, value in trial.figures.items() if math.isfinite(value)}
        return
    trial.loss = search.objective.loss(trial.figures)


def _figures(search: Search, trial: Trial) -> dict[str, float]:
    summary = read_run(trial.folder).summary
    found = {
        search.metric: summary[search.metric],
        "bytes": summary["traffic_vs_allreduce_fp32"] or 0.0,
        "size": summary["parameters_final"] / summary["parameters_full"],
        "wall": summary["wall_s"],
    }
    if search.links is not None:
        found["seconds"] = _planned(search, trial)
    return {name: float(value) for name, value in found.items()}


def _planned(search: Search, trial: Trial) -> float:
    """Seconds of the whole run on the search's link, with the ranks that the trial found."""
    assert search.links is not None
    job = search.job_of(trial.values, trial.folder)
    workload = of_recipe(job.trained, job.workers, job.data)
    factored = bool(read_records(trial.folder / "records.jsonl", "ranks"))
    known = computing.given(search.compute) if search.compute else None
    layout = Layout(workers=job.workers)
    made = make_plan(
        workload,
        {job.method: job.config},
        layout,
        search.links,
        stopwatch=Stopwatch(workload, known),
        ranks=trial.folder if factored else None,
        bounds=False,
    )
    return sum(made.rows[0].forecast.seconds(search.links).values())
