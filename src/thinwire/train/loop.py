"""`fit`: train a recipe with the method of a config."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.base.errors import ConfigError, SaveError, one_line
from thinwire.checkpoint import saves
from thinwire.checkpoint.saves import remove
from thinwire.comm.process_groups import next_number
from thinwire.comm.topology import join
from thinwire.elastic.stopping import Stop
from thinwire.factor.stability import Stability
from thinwire.loggers import Logger, Loggers, chosen
from thinwire.loggers.log import begin
from thinwire.train import checkpoint
from thinwire.train.batcher import Batch
from thinwire.train.run import Run, prepare
from thinwire.train.run_folder import CHECKPOINTS, best_epochs
from thinwire.train.summary import summarise, write_model, write_result
from thinwire.train.task import Recipe

log = logging.getLogger("thinwire")


def fit(
    recipe: Recipe,
    config: Any,
    *,
    out: str | Path,
    seed: int = 0,
    data: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    save_every: int | None = None,
    keep: int = 2,
    until: int | None = None,
    model: bool = True,
    stability: int | None = None,
    stability_back: int = 1,
    spectra: bool = False,
    command: list[str] | None = None,
    loggers: Sequence[str | Logger] = (),
) -> dict[str, Any]:
    """Train `recipe` with the method of `config` and write records, summary and model to `out`; collective.

    Joins the job it is started in (torchrun, srun) or trains alone. Returns the summary.

    `resume` continues from the latest sound save in `out/checkpoint` if there is one; `save_every` writes one every
    N steps while training goes on, and the last `keep` are kept. A save that cannot be written is reported and does
    not end the run. A folder that already holds a run is refused without `resume` or `overwrite`. `until` saves and
    stops after that step; the summary then says only that. A request to stop does the same, and the summary has it in
    `stopped_by`; `thinwire.elastic.stopping.on_signals` makes signals such requests. Without `model` the finished model
    is not written. With `stability`, rank 0 compares its bases every N steps with those of `stability_back` comparisons
    before; a resumed run starts over. With `spectra`, rank 0 records singular values at each evaluation. `command` is
    what to type to train this again, for the summary.

    `loggers` are names of trackers ("tensorboard", "wandb:PROJECT"), loggers of `thinwire.loggers`, or functions that
    take a record; rank 0 calls them (docs/logging.md).

    A recipe with patience returns to its best epoch at the end.
    """
    found = chosen(loggers)
    join()
    with ExitStack() as held:
        run = prepare(recipe, config, Path(out), seed, data, resume, overwrite, held=held)
        held.enter_context(closing(run.recorder))
        run.keep, run.spectra, run.command = keep, spectra, command
        if stability and run.replica.topology.rank == 0:
            run.watch = Stability(run.replica, stability, stability_back, step=run.replica.step)
        run.note_precision()
        run.replica.traffic.times.on_work = run.note_work
        with logged(run, found) as summary:
            run.note_start()
            run.note_resume()
            run.note_ranks()
            summary |= _train(run, min(until or recipe.steps, recipe.steps), save_every, write=model)
        return summary


def _train(run: Run, last: int, save_every: int | None, *, write: bool) -> dict[str, Any]:
    """Up to the step `last`, or to the end; the summary."""
    recipe, figures = run.recipe, dict[str, float]()
    with run.fast_convolutions(), run.batcher.steps(range(run.replica.step, last)) as batches, stopping(run) as stop:
        for done, batch in enumerate(batches, start=run.replica.step + 1):
            train_step(run, batch)
            run.note_stability()
            epoch_over = recipe.ends_epoch(done)
            if epoch_over:
                run.replica.epoch_end()
            validate = epoch_over and recipe.patience is not None
            if validate or done % recipe.eval_every == 0 or done == recipe.steps:
                figures = _evaluate(run, validate=validate)
            if validate:
                tired = run.lost_patience(figures)
                save_best(run)
                if tired:
                    break
            if done < last and stop.now():
                return _stop(run) | {"stopped_by": stop.why}
            if save_every and done % save_every == 0 and done < recipe.steps:
                save_checkpoint(run)
        else:
            if last < recipe.steps:
                return _stop(run)
    run.note_end()
    run.spent.end_steps()
    if run.writing:
        run.note_work("waiting for the last save")
    settle(run)
    if run.best:
        run.note_work("returning to the best epoch")
        figures = run.go_back() or figures
    return _conclude(run, figures, write=write)


def train_step(run: Run, batch: Batch) -> Tensor:
    """One optimizer step; returns this worker's loss without waiting for it."""
    run.count_step()
    x, y = batch
    with run.precision:
        loss = run.recipe.task.loss(run.replica(x), y)
    run.optimizer.zero_grad()
    loss.backward()
    if run.recipe.clip is not None and not run.replica.clips:
        nn.utils.clip_grad_norm_(run.replica.parameters(), run.recipe.clip)
    phase, rate = run.replica.phase, run.scheduler.get_last_lr()[0]
    run.replica.observe(loss)
    run.optimizer.step()
    run.scheduler.step()
    run.note_ranks()
    run.note_agreement()
    run.note_events()
    loss = loss.detach()
    run.recorder.write(
        "step", run.replica.numbers, step=run.replica.step, phase=phase, loss=loss, lr=rate, **run.so_far()
    )
    return loss


def _evaluate(run: Run, *, finished: bool = False, validate: bool = False) -> dict[str, float]:
    """Figures of the merged model on held-out data; with `validate` also its loss on validation data."""
    replica, task = run.replica, run.recipe.task
    model = "finished" if finished else "world" if replica.in_sync else "merged"
    run.note_work("evaluating the finished model" if finished else "evaluating")
    with run.spent.evaluates(), replica.merged() if replica.needs_merged else nullcontext():
        figures = task.figures(replica.wire.all_reduce_sum(_totals(run), purpose="evaluate"))
        if validate:
            unseen = replica.wire.all_reduce_sum(_totals(run, "validation"), purpose="evaluate")
            figures["validation_loss"] = task.figures(unseen)["loss"]
    run.recorder.write(
        "evaluation",
        replica.numbers,
        step=replica.step,
        phase=replica.phase,
        model=model,
        **figures,
        **run.so_far(),
        ranks=replica.ranks(),
        trainable=sum(p.numel() for p in replica.parameters() if p.requires_grad),
        time=replica.traffic.split,
    )
    if not finished:
        run.note_spectra()
    return figures


@torch.no_grad()
def _totals(run: Run, part: str = "heldout") -> Tensor:
    """Sums over this worker's share of a part of the data."""
    totals = torch.zeros(3, dtype=torch.float64, device=run.device)
    run.replica.eval()
    with run.precision:
        for x, y in run.batcher.parts(part):
            totals += run.recipe.task.totals(run.replica(x), y)
    run.replica.train()
    return totals


def _conclude(run: Run, before: dict[str, float], *, write: bool) -> dict[str, Any]:
    """Finish the model, evaluate it again and write the results; `before` has the figures before `finish`."""
    before = before or _evaluate(run)
    run.counts.update(run.replica)
    run.note_work("last average and truncation")
    small = run.replica.finish()
    run.note_ranks()
    after = _evaluate(run, finished=True)
    metric = run.recipe.task.metric
    figures = after | {f"{metric}_before_truncation": before[metric]}
    summary = summarise(
        run.recipe,
        run.replica,
        identity=run.identity,
        figures=figures,
        wall_s=run.wall_s,
        counts=run.counts,
        split_size=run.batcher.source.heldout_size,
    )
    summary["precision"] = run.recipe.precision_name(run.device)
    summary |= {} if run.best is None else {"best_epoch": run.best}
    summary["spent"] = run.spent.table()
    summary |= {} if run.command is None else {"command": run.command}
    if run.replica.topology.rank == 0:
        run.note_work("writing the model" if write else "writing the summary")
        write_result(run.out, summary, partial(_write_model, run, small if write else None, summary))
        if not saves.find(run.out / CHECKPOINTS):
            for epoch in best_epochs(run.out):
                remove(epoch)
    return summary


def _write_model(run: Run, model: nn.Module | None, summary: dict[str, Any], place: Path) -> None:
    """Write it if there is one; that is the longest part of finishing, so the summary has the time after it."""
    if model is not None:
        write_model(model, place, run.batcher.example(), run.recipe.transform_name)
    summary["spent"] = run.spent.table()


def _stop(run: Run) -> dict[str, Any]:
    """Save, to be resumed later."""
    run.note_work("saving")
    save_and_wait(run)
    run.recorder.write("stopped", step=run.replica.step, steps=run.recipe.steps)
    return {"stopped_at": run.replica.step, "steps": run.recipe.steps}


@contextmanager
def logged(run: Run, given: Sequence[Logger]) -> Iterator[dict[str, Any]]:
    """On rank 0, let loggers see all records made inside; what the block adds to the dict is the run's summary."""
    summary: dict[str, Any] = {}
    if run.replica.topology.rank != 0 or not given:
        yield summary
        return
    loggers = run.recorder.loggers = Loggers(given)
    config = run.identity | {"world_size": run.replica.topology.world_size}
    start = time.monotonic()
    begin(loggers, run.replica, run.out, config, resumed=run.resumed)
    run.started += time.monotonic() - start  # seconds for some trackers, and not the run's
    try:
        yield summary
    finally:
        try:
            run.recorder.close()  # its last record comes before the end
        finally:
            status = "failed" if not summary else "stopped" if "stopped_at" in summary else "finished"
            loggers.end(status, summary)


def save_checkpoint(run: Run) -> None:
    """Begin a checkpoint; collective. One that cannot be written is reported, and the older ones stay."""
    _begin(run, saves.at_step(run.out / CHECKPOINTS, run.replica.step))


def save_best(run: Run) -> None:
    """Begin a save of the best epoch if that is this one; collective."""
    if run.best and run.best["step"] == run.replica.step:
        _begin(run, run.best_folder)


def settle(run: Run) -> None:
    """Wait for the save that is being written; collective. Reports one that could not be."""
    writing, run.writing = run.writing, None
    try:
        if writing is not None:
            writing.wait()
    except SaveError as error:
        _report(run, error)


def save_and_wait(run: Run) -> None:
    """Write a checkpoint on which the rest of the run depends; collective. Raises if it cannot be written."""
    settle(run)
    _started(run, saves.at_step(run.out / CHECKPOINTS, run.replica.step)).wait()


@contextmanager
def stopping(run: Run) -> Iterator[Stop]:
    """Follow requests to stop; collective."""
    stop = Stop(run.replica.wire, next_number())
    try:
        yield stop
    finally:
        stop.release_groups()


def _begin(run: Run, place: Path) -> None:
    settle(run)
    try:
        run.writing = _started(run, place)
    except SaveError as error:
        _report(run, error)


def _started(run: Run, place: Path) -> saves.Save:
    run.recorder.write("save", step=run.replica.step, wall_s=round(run.wall_s, 3))
    run.recorder.flush()  # a resumed run keeps the lines up to its save
    position = {
        "step": run.replica.step,
        "wall_s": run.wall_s,
        "evaluating_s": run.spent.evaluating,
        "counts": run.counts.state(),
        "best": run.best,
        "identity": run.identity,
    }
    files = checkpoint.capture(run.replica, run.scheduler, position)
    best = run.best_folder if run.best else None
    try:
        tidy = partial(_tidy, run.out, run.keep, run.replica.step, best)
        return saves.Save(place, files, run.replica.wire, after=tidy)
    except ConfigError as error:  # something else has the name of the save
        raise SaveError(str(error)) from error


def _tidy(out: Path, keep: int, step: int, best: Path | None) -> None:
    """Delete checkpoints that are not kept, and epochs that no checkpoint refers to."""
    checkpoints = out / CHECKPOINTS
    if checkpoints.is_dir():
        saves.prune(checkpoints, keep, step)
    needed = {f"best-{step}" for step in checkpoint.best_steps(checkpoints)} | {best.name if best else None}
    for epoch in best_epochs(out):
        if epoch.name.partition(".")[0] not in needed:
            saves.remove(epoch)


def _report(run: Run, error: SaveError) -> None:
    run.recorder.write("event", step=run.replica.step, event="save failed", reason=one_line(error))
    if run.replica.topology.rank == 0:
        log.warning("%s; training goes on", error)
