"""The state of a run on one worker, and everything up to its first step."""

from __future__ import annotations

import dataclasses
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from thinwire.base.errors import ConfigError, DamagedError, LostError
from thinwire.base.files import read_json
from thinwire.checkpoint.saves import newest, verify
from thinwire.comm.buckets import checksum
from thinwire.comm.ledger import Ledger
from thinwire.comm.topology import place
from thinwire.comm.wire import Wire
from thinwire.config.faults import Faults
from thinwire.factor.stability import Stability, spectra
from thinwire.replica.attaching import attach
from thinwire.replica.preflight import check_same_data
from thinwire.replica.replica import Replica
from thinwire.train import checkpoint, run_folder
from thinwire.train.batcher import Batcher
from thinwire.train.data import Source, check_share
from thinwire.train.recorder import Recorder
from thinwire.train.schedule import bring_to, scheduled
from thinwire.train.step_rng import StepRNG
from thinwire.train.summary import Counts, describe_optimizers
from thinwire.train.task import Recipe

FINISHING = "finishing"
"""The phase after the last step, in records of work."""
_EVERY_S = 1.0
_PARTS = {"train": "to train on", "validation": "to validate on", "heldout": "held out"}


def _compare_data(source: Source, wire: Wire) -> None:
    """Refuse data that differs in the number of examples, or in the first, the middle or the last; collective.

    With one more example on one node, its workers would use another order: some examples would be trained on twice,
    others never, without any error.
    """
    if wire.topology.world_size == 1:
        return
    sizes = {part: getattr(source, f"{part}_size", 0) for part in _PARTS}
    lines = [f"{size:,} examples {_PARTS[part]}" for part, size in sizes.items()]
    if hasattr(source, "fingerprint"):
        lines.append(f"files of fingerprint {source.fingerprint()}")
    else:
        for part in (part for part, size in sizes.items() if size):
            rows = np.unique([0, sizes[part] // 2, sizes[part] - 1])
            rng = (StepRNG(0, 0, batch=len(rows)),) if part == "train" else ()
            held = [t.cpu() for t in getattr(source, part)(rows, *rng)]
            lines.append(f"examples {', '.join(map(str, rows))} {_PARTS[part]} of checksum {checksum(held):x}")
    check_same_data(lines, wire)


_SLACK = 0.05
"""Relative difference between passes and epochs that is accepted without a warning."""
log = logging.getLogger("thinwire")


def passes(recipe: Recipe, source: Source) -> float:
    """How many times the run sees its training data."""
    return recipe.steps * recipe.batch / _examples(source)


def note_length(recipe: Recipe, source: Source) -> None:
    """Warn, on rank 0, if an epoch should be one pass over the data and is not."""
    here, found = place(), passes(recipe, source)
    if not recipe.epochs_are_passes or abs(found / recipe.epochs - 1) <= _SLACK or (here and here.rank):
        return
    examples = _examples(source)
    steps = max(1, round(recipe.epochs * examples / recipe.batch))
    log.warning(
        "%s steps of %s examples are %.3g passes over this data of %s, not %d epochs; "
        "for those give `--steps %d`, or replace(steps=%d) in a recipe of your own",
        *(f"{recipe.steps:,}", f"{recipe.batch:,}", found, f"{examples:,}", recipe.epochs, steps, steps),
    )


def _examples(source: Source) -> int:
    return getattr(source, "pass_size", source.train_size)


_SUMS = ("seconds", "compute", "wire", "decomposition")


class TimeSplit:
    """Adds evaluating and finishing to what the ledger knows; waiting for the wire is always a part of its own."""

    def __init__(self, ledger: Ledger, evaluating: float = 0.0) -> None:
        self._ledger = ledger
        self.evaluating = evaluating
        """Seconds of evaluation so far."""
        self._after_steps: dict[str, float] | None = None

    @property
    def in_steps(self) -> bool:
        """Whether there are steps to come."""
        return self._after_steps is None

    @contextmanager
    def evaluates(self) -> Iterator[None]:
        """Charge what is inside to evaluation."""
        start, waited = time.perf_counter(), self._waited()
        yield
        self.evaluating += max(0.0, time.perf_counter() - start - (self._waited() - waited))

    def end_steps(self) -> None:
        """The last step is over: what follows is finishing."""
        self._after_steps = self._sums()

    def table(self) -> dict[str, float]:
        """Seconds by part, from attach until now."""
        now = self._sums()
        end = self._after_steps or now
        since = {name: now[name] - end[name] for name in now}
        parts = {
            "computing": end["compute"],
            "waiting": now["wire"],
            "method": end["decomposition"] + end["method"],
            "evaluating": now["evaluating"],
            "finishing": max(0.0, since["seconds"] - since["wire"] - since["evaluating"]),
        }
        other = max(0.0, now["seconds"] - sum(parts.values()))
        return {name: round(seconds, 3) for name, seconds in (parts | {"other": other}).items()}

    def _sums(self) -> dict[str, float]:
        rows = self._ledger.split.values()
        known = {name: sum(row[name] for row in rows) for name in _SUMS}
        return known | {"method": self._ledger.times.after_steps, "evaluating": self.evaluating}

    def _waited(self) -> float:
        self._ledger.clock.settle()
        return self._ledger.waiting


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
    writing: bool = False
    """Whether a save is being written."""
    resumed: bool = False
    """Whether it continues from a save."""

    def note_start(self) -> None:
        """Record what is trained from here on; again when the run is resumed, not by a group that joins it."""
        replica, recipe = self.replica, self.recipe
        if replica.joined_late:
            return
        about = replica.describe()
        self.recorder.write(
            "start",
            step=replica.step,
            recipe=recipe.name,
            seed=self.identity["seed"],
            **{name: about[name] for name in ("method", "config", "parameters_full")},
            **describe_optimizers(recipe),
            steps=recipe.steps,
            batch=recipe.batch,
            metric=recipe.task.metric,
            split=recipe.split,
            split_size=self.batcher.source.heldout_size,
            world_size=replica.topology.world_size,
            # All-reduce sends the same at every step, so these two give what it would have sent at any of them.
            usual_bytes=replica.baseline()["allreduce_fp32"],
            usual_bytes_at_end=replica.baseline(recipe.steps)["allreduce_fp32"],
            **self.so_far(),
        )

    def note_work(self, what: str, done: int = 0, of: int | None = None) -> None:
        """Record work that is no step and may take long: its beginning, and once a second how far it is."""
        now = time.monotonic()
        if done and now - self.noted < _EVERY_S:
            return
        self.noted = now
        phase = self.replica.phase if self.spent.in_steps else FINISHING
        far = {} if of is None else {"done": done, "of": of}
        self.recorder.write("work", step=self.replica.step, phase=phase, what=what, **far, wall_s=round(self.wall_s, 3))

    def so_far(self) -> dict[str, Any]:
        """Bytes, and seconds of waiting and in all, for a record."""
        traffic = self.replica.traffic
        return {
            "slow_bytes": traffic.slow_bytes,
            "evaluate_bytes": traffic.slow_bytes_for("evaluate"),
            "fast_bytes": traffic.fast_bytes,
            "wire_s": round(traffic.waiting, 4),
            "wall_s": round(self.wall_s, 3),
        }

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
            more: dict[str, Any] = {}
            if (late := self.replica.waits.latest) is not None:
                more["late"] = {"group": late.group, "seconds": round(late.seconds, 4)}
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

    def begin_step(self) -> Callable[[], None]:
        """Note the size of the step that starts now; the function that is returned counts it."""
        replica = self.replica
        if self.shape != (shape := (replica.phase, replica.decompositions)):
            self.shape = shape
            self.counts.update(replica)
        return partial(self.counts.count, together=replica.in_sync, full=not replica.ranks())

    def meet(self) -> bool:
        """Before a step, with `faults=`: groups that come, also this one, are where the others are; collective.

        Whether some came just now.
        """
        replica, was_out = self.replica, self.replica.is_given_up
        replica.before_step()
        bring_to(self.scheduler, replica.step)
        if was_out:
            self.events = _noted_before(replica)
        latest = replica.events[-1] if replica.events else {}
        return bool(latest.get("came")) and latest["step"] == replica.step

    def count_as_the_first(self) -> None:
        """Take counters from a worker that has taken every step, where groups may join; collective."""
        if self.replica.may_lose_groups:
            mine = self.counts.state(), self.wall_s, self.spent.evaluating
            counts, wall_s, self.spent.evaluating = max(
                self.replica.wire.all_gather_object(mine), key=lambda each: each[0]["steps"]
            )
            self.counts = Counts.of(counts | {name: mine[0][name] for name in ("trainable", "total")})
            self.earlier_s, self.started = wall_s, time.monotonic()

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
        if (step := self.replica.step) and not self.replica.joined_late:
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
        here, convolves = place(), any(isinstance(module, nn.Conv2d) for module in self.replica.module.modules())
        has_own_gpu = torch.cuda.is_available() and (here.local_size if here else 1) <= torch.cuda.device_count()
        torch.backends.cudnn.benchmark = before or (convolves and has_own_gpu)
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

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
    faults: Faults | None = None,
) -> Run:
    """Everything up to the first step; collective. A run in `out` is resumed, overwritten or refused.

    The folder is this run's until `held` is closed. With `faults` the run may be under way, and this group joins it.
    """
    if not (resume or overwrite or faults):
        # On every worker and before they connect: rank 0 writes nothing until all have checked.
        run_folder.refuse_occupied(out, run_folder.of_a_run(out), resume=True)
    run_folder.refuse_links(out)
    source = _source(recipe, data)
    replica, optimizer, scheduler, device = _attached(recipe, config, source, seed, faults)
    if faults is not None:
        held.callback(_release, replica)
    rank, world_size = replica.data_rank, replica.data_world_size
    check_share(recipe.batch, world_size)
    batcher = Batcher(recipe, source, device, seed=seed, rank=rank, world_size=world_size)
    identity = checkpoint.identity(recipe, config, seed)
    joined, found = replica.joined_late, None
    if not joined and not replica.together(lambda: _compare_data(source, replica.wire), "the comparison of data"):
        raise LostError("this group was given up while the run began; start it again to join")
    note_length(recipe, source)
    _seed(seed, rank + 1)  # workers have different dropout, though they start from one model
    out.mkdir(parents=True, exist_ok=True)
    if not joined:
        _take_folder(out, replica, held, may_be_used=resume or overwrite)
        found = checkpoint.resume(out / run_folder.CHECKPOINTS, replica, scheduler, identity) if resume else None
        if not found and replica.topology.rank == 0:
            run_folder.clear(out)
    saved = found or {}
    noted = replica.decompositions if saved or joined else 0  # loading undoes those of attach
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
        events=_noted_before(replica) if joined else len(replica.events),
        counts=Counts.of(saved.get("counts", {})),
        best=saved.get("best"),
        resumed=bool(saved),
        recorder=Recorder(
            out / "records.jsonl",
            active=lambda: replica.topology.rank == 0 and not replica.is_given_up,
            keep_until=replica.step if joined else saved.get("step", 0),
        ),
    )


def _attached(
    recipe: Recipe, config: Any, source: Source, seed: int, faults: Faults | None
) -> tuple[Replica, Optimizer, LambdaLR, torch.device]:
    """The recipe's model in training, on this worker's device."""
    if faults is not None and (here := place()) is not None and torch.cuda.is_available():
        torch.cuda.set_device(here.local_rank % torch.cuda.device_count())  # as `join` does elsewhere
    device = own_device()
    _seed(seed)
    model = recipe.model(source).to(device)
    optimizer = recipe.optimizer(model.parameters())
    scheduler = scheduled(optimizer, recipe.rate, steps=recipe.steps, epochs=recipe.epochs)
    return attach(model, optimizer, config, faults=faults), optimizer, scheduler, device


def _release(replica: Replica) -> None:
    """Let the others know at once that this worker has ended, however it does."""
    if replica.phase != "finished":
        replica.detach()


def _noted_before(replica: Replica) -> int:
    """How many events others have recorded, in a group that has just come: all but that one."""
    return max(0, len(replica.events) - 1)


def _take_folder(out: Path, replica: Replica, held: ExitStack, *, may_be_used: bool) -> None:
    """Let the folder be this run's, by rank 0; where groups may be lost, all learn of a refusal; collective."""
    taken = ExitStack()
    held.callback(taken.close)

    def take() -> None:
        taken.close()
        if replica.topology.rank == 0:
            taken.enter_context(run_folder.locked(out))
            if not may_be_used:  # another run may have ended since
                run_folder.refuse_occupied(out, run_folder.of_a_run(out), resume=True)

    def take_together() -> None:
        why = None
        try:
            take()
        except ConfigError as error:
            why = str(error)
        if refused := next(filter(None, replica.wire.all_gather_object(why)), None):
            raise ConfigError(refused)

    if not replica.may_lose_groups:
        take()
    elif not replica.together(take_together, "the beginning of the run"):
        raise LostError("this group was given up while the run began; start it again to join")


def _source(recipe: Recipe, data: Path | None) -> Source:
    source = recipe.source(data)
    if recipe.patience is not None and not getattr(source, "validation_size", 0):
        raise ConfigError(
            f"`patience`={recipe.patience} needs validation data; "
            f"give the source of the recipe {recipe.name} `validation` and `validation_size`, or leave `patience` out"
        )
    return source


def own_device() -> torch.device:
    """The device of this worker: its GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _seed(seed: int, stream: int = 0) -> None:
    words = np.random.SeedSequence((seed, stream)).generate_state(3)
    torch.manual_seed(int(words[0]))
    np.random.seed(words[1])
    random.seed(int(words[2]))
