"""Engine 2: groups train alone, and average their parameters every few steps.

    1. warm-up: the whole world averages gradients at every step, in `warmup_wire`
    2. local: each group trains alone, its members averaging their gradients
    3. every `every` steps each fragment of the model has its turn: groups send it, in `wire`
    4. `overlap` steps later the mean has arrived: used as it is, or as a gradient for the `outer` step; a group
       continues from that, or from a mix with its own values if it trained meanwhile

Every worker keeps a copy of the agreed values, with the same bits. With one group nothing is sent.
"""

import functools
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import Tensor

from thinwire.comm.topology import Topology
from thinwire.config import DiLoCo, LocalSGD
from thinwire.config.common import Nesterov, Radial
from thinwire.methods.agreement import Agreement
from thinwire.methods.averaged import AveragedTensors, all_restored, not_finite
from thinwire.methods.base import Cycle, Method
from thinwire.methods.change_scales import ChangeScales
from thinwire.methods.context import MethodContext, Saved
from thinwire.methods.contributions import Contributions
from thinwire.methods.diverged import refuse_diverged
from thinwire.methods.features import Feature, joins_not, refuses_code
from thinwire.methods.merging import average_buffers, average_moments
from thinwire.methods.rounds import Round, fragments_of
from thinwire.methods.same_bits import Named, SameBits
from thinwire.methods.statistics import OuterStatistics


class LocalTraining(Method):
    """Groups that train alone after a warm-up, and average fragments of the model in turn."""

    phases: ClassVar[tuple[str, ...]] = ("warmup", "local")
    config: LocalSGD | DiLoCo

    def __init__(self, config: Any, context: MethodContext) -> None:
        super().__init__(config, context)
        self.fragments: list[AveragedTensors] = []
        """The last of them is sent at the end of each round."""
        self.round = Round(config, self.optimizers, self.wire)
        self.buffers_at = 0
        """The step after which groups last agreed on buffers."""
        self.scales = ChangeScales(config, context, self.weight, lambda: not self.in_sync)
        self.outer = self._outer()
        self.statistics = OuterStatistics(self.model, self.outer)
        self.agreement: Agreement = Agreement(self.model, self.wire, self.round.is_annealing)
        self.contributions = Contributions(config, context, self.events, lambda: self.absent)
        self.same_bits = SameBits(self.wire, config.checksum_every)

    @classmethod
    def refuses(cls, config: Any, feature: Feature) -> str | None:
        if feature is Feature.SHARDS:
            if why := _refuses_shards(config):
                return why
        elif feature is Feature.JOIN:
            for name, value in (("second_moment", "shared"), ("rows", "seen")):
                if getattr(config, name) == value:
                    return joins_not(f"{name}={value!r}")
        codes = (refuses_code(config, name, feature) for name in ("wire", "warmup_wire"))
        return next(filter(None, codes), None) or super().refuses(config, feature)

    @classmethod
    def role(cls, config: Any, topology: Topology) -> Hashable:
        """All groups do the same."""
        return None

    def _outer(self) -> Nesterov | Radial | None:
        """The outer step for as many groups as there are."""
        outer = self.config.outer
        # Where updates are as long as all-reduce's, no momentum has to make up for short ones.
        groups = len(self.topology.groups) if self.config.second_moment == "group" else 1
        return outer.among(groups) if isinstance(outer, Nesterov) else outer

    def attach(self) -> None:
        """Begin with the warm-up; one of no steps is over at once."""
        fragments_of(self.model, self.config.fragments)  # refused now, not after the warm-up
        self.gradients.together(self.config.warmup_wire)
        self._separate_if_due()

    def after_step(self) -> None:
        """Exchange what is due between groups."""
        if self.phase == "warmup":
            self._separate_if_due()
        else:
            self._exchange()

    @property
    def in_sync(self) -> bool:
        """False while groups train apart."""
        return self.phase == "warmup" or len(self.topology.groups) == 1

    @property
    def holds_one_model(self) -> bool:
        """Also right after an average."""
        return self.in_sync or not any(self._is_apart(fragment) for fragment in self.fragments)

    @property
    def next_event(self) -> int:
        """The end of the warm-up, then the next fragment that is sent, or comes back."""
        if self.phase == "warmup":
            return self.config.warmup_length
        turns = self._turns()
        ahead = [self.round.turn(i, len(turns), self.step) for i in range(len(turns))]
        ahead += [due for f in self.fragments if (due := f.due) is not None]
        ahead += [turn for f in self.fragments if (turn := f.turn) is not None and turn > self.step]
        return min(ahead, default=sys.maxsize)

    @property
    def leaves_out_diverged(self) -> bool:
        return self.config.diverged == "leave_out"

    @property
    def averages_moments(self) -> bool:
        return self.config.moments == "average"

    @property
    def averaged_tensors(self) -> Sequence[AveragedTensors]:
        return self.fragments

    @property
    def last_average(self) -> int:
        """Each fragment has a turn in every round."""
        return self.step + 1 - self.round.period

    @property
    def missed(self) -> str:
        """Also averages: that of `finish` does not count."""
        never = "never averaged before the end" if not (self.in_sync or self.same_bits.averages) else ""
        return super().missed or never

    def finish(self, cutoff: float | None) -> None:
        """One model again; cut it where a cutoff is given."""
        if self.phase != "warmup":
            self.check_counters()
            self._merge(last=True)
        super().finish(cutoff)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The mean of what groups hold; pending averages are waited for, and applied when they are due."""
        with self.wire.ledger.booked_under("merge"):  # counts as training, not as evaluation
            self._settle()
        with all_restored(self.model, self.fragments):
            self._merge()
            yield

    def _separate_if_due(self) -> None:
        """End the warm-up: from here on groups train apart."""
        if self.step < self.config.warmup_length:
            return
        self.check_counters()
        self.set_phase("local")
        self.gradients.apart()
        self.scales.separate()
        self._make_fragments()
        self.round.begin(self.step)
        self._agreed()

    def _make_fragments(self) -> None:
        """With one group and no outer step there is nothing to average."""
        self.fragments = []
        if not (self.in_sync and self.config.outer is None):
            self.fragments = [self._averaged(each) for each in fragments_of(self.model, self.config.fragments)]

    def _averaged(self, parameters: Sequence[Tensor], *, is_whole: bool = False) -> AveragedTensors:
        """An outer step must not move what a lone worker has frozen meanwhile; unless this `is_whole`."""
        current = functools.partial(list[Tensor], parameters)
        return AveragedTensors(
            *(self.wire, current, self.config.wire, self.step),
            outer=self.outer,
            offload=getattr(self.config, "offload", False),
            measured=True,
            scaled=self.scales.are_used or self.contributions.need_agreed,
            copies_of=self.masters.of,
            is_fixed=(lambda p: False) if is_whole else (lambda p: not p.requires_grad),
        )

    def _turns(self) -> list[list[AveragedTensors]]:
        """What is sent together in this round, one after the other; the last at its end."""
        return [[fragment] for fragment in self.fragments]

    def _exchange(self) -> None:
        """Apply averages that are due, then send."""
        due = [fragment for fragment in self.fragments if fragment.due == self.step]
        if due:
            self._arrive(due)
        for fragment in self.fragments:
            if fragment.turn == self.step:
                fragment.aggregator.middle()
        turns = self._turns()
        for i, fragments in enumerate(turns):
            if self.round.has_turn(i, len(turns), self.step):
                self._send(fragments, self.config.overlap)
        if turns and self.round.ends(self.step):
            self._end_round()

    def _send(self, fragments: Sequence[AveragedTensors], overlap: int, *, last: bool = False) -> None:
        if self.scales.moments.kind == "shared" and not self.in_sync:  # a group that diverged stops before it is shared
            refuse_diverged(self.wire, self.model, self.observed, self.step)
        self._screen(fragments)
        scales = self.scales.of(fragments, self.fragments, ends_round=True)
        for fragment, scale in zip(fragments, scales, strict=True):
            # What the others left out earlier travels with the last one too.
            senders = None if last else self._senders(fragment)
            weights, gain = self._weights(fragment), self.contributions.gain
            fragment.send(self.step, overlap, weights=weights, senders=senders, scales=scale, gain=gain, last=last)
        if overlap == 0:
            self._arrive(fragments)

    def _weights(self, fragment: AveragedTensors) -> Sequence[float] | None:
        """This group's weight in the mean of each tensor; None for that of its workers."""
        weight = self.contributions.weight(self._group_weights(fragment))
        return None if weight is None else [weight] * len(fragment.tensors())

    def _group_weights(self, fragment: AveragedTensors) -> Sequence[float] | None:
        """The weights of all groups; None for those of their workers."""
        return None

    def _screen(self, fragments: Sequence[AveragedTensors] = ()) -> None:
        """Find groups that count less than others in the next average, by what they hold now; collective."""
        if self.config.is_screened and not self.in_sync:
            self.contributions.screen(fragments, self.observed, self.step)

    def _senders(self, fragment: AveragedTensors) -> Sequence[int] | None:
        """The groups that trained it; None for all."""
        return None

    def _end_round(self) -> None:
        self.round.begin(self.step, self._next_change)

    @property
    def _next_change(self) -> int | None:
        """A step that rounds must not pass over by growing."""
        return None

    def _arrive(self, fragments: Sequence[AveragedTensors]) -> None:
        """Apply averages; everything else is averaged with the last fragment of each round."""
        ends_round = self._ends_round(fragments)
        if ends_round:
            self.check_counters()
        if any(f.pending is not None and f.pending.overlap for f in fragments):
            self._screen()  # otherwise that was just done
        if ends_round and not (self.config.is_screened and not self.in_sync):
            refuse_diverged(self.wire, self.model, self.observed, self.step)
        for fragment in fragments:
            self._receive(fragment)
        gains = self.agreement.measure(fragments, self.step)
        for fragment, gain in zip(fragments, gains, strict=True):
            self._apply(fragment, gain)
        if self.contributions.is_left_out:
            self._start_again([f for f in self.fragments if f not in fragments], keeps_moments=ends_round)
        if ends_round:
            average_buffers(self.wire, self.model.buffers(), self.contributions.share)
            self.statistics.step()
            self._average_moments()
            self._agreed()
            self.same_bits.averaged(self._held_alike, self.step)
            self.context.after_merge()

    def _held_alike(self) -> Named:
        """What all workers hold with the same bits when a round has ended."""
        names = {id(p): repr(name) for name, p in self.model.named_parameters()}
        apart = {id(p) for f in self.fragments if self._is_apart(f) for p in f.tensors()}
        held: Named = [(f"parameter {names[id(p)]}", p) for p in self.model.parameters() if id(p) not in apart]
        held += [(f"buffer {name!r}", b) for name, b in self.model.named_buffers()]
        for fragment in self.fragments:
            labels = [names.get(id(t), "a tensor") for t in fragment.tensors()]
            held += [(f"the {what} of {labels[i]}", t) for what, i, t in fragment.outer_state()]
        return held + [("running statistics of the outer step", t) for t in self.statistics.tensors()]

    def _ends_round(self, fragments: Sequence[AveragedTensors]) -> bool:
        return self.fragments[-1] in fragments

    def _average_moments(self) -> None:
        if self.config.moments == "reset":
            self.optimizers.reset(list(self.model.parameters()))
        elif self.config.moments == "average":
            average_moments(self.wire, self.optimizers, list(self.model.parameters()), self.contributions.share)

    @property
    def _averages_moments(self) -> bool:
        """Whether this group takes the others' moments when a round ends now."""
        return self.config.moments == "average"

    def _start_again(self, others: Sequence[AveragedTensors], *, keeps_moments: bool) -> None:
        """This group was left out and has what arrived; take `others` as agreed, and drop what came from its own."""
        for fragment in others:
            fragment.move(1.0, fragment.level)
        if not (keeps_moments and self._averages_moments):
            self.optimizers.reset(list(self.model.parameters()))
        self.observed.zero_()

    def _apply(self, fragment: AveragedTensors, gain: Tensor | None = None) -> None:
        assert fragment.pending is not None, "nothing was received"
        overlap = fragment.pending.overlap  # only what was trained is sent so, though it may be paused by now
        fragment.agree(gains=gain, outer=bool(overlap) or self._was_trained(fragment))
        mixes = overlap and self._trains(fragment)
        if self.contributions.is_left_out and mixes:
            fragment.move(1.0, fragment.level)  # all of it here, but others mix
        else:
            fragment.move(1 - self.config.mix if mixes else 1.0, self.step)

    def _trains(self, fragment: AveragedTensors) -> bool:
        """Whether groups train it now."""
        return True

    def _was_trained(self, fragment: AveragedTensors) -> bool:
        """Whether groups trained it before it was sent."""
        return True

    def _merge(self, *, last: bool = False) -> None:
        """Apply pending averages, then take the mean of what groups hold; the `last` one leaves nothing unsent.

        An outer step out of turn would apply the whole momentum again after only a few steps of training.
        """
        if self.in_sync:
            return
        pending = [fragment for fragment in self.fragments if fragment.pending is not None]
        if not self.config.is_screened:
            refuse_diverged(self.wire, self.model, self.observed, self.step)
        elif pending:
            self._screen()
        for fragment in pending:
            self._receive(fragment)
            self._apply(fragment)
        apart = [f for f in self.fragments if self._is_apart(f) or (last and self._refines(f))]
        self._screen(apart)
        scales = self.scales.of(apart, self.fragments, ends_round=last)
        for fragment, scale in zip(apart, scales, strict=True):
            senders = None if last else self._senders(fragment)
            weights, gain = self._weights(fragment), self.contributions.gain
            fragment.send(self.step, 0, weights=weights, senders=senders, scales=scale, gain=gain, last=last)
        for fragment in apart:
            self._receive(fragment)
            fragment.agree(outer=False)
            fragment.move(1.0, self.step)
        if self.buffers_at != self.step:
            average_buffers(self.wire, self.model.buffers(), self.contributions.share)

    def _refines(self, fragment: AveragedTensors) -> bool:
        """Whether a code has left something out; in the shard of any member, so that all of a group send alike."""
        return not self.wire.all_of_group(not fragment.aggregator.refine())

    def _is_apart(self, fragment: AveragedTensors) -> bool:
        """Whether groups may hold different values of it."""
        return fragment.level != self.step

    def _receive(self, fragment: AveragedTensors) -> None:
        if not fragment.receive():
            refuse_diverged(self.wire, self.model, self.observed, self.step)
            raise not_finite(self.step)

    def _settle(self) -> None:
        """Wait for pending averages; they are still applied when they are due."""
        for fragment in self.fragments:
            if fragment.pending is not None:
                self._receive(fragment)

    def _agreed(self) -> None:
        self.buffers_at = self.step
        self.observed.zero_()

    # Checkpoints and plans.

    def state_dict(self) -> dict[str, Any]:
        """With pending averages, which are waited for."""
        self._settle()
        state, fragments = super().state_dict(), [fragment.state_dict() for fragment in self.fragments]
        state["shared"] |= {"buffers_at": self.buffers_at, "fragments": [f["shared"] for f in fragments]}
        state["shared"] |= {"round": self.round.state_dict(), "agreement": self.agreement.state_dict()}
        state["shared"] |= {"statistics": self.statistics.state_dict(), "averages": self.same_bits.averages}
        state["local"] |= {"fragments": [f["local"] for f in fragments]}
        scales = self.scales.state_dict()
        state["shared"]["scales"], state["local"]["scales"] = scales["shared"], scales["local"]
        return state

    def drop_pending(self) -> None:
        for fragment in self.fragments:
            fragment.drop()

    def begin_again(self) -> None:
        """All hold what was loaded: agreed values, momentum and residuals start from it."""
        super().begin_again()
        self.contributions.clear()
        self.scales.forget()
        if self.phase != "warmup":
            self._make_fragments()
            self.statistics.restart()

    def abandon_pending(self) -> None:
        for fragment in self.fragments:
            fragment.abandon()

    def load_state_dict(self, saved: Saved) -> None:
        """Pending averages are dropped; a save of one group may hold nothing agreed on but the model."""
        if not saved.stays:  # where a group was lost, nothing more arrives
            self.drop_pending()
        super().load_state_dict(saved)
        shared, local = saved.shared, saved.local
        self.buffers_at, self.fragments = shared["buffers_at"], []
        self.round.load_state_dict(shared["round"])
        self.agreement.load_state_dict(shared["agreement"])
        self.statistics.load_state_dict(shared["statistics"])
        self.same_bits.averages = shared["averages"]
        self.contributions.clear()
        self.scales.load_state_dict(shared["scales"], local["scales"] if local else None, saved.stays)
        self.scales.moments.share = self.weight
        self.outer = self.statistics.outer = self._outer()
        if self.phase != "warmup":
            self._make_fragments()
        for i, (fragment, kept) in enumerate(zip(self.fragments, shared["fragments"], strict=False)):
            fragment.load_state_dict(kept, local["fragments"][i] if local else {}, saved.stays)
        if self.fragments:
            self.round.resume(self.step)

    @property
    def cycle(self) -> Cycle | None:
        """A round in which each fragment has its turn."""
        if self.phase == "warmup":
            return None
        parts = [
            (f.pending and (self.step - f.pending.sent, f.pending.received), f.momentum is None, f.level == self.step)
            for f in self.fragments
        ]
        place = self.step - self.round.start, self.round.period, self.buffers_at == self.step, self.same_bits.place
        return Cycle((*place, *parts), sys.maxsize)

    def shift(self, steps: int) -> None:
        """As if everything so far had happened `steps` steps later."""
        self.buffers_at += steps
        self.round.start += steps
        for fragment in self.fragments:
            fragment.shift(steps)


def _refuses_shards(config: Any) -> str | None:
    """What is not averaged shard by shard."""
    usual = {"moments": "keep", "second_moment": "group", "rows": "mean", "diverged": "stop", "outliers": "keep"}
    for name, value in usual.items():
        if getattr(config, name) != value:
            return f"`{name}`={getattr(config, name)!r} is not for sharded models: leave it out, it is {value!r} then"
    if isinstance(config.outer, Radial):
        return "`outer`=Radial(…) measures whole weights, and the model is sharded: use Nesterov(…) or None"
    return None
