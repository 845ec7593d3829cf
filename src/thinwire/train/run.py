"""The state of a run on one worker, and everything up to its first step."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from thinwire.base.errors import ConfigError, DamagedError
from thinwire.base.files import read_json
from thinwire.checkpoint.saves import Save, newest, verify
from thinwire.comm.topology import place
from thinwire.factor.spectrum import spectra
from thinwire.factor.stability import Stability
from thinwire.replica.attaching import attach
from thinwire.replica.replica import Replica
from thinwire.train import checkpoint, folder
from thinwire.train.batcher import Batcher
from thinwire.train.counts import Counts
from thinwire.train.data.source import Source, check_share
from thinwire.train.length import note_length
from thinwire.train.recorder import Recorder
from thinwire.train.same_data import compare
from thinwire.train.schedule import scheduled
from thinwire.train.task import Recipe
from thinwire.train.time_split import TimeSplit

log = logging.getLogger("thinwire")


@dataclasses.dataclass(kw_only=True)
class Run:
    """The state of a run on one worker."""

    recipe: Recipe
    identity: dict[str, Any]
    """What makes two runs the same; see `checkpoint.identity`."""
    batcher: Batcher
    replica: Replica
    optimizer: Optimizer
    scheduler: LambdaLR
    device: torch.device
    out: Path
    recorder: Recorder
    spent: TimeSplit
    """Where the time went."""
    earlier_s: float
    """Seconds spent before the run was resumed."""
    noted: float = 0.0
    """When work was last recorded."""
    watch: Stability | None = None
    """Compares the bases, on rank 0."""
    spectra: bool = False
    """Whether rank 0 records singular values at each evaluation."""
    command: list[str] | None = None
    """The words of the command line that train this again, if there was one."""
    started: float = dataclasses.field(default_factory=time.monotonic)
    decompositions: int = 0
    """Decompositions recorded so far."""
    averages: int = 0
    """Averages recorded so far."""
    events: int = 0
    """Events recorded so far."""
    counts: Counts = dataclasses.field(default_factory=Counts)
    """Steps by the model's size."""
    shape: tuple[str, int] | None = None
    """Phase and decompositions when the model's size was last read."""
    best: dict[str, Any] | None = None
    """The evaluation of the epoch with the lowest validation loss, in a run with patience."""
    keep: int = 2
    """Checkpoints that are kept."""
    writing: Save | None = None
    """The save that is being written."""
    resumed: bool = False
    """Whether it continues from a save."""

    def note_ranks(self) -> None:
        """Record the ranks after each decomposition; a plan can use them."""
        if self.decompositions != self.replica.decompositions:
            self.decompositions = self.replica.decompositions
            self.recorder.write("ranks", step=self.replica.step, ranks=self.replica.found_ranks)

    def note_agreement(self) -> None:
        """Record how far groups agreed at each average."""
        found = self.replica.agreement
        if found is not None and found.averages != self.averages:
            self.averages = found.averages
            layers = {name: round(ratio, 4) for name, ratio in found.ratios.items()}
            late = self.replica.waits.latest
            more: dict[str, Any] = (
                {"late": {"group": late.group, "seconds": round(late.seconds, 4)}} if late is not None else {}
            )
            self.recorder.write("agreement", step=self.replica.step, ratio=found.ratio, layers=layers, **more)

    def note_events(self) -> None:
        """Record groups that were lost, joined, or counted less than others."""
        for event in self.replica.events[self.events :]:
            if "event" in event:
                self.recorder.write("event", **event)
        self.events = len(self.replica.events)

    def note_precision(self) -> None:
        """Log, on rank 0, if the recipe asks for bf16 and this device computes in fp32."""
        name = self.recipe.precision_name(self.device)
        if self.recipe.autocast and name == "fp32" and self.replica.topology.rank == 0:
            log.info("computing in fp32: bf16 autocast is for GPUs, many CPUs emulate it")

    def count_step(self) -> None:
        """Count the step that starts now."""
        replica = self.replica
        if self.shape != (shape := (replica.phase, replica.decompositions)):
            self.shape = shape
            self.counts.update(replica)
        self.counts.count(together=replica.in_sync, full=not replica.ranks())

    def note_stability(self) -> None:
        """Record each comparison of the bases."""
        if self.watch and (record := self.watch.update(self.replica.step)):
            self.recorder.write("stability", **record)

    def note_spectra(self) -> None:
        """Record the singular values of each layer."""
        if self.spectra and self.replica.topology.rank == 0:
            self.recorder.write("spectra", step=self.replica.step, layers=spectra(self.replica))

    def note_resume(self) -> None:
        """Record that the run goes on from a save, and how many steps are taken again."""
        if step := self.replica.step:
            lost = self.recorder.lost_steps
            self.recorder.write("resume", step=step, lost_steps=lost, wall_s=round(self.wall_s, 3))

    def lost_patience(self, figures: dict[str, float]) -> bool:
        """Whether the validation loss has not fallen for as many epochs as the recipe's patience."""
        if self.best is None or figures["validation_loss"] < self.best["validation_loss"]:
            self.best = {**figures, "step": self.replica.step, "epochs_since": 0}
        else:
            self.best["epochs_since"] += 1
        return self.best["epochs_since"] >= (self.recipe.patience or 0)

    @property
    def best_folder(self) -> Path:
        """Where the best epoch is saved. Named by its step: the last checkpoint may refer to an earlier one."""
        return self.out / f"best-{self.best['step'] if self.best else None}"

    def note_end(self) -> None:
        """Note what was spent until the end of the run, before the run returns to its best epoch."""
        if self.best is not None:
            spent = {"slow_bytes": self.replica.traffic.slow_bytes, "wall_s": round(self.wall_s, 3)}
            self.best["ended_at"] = {"step": self.replica.step, **spent}

    def go_back(self) -> dict[str, Any]:
        """Return to the best epoch, with its bytes and seconds, and return its figures; collective.

        If the epoch could not be saved, the model stays the last one, and there are no figures.
        """
        assert self.best is not None
        if self.replica.step > self.best["step"] and not self._has_best():
            self.best = None
            return {}
        if self.replica.step > self.best["step"]:
            place = newest(self.best_folder)
            saved = read_json(place / "position.json", schema=checkpoint.POSITION)
            checkpoint.load(place, self.replica, self.scheduler, check=False)
            self.counts = Counts.of(saved["counts"])
            self.earlier_s, self.started = saved["wall_s"], time.monotonic()
            self.spent = TimeSplit(self.replica.traffic, saved.get("evaluating_s", 0.0))
            self.spent.end_steps()
            self.decompositions, self.shape = self.replica.decompositions, None
        return self.best

    def _has_best(self) -> bool:
        """Whether the best epoch's save is sound; collective."""
        here = self.best_folder
        try:
            verify(newest(here) if here.with_name(f"{here.name}.old").is_dir() else here, self.replica.wire)
        except DamagedError as error:
            if self.replica.topology.rank == 0:
                log.warning("the result is of the last step, not of the best epoch, whose save is lost: %s", error)
            return False
        return True

    @contextmanager
    def fast_convolutions(self) -> Iterator[None]:
        """Let cuDNN benchmark convolutions here, unless workers share a GPU: a search may use all its memory."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before or (self._convolves and _has_own_gpu())
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    @property
    def _convolves(self) -> bool:
        return any(isinstance(module, nn.Conv2d) for module in self.replica.module.modules())

    @property
    def precision(self) -> torch.autocast:
        """The recipe's autocast context on this device."""
        return self.recipe.precision(self.device)

    @property
    def wall_s(self) -> float:
        return self.earlier_s + time.monotonic() - self.started


def prepare(
    recipe: Recipe,
    config: Any,
    out: Path,
    seed: int,
    data: Path | None,
    resume: bool,
    overwrite: bool = False,
    *,
    held: ExitStack,
) -> Run:
    """Everything up to the first step; collective. A run in `out` is resumed, overwritten or refused.

    The folder is this run's until `held` is closed.
    """
    if not (resume or overwrite):
        # On every worker and before they connect: rank 0 writes nothing until all have checked.
        folder.refuse_occupied(out, folder.of_a_run(out), resume=True)
    folder.refuse_links(out)
    source = _source(recipe, data)
    device = own_device()
    _seed(seed)
    model = recipe.model(source).to(device)
    optimizer = recipe.optimizer(model.parameters())
    scheduler = scheduled(optimizer, recipe.rate, steps=recipe.steps, epochs=recipe.epochs)
    replica = attach(model, optimizer, config)
    rank, world_size = replica.topology.rank, replica.topology.world_size
    check_share(recipe.batch, world_size)
    batcher = Batcher(recipe, source, device, seed=seed, rank=rank, world_size=world_size)
    compare(source, replica.wire)
    note_length(recipe, source)
    _seed(seed, rank + 1)  # workers have different dropout, though they start from one model
    out.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        held.enter_context(folder.locked(out))
        if not (resume or overwrite):  # another run may have ended since
            folder.refuse_occupied(out, folder.of_a_run(out), resume=True)
    identity = checkpoint.identity(recipe, config, seed)
    found = checkpoint.resume(out / folder.CHECKPOINTS, replica, scheduler, identity) if resume else None
    saved = found or {}
    if not saved and rank == 0:
        folder.clear(out)
    noted = replica.decompositions if saved else 0  # loading undoes those of attach
    return Run(
        recipe=recipe,
        identity=identity,
        batcher=batcher,
        replica=replica,
        optimizer=optimizer,
        scheduler=scheduler,
        device=device,
        out=out,
        spent=TimeSplit(replica.traffic, saved.get("evaluating_s", 0.0)),
        earlier_s=saved.get("wall_s", 0.0),
        decompositions=noted,
        averages=replica.agreement.averages if replica.agreement is not None else 0,
        events=len(replica.events),
        counts=Counts.of(saved.get("counts", {})),
        best=saved.get("best"),
        resumed=bool(saved),
        recorder=Recorder(out / "records.jsonl", active=rank == 0, keep_until=saved.get("step", 0)),
    )


def _source(recipe: Recipe, data: Path | None) -> Source:
    source = recipe.source(data)
    if recipe.patience is not None and not getattr(source, "validation_size", 0):
        raise ConfigError(
            f"`patience`={recipe.patience} needs validation data; "
            f"give the source of the recipe {recipe.name} `validation` and `validation_size`, or leave `patience` out"
        )
    return source


def _has_own_gpu() -> bool:
    here = place()
    return torch.cuda.is_available() and (here.local_size if here else 1) <= torch.cuda.device_count()


def own_device() -> torch.device:
    """The device of this worker: its GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _seed(seed: int, stream: int = 0) -> None:
    words = np.random.SeedSequence((seed, stream)).generate_state(3)
    torch.manual_seed(int(words[0]))
    np.random.seed(words[1])
    random.seed(int(words[2]))
