"""Workers with fewer batches than others: `with replica.join():` around the loop, as torch's Join.

A worker whose loop is over stays and does what the others wait for. Before anything that is collective each worker
says what comes next: a pass that averages gradients, the end of a step, or nothing, because it has no batches left.

    the world averages gradients    it has gradients of zero, and the mean is still divided by all workers; it takes no
                                    steps, and at the end it is given model and optimizer by one that took all of them.
                                    The others update at the learning rates of one of them
    groups train apart              nothing is said between averages. A group that has trained nothing since the one
                                    before has no weight in it, and takes the mean. Each trains at its own rates
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.base.errors import ConfigError, DisagreementError
from thinwire.checkpoint.state import RunState, pack, unpack
from thinwire.comm import process_groups
from thinwire.exchange.parts import Feature, joins_not
from thinwire.methods.registry import refuse
from thinwire.methods.runner import Runner

_OVER, _PASS, _STEP = 0, 1, 2


class Said(NamedTuple):
    """What a worker says before something collective."""

    next: int
    """What comes next: nothing, a pass or the end of a step."""
    steps: int
    """The steps of the run that it knows to be over."""
    batches: int
    trained: int
    """The last step that it took itself."""
    idle: int
    """Steps of the run that it sat out."""
    rates: tuple[float, ...]
    """Its learning rates."""


class Joining:
    """One worker's part in a loop that ends at different times on different workers."""

    def __init__(self, method: Runner, unrounded: Callable[[], Any]) -> None:
        self.method, self.unrounded = method, unrounded
        self.trained = self.known = method.step
        self._rates: tuple[float, ...] = ()
        self._own: list[Any] = []
        self._met = 0
        """The last step at whose end this worker met others."""

    # A worker that has batches.

    def before_pass(self) -> None:
        """A batch comes; if the world averages its gradients, the others must have a part in it."""
        self._rates = ()
        if self._is_together:
            there = [each for each in self._say(_PASS) if each.next != _OVER]
            self._rates = min(there, key=lambda each: each.idle).rates

    def before_update(self, optimizer: Optimizer) -> None:
        """Update at the rates of whoever has sat out fewest steps; each worker's scheduler counts its own batches."""
        self._own = [group.get("lr") for group in optimizer.param_groups]
        theirs = [
            rate for (o, _), rate in zip(self.method.optimizers.groups, self._rates, strict=False) if o is optimizer
        ]
        for group, own, rate in zip(optimizer.param_groups, self._own, theirs, strict=False):
            if own is not None and float(own) != rate:
                group["lr"] = torch.full_like(own, rate) if isinstance(own, Tensor) else rate

    def after_update(self, optimizer: Optimizer) -> None:
        """Give a scheduler its own rates back."""
        for group, own in zip(optimizer.param_groups, self._own, strict=False):
            if "lr" in group:
                group["lr"] = own

    def end_step(self) -> None:
        """A step of this worker's own."""
        self.trained = self.method.step + 1
        if meets := self._meets:
            self._prepare(self._say(_STEP))
        self.method.end_step()
        self.known = self.method.step
        self._met = self.method.step if meets else self._met
        self._clear()

    # A worker that has none.

    def stay(self) -> bool:
        """Do what others wait for until no worker has batches; whether this one was given another model at the end."""
        self._drop_gradients()  # of its last step; they would be averaged again
        while True:
            if not self._meets:
                self.method.counters.idle += 1
                self.method.end_step()  # nothing is collective, and nothing is trained
                continue
            said = self._say(_OVER)
            kinds = {each.next for each in said} - {_OVER}
            if not kinds:
                return self._leave(said)
            self._adopt_batches(said)
            with self.unrounded():
                if kinds == {_PASS}:
                    self.method.gradients.replicated.pass_without_data()
                else:
                    self._end_with_others(said)

    def _end_with_others(self, said: list[Said]) -> None:
        self._prepare(said)
        self.method.counters.idle += 1
        self.method.gradients.note_update()  # what its code left out is sent with the others' next gradients
        self.method.end_step()
        self.known = self._met = self.method.step
        self._drop_gradients()
        self._clear()

    def _drop_gradients(self) -> None:
        for p in self.method.model.parameters():
            p.grad = None

    # Both.

    @property
    def _is_together(self) -> bool:
        """Whether the world averages gradients."""
        return self.method.gradients.members == self.method.topology.world

    @property
    def _meets(self) -> bool:
        """Whether the end of the next step is collective."""
        return self._is_together or self.method.meets_next

    def _say(self, kind: int) -> list[Said]:
        method, at = self.method, self.known if kind == _OVER else self.method.step
        own = [kind, at, method.forwards, self.trained, method.counters.idle, *method.optimizers.rates]
        said = [
            Said(int(next), int(steps), int(batches), int(trained), int(idle), tuple(rates))
            for next, steps, batches, trained, idle, *rates in method.wire.all_gather_scalars(own, "control")
        ]
        kinds = {each.next for each in said} - {_OVER}
        if len(kinds) > 1:
            steps = [rank for rank, each in enumerate(said) if each.next == _STEP]
            raise DisagreementError(
                f"workers disagree at step {self.method.step}: ranks {', '.join(map(str, steps))} end a step, others "
                "begin one more batch of it; accumulate gradients over equally many batches on all workers"
            )
        return said

    def _prepare(self, said: list[Said]) -> None:
        """Before a step ends together: who counts, whose buffers all take, and who must catch up."""
        there = [rank for rank, each in enumerate(said) if each.next != _OVER]
        replicated = self.method.gradients.replicated
        replicated.buffers_from = there[0] if self._is_together else None
        if self._is_together and not self.method.only_gradients and self.method.next_event <= self.method.step + 1:
            self._give(there[0], [rank for rank in range(len(said)) if rank not in there])
        elif not self._is_together:
            since = self._met if self.method.last_average is None else self.method.last_average
            groups = enumerate(self.method.topology.groups)
            absent = {i for i, group in groups if all(said[rank].trained <= since for rank in group)}
            self.method.absent = frozenset(absent)

    def _clear(self) -> None:
        self.method.gradients.replicated.buffers_from = None
        self.method.absent = frozenset()

    def _adopt_batches(self, said: list[Said]) -> None:
        """Counters are compared at averages; this worker's stand still."""
        self.method.forwards = next(each.batches for each in said if each.next != _OVER)

    def _leave(self, said: list[Said]) -> bool:
        """All are over: count the steps that were taken, and hold what the last worker holds if all should."""
        most = max(each.steps for each in said)
        self.method.counters.idle += most - self.method.step
        together, self.method.step = self._is_together, most
        last = next(rank for rank, each in enumerate(said) if each.steps == most and each.trained == most)
        self.method.forwards = said[last].batches
        others = [rank for rank, each in enumerate(said) if each.trained < most]
        if together and others:
            self._give(last, others)
        process_groups.note_meeting(self.method.topology.rank)  # whatever steps each has taken
        return together and self.method.topology.rank in others

    def _give(self, giver: int, takers: list[int]) -> None:
        """Model and optimizers of one worker, with their learning rates, to those that took fewer steps; collective."""
        if not takers:
            return
        state, gives = RunState(self.method), self.method.topology.rank == giver
        payload = pack(state.read("model", "optimizer")) if gives else None
        packed = self.method.wire.broadcast_bytes(payload, (giver, *takers), "join")
        if packed is not None and not gives:
            state.fill(unpack(packed))


def refuse_joining(method: Runner, *, has_scaler: bool, has_faults: bool) -> None:
    """What `join()` cannot do, in one sentence."""
    refuse(method.config, Feature.JOIN)
    groups = method.topology.groups
    uses = {
        "a GradScaler": has_scaler,
        "faults=…": has_faults,
        # Whoever has no batches takes no steps; of shards all members take each step, in parts of their own.
        "sharded models": method.wire.is_sharded,
        "SyncBatchNorm": any(isinstance(m, nn.SyncBatchNorm) for m in method.model.modules()),
        "groups of several workers that train apart": method.trains_apart
        and len(groups) > 1
        and any(len(group) > 1 for group in groups),
    }
    for what, is_used in uses.items():
        if is_used:
            raise ConfigError(joins_not(what))
