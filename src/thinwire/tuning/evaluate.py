"""Run one trial: start its workers, watch them, and say what became of it. Called by all ranks of the trial.

A trial runs in processes of its own, each started by the rank that it belongs to: one that runs out of memory, hangs or
dies takes nothing else with it. Workers hold a pipe from the rank that started them and exit with it, as they do with
`launcher.py`. A trial that is worse than half of the others were at the same point is stopped (the median rule).
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch

from thinwire.base.errors import ThinwireError
from thinwire.checkpoint import saves
from thinwire.launch.failures import ERROR_DIR, TorchrunLog, first_cause
from thinwire.launch.launcher import end, free_port
from thinwire.plan import compute as computing
from thinwire.plan.forecast import Layout
from thinwire.plan.planner import Stopwatch, make_plan
from thinwire.plan.workload import of_recipe
from thinwire.report.records import read_records
from thinwire.report.runs import read_run
from thinwire.train.run_folder import CHECKPOINTS
from thinwire.tuning.objective import FAILED
from thinwire.tuning.search import ERRORS, FINISHED, LOG, RUNNING, STOPPED, Search, Trial

_POLL_S, _LOOK_S = 0.1, 1.0
_CLASH = "address already in use"
_DIVERGED = ("not finite", "diverged", "NaN")
_SHUTDOWN_S = 5
_FOREIGN = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "TORCHELASTIC_", "THINWIRE_STORE", "THINWIRE_GROUP")
"""What the search's own launcher has set: a worker that reads it would think that it was started by that."""
LEAST, BEGINS = 4, 0.25
"""Ended trials without which there is no median, and the share of a run before which no trial is stopped."""


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
        end(crew.processes, _SHUTDOWN_S)


def _watched(search: Search, trial: Trial, ranks: Ranks, crew: Crew) -> tuple[str, str]:
    start, looked = time.monotonic(), 0.0
    limit, others = math.inf, []
    if ranks.rank == 0:
        limit = search.limits.of_trial([other.seconds for other in search.trials() if other.status == FINISHED])
        others = _others(search, trial)
    verdict: tuple[str, str] | None = None
    while True:
        codes: list[int | None] = [code for part in ranks.gather(crew.exit_codes()) for code in part]
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
    made = make_plan(
        workload,
        {job.method: job.config},
        Layout(workers=job.workers),
        search.links,
        stopwatch=Stopwatch(workload, computing.given(search.compute) if search.compute else None),
        ranks=trial.folder if factored else None,
        bounds=False,
    )
    return sum(made.rows[0].forecast.seconds(search.links).values())


class Ranks:
    """The ranks of one trial, as seen from one of them: here this process alone, which starts all workers."""

    rank = 0

    def __init__(self, workers: int, devices: Sequence[int] = ()) -> None:
        self.workers, self.devices = workers, devices

    def gather(self, value: Any) -> list[Any]:
        """What every rank gives, on all ranks."""
        return [value]

    def share(self, value: Any) -> Any:
        """What the first rank gives, on all ranks."""
        return value

    def places(self) -> list[dict[str, str]]:
        """The environment of each worker that this rank starts."""
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [address | place(i, self.workers, i, self.workers, self.devices) for i in range(self.workers)]


def place(rank: int, world: int, local: int, local_world: int, devices: Sequence[int] = ()) -> dict[str, str]:
    """The variables that torchrun would set for a worker; with `devices`, those GPUs of its node are the trial's."""
    variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": local_world}
    shown = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}
    return {name: str(value) for name, value in variables.items()} | shown


def devices_for(local_ranks: Sequence[int]) -> list[int]:
    """The GPUs of a node that ranks with these numbers there share; none without GPUs."""
    count = torch.cuda.device_count()
    return sorted({rank % count for rank in local_ranks}) if count else []


class Crew:
    """The workers of a trial that this rank has started."""

    def __init__(self, words: Sequence[str], places: Sequence[dict[str, str]], folder: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        self.processes: list[subprocess.Popen[bytes]] = []
        with (folder / LOG).open("ab") as log:
            for environment in places:
                own = {**environment, ERROR_DIR: str((folder / ERRORS).absolute())}
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "thinwire", *words],
                        env={"OMP_NUM_THREADS": "1"} | kept | own,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def exit_codes(self) -> list[int | None]:
        """None for a worker that runs."""
        return [process.poll() for process in self.processes]


def why(folder: Path, codes: Sequence[int | None]) -> str:
    """What ended a trial whose workers have these exit codes, in one line."""
    killed = next(((rank, -code) for rank, code in enumerate(codes) if code is not None and code < 0), None)
    failed = next((code for code in codes if code), 1)
    reason = str(first_cause(folder / ERRORS, TorchrunLog(len(codes)), failed or 1))
    if reason.startswith("the workers exited") and killed:
        name = signal.Signals(killed[1]).name
        reason = f"worker {killed[0]} was killed by {name}{', as by a system without memory' * (name == 'SIGKILL')}"
    elif reason.startswith("the workers exited") and (last := _last_line(folder / LOG)):
        reason = last
    return reason.splitlines()[0] if reason.strip() else "it ended without saying why"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.is_file() else []
    return lines[-1] if lines else ""


def curve_of(folder: Path, metric: str, steps: int) -> list[list[float]]:
    """The share of the run and the metric there, where it is a number; of a run that may still be running."""
    found = read_records(folder / "records.jsonl", "evaluation")
    at = ((record["step"] / steps, record.get(metric, math.nan)) for record in found)
    return [[share, value] for share, value in at if math.isfinite(value)]


def best_until(curve: Sequence[Sequence[float]], share: float, lower: bool) -> float | None:
    """The best metric up to this share of a run."""
    seen = [value for at, value in curve if at <= share + 1e-9]
    return (min if lower else max)(seen, default=None)


def reason_to_stop(curve: Sequence[Sequence[float]], others: Iterable[Sequence[Sequence[float]]], lower: bool) -> str:
    """Why a trial with this curve so far should be stopped; nothing if it should go on."""
    if not curve or curve[-1][0] < BEGINS or curve[-1][0] >= 1:
        return ""
    share = curve[-1][0]
    there = [best for other in others if (best := best_until(other, share, lower)) is not None]
    own = best_until(curve, share, lower)
    if len(there) < LEAST or own is None:
        return ""
    middle = median(there)
    if own <= middle if lower else own >= middle:
        return ""
    return (
        f"{own:.4g} after {100 * share:.0f} % of the run, where half of {len(there)} trials had {middle:.4g} or better"
    )
