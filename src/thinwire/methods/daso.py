"""DASO: hierarchical, asynchronous averaging (dissertation, chapter 3).

Gradients are averaged inside the node at every step. Between nodes, parameters:

    1. warm-up: at every step, and everybody waits
    2. cycling: every B steps nodes send what they hold and go on training. S steps later the mean is there, and
       w ← (2S·w + P·mean) / (2S + P), with P the number of nodes (Eq. 3.2); or, compensated, the mean and all that
       the node itself has trained since
    3. cool-down: as the warm-up, so that all end with one model

Once the loss does not fall any more B and S are halved; at B = 1 both start again. What travels is the difference to
the last agreed values, which every worker has. Running statistics travel with the parameters, in fp32; other buffers
are averaged where phases change. The optimizer's state is each node's own. With one node it is plain data-parallel
training.
"""

import logging
import math
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch import Tensor, nn

from thinwire.comm.codec import all_finite, pack_wide, reals
from thinwire.comm.topology import Topology
from thinwire.comm.transfer import make_rotating, make_transfer
from thinwire.config import DASO
from thinwire.errors import ConfigError, DivergedError
from thinwire.methods.base import Cycle, Ground, Method
from thinwire.methods.cargo import Cargo, Flight
from thinwire.methods.merging import average_buffers, put_back, refuse_diverged
from thinwire.methods.plateau import Plateau

log = logging.getLogger("thinwire")


class DASOMethod(Method):
    """Parameters averaged between nodes while training goes on."""

    phases = ("warmup", "cycling", "cooldown")
    complex_wires = ("fp32", "bf16", "int8")
    config: DASO

    def __init__(self, config: DASO, ground: Ground) -> None:
        super().__init__(config, ground)
        self.every, self.wait = config.max_skips, config.wait
        self.plateau = Plateau(config.plateau_patience or 0, config.plateau_threshold)
        self.epochs = 0
        self.sent_at = self.sends = 0
        self.agreed_at = 0
        self.flight: Flight | None = None
        self.cargo: list[Cargo] = []
        """Parameters, then statistics if there are any."""
        self._warned: set[str] = set()

    @classmethod
    def role(cls, config: DASO, topology: Topology) -> Hashable:
        """Where sums are coded each node owns another part of them."""
        return super().role(config, topology) if config.wire == "int8" else None

    def attach(self) -> None:
        """Nodes by themselves from the first step; a warm-up of no steps is over at once."""
        self.replicated.wrap(self.topology.group)
        self._load_cargo()
        self._enter_phase()

    def after_step(self) -> None:
        """Count it, agree on buffers inside the node, and exchange what is due between nodes."""
        self.step += 1
        self.replicated.hand_on_buffers()
        if not self.spans_world:
            if self.phase == "cycling":
                self._cycle()
            else:
                self._send(0)
                self._arrive()
        self._enter_phase()
        if self.step == self.config.total_steps and not self.spans_world:
            self._average_rest()
        self._warn()

    @property
    def spans_world(self) -> bool:
        """Only with one node: parameters may agree between steps, the optimizer's state never does."""
        return len(self.topology.groups) == 1

    @property
    def assumes(self) -> str:
        """Losses are not known before."""
        adapts = self.config.plateau_patience is not None and not self.spans_world
        return "the loss keeps falling, so B and S stay" if adapts else ""

    @property
    def quiet_until(self) -> int:
        """The end of a phase; in cycling the next average that is sent, or comes back."""
        if self.phase != "cycling" or self.spans_world:
            return self._phase_end
        flight = self.flight
        ahead = [self._phase_end, self.sent_at + self.every]
        if flight is not None:
            turn = self.cargo[0].transfer.turn(flight.wait)
            ahead += [flight.sent + flight.wait, *([flight.sent + turn] if turn is not None else [])]
        return min(step for step in ahead if step > self.step)

    def skip(self, steps: int) -> None:
        """Those of warm-up and cool-down send something each."""
        super().skip(steps)
        if self.phase != "cycling":
            self.sends += steps

    @property
    def cycle(self) -> Cycle | None:
        """From one average to the next that the same member carries, while the pace stays."""
        if self.phase != "cycling" or self.spans_world:
            return None
        flight = self.flight
        under_way = flight and (self.step - flight.sent, flight.wait, bool(flight.means), flight.first)
        since = self.step - self.sent_at, self.agreed_at == self.step
        place = self.every, self.wait, self.plateau.worse, self.sends % self.topology.shares, *since, under_way
        # What would come back after the phase is not sent.
        return Cycle(place, self._phase_end - self.every - self.wait)

    def shift(self, steps: int) -> None:
        """So much later was the last average sent."""
        super().shift(steps)
        self.sent_at += steps
        self.agreed_at += steps
        if self.flight is not None:
            self.flight.sent += steps

    def epoch_end(self, loss: float | None) -> None:
        """Average oftener once the mean loss over workers does not fall any more; then less often again."""
        self.epochs += 1
        if self.spans_world:
            return
        self.wire.barrier("epoch_end()")
        total, count = self.observed.tolist() if loss is None else (loss, 1.0)
        self.observed.zero_()
        rows = self.wire.everyone([total, count], "control")
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
        if self.phase == "cycling" and self.config.plateau_patience is not None and self.plateau.reached(mean):
            self._change_pace()

    def finish(self, cutoff: float | None) -> None:
        """One model again; cut it where a cutoff is given."""
        self.check_counters()
        self.merge()
        super().finish(cutoff)

    def merge(self) -> None:
        """The mean of what nodes hold now; what is under way is older, and only agreed on."""
        if self.spans_world:
            return
        self.check_health()
        if self.flight is not None:
            self._take()
        # Statistics may have moved since, by batches that were no step of training.
        first = 0 if self.agreed_at != self.step else 1
        if self.cargo[first:]:
            self._send(0, first)
            self._arrive()
        self._average_rest()

    @contextmanager
    def lend_merged(self) -> Iterator[None]:
        """Lend what `merge` would leave; what is under way is waited for, and taken in when it is due."""
        with self.wire.ledger.everything_is("merge"):  # training pays for it, not the evaluation
            self.settle()
        before = self.flight, self.cargo, self.sends, self.sent_at, self.agreed_at
        self.cargo = [Cargo(part.tensors, part.transfer, part.base.clone()) for part in self.cargo]
        errors = [{name: t.clone() for name, t in part.transfer.state().items()} for part in self.cargo]
        with put_back(self.model):
            try:
                self.merge()
                yield
            finally:
                self.flight, self.cargo, self.sends, self.sent_at, self.agreed_at = before
                for part, error in zip(self.cargo, errors, strict=True):
                    part.transfer.load_state(error)

    @property
    def weight(self) -> float:
        """This node's share in a mean over workers."""
        return len(self.topology.group) / self.topology.world_size

    def check_health(self) -> None:
        """A node that diverged stops the run here, by name."""
        refuse_diverged(self.wire, self.model, self.observed, self.step)

    # Exchanges.

    def _load_cargo(self) -> None:
        """Who travels, from now on as if all nodes had just agreed on it."""
        self.cargo = []
        if self.spans_world:
            return
        trained = [p for p in self.parameters() if p.requires_grad]
        if not trained:
            raise ConfigError("no parameter of the model is trained: all are frozen, so there is nothing to average")
        make = make_transfer if self.config.sharded else make_rotating
        kinds: list[tuple[Callable[[], list[Tensor]], str]]
        kinds = [(lambda: [reals(p) for p in trained], self.config.wire), (self._statistics, "fp32")]
        for tensors, rounding in kinds:
            if any(t.numel() for t in tensors()):
                base = pack_wide(tensors())
                transfer = make(self.wire, base.numel(), rounding, base.device, "merge")
                self.cargo.append(Cargo(tensors, transfer, base))

    def _statistics(self) -> list[Tensor]:
        """Running means and variances; in fewer bits a small variance beside a large one might become negative."""
        norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
        found = [b for norm in norms for b in norm.buffers(recurse=False) if b.is_floating_point()]
        return list({id(b): b for b in found}.values())

    def _average_rest(self) -> None:
        """Buffers that do not travel with the parameters, if they differ."""
        known = {id(b) for part in self.cargo for b in part.tensors()}
        average_buffers(self.wire, [b for b in self.model.buffers() if id(b) not in known], self.weight)

    def _cycle(self) -> None:
        """Take in what is due, then send what is, unless it would come back after the phase is over."""
        flight = self.flight
        if flight is not None:
            turn = self.cargo[0].transfer.turn(flight.wait)
            if self.step >= flight.sent + flight.wait:
                self._arrive()
            elif not flight.means and turn is not None and self.step >= flight.sent + turn:
                self.cargo[0].transfer.middle()
        if self.flight is None and self.step >= self.sent_at + self.every and self.step + self.wait <= self._phase_end:
            self._send(self.wait)
            if self.wait == 0:
                self._arrive()

    def _send(self, wait: int, first: int = 0) -> None:
        self.flight = Flight(self.step, wait, self.ask_counters(), first=first)
        for part in self.cargo[first:]:
            if part is self.cargo[0] and wait and self.config.compensate:
                self.flight.own = pack_wide(part.tensors())
            part.send(wait, self.sends)
        self.sent_at = self.step
        self.sends += 1

    def _arrive(self) -> None:
        """Take in what came back; statistics are never compensated.

        A variance plus what it changed by elsewhere may be negative.
        """
        flight, nodes = self._take(), len(self.topology.groups)
        weight = nodes / (2 * flight.wait + nodes)
        for part in self.cargo[flight.first :]:
            if part is self.cargo[0] and flight.own is not None:
                part.shift_from(flight.own)
            else:
                part.mix(weight)
        if flight.wait == 0:
            self.agreed_at = self.step

    def _take(self) -> Flight:
        """What was under way; its means are from now on what all agree on."""
        self.settle()
        flight, self.flight = self.flight, None
        assert flight is not None, "nothing is on its way"
        for part, mean in zip(self.cargo[flight.first :], flight.means, strict=True):
            part.agree_on(mean)
        return flight

    def settle(self) -> None:
        """Wait for what is under way; it is taken in when it is due all the same."""
        flight = self.flight
        if flight is None or flight.means:
            return
        assert flight.counters is not None
        self.compare_counters(flight.counters.wait().tolist())
        parts = self.cargo[flight.first :]
        found = [part.transfer.end_narrow() for part in parts]
        means = [mean for mean in found if mean is not None]
        if len(means) < len(found) or not all_finite(means):
            self.flight = None
            self.check_health()
            raise DivergedError(
                f"what nodes sent does not add up to finite numbers at step {self.step}; lower the learning rate or go "
                "back to a checkpoint"
            )
        flight.means = [part.received(mean) for mean, part in zip(means, parts, strict=True)]

    # Phases and pace.

    @property
    def _phase_end(self) -> int:
        ends = {"warmup": self.config.warmup_length, "cycling": self.config.total_steps - self.config.cooldown_length}
        return ends.get(self.phase, sys.maxsize)

    def _enter_phase(self) -> None:
        while self.step >= self._phase_end:
            self.check_counters()
            if not self.spans_world:
                self._average_rest()
            self._set_phase(self.phases[self.phases.index(self.phase) + 1])
            self.sent_at = self.step

    def _change_pace(self) -> None:
        config = self.config
        if self.every == 1:
            self.every, self.wait = config.max_skips, config.wait
        else:
            self.every = max(1, self.every // 2)
            self.wait = min(max(1, self.wait // 2), self.every) if config.wait else 0
        self.events.append({"step": self.step, "every": self.every, "wait": self.wait})
        if self.topology.rank == 0:
            log.info("the loss stopped falling at step %d: from now on B = %d, S = %d", *self.events[-1].values())

    def _warn(self) -> None:
        config = self.config
        late = self.step > 2 * max(1.0, config.steps_per_epoch)
        if self.assumes and late and not self.epochs and self.phase == "cycling":
            self._warn_once(
                f"epoch_end() was not called in {self.step} steps, so B={self.every} and S={self.wait} stay as they "
                "are; call replica.epoch_end(loss) after each epoch, or pin them by plateau_patience=None"
            )
        if self.step > config.total_steps:
            self._warn_once(f"step {self.step} is beyond total_steps={config.total_steps}: training stays in cool-down")

    def _warn_once(self, text: str) -> None:
        kind = text.split()[0]
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, stacklevel=4)

    # Checkpoints.

    def state(self) -> dict[str, Any]:
        """With the pace, and what is under way."""
        return {
            **super().state(),
            "pace": [self.every, self.wait],
            "plateau": asdict(self.plateau),
            "epochs": self.epochs,
            "events": self.events,
            "exchanges": [self.sent_at, self.sends, self.agreed_at],
            "flight": [self.flight.sent, self.flight.wait] if self.flight else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to where the save was made; what is under way is dropped unseen, for it may be what diverged."""
        if self.flight is not None and not self.flight.means:
            assert self.flight.counters is not None
            self.flight.counters.wait()
            for part in self.cargo:
                part.transfer.end_narrow()
        super().load_state(state)
        self.every, self.wait = state["pace"]
        self.plateau = Plateau(**state["plateau"])
        self.epochs, self.events = state["epochs"], state["events"]
        self.sent_at, self.sends, self.agreed_at = state["exchanges"]
        self.flight = Flight(*state["flight"]) if state["flight"] else None

    def tensors(self) -> dict[str, Tensor]:
        """What was last agreed on, and what came back but is not due yet."""
        kept = {f"base.{i}": part.base for i, part in enumerate(self.cargo)}
        if self.flight is not None:
            kept |= {f"mean.{i}": mean for i, mean in enumerate(self.flight.means)}
            kept |= {"own": self.flight.own} if self.flight.own is not None else {}
        return kept

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take it back; in a save of one node all agree on the model."""
        self._load_cargo()
        for i, part in enumerate(self.cargo if tensors else ()):
            base = tensors[f"base.{i}"]
            if base.shape != part.base.shape:
                raise ConfigError(
                    f"the save holds {len(base)} values that nodes average, here are {len(part.base)}; "
                    "build the same model, with the same parameters frozen"
                )
            part.base = base
        if self.flight is not None:
            self.flight.means = [tensors[f"mean.{i}"] for i in range(len(self.cargo))]
            self.flight.own = tensors.get("own")

    def workspace(self) -> list[Tensor]:
        """Room for what is packed."""
        return [part.room for part in self.cargo]

    def own_tensors(self) -> dict[str, Tensor]:
        """What this worker could not say in the bits it had."""
        return self.cargo[0].transfer.state() if self.cargo else {}

    def load_own_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take it back."""
        if tensors:
            self.cargo[0].transfer.load_state(tensors)
