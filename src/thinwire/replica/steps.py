"""The loop that every worker walks through alike, also one that joins in the middle: `for step in replica.steps(…)`.

What all groups do together comes before a step, never after it: that is where a group that joins begins, as the others
do. So in each round: let others in, go by `replica.step`, stop if all stop, save if it is due, set the rate, yield.
"""

import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from thinwire.base.errors import ConfigError, LostError, SaveError
from thinwire.base.files import write_tensors
from thinwire.checkpoint import saves
from thinwire.checkpoint.also import Also, check
from thinwire.elastic.stopping import SIGNALS, exit_code

log = logging.getLogger("thinwire")

_SIGNALS = {signal.name for signal in SIGNALS}


def iterate(
    replica: Any,
    total: int,
    *,
    folder: Path | str | None,
    save_every: int | None,
    keep: int,
    scheduler: Any,
    also: Also | None,
) -> Iterator[int]:
    """Yield the number of each step; see `Replica.steps`."""
    _check(total, folder, save_every, keep, scheduler)
    check(also)
    if also and folder is None:
        raise ConfigError(f"`also`={{{', '.join(map(repr, also))}}} of steps() needs a `folder` for the saves")
    place = None if folder is None else Path(folder)
    return _Loop(replica, total, place, save_every, keep, scheduler, also).steps()


def _check(total: int, folder: Path | str | None, save_every: int | None, keep: int, scheduler: Any) -> None:
    for name, value in (("total", total), ("keep", keep), ("save_every", 1 if save_every is None else save_every)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"`{name}`={value!r} of steps() must be a whole number from 1 on")
    if save_every is not None and folder is None:
        raise ConfigError(f"`save_every`={save_every} of steps() needs a `folder` for the saves")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "steps() cannot bring ReduceLROnPlateau to a step, since it goes by a loss: leave `scheduler` out and call "
            "it yourself, on all workers with the same loss"
        )


class _Loop:
    def __init__(
        self,
        replica: Any,
        total: int,
        folder: Path | None,
        save_every: int | None,
        keep: int,
        scheduler: Any,
        also: Also | None,
    ) -> None:
        self.replica, self.total, self.folder, self.save_every = replica, total, folder, save_every
        self.keep, self.scheduler, self.also = keep, scheduler, also
        self.saved_at = self.rate_at = -1

    def steps(self) -> Iterator[int]:
        replica = self.replica
        self._resume()
        while True:
            replica.before_step()  # a group that was given up may be elsewhere then
            step = replica.step
            if step >= self.total:
                return
            if replica.stop_requested():
                self._stop()
                return
            if self._is_due(step):
                self._save(step)
            self._set_rate(step)
            yield step

    def _resume(self) -> None:
        """Go on from the newest sound save, unless this group has taken over what others have come to."""
        replica = self.replica
        if self.folder is None or replica.step or replica.joined_late:
            return
        found = replica.resume(self.folder, also=self.also)
        if found is not None:
            self.saved_at = replica.step
            if not replica.topology.rank:
                log.info("going on from %s", found)

    def _is_due(self, step: int) -> bool:
        return bool(self.save_every) and step > 0 and step % (self.save_every or 1) == 0 and step != self.saved_at

    def _save(self, step: int, *, must: bool = False) -> None:
        """Write a save and delete old ones; a disk that refuses it does not end a run that can go on."""
        assert self.folder is not None
        try:
            self.replica.save(saves.at_step(self.folder, step), also=self.also)
            self.saved_at = step
            if not self.replica.topology.rank:
                saves.prune(self.folder, self.keep, step)
        except SaveError as error:
            if must:
                raise
            if not self.replica.topology.rank:
                log.warning("%s; training goes on", error)

    def _stop(self) -> None:
        """After a signal: save and end the process; after `stop()` there is nothing to do."""
        replica, why = self.replica, self.replica.stopped_by
        if why not in _SIGNALS:
            log.info("stopped after step %d: %s", replica.step, why)
            return
        if self.folder is None:
            log.warning("stopped by %s after step %d; give steps() a `folder` to save", why, replica.step)
            return
        if replica.step != self.saved_at:
            self._save(replica.step, must=True)
        if replica.is_given_up:
            raise LostError(
                f"stopped by {why}, but this group was given up before and is not in the save of the others"
            )
        log.info("stopped by %s and saved after step %d", why, replica.step)
        sys.exit(exit_code())

    def _set_rate(self, step: int) -> None:
        """Bring the scheduler to this step, also if this worker comes from elsewhere."""
        scheduler, before = self.scheduler, self.rate_at
        self.rate_at = step
        if scheduler is None or before == step:
            return
        if scheduler.last_epoch > step:
            raise ConfigError(
                f"the scheduler is at step {scheduler.last_epoch} before step {step} of the replica: leave "
                "`scheduler.step()` out of a loop over `steps(…, scheduler=scheduler)`"
            )
        if step != before + 1 or step == 0:  # a save may have set rates, from which the scheduler must not go on
            _set_rates(scheduler)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")  # others took those steps
            while scheduler.last_epoch < step:
                scheduler.step()


def _set_rates(scheduler: Any) -> None:
    """Set the rates that belong to the step at which the scheduler is."""
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate


def rescue(replica: Any) -> str:
    """Write this worker's model as it is, and say where."""
    where = (
        Path(tempfile.mkdtemp(prefix="thinwire-")) / f"model-rank{replica.topology.rank}-step{replica.step}.safetensors"
    )
    try:
        write_tensors(where, {name: t.detach().cpu().clone() for name, t in replica.module.state_dict().items()})
    except OSError as error:
        return f"Its model could not be written either ({error}): replica.module still holds it"
    return f"This worker's model, as it is after step {replica.step}, is in {where}"
