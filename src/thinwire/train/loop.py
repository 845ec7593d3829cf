"""`fit`: train a recipe with the method of a config."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.base.errors import ConfigError, LostError, SaveError, one_line
from thinwire.checkpoint import saves
from thinwire.checkpoint.saves import remove
from thinwire.comm.ledger import Ledger
from thinwire.comm.process_groups import next_number
from thinwire.comm.topology import join
from thinwire.comm.wire import attempt
from thinwire.config.faults import Faults
from thinwire.elastic.stopping import Left, Stop
from thinwire.factor.stability import Stability
from thinwire.loggers import Logger, Loggers, chosen
from thinwire.loggers.log import begin
from thinwire.replica.replica import Replica
from thinwire.train import checkpoint
from thinwire.train.batcher import Batch
from thinwire.train.run import Run, prepare
from thinwire.train.run_folder import CHECKPOINTS, best_epochs
from thinwire.train.schedule import bring_to
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
    faults: Faults | None = None,
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

    With `faults` the run goes on without groups that die, and a group that is started again joins it, with the same
    arguments: each has a launcher of its own, and all see the folder `out` (docs/faults.md). Rank 0 may be another
    worker then, which goes on with records and loggers. Patience and `stability` are refused.
    """
    found = chosen(loggers)
    if faults is None:
        join()
    else:
        refuse_with_faults(recipe, stability)
    with ExitStack() as held:
        run = prepare(recipe, config, Path(out), seed, data, resume, overwrite, held=held, faults=faults)
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


def refuse_with_faults(recipe: Recipe, stability: int | None) -> None:
    """What of a run cannot be handed over to a group that joins, or to another rank 0."""
    if recipe.patience is not None:
        raise ConfigError(
            f"`patience`={recipe.patience} with faults=… is not supported: a group that joins does not know the best "
            "epoch; give the recipe patience=None, or leave `faults` out"
        )
    if stability:
        raise ConfigError(
            f"`stability`={stability} with faults=… is not supported: rank 0 alone has the bases to compare with, and "
            "may be lost; leave one of them out"
        )


def _train(run: Run, last: int, save_every: int | None, *, write: bool) -> dict[str, Any]:
    """Up to the step `last`, or to the end; the summary.

    What workers do together after a step comes when a group that joins is there: in the next round of the loop.
    """
    recipe, replica, figures, tired = run.recipe, run.replica, dict[str, float](), False
    with run.fast_convolutions(), run.batcher.by_step(last) as batch, stopping(run) as stopped_by:
        followed = replica.step
        while True:
            came, done = run.meet(), replica.step
            if done and (came or done != followed):
                followed = done
                run.note_stability()
                epoch_over = recipe.ends_epoch(done)
                if epoch_over:
                    replica.epoch_end()
                validate = epoch_over and recipe.patience is not None
                if validate or done % recipe.eval_every == 0 or done == recipe.steps:
                    figures = _evaluate(run, validate=validate)
                if validate:
                    tired = run.lost_patience(figures)
                    save_best(run)
                    if tired:
                        break
                if done < last and (why := stopped_by()):
                    return _stop(run) | {"stopped_by": why}
                if save_every and done % save_every == 0 and done < recipe.steps:
                    save_checkpoint(run)
            if replica.is_given_up:
                continue
            if done >= last:
                break
            train_step(run, batch(done))
        if last < recipe.steps and not tired:
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
    """One optimizer step; returns this worker's loss without waiting for it. Nobody takes it if a group is lost."""
    count_step, before = run.begin_step(), run.replica.step
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
    loss = loss.detach()
    if run.replica.step == before:
        run.note_events()
        return loss
    count_step()
    bring_to(run.scheduler, run.replica.step)
    run.note_ranks()
    run.note_agreement()
    run.note_events()
    run.recorder.write(
        "step", run.replica.numbers, step=run.replica.step, phase=phase, loss=loss, lr=rate, **run.so_far()
    )
    return loss


def _evaluate(run: Run, *, finished: bool = False, validate: bool = False) -> dict[str, float]:
    """Figures of the merged model on held-out data; with `validate` also its loss on validation data.

    None of them in a group that was given up.
    """
    replica, task = run.replica, run.recipe.task
    model = "finished" if finished else "world" if replica.in_sync else "merged"
    run.note_work("evaluating the finished model" if finished else "evaluating")
    with run.spent.evaluates():
        totals = _totals_of_world(run, ["heldout", *(["validation"] if validate else [])], finished=finished)
    if not totals:
        return {}
    figures = task.figures(totals[0])
    if validate:
        figures["validation_loss"] = task.figures(totals[1])["loss"]
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


def _totals_of_world(run: Run, parts: Sequence[str], *, finished: bool) -> list[Tensor]:
    """Sums over parts of the data, each worker's share by the workers that there are; collective.

    Shares are taken anew if a group is lost with its own. When the run is over nobody does that together any more, and
    each that is left takes all. None in a group that was given up.
    """
    replica = run.replica
    while True:
        with replica.merged() if replica.needs_merged else nullcontext():
            layout = replica.topology
            own = [_totals(run, part, layout.rank, layout.world_size) for part in parts]
        sums: list[Tensor] = []

        def add(own: list[Tensor] = own, sums: list[Tensor] = sums) -> None:
            sums[:] = [replica.wire.all_reduce_sum(each, purpose="evaluate") for each in own]

        if finished:
            return sums if attempt(add) is None else [_totals(run, part, 0, 1) for part in parts]
        if not replica.together(add, "an evaluation"):
            return []
        if replica.topology == layout:
            return sums


@torch.no_grad()
def _totals(run: Run, part: str, rank: int, world_size: int) -> Tensor:
    """Sums over a worker's share of a part of the data."""
    totals = torch.zeros(3, dtype=torch.float64, device=run.device)
    run.replica.eval()
    with run.precision:
        for x, y in run.batcher.parts(part, rank, world_size):
            totals += run.recipe.task.totals(run.replica(x), y)
    run.replica.train()
    return totals


def _conclude(run: Run, before: dict[str, float], *, write: bool) -> dict[str, Any]:
    """Finish the model, evaluate it again and write the results; `before` has the figures before `finish`."""
    before = before or _evaluate(run)
    run.replica.together(run.count_as_the_first, "the end of the run")
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
        ledger=_traffic(run.replica),
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


def _traffic(replica: Replica) -> Ledger:
    """The ledger as the mean over nodes, or this node's own if a group was lost after the end; collective."""
    found: list[Ledger] = []
    return found[0] if attempt(lambda: found.append(replica.mean_traffic())) is None else replica.traffic


def _write_model(run: Run, model: nn.Module | None, summary: dict[str, Any], place: Path) -> None:
    """Write it if there is one; that is the longest part of finishing, so the summary has the time after it."""
    if model is not None:
        write_model(model, place, run.batcher.example(), run.recipe.transform_name)
    summary["spent"] = run.spent.table()


def _stop(run: Run) -> dict[str, Any]:
    """Save, to be resumed later."""
    run.note_work("saving")
    save_and_wait(run)
    if run.replica.is_given_up:
        raise LostError("this group was given up and is not in the save of the others; start it again to join them")
    run.recorder.write("stopped", step=run.replica.step, steps=run.recipe.steps)
    return {"stopped_at": run.replica.step, "steps": run.recipe.steps}


@contextmanager
def logged(run: Run, given: Sequence[Logger]) -> Iterator[dict[str, Any]]:
    """On rank 0, let loggers see all records made inside; what the block adds to the dict is the run's summary.

    A worker that becomes rank 0 later begins its loggers then.
    """
    summary: dict[str, Any] = {}
    recorder, config = run.recorder, run.identity | {"world_size": run.replica.topology.world_size}

    def begin_loggers(*, resumed: bool) -> None:
        recorder.loggers = Loggers(given)
        start = time.monotonic()
        begin(recorder.loggers, run.replica, run.out, config, resumed=resumed)
        run.started += time.monotonic() - start  # seconds for some trackers, and not the run's

    def take_over() -> None:
        try:
            if given and not recorder.loggers:
                begin_loggers(resumed=True)
        except Exception as error:  # the run is under way
            recorder.loggers = Loggers()
            log.warning("loggers could not go on after the loss of rank 0, training does: %s", one_line(error))

    recorder.takes_over = take_over
    if given and run.replica.topology.rank == 0:
        begin_loggers(resumed=run.resumed or run.replica.joined_late)
    left = False
    try:
        yield summary
    except Left:
        left = True
        raise
    finally:
        try:
            recorder.close()  # its last record comes before the end
        finally:
            status = "stopped" if left or "stopped_at" in summary else "finished" if summary else "failed"
            if run.replica.topology.rank == 0:
                recorder.loggers.end(status, summary)


def save_checkpoint(run: Run) -> None:
    """Begin a checkpoint; collective. One that cannot be written is reported, and the older ones stay."""
    _begin(run, saves.at_step(run.out / CHECKPOINTS, run.replica.step))


def save_best(run: Run) -> None:
    """Begin a save of the best epoch if that is this one; collective."""
    if run.best and run.best["step"] == run.replica.step:
        _begin(run, run.best_folder)


def settle(run: Run) -> None:
    """Wait for the save that is being written; collective. Reports one that could not be."""
    run.writing = False
    try:
        run.replica.wait_for_save()
    except SaveError as error:
        _report(run, error)


def save_and_wait(run: Run) -> None:
    """Write a checkpoint on which the rest of the run depends; collective. Raises if it cannot be written."""
    settle(run)
    _save(run, saves.at_step(run.out / CHECKPOINTS, run.replica.step), wait=True)


@contextmanager
def stopping(run: Run) -> Iterator[Callable[[], str | None]]:
    """Follow requests to stop; the function says after a step why all stop now, if they do. Collective."""
    replica = run.replica
    if replica.may_lose_groups:
        yield lambda: replica.stopped_by if replica.stop_requested() else None
        return
    stop = Stop(replica.wire, next_number())
    try:
        yield lambda: stop.why if stop.now() else None
    finally:
        stop.release_groups()


def _begin(run: Run, place: Path) -> None:
    settle(run)
    try:
        _save(run, place, wait=False)
        run.writing = True
    except SaveError as error:
        _report(run, error)


def _save(run: Run, place: Path, *, wait: bool) -> None:
    run.recorder.write("save", step=run.replica.step, wall_s=round(run.wall_s, 3))
    run.recorder.flush()  # a resumed run keeps the lines up to its save

    def beside() -> saves.Files:
        run.count_as_the_first()
        position = {
            "step": run.replica.step,
            "wall_s": run.wall_s,
            "evaluating_s": run.spent.evaluating,
            "counts": run.counts.state(),
            "best": run.best,
            "identity": run.identity,
        }
        return checkpoint.beside(run.replica, run.scheduler, position)

    best = run.best_folder if run.best else None
    tidy = partial(_tidy, run.out, run.keep, run.replica.step, best)
    try:
        run.replica.save_with(place, beside, wait=wait, after=tidy)
    except saves.OccupiedError as error:
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
