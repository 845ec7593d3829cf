"""The saves of a run in training: written while it goes on, and a disk that refuses one does not end it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinwire.base.errors import ConfigError, SaveError, one_line
from thinwire.checkpoint import saves
from thinwire.comm.process_groups import next_number
from thinwire.elastic.stopping import Stop
from thinwire.train import checkpoint, folder
from thinwire.train.run import Run

log = logging.getLogger("thinwire")


def save_checkpoint(run: Run) -> None:
    """Begin a checkpoint; collective. One that cannot be written is reported, and the older ones stay."""
    _begin(run, saves.at_step(run.out / folder.CHECKPOINTS, run.replica.step))


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
    _started(run, saves.at_step(run.out / folder.CHECKPOINTS, run.replica.step)).wait()


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
        tidy = functools.partial(_tidy, run.out, run.keep, run.replica.step, best)
        return saves.Save(place, files, run.replica.wire, after=tidy)
    except ConfigError as error:  # something else has the name of the save
        raise SaveError(str(error)) from error


def _tidy(out: Path, keep: int, step: int, best: Path | None) -> None:
    """Delete checkpoints that are not kept, and epochs that no checkpoint refers to."""
    checkpoints = out / folder.CHECKPOINTS
    if checkpoints.is_dir():
        saves.prune(checkpoints, keep, step)
    needed = {f"best-{step}" for step in checkpoint.best_steps(checkpoints)} | {best.name if best else None}
    for epoch in folder.best_epochs(out):
        if epoch.name.partition(".")[0] not in needed:
            saves.remove(epoch)


def _report(run: Run, error: SaveError) -> None:
    run.recorder.write("event", step=run.replica.step, event="save failed", reason=one_line(error))
    if run.replica.topology.rank == 0:
        log.warning("%s; training goes on", error)
