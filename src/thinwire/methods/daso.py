"""DASO: hierarchical, asynchronous averaging (dissertation of D. Coquelin, chapter 3).

Gradients are averaged inside the node at every step. Between nodes, parameters:

    1. warm-up: at every step, and all workers wait
    2. cycling: every B steps nodes send what they hold and keep training. S steps later the mean has arrived, and
       w ← (2S·w + P·mean) / (2S + P), with P the number of nodes (Eq. 3.2); or, compensated, the mean and all that
       the node itself has trained since
    3. cool-down: as the warm-up, so that all nodes end with one model

Once the loss does not fall any more B and S are halved; at B = 1 both start again. Running statistics travel with the
parameters, in fp32; other buffers are averaged where phases change. The optimizer's state is each node's own. With one
node it is plain data-parallel training.
"""

import logging
import math
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from thinwire.base.errors import ConfigError, DivergedError
from thinwire.comm.topology import Topology
from thinwire.comm.wire import Pending
from thinwire.config import DASO
from thinwire.methods.averaged import AveragedTensors, all_restored, not_finite
from thinwire.methods.base import Cycle, Method
from thinwire.methods.context import MethodContext, Saved
from thinwire.methods.diverged import refuse_diverged
from thinwire.methods.features import Feature, joins_not, needs_whole_weights
from thinwire.methods.merging import average_buffers
from thinwire.methods.registry import register
from thinwire.methods.second_moment import SecondMoment


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


log = logging.getLogger("thinwire")


def _example(**more: Any) -> DASO:
    fields = {"total_steps": 20, "warmup": 4, "cooldown": 4, "every": 4, "overlap": 2, "plateau_patience": None}
    return DASO(**{**fields, **more})


@register("daso", DASO, example=_example)
class DASOMethod(Method):
    """Gradients inside the node, parameters between nodes while training goes on."""

    phases = ("warmup", "cycling", "cooldown")
    config: DASO

    def __init__(self, config: DASO, context: MethodContext) -> None:
        super().__init__(config, context)
        self.every, self.overlap = config.every, config.overlap
        self.plateau = Plateau(config.plateau_patience or 0, config.plateau_threshold)
        self.epochs = 0
        self.sent_at = 0
        self.averaged: list[AveragedTensors] = []
        """Parameters, then statistics if there are any."""
        self.second_moment = SecondMoment(context, config.second_moment, self.weight, lambda: not self.in_sync)
        self._counters: Pending | None = None
        self._warned = False
        if config.plateau_patience is not None:
            context.on_epoch_end.append(self._epoch_end)

    @classmethod
    def refuses(cls, config: DASO, feature: Feature) -> str | None:
        """One member carries all of a node's parameters, and an average counts every node."""
        if feature is Feature.SHARDS:
            return needs_whole_weights(config)
        if feature is Feature.JOIN:
            return joins_not("DASO, whose averages count nodes that have trained nothing")
        return super().refuses(config, feature)

    @classmethod
    def role(cls, config: DASO, topology: Topology) -> Hashable:
        """All nodes do the same."""
        return None

    def attach(self) -> None:
        """Nodes train apart from the first step; a warm-up of no steps ends at once."""
        self.gradients.apart()
        self._make_averaged(self.config.warmup_code)
        self._enter_phase()

    def after_step(self) -> None:
        """Exchange what is due between nodes."""
        if not self.in_sync:
            if self.phase == "cycling":
                self._cycle()
            else:
                self._send(0)
                self._arrive()
        self._enter_phase()
        if self.step == self.config.total_steps and not self.in_sync:
            self._average_rest()
        self._warn()

    @property
    def in_sync(self) -> bool:
        """Only with one node: parameters may agree between steps, the optimizer's state never does."""
        return len(self.topology.groups) == 1

    @property
    def holds_one_model(self) -> bool:
        """Also right after an average that all waited for."""
        return self.in_sync or self.averaged[0].level == self.step

    @property
    def next_event(self) -> int:
        """The end of a phase; in cycling the next average that is sent, or comes back."""
        if self.phase != "cycling" or self.in_sync:
            return self._phase_end
        first = self.averaged[0]
        ahead = [self._phase_end, self.sent_at + self.every, first.due, first.turn]
        return min(step for step in ahead if step is not None and step > self.step)

    @property
    def meets_next(self) -> bool:
        """Nodes average at every step but in cycling; there an average may be late if nodes were lost."""
        is_late = self.phase != "cycling" or self.step + 1 >= self.sent_at + self.every
        return super().meets_next or (is_late and not self.in_sync)

    def finish(self, cutoff: float | None) -> None:
        """One model again; cut it where a cutoff is given."""
        self.check_counters()
        self._merge()
        super().finish(cutoff)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The mean of what nodes hold; pending averages are waited for, and applied when they are due."""
        with self.wire.ledger.booked_under("merge"):  # counts as training, not as evaluation
            self._settle()
        sent_at = self.sent_at
        with all_restored(self.model, self.averaged):
            try:
                self._merge()
            finally:
                self.sent_at = sent_at
            yield

    # Exchanges.

    def _make_averaged(self, code: str) -> None:
        self.averaged = []
        if self.in_sync:
            return
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if not trained:
            raise ConfigError("no parameter of the model is trained: all are frozen, so there is nothing to average")
        kinds: list[tuple[Callable[[], Sequence[Tensor]], str]] = [(lambda: trained, code), (self._statistics, "fp32")]
        self.averaged = [
            AveragedTensors(
                *(self.wire, tensors, its_code, self.step),
                rotating=not self.config.sharded,
                copies_of=self.masters.of,
            )
            for tensors, its_code in kinds
            if any(t.numel() for t in tensors())
        ]

    @property
    def _code(self) -> str:
        return self.config.warmup_code if self.phase == "warmup" else self.config.wire

    def _statistics(self) -> list[Tensor]:
        """Running means and variances; in fewer bits a small variance next to a large one could become negative."""
        norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        found = [b for norm in norms for b in norm.buffers(recurse=False) if b.is_floating_point()]
        return list({id(b): b for b in found}.values())

    def _average_rest(self) -> None:
        """Buffers that do not travel with the parameters, if they differ."""
        known = {id(b) for part in self.averaged for b in part.tensors()}
        average_buffers(self.wire, [b for b in self.model.buffers() if id(b) not in known], self.weight)

    def _cycle(self) -> None:
        """Apply an average that is due, then send the next, unless it would arrive after the phase is over."""
        first = self.averaged[0]
        if first.due is not None and self.step >= first.due:
            self._arrive()
        elif first.turn is not None and self.step >= first.turn:
            first.aggregator.middle()
        is_due = first.pending is None and self.step >= self.sent_at + self.every
        if is_due and self.step + self.overlap <= self._phase_end:
            self._send(self.overlap)
            if self.overlap == 0:
                self._arrive()

    def _send(self, overlap: int, first: int = 0) -> None:
        self._counters = self.counters.gather(self.step, self.forwards)
        for part in self.averaged[first:]:
            keep_own = part is self.averaged[0] and overlap > 0 and self.config.compensate
            part.send(self.step, overlap, keep_own=keep_own)
        self.sent_at = self.step

    def _arrive(self) -> None:
        """Apply what arrived; statistics are never compensated.

        A variance plus its change elsewhere may be negative.
        """
        self._settle()
        nodes = len(self.topology.groups)
        for part in self.averaged:
            if part.pending is None:
                continue
            pending = part.agree()
            if pending.own is not None:
                part.shift_from(pending.own)
            else:
                part.move(nodes / (2 * pending.overlap + nodes), self.step)

    def _settle(self) -> None:
        """Wait for pending averages; they are still applied when they are due."""
        if self._counters is not None:
            rows, self._counters = self._counters.wait().tolist(), None
            self.counters.compare(rows)
        sound = [part.receive() for part in self.averaged if part.pending is not None]
        if not all(sound):
            for part in self.averaged:
                part.pending = None
            refuse_diverged(self.wire, self.model, self.observed, self.step)
            raise not_finite(self.step)

    def _merge(self) -> None:
        """The mean of what nodes hold now; a pending average is older, and not applied."""
        if self.in_sync:
            return
        refuse_diverged(self.wire, self.model, self.observed, self.step)
        self._settle()
        for part in self.averaged:
            if part.pending is not None:
                part.agree()
        if self.averaged[0].level != self.step:
            self._send(0)
            self._arrive()
        elif self.averaged[1:] and not self._statistics_agree():
            self._send(0, first=1)
            self._arrive()
        self._average_rest()

    def _statistics_agree(self) -> bool:
        """Whether they are still as averaged: batches outside of training steps may have changed them."""
        agree = self.wire.agree(self.averaged[1].tensors(), "checksums")
        return self.wire.read(lambda: agree, True)

    # Phases and pace.

    @property
    def _phase_end(self) -> int:
        ends = {"warmup": self.config.warmup_length, "cycling": self.config.total_steps - self.config.cooldown_length}
        return ends.get(self.phase, sys.maxsize)

    def _enter_phase(self) -> None:
        while self.step >= self._phase_end:
            self.check_counters()
            if not self.in_sync:
                self._average_rest()
            if self.phase == "warmup" and self.config.warmup_code != self.config.wire:
                self._make_averaged(self.config.wire)
            self.set_phase(self.phases[self.phases.index(self.phase) + 1])
            self.sent_at = self.step

    def _epoch_end(self, loss: float | None) -> None:
        """Average more often once the mean loss over workers does not fall any more; then less often again."""
        self.epochs += 1
        if self.in_sync:
            return
        self.wire.barrier("epoch_end()")
        total, count = self.observed.tolist() if loss is None else (loss, 1.0)
        self.observed.zero_()
        rows = self.wire.all_gather_scalars([total, count], "control")
        if not all(row[1] for row in rows):
            raise ConfigError(
                "epoch_end() was given no loss and none was observed since the last one; "
                "call epoch_end(loss), or observe(loss) at every step"
            )
        bad = [rank for rank, (total, _) in enumerate(rows) if not math.isfinite(total)]
        if bad:
            raise DivergedError(
                f"rank {bad[0]} has a loss that is not finite at the end of the epoch, step {self.step}; "
                "lower the learning rate or go back to a checkpoint"
            )
        mean = sum(total / count for total, count in rows) / len(rows)
        if self.phase == "cycling" and self.plateau.reached(mean):
            self._change_pace()

    def _change_pace(self) -> None:
        config = self.config
        if self.every == 1:
            self.every, self.overlap = config.every, config.overlap
        else:
            self.every = max(1, self.every // 2)
            self.overlap = min(max(1, self.overlap // 2), self.every) if config.overlap else 0
        self.events.append({"step": self.step, "every": self.every, "overlap": self.overlap})
        if self.topology.rank == 0:
            log.info("the loss stopped falling at step %d: from now on B = %d, S = %d", *self.events[-1].values())

    def _warn(self) -> None:
        is_late = self.phase == "cycling" and self.step > self.config.total_steps // 2
        if self.assumes and not self.epochs and is_late and not self._warned:
            self._warned = True
            warnings.warn(
                f"epoch_end() was not called in {self.step} steps, so B={self.every} and S={self.overlap} stay as they "
                "are; call replica.epoch_end(loss) after each epoch, or pin them by plateau_patience=None",
                stacklevel=4,
            )

    # Checkpoints and plans.

    def state_dict(self) -> dict[str, Any]:
        """With the pace, and pending averages, which are waited for."""
        self._settle()
        state, averaged = super().state_dict(), [part.state_dict() for part in self.averaged]
        state["shared"] |= {
            "pace": [self.every, self.overlap],
            "plateau": asdict(self.plateau),
            "epochs": self.epochs,
            "sent_at": self.sent_at,
            "second_moment": self.second_moment.state_dict(),
            "averaged": [part["shared"] for part in averaged],
        }
        state["local"]["averaged"] = [part["local"] for part in averaged]
        return state

    def drop_pending(self) -> None:
        if self._counters is not None:
            self._counters.wait()
        self._counters = None
        for part in self.averaged:
            part.drop()

    def begin_again(self) -> None:
        super().begin_again()
        self._make_averaged(self._code)

    def abandon_pending(self) -> None:
        self._counters = None
        for part in self.averaged:
            part.abandon()

    def load_state_dict(self, saved: Saved) -> None:
        """Pending averages are dropped; a save of one node holds nothing agreed on but the model."""
        if not saved.stays:  # where a group was lost, nothing more arrives
            self.drop_pending()
        super().load_state_dict(saved)
        shared, local = saved.shared, saved.local
        self.every, self.overlap = shared["pace"]
        self.plateau = Plateau(**shared["plateau"])
        self.epochs, self.sent_at = shared["epochs"], shared["sent_at"]
        self.second_moment.load_state_dict(shared["second_moment"])
        self.second_moment.share = self.weight
        self._make_averaged(self._code)
        for i, (part, kept) in enumerate(zip(self.averaged, shared["averaged"], strict=False)):
            part.load_state_dict(kept, local["averaged"][i] if local else {}, saved.stays)

    @property
    def assumes(self) -> str:
        """For plans: losses are not known before."""
        adapts = self.config.plateau_patience is not None and not self.in_sync
        return "the loss keeps falling, so B and S stay" if adapts else ""

    @property
    def cycle(self) -> Cycle | None:
        """From one average to the next, while the pace stays."""
        if self.phase != "cycling" or self.in_sync:
            return None
        first = self.averaged[0]
        under_way = first.pending and (self.step - first.pending.sent, first.pending.overlap, first.pending.received)
        since = self.step - self.sent_at, first.level == self.step
        # What would come back after the phase is not sent.
        place = self.every, self.overlap, self.plateau.worse, *since, under_way
        return Cycle(place, self._phase_end - self.every - self.overlap)

    def shift(self, steps: int) -> None:
        """As if everything so far had happened `steps` steps later."""
        self.sent_at += steps
        for part in self.averaged:
            part.shift(steps)
