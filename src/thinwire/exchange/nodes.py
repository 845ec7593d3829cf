"""Nodes average their parameters while training goes on: DASO's exchange."""

import logging
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor, nn

from thinwire.base.errors import ConfigError, DivergedError
from thinwire.comm.topology import Topology
from thinwire.comm.wire import Pending
from thinwire.exchange.averaged import AveragedTensors, all_restored, not_finite
from thinwire.exchange.diverged import refuse_diverged
from thinwire.exchange.merging import average_buffers
from thinwire.exchange.parts import Cycle, Exchange, Feature, PartState, Run, Schedule, needs_every_group
from thinwire.exchange.second_moment import SecondMoment

log = logging.getLogger("thinwire")


@dataclass
class Plateau:
    """The best loss so far, and how many since were not better."""

    patience: int
    threshold: float
    best: float | None = None
    worse: int = 0
    """Losses in a row that were not better."""

    def reached(self, loss: float) -> bool:
        """Add a loss; counting starts again when this returns True."""
        if self.best is None or loss < self.best - self.threshold * abs(self.best):
            self.best, self.worse = loss, 0
        else:
            self.worse += 1
        if self.worse <= self.patience:
            return False
        self.worse = 0
        return True


class NodeAverages(Exchange):
    """Parameters of nodes: at every step, or in cycling every B steps and S steps later.

    The same object is in all phases, so that what codes leave out is kept where they are equal.
    """

    def __init__(self, config: Any, cycling: str) -> None:
        """The settings, and the name of the phase in which nodes do not wait."""
        self.config, self.cycling = config, cycling
        self.every, self.overlap = config.every, config.overlap
        self.plateau = Plateau(config.plateau_patience or 0, config.plateau_threshold)
        self.epochs = 0
        self.sent_at = 0
        self.averaged: list[AveragedTensors] = []
        """Parameters, then statistics if there are any."""
        self._said: Pending | None = None
        self._warned = False

    def attach(self, run: Run) -> None:
        super().attach(run)
        self.schedule: Pace = Pace(self)
        kind = self.config.second_moment
        self.second_moment = SecondMoment(run.context, kind, run.weight, lambda: not run.in_sync)
        if self.config.plateau_patience is not None:
            run.context.on_epoch_end.append(self._epoch_end)

    def refuses(self, feature: Feature, config: Any) -> str | None:
        """An average counts every node."""
        return needs_every_group(feature, config, "averages count nodes")

    def role(self, topology: Topology) -> Hashable:
        """All nodes do the same."""
        return None

    def begin(self, *, again: bool) -> None:
        """Nodes train apart from the first step; residuals go on where the code is the same."""
        if not again or self._made_for != self._code:
            self._make_averaged(self._code)
        self.sent_at = self.run.step

    def end(self, *, again: bool) -> None:
        """Between phases buffers are averaged; at the end everything."""
        if not again:
            self._merge()
        elif not self.run.in_sync:
            self._average_rest()

    def after_step(self) -> None:
        """Exchange what is due between nodes."""
        run = self.run
        if not run.in_sync:
            if run.phase == self.cycling:
                self._cycle()
            else:
                self._send(0)
                self._arrive()
            if run.step == self.config.total_steps:
                self._average_rest()
        self._warn()

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The mean of what nodes hold; pending averages are waited for, and applied when they are due."""
        with self.run.wire.ledger.booked_under("merge"):  # counts as training, not as evaluation
            self._settle()
        sent_at = self.sent_at
        with all_restored(self.run.model, self.averaged):
            try:
                self._merge()
            finally:
                self.sent_at = sent_at
            yield

    def _make_averaged(self, code: str) -> None:
        self._made_for, self.averaged = code, []
        if self.run.in_sync:
            return
        trained = [p for p in self.run.model.parameters() if p.requires_grad]
        if not trained:
            raise ConfigError("no parameter of the model is trained: all are frozen, so there is nothing to average")
        kinds: list[tuple[Callable[[], Sequence[Tensor]], str]] = [(lambda: trained, code), (self._statistics, "fp32")]
        self.averaged = [
            AveragedTensors(
                *(self.run.wire, tensors, its_code, self.run.step),
                rotating=not (self.config.sharded or self.run.wire.is_sharded),  # of shards all carry their own
                copies_of=self.run.masters.of,
            )
            for tensors, its_code in kinds
            if any(t.numel() for t in tensors())
        ]

    @property
    def _code(self) -> str:
        return self.config.warmup_code if self.run.phase == "warmup" else self.config.wire

    def _statistics(self) -> list[Tensor]:
        """Running means and variances; in fewer bits a small variance next to a large one could become negative."""
        norms = [m for m in self.run.model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        found = [b for norm in norms for b in norm.buffers(recurse=False) if b.is_floating_point()]
        return list({id(b): b for b in found}.values())

    def _average_rest(self) -> None:
        """Buffers that do not travel with the parameters, if they differ."""
        known = {id(b) for part in self.averaged for b in part.tensors()}
        average_buffers(self.run.wire, [b for b in self.run.model.buffers() if id(b) not in known], self.run.weight)

    def _cycle(self) -> None:
        """Apply an average that is due, then send the next, unless it would arrive after the phase is over."""
        first = self.averaged[0]
        if first.due is not None and self.run.step >= first.due:
            self._arrive()
        elif first.turn is not None and self.run.step >= first.turn:
            first.aggregator.middle()
        is_due = first.pending is None and self.run.step >= self.sent_at + self.every
        if is_due and self.run.step + self.overlap <= self.run.phase_end:
            self._send(self.overlap)
            if self.overlap == 0:
                self._arrive()

    def _send(self, overlap: int, first: int = 0) -> None:
        self._said = self.run.counters.gather(self.run.step, self.run.forwards)
        for part in self.averaged[first:]:
            keep_own = part is self.averaged[0] and overlap > 0 and self.config.compensate
            part.send(self.run.step, overlap, keep_own=keep_own)
        self.sent_at = self.run.step

    def _arrive(self) -> None:
        """Apply what arrived; statistics are never compensated.

        A variance plus its change elsewhere may be negative.
        """
        self._settle()
        nodes = len(self.run.topology.groups)
        for part in self.averaged:
            if part.pending is None:
                continue
            pending = part.agree()
            if pending.own is not None:
                part.shift_from(pending.own)
            else:
                part.move(nodes / (2 * pending.overlap + nodes), self.run.step)

    def _settle(self) -> None:
        """Wait for pending averages; they are still applied when they are due."""
        if self._said is not None:
            rows, self._said = self._said.wait().tolist(), None
            self.run.counters.compare(rows)
        sound = [part.receive() for part in self.averaged if part.pending is not None]
        if not all(sound):
            for part in self.averaged:
                part.pending = None
            refuse_diverged(self.run.wire, self.run.model, self.run.observed, self.run.step)
            raise not_finite(self.run.step)

    def _merge(self) -> None:
        """The mean of what nodes hold now; a pending average is older, and not applied."""
        if self.run.in_sync:
            return
        refuse_diverged(self.run.wire, self.run.model, self.run.observed, self.run.step)
        self._settle()
        for part in self.averaged:
            if part.pending is not None:
                part.agree()
        if self.averaged[0].level != self.run.step:
            self._send(0)
            self._arrive()
        elif self.averaged[1:] and not self._statistics_agree():
            self._send(0, first=1)
            self._arrive()
        self._average_rest()

    def _statistics_agree(self) -> bool:
        """Whether they are still as averaged: batches outside of training steps may have changed them."""
        agree = self.run.wire.agree(self.averaged[1].tensors(), "checksums")
        return self.run.wire.read(lambda: agree, True)

    # Pace.

    def _epoch_end(self, loss: float | None) -> None:
        """Average more often once the mean loss over workers does not fall any more; then less often again."""
        self.epochs += 1
        if self.run.in_sync:
            return
        self.run.wire.barrier("epoch_end()")
        total, count = self.run.observed.tolist() if loss is None else (loss, 1.0)
        self.run.observed.zero_()
        rows = self.run.wire.all_gather_scalars([total, count], "control")
        if not all(row[1] for row in rows):
            raise ConfigError(
                "epoch_end() was given no loss and none was observed since the last one; "
                "call epoch_end(loss), or observe(loss) at every step"
            )
        bad = [rank for rank, (total, _) in enumerate(rows) if not math.isfinite(total)]
        if bad:
            raise DivergedError(
                f"rank {bad[0]} has a loss that is not finite at the end of the epoch, step {self.run.step}; "
                "lower the learning rate or go back to a checkpoint"
            )
        mean = sum(total / count for total, count in rows) / len(rows)
        if self.run.phase == self.cycling and self.plateau.reached(mean):
            self._change_pace()

    def _change_pace(self) -> None:
        config = self.config
        if self.every == 1:
            self.every, self.overlap = config.every, config.overlap
        else:
            self.every = max(1, self.every // 2)
            self.overlap = min(max(1, self.overlap // 2), self.every) if config.overlap else 0
        self.run.events.append({"step": self.run.step, "every": self.every, "overlap": self.overlap})
        if self.run.topology.rank == 0:
            log.info("the loss stopped falling at step %d: from now on B = %d, S = %d", *self.run.events[-1].values())

    def _warn(self) -> None:
        is_late = self.run.phase == self.cycling and self.run.step > self.config.total_steps // 2
        if self.schedule.assumes and not self.epochs and is_late and not self._warned:
            self._warned = True
            warnings.warn(
                f"epoch_end() was not called in {self.run.step} steps, so B={self.every} and S={self.overlap} stay as "
                "they are; call replica.epoch_end(loss) after each epoch, or pin them by plateau_patience=None",
                stacklevel=4,
            )

    # Checkpoints.

    def state_dict(self) -> PartState:
        """With the pace, and pending averages, which are waited for."""
        self._settle()
        averaged = [part.state_dict() for part in self.averaged]
        shared = {
            "pace": [self.every, self.overlap],
            "plateau": asdict(self.plateau),
            "epochs": self.epochs,
            "sent_at": self.sent_at,
            "second_moment": self.second_moment.state_dict(),
            "averaged": [part["shared"] for part in averaged],
        }
        return PartState(shared, {"averaged": [part["local"] for part in averaged]})

    def forget(self, how: Literal["drop", "abandon", "restart"]) -> None:
        """After a restart nodes average from what all hold."""
        if self._said is not None and how != "abandon":
            self._said.wait()
        self._said = None
        for part in self.averaged:
            part.abandon() if how == "abandon" else part.drop()
        if how == "restart":
            self._make_averaged(self._code)

    def load_state_dict(self, state: PartState, *, stays: bool) -> None:
        """A save of one node holds nothing agreed on but the model."""
        shared, local = state.shared, state.local
        self.every, self.overlap = shared["pace"]
        self.plateau = Plateau(**shared["plateau"])
        self.epochs, self.sent_at = shared["epochs"], shared["sent_at"]
        self.second_moment.load_state_dict(shared["second_moment"])
        self.second_moment.share = self.run.weight
        self._make_averaged(self._code)
        for i, (part, kept) in enumerate(zip(self.averaged, shared["averaged"], strict=False)):
            part.load_state_dict(kept, local["averaged"][i] if local else {}, stays)


class Pace(Schedule):
    """When nodes average."""

    of: NodeAverages

    @property
    def next_event(self) -> int:
        """In cycling the next average that is sent, or comes back; elsewhere steps are alike until the phase ends."""
        of, run = self.of, self.run
        if run.phase != of.cycling or run.in_sync:
            return super().next_event
        first = of.averaged[0]
        ahead = [of.sent_at + of.every, first.due, first.turn]
        return min((step for step in ahead if step is not None and step > run.step), default=super().next_event)

    @property
    def meets_next(self) -> bool:
        """Nodes average at every step but in cycling; there an average may be late if nodes were lost."""
        is_late = self.run.phase != self.of.cycling or self.run.step + 1 >= self.of.sent_at + self.of.every
        return super().meets_next or (is_late and not self.run.in_sync)

    @property
    def holds_one_model(self) -> bool:
        """Right after an average that all waited for."""
        return self.of.averaged[0].level == self.run.step

    @property
    def averaged(self) -> Sequence[AveragedTensors]:
        return self.of.averaged

    @property
    def assumes(self) -> str:
        """Losses are not known before."""
        adapts = self.of.config.plateau_patience is not None and not self.run.in_sync
        return "the loss keeps falling, so B and S stay" if adapts else ""

    @property
    def cycle(self) -> Cycle | None:
        """From one average to the next, while the pace stays."""
        of, run = self.of, self.run
        if run.phase != of.cycling or run.in_sync:
            return None
        first = of.averaged[0]
        under_way = first.pending and (run.step - first.pending.sent, first.pending.overlap, first.pending.received)
        since = run.step - of.sent_at, first.level == run.step
        # What would come back after the phase is not sent.
        return Cycle((of.every, of.overlap, of.plateau.worse, *since, under_way), run.phase_end - of.every - of.overlap)

    def shift(self, steps: int) -> None:
        self.of.sent_at += steps
        for part in self.of.averaged:
            part.shift(steps)
