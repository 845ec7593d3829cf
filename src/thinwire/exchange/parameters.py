"""Parameters, averaged every few steps between groups that train alone.

    1. every `every` steps each fragment of the model has its turn: groups send it, in `wire`
    2. `overlap` steps later the mean has arrived: used as it is, or as a gradient for the `outer` step; a group
       continues from that, or from a mix with its own values if it trained meanwhile

Every worker keeps a copy of the agreed values, with the same bits. With one group nothing is sent.
"""

import functools
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from thinwire.base.errors import ConfigError
from thinwire.comm.fsdp import whole_of
from thinwire.comm.topology import Topology
from thinwire.comm.wire import Wire
from thinwire.config.common import Averaged, Nesterov, Radial
from thinwire.exchange.agreement import Agreement, Named, SameBits
from thinwire.exchange.averaged import AveragedTensors, all_restored, not_finite
from thinwire.exchange.change_scales import ChangeScales
from thinwire.exchange.contributions import Contributions
from thinwire.exchange.diverged import refuse_diverged
from thinwire.exchange.merging import OuterStatistics, average_buffers, average_moments
from thinwire.exchange.parts import (
    Cycle,
    Exchange,
    Feature,
    PartState,
    Run,
    Schedule,
    joins_not,
    refuses_code,
    refuses_columns,
)
from thinwire.factor.optimizers import Optimizers


class Parameters(Exchange):
    """Parameters, averaged between groups in turns of their fragments."""

    def __init__(self, config: Averaged) -> None:
        """The settings: a config that derives from `Averaged`, such as `LocalSGD(every=24, wire="int2")`."""
        self.config: Any = config
        self.fragments: list[AveragedTensors] = []
        """The last of them is sent at the end of each round."""
        self.buffers_at = 0
        """The step after which groups last agreed on buffers."""
        self.leaves_out_diverged = config.diverged == "leave_out"
        self.averages_moments = self._moments == "average"

    @property
    def _count(self) -> int:
        return getattr(self.config, "fragments", 1)

    @property
    def _moments(self) -> str:
        return getattr(self.config, "moments", "keep")

    def attach(self, run: Run) -> None:
        super().attach(run)
        self.schedule: Rounds = Rounds(self)
        self.round = Round(self.config, run.optimizers, run.wire)
        self.scales = ChangeScales(self.config, run.context, run.weight, lambda: not run.in_sync)
        self.outer = self._outer()
        self.statistics = OuterStatistics(run.model, self.outer)
        self.agreement: Agreement = Agreement(run.model, run.wire, self.round.is_annealing)
        self.contributions = Contributions(self.config, run.context, run.events, lambda: run.absent)
        self.same_bits = SameBits(run.wire, self.config.checksum_every)
        fragments_of(run.model, self._count)  # refused now, not after a warm-up

    def refuses(self, feature: Feature, config: Any) -> str | None:
        for name, value in (("second_moment", "shared"), ("rows", "seen")):
            if getattr(self.config, name) == value:
                if feature is Feature.JOIN:
                    return joins_not(f"{name}={value!r}")
                if feature is Feature.COLUMNS:
                    return refuses_columns(name, value)
        return refuses_code(self.config.wire, feature, config)

    def role(self, topology: Topology) -> Hashable:
        """All groups do the same."""
        return None

    def _outer(self) -> Nesterov | Radial | None:
        """The outer step for as many groups as there are."""
        outer = self.config.outer
        # Where updates are as long as all-reduce's, no momentum has to make up for short ones.
        groups = len(self.run.topology.groups) if self.config.second_moment == "group" else 1
        return outer.among(groups) if isinstance(outer, Nesterov) else outer

    def begin(self, *, again: bool) -> None:
        """From here on groups train apart."""
        if not again:
            self.scales.separate()
            self._make_fragments()
            self.round.begin(self.run.step)
            self._agreed()

    def end(self, *, again: bool) -> None:
        """One model again, with nothing left unsent."""
        if not again:
            self._merge(last=True)
            self.fragments = []  # which hold as much as the model

    @contextmanager
    def merged(self) -> Iterator[None]:
        """The mean of what groups hold; pending averages are waited for, and applied when they are due."""
        with self.run.wire.ledger.booked_under("merge"):  # counts as training, not as evaluation
            self._settle()
        with all_restored(self.run.model, self.fragments):
            self._merge()
            yield

    def _make_fragments(self) -> None:
        """With one group and no outer step there is nothing to average."""
        self.fragments = []
        if not (self.run.in_sync and self.config.outer is None):
            self.fragments = [self._averaged(each) for each in fragments_of(self.run.model, self._count)]

    def _averaged(self, parameters: Sequence[Tensor], *, is_whole: bool = False) -> AveragedTensors:
        """An outer step must not move what a lone worker has frozen meanwhile; unless this `is_whole`."""
        current = functools.partial(list[Tensor], parameters)
        return AveragedTensors(
            *(self.run.wire, current, self.config.wire, self.run.step),
            outer=self.outer,
            offload=getattr(self.config, "offload", False),
            measured=True,
            scaled=self.scales.are_used or self.contributions.need_agreed,
            copies_of=self.run.masters.of,
            is_fixed=(lambda p: False) if is_whole else (lambda p: not p.requires_grad),
        )

    def turns(self) -> list[list[AveragedTensors]]:
        """What is sent together in this round, one after the other; the last at its end."""
        return [[fragment] for fragment in self.fragments]

    def after_step(self) -> None:
        """Apply averages that are due, then send."""
        due = [fragment for fragment in self.fragments if fragment.due == self.run.step]
        if due:
            self._arrive(due)
        for fragment in self.fragments:
            if fragment.turn == self.run.step:
                fragment.aggregator.middle()
        turns = self.turns()
        for i, fragments in enumerate(turns):
            if self.round.has_turn(i, len(turns), self.run.step):
                self._send(fragments, self.config.overlap)
        if turns and self.round.ends(self.run.step):
            self._end_round()

    def _send(self, fragments: Sequence[AveragedTensors], overlap: int, *, last: bool = False) -> None:
        if (
            self.scales.moments.kind == "shared" and not self.run.in_sync
        ):  # a group that diverged stops before it is shared
            refuse_diverged(self.run.wire, self.run.model, self.run.observed, self.run.step)
        self._screen(fragments)
        scales = self.scales.of(fragments, self.fragments, ends_round=True)
        for fragment, scale in zip(fragments, scales, strict=True):
            # What the others left out earlier travels with the last one too.
            senders = None if last else self._senders(fragment)
            weights, gain = self._weights(fragment), self.contributions.gain
            fragment.send(self.run.step, overlap, weights=weights, senders=senders, scales=scale, gain=gain, last=last)
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
        if self.config.is_screened and not self.run.in_sync:
            self.contributions.screen(fragments, self.run.observed, self.run.step)

    def _senders(self, fragment: AveragedTensors) -> Sequence[int] | None:
        """The groups that trained it; None for all."""
        return None

    def _end_round(self) -> None:
        self.round.begin(self.run.step, self._next_change)

    @property
    def _next_change(self) -> int | None:
        """A step that rounds must not pass over by growing."""
        return None

    def _arrive(self, fragments: Sequence[AveragedTensors]) -> None:
        """Apply averages; everything else is averaged with the last fragment of each round."""
        ends_round = self._ends_round(fragments)
        if ends_round:
            self.run.check_counters()
        if any(f.pending is not None and f.pending.overlap for f in fragments):
            self._screen()  # otherwise that was just done
        if ends_round and not (self.config.is_screened and not self.run.in_sync):
            refuse_diverged(self.run.wire, self.run.model, self.run.observed, self.run.step)
        for fragment in fragments:
            self._receive(fragment)
        gains = self.agreement.measure(fragments, self.run.step)
        for fragment, gain in zip(fragments, gains, strict=True):
            self._apply(fragment, gain)
        if self.contributions.is_left_out:
            self._start_again([f for f in self.fragments if f not in fragments], keeps_moments=ends_round)
        if ends_round:
            average_buffers(self.run.wire, self.run.model.buffers(), self.contributions.share)
            self.statistics.step()
            self._average_moments()
            self._agreed()
            self.same_bits.averaged(self._held_alike, self.run.step)
            self.run.context.after_merge()

    def _held_alike(self) -> Named:
        """What all workers hold with the same bits when a round has ended."""
        names = {id(p): repr(name) for name, p in self.run.model.named_parameters()}
        apart = {id(p) for f in self.fragments if self.is_apart(f) for p in f.tensors()}
        held: Named = [(f"parameter {names[id(p)]}", p) for p in self.run.model.parameters() if id(p) not in apart]
        held += [(f"buffer {name!r}", b) for name, b in self.run.model.named_buffers()]
        for fragment in self.fragments:
            labels = [names.get(id(t), "a tensor") for t in fragment.tensors()]
            held += [(f"the {what} of {labels[i]}", t) for what, i, t in fragment.outer_state()]
        return held + [("running statistics of the outer step", t) for t in self.statistics.tensors()]

    def _ends_round(self, fragments: Sequence[AveragedTensors]) -> bool:
        return self.fragments[-1] in fragments

    def _average_moments(self) -> None:
        if self._moments == "reset":
            self.run.optimizers.reset(self._held)
        elif self._moments == "average":
            average_moments(self.run.wire, self.run.optimizers, self._held, self.contributions.share)

    @property
    def _held(self) -> list[nn.Parameter]:
        """All parameters, as optimizers know them."""
        return [whole_of(p) for p in self.run.model.parameters()]

    @property
    def _averages_moments(self) -> bool:
        """Whether this group takes the others' moments when a round ends now."""
        return self._moments == "average"

    def _start_again(self, others: Sequence[AveragedTensors], *, keeps_moments: bool) -> None:
        """This group was left out and has what arrived; take `others` as agreed, and drop what came from its own."""
        for fragment in others:
            fragment.move(1.0, fragment.level)
        if not (keeps_moments and self._averages_moments):
            self.run.optimizers.reset(self._held)
        self.run.observed.zero_()

    def _apply(self, fragment: AveragedTensors, gain: Tensor | None = None) -> None:
        assert fragment.pending is not None, "nothing was received"
        overlap = fragment.pending.overlap  # only what was trained is sent so, though it may be paused by now
        fragment.agree(gains=gain, outer=bool(overlap) or self._was_trained(fragment))
        mixes = overlap and self._trains(fragment)
        if self.contributions.is_left_out and mixes:
            fragment.move(1.0, fragment.level)  # all of it here, but others mix
        else:
            fragment.move(1 - self.config.mix if mixes else 1.0, self.run.step)

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
        if self.run.in_sync:
            return
        pending = [fragment for fragment in self.fragments if fragment.pending is not None]
        if not self.config.is_screened:
            refuse_diverged(self.run.wire, self.run.model, self.run.observed, self.run.step)
        elif pending:
            self._screen()
        for fragment in pending:
            self._receive(fragment)
            self._apply(fragment)
        apart = [f for f in self.fragments if self.is_apart(f) or (last and self._refines(f))]
        self._screen(apart)
        scales = self.scales.of(apart, self.fragments, ends_round=last)
        for fragment, scale in zip(apart, scales, strict=True):
            senders = None if last else self._senders(fragment)
            weights, gain = self._weights(fragment), self.contributions.gain
            fragment.send(self.run.step, 0, weights=weights, senders=senders, scales=scale, gain=gain, last=last)
        for fragment in apart:
            self._receive(fragment)
            fragment.agree(outer=False)
            fragment.move(1.0, self.run.step)
        if self.buffers_at != self.run.step:
            average_buffers(self.run.wire, self.run.model.buffers(), self.contributions.share)

    def _refines(self, fragment: AveragedTensors) -> bool:
        """Whether a code has left something out; in the shard of any member, so that all of a group send alike."""
        return not self.run.wire.all_of_group(not fragment.aggregator.refine())

    def is_apart(self, fragment: AveragedTensors) -> bool:
        """Whether groups may hold different values of it."""
        return fragment.level != self.run.step

    def _receive(self, fragment: AveragedTensors) -> None:
        if not fragment.receive():
            refuse_diverged(self.run.wire, self.run.model, self.run.observed, self.run.step)
            raise not_finite(self.run.step)

    def _settle(self) -> None:
        """Wait for pending averages; they are still applied when they are due."""
        for fragment in self.fragments:
            if fragment.pending is not None:
                self._receive(fragment)

    def _agreed(self) -> None:
        self.buffers_at = self.run.step
        self.run.observed.zero_()

    # Checkpoints.

    def state_dict(self) -> PartState:
        """With pending averages, which are waited for."""
        self._settle()
        fragments, scales = [fragment.state_dict() for fragment in self.fragments], self.scales.state_dict()
        shared = {"buffers_at": self.buffers_at, "fragments": [f["shared"] for f in fragments]}
        shared |= {"round": self.round.state_dict(), "agreement": self.agreement.state_dict()}
        shared |= {"statistics": self.statistics.state_dict(), "averages": self.same_bits.averages}
        shared |= {"scales": scales["shared"]}
        return PartState(shared, {"fragments": [f["local"] for f in fragments], "scales": scales["local"]})

    def forget(self, how: Literal["drop", "abandon", "restart"]) -> None:
        """After a restart agreed values, momentum and residuals start from what all hold."""
        for fragment in self.fragments:
            fragment.abandon() if how == "abandon" else fragment.drop()
        if how == "restart":
            self.contributions.clear()
            self.scales.forget()
            self._make_fragments()
            self.statistics.restart()

    def load_state_dict(self, state: PartState, *, stays: bool) -> None:
        """A save of one group may hold nothing agreed on but the model."""
        shared, local = state.shared, state.local
        self.buffers_at = shared["buffers_at"]
        self.round.load_state_dict(shared["round"])
        self.agreement.load_state_dict(shared["agreement"])
        self.statistics.load_state_dict(shared["statistics"])
        self.same_bits.averages = shared["averages"]
        self.contributions.clear()
        self.scales.load_state_dict(shared["scales"], local["scales"] if local else None, stays)
        self.scales.moments.share = self.run.weight
        self.outer = self.statistics.outer = self._outer()
        self._make_fragments()
        for i, (fragment, kept) in enumerate(zip(self.fragments, shared["fragments"], strict=False)):
            fragment.load_state_dict(kept, local["fragments"][i] if local else {}, stays)
        if self.fragments:
            self.round.resume(self.run.step)


class Rounds(Schedule):
    """Turns of fragments, and the rounds that they make up."""

    of: Parameters

    @property
    def next_event(self) -> int:
        """The next fragment that is sent, or comes back."""
        of, turns, step = self.of, self.of.turns(), self.run.step
        ahead = [of.round.turn(i, len(turns), step) for i in range(len(turns))]
        ahead += [due for f in of.fragments if (due := f.due) is not None]
        ahead += [turn for f in of.fragments if (turn := f.turn) is not None and turn > step]
        return min(ahead, default=sys.maxsize)

    @property
    def last_average(self) -> int:
        """Each fragment has a turn in every round."""
        return self.run.step + 1 - self.of.round.period

    @property
    def holds_one_model(self) -> bool:
        """Right after an average."""
        return not any(self.of.is_apart(fragment) for fragment in self.of.fragments)

    @property
    def averaged(self) -> Sequence[AveragedTensors]:
        return self.of.fragments

    @property
    def missed(self) -> str:
        """Also averages: that of `finish` does not count."""
        return "" if self.run.in_sync or self.of.same_bits.averages else "never averaged before the end"

    @property
    def cycle(self) -> Cycle:
        """A round in which each fragment has its turn."""
        of, step = self.of, self.run.step
        parts = [
            (f.pending and (step - f.pending.sent, f.pending.received), f.momentum is None, f.level == step)
            for f in of.fragments
        ]
        place = step - of.round.start, of.round.period, of.buffers_at == step, of.same_bits.place
        return Cycle((*place, *parts))

    def shift(self, steps: int) -> None:
        self.of.buffers_at += steps
        self.of.round.start += steps
        for fragment in self.of.fragments:
            fragment.shift(steps)


class Round:
    """The steps between two averages of everything."""

    def __init__(self, config: Averaged, optimizers: Optimizers, wire: Wire) -> None:
        self.config = config
        self.optimizers = optimizers
        self.wire = wire
        self.start = 0
        """The step after which it began."""
        self.period = config.round_length
        """Steps in it."""
        self.highest_rate = 0.0
        """The highest learning rate at the beginning of a round so far."""

    def begin(self, step: int, until: int | None = None) -> None:
        """A new round, as long on all workers; one that has grown ends at step `until` if it would pass over it."""
        self.start, self.period = step, self.config.round_length
        rate = self.rate
        self.highest_rate = max(rate, self.highest_rate)
        if self.config.every_max is None:
            return
        own = self.config.every_max if self.highest_rate > 0 else self.config.round_length
        if until is not None and until > step:
            own = max(self.config.round_length, min(own, until - step))
        if rate * rate > 0:
            own = min(own, int(self.config.round_length * (self.highest_rate / rate) ** 2))
        self.period = int(min(row[0] for row in self.wire.all_gather_scalars([float(own)], "control")))

    def resume(self, step: int) -> None:
        """Begin again if the round is long over: a group that was alone has had none. All workers see that alike."""
        if step - self.start >= self.period:
            self.start, self.period = step, self.config.round_length

    @property
    def rate(self) -> float:
        """The highest learning rate of all parameter groups now."""
        return max(self.optimizers.rates)

    def is_annealing(self) -> bool:
        """Whether the learning rate has fallen far below the highest one."""
        return self.rate < 0.25 * self.highest_rate

    def offset(self, index: int, count: int) -> int:
        """Steps from its start to the turn of one of `count` that are spread over it."""
        return self.period * (index + 1) // count

    def has_turn(self, index: int, count: int, step: int) -> bool:
        return step - self.start == self.offset(index, count)

    def turn(self, index: int, count: int, step: int) -> int:
        """The next step at which one of `count` has its turn, if the next round is as long."""
        at = self.start + self.offset(index, count)
        return at if at > step else at + self.period

    def ends(self, step: int) -> bool:
        return step - self.start == self.period

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start, "period": self.period, "highest_rate": self.highest_rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.period, self.highest_rate = state["start"], state["period"], state["highest_rate"]


def fragments_of(model: nn.Module, count: int) -> list[list[nn.Parameter]]:
    """Trained parameters in `count` fragments of nearly the same size, whole layers each.

    The largest layer goes to the fragment that has least so far. Layers of one size thus take turns, and each fragment
    has some from the whole depth of the model.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for layer_of in (_block, lambda name: name.rpartition(".")[0]):
        layers: dict[str, list[nn.Parameter]] = {}
        for name, p in trained:
            layers.setdefault(layer_of(name), []).append(p)
        if len(layers) >= count:
            break
    else:
        raise ConfigError(
            f"`fragments`={count} is more than the {len(layers)} layers of this model that are trained; "
            f"use at most {len(layers)}"
        )
    sizes = [0] * count
    home: dict[int, int] = {}
    for layer in sorted(layers.values(), key=lambda layer: -_size(layer)):
        least = sizes.index(min(sizes))
        sizes[least] += _size(layer)
        home.update({id(p): least for p in layer})
    return [[p for _, p in trained if home[id(p)] == i] for i in range(count)]


def _size(layer: list[nn.Parameter]) -> int:
    """Of whole weights: members of a group that shards them must cut alike."""
    return sum(whole_of(p).numel() for p in layer)


def _block(name: str) -> str:
    """The entry of a list of modules that a parameter is in, as "h.3" for "h.3.mlp.weight"; else its module."""
    modules = name.split(".")[:-1]
    number = next((i for i, module in enumerate(modules) if module.isdigit()), len(modules))
    return ".".join(modules[: number + 1])
