"""The contract between a method and the replica that drives it.

    attach()                     once, when every worker holds the same model
    after_step()                 when a step is over; the only place where phase or shape may change
    begin_again()                when other values were loaded into the model
    merged()                     around an evaluation while workers hold different models
    finish(cutoff)               once, at the end: one model on all workers, as small as the method makes it
    state_dict(), load_state_dict(…)    what a checkpoint needs beyond model and optimizer

    phase, in_sync, next_event   what it does, whether all workers hold the same model, the next step that may differ

A method changes the model and its optimizers in place, and reaches other workers only through its wire. It averages
gradients by `self.gradients` (engine 1), parameters by `averaging.py` (engine 2). What it alone needs, such as a hook
around updates, it adds to its context. `register` makes it known; docs/extending.md shows a whole one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire.base.errors import ThinwireError
from thinwire.comm import process_groups
from thinwire.comm.fsdp import shard_again, with_modules
from thinwire.comm.topology import Topology
from thinwire.factor.convert import Kept, Layer, OrderOfUse, find_layers, to_factors, to_full
from thinwire.methods.agree import agreed_factors, agreed_in_turn, gathered_layer
from thinwire.methods.context import MethodContext, Saved
from thinwire.methods.features import Feature
from thinwire.methods.gradients import GradientAveraging
from thinwire.methods.masters import Masters
from thinwire.methods.meetings import Counters, Waits


def untraced(method: Callable[..., Any]) -> Any:
    """The method as `torch.compile` leaves it alone; what it calls may be compiled."""
    try:
        return torch.compiler.disable(method, recursive=False)
    except AttributeError:  # torch 2.6 marks functions only, not methods

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        return torch.compiler.disable(call, recursive=False)


if TYPE_CHECKING:
    from thinwire.methods.agreement import Agreement
    from thinwire.methods.averaged import AveragedTensors


class Cycle(NamedTuple):
    """A place in a cycle of steps, for plans: equal steps from equal places send the same."""

    place: Hashable
    """Counted from the present step."""
    end: int
    """The step at which this stops being true."""


class Method(ABC):
    """One way of training over a slow link."""

    phases: ClassVar[tuple[str, ...]] = ("train",)
    """Every name that `phase` may have, the first one first."""
    only_gradients: ClassVar[bool] = False
    """Whether the optimizer alone changes parameters: they are never averaged, and keep their shapes."""
    cuts_at_end: ClassVar[bool] = False
    """Whether `finish` cuts at the config's `cutoff` where none is given."""
    must_factor = False
    """Whether a model without layers to factor is refused."""
    usage: OrderOfUse | None = None
    """Watches the order in which layers are used, where the first and the last stay full."""
    agreement: "Agreement | None" = None
    """How far groups agreed at averages, where that is measured."""

    def __init__(self, config: Any, context: MethodContext) -> None:
        self.config = config
        self.context = context
        self.model, self.optimizers, self.wire = context.model, context.optimizers, context.wire
        self.masters = Masters(context.optimizers)
        self.counters = Counters(context.wire, context.optimizers, context.has_scaler)
        self.gradients = GradientAveraging(context)
        self.step = 0
        self.forwards = 0
        self.waits = Waits()
        self.absent: frozenset[int] = frozenset()
        """Groups that have trained nothing since the last average, and have no weight in the next one: in `join()`."""
        self.observed = torch.zeros(2, dtype=torch.float64)  # sum of losses, how many
        self.events: list[dict[str, Any]] = []
        """Decisions during the run, as plain values with their steps, for the summary."""
        self.layers: list[Layer] = []
        self.kept: list[Kept] = []
        self.decompositions = 0
        self.found_ranks: dict[str, int] = {}
        # Counters must not be traced: every step would look like another program to torch.compile.
        self.forward = untraced(self.forward)  # type: ignore[method-assign]
        self.watch = torch.compiler.disable(self.gradients.replicated.watch)
        self.set_phase(self.phases[0])

    @property
    def topology(self) -> Topology:
        """The layout, as it is now."""
        return self.wire.topology

    @classmethod
    def refuses(cls, config: Any, feature: Feature) -> str | None:
        """Why a run by this config cannot use a feature, and what to do instead; None if it can.

        It is asked before there are workers to talk to. Each class answers for what it adds.
        """
        return None

    # The contract.

    @abstractmethod
    def attach(self) -> None:
        """Take over the model, and choose how gradients are averaged at first."""

    @abstractmethod
    def after_step(self) -> None:
        """A step is over, and counted; do what is due now."""

    @property
    def in_sync(self) -> bool:
        """Whether all workers hold the same model between steps."""
        return True

    @property
    def holds_one_model(self) -> bool:
        """Whether all workers hold the same parameters now, perhaps only until the next step."""
        return self.in_sync

    @property
    def trains_apart(self) -> bool:
        """Whether groups train apart in some phase."""
        return not self.only_gradients

    @property
    def leaves_out_diverged(self) -> bool:
        """Whether a group whose values are not finite is left out of averages; else the run stops."""
        return False

    @property
    def averages_moments(self) -> bool:
        """Whether groups average their optimizers' state."""
        return False

    @property
    def next_event(self) -> int:
        """The next step that may be unlike the one before it; a plan simulates those before it by one of them."""
        return self.step + 1

    @property
    def meets_next(self) -> bool:
        """Whether the end of the next step is more than agreeing on buffers.

        Where groups may be lost, all of them do it or none.
        """
        return self.next_event <= self.step + 1

    @property
    def last_average(self) -> int | None:
        """The step of the last average of what the end of the next step averages; None is when groups last met."""
        return None

    @property
    def missed(self) -> str:
        """What the method has not done by the end of a run, for the log."""
        return f"never left its {self.phase!r} phase" if self.phase == self.phases[0] != self.phases[-1] else ""

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Give every worker, for a while, the model that a merge would give now."""
        yield

    def finish(self, cutoff: float | None) -> None:
        """Leave one model on all workers; cut it where a cutoff is given."""
        if cutoff is not None:
            self.layers, self.kept = find_layers(with_modules(self.model), trained=self.optimizers.parameters)
            self.cut(cutoff)

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors: what is the same on all workers of a group, and what is this worker's; collective.

        Plain values under "shared" are the same on all workers.
        """
        gradients = self.gradients.state_dict()
        return {
            "shared": {
                "step": self.step,
                "phase": self.phase,
                "events": [dict(event) for event in self.events],
                "decompositions": self.decompositions,
                "found_ranks": self.found_ranks,
                "gradients": gradients["shared"],
            },
            "local": {
                "forwards": self.forwards,
                "idle": self.counters.idle,
                "observed": self.observed.tolist(),
                "gradients": gradients["local"],
            },
        }

    def drop_pending(self) -> None:  # noqa: B027
        """Forget what was sent and has not arrived: something is loaded, perhaps because it is what diverged."""

    def begin_again(self) -> None:
        """Other values were loaded into the model, the same on all workers: forget what belongs to those before them.

        Collective.
        """
        self.drop_pending()
        self.masters.follow()
        self.gradients.forget()
        self.observed.zero_()

    def abandon_pending(self) -> None:  # noqa: B027
        """Forget the same without waiting: groups are not as they were when it was sent."""

    def load_state_dict(self, saved: Saved) -> None:
        """Continue from what all workers' `state_dict` gave; values are loaded when the model has its shape."""
        self.step = saved.shared["step"]
        self.set_phase(saved.shared["phase"])
        self.events[:] = saved.shared["events"]
        self.decompositions, self.found_ranks = saved.shared["decompositions"], saved.shared["found_ranks"]
        local = saved.local or saved.everyone[0]
        self.forwards, self.counters.idle = local["forwards"], local.get("idle", 0)
        self.observed = torch.tensor(local["observed"], dtype=torch.float64)
        saved.load_values()
        self.gradients.load_state_dict(saved)

    def factor_now(self) -> None:
        """Make factors of the weights at the next average; collective."""
        raise ThinwireError(f"factor_now() is for thinwire.AB, not for {type(self.config).__name__}")

    # What plans ask; the defaults are slow and exact.

    @classmethod
    def role(cls, config: Any, topology: Topology) -> Hashable:
        """The same for workers that do the same, where their groups have the same size; by default each is unlike."""
        return len(topology.groups), topology.group_index

    @property
    def cycle(self) -> Cycle | None:
        """The place in a cycle of steps that repeats, if there is one."""
        return None

    def shift(self, steps: int) -> None:  # noqa: B027
        """Be as if everything so far had happened so many steps later."""

    @property
    def assumes(self) -> str:
        """What has to be true for a run to send what a plan says, in words."""
        return ""

    @property
    def averaged_tensors(self) -> "Sequence[AveragedTensors]":
        """What is averaged between groups, for the memory it takes."""
        return ()

    # What the replica calls, the same for all methods.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A training batch through the model."""
        replicated = self.gradients.replicated
        self.forwards += replicated.syncs
        outputs = replicated.forward(*args, **kwargs)
        self.watch(outputs)
        return outputs

    def end_step(self) -> None:
        """All optimizers have stepped."""
        self.step += 1
        self.waits.arrive()
        self.settle()

    def settle(self) -> None:
        """What is to be done after a step; where nothing is due, it may be done again."""
        with self.wire.ledger.times.after_step():
            self.gradients.end_step()
            self.wire.ledger.clock.time_all()
            self.after_step()
            if self.masters.names:  # or an optimizer would undo what the method made of its parameters
                self.masters.follow()

    def observe(self, loss: float | Tensor) -> None:
        """Note a training loss; never waits for the device."""
        value = loss.detach().to(torch.float64).mean() if isinstance(loss, Tensor) else float(loss)
        self.observed = self.observed.to(value.device) if isinstance(value, Tensor) else self.observed
        self.observed[0] += value
        self.observed[1] += 1

    def release(self) -> None:
        """Release the model, in its present shape."""
        self.gradients.replicated.unwrap()
        process_groups.rest()
        for callback in self.context.on_release:
            callback()

    # What methods share.

    @property
    def weight(self) -> float:
        """This group's share in a mean over workers."""
        return len(self.topology.group) / self.topology.world_size

    def set_phase(self, phase: str) -> None:
        """Enter a phase; the ledger has bytes and seconds by phase."""
        self.phase = phase
        self.wire.ledger.phase = phase

    def check_counters(self) -> None:
        """Refuse workers at different steps or learning rates; called before every change of phase, collective."""
        rows = self.counters.check(self.step, self.forwards, self.waits.own)
        self.waits.meet(rows, self.topology.groups, self.topology.rank)

    def agreed_factors(self, cutoff: float | None) -> Iterable[tuple[Layer, tuple[Tensor, ...]]]:
        """Factors of every layer that they make smaller, the same on all workers; collective.

        Without a cutoff, at the highest rank at which they do. Those of a sharded model are found one after the other,
        while the caller takes them.
        """
        self.decompositions += 1
        if self.wire.is_sharded:
            return self._factors_in_turn(cutoff)
        found = agreed_factors(self.layers, self.wire, lambda layer: self.context.find_factors(layer, cutoff))
        self.found_ranks = {layer.label: factors[0].shape[1] for layer, factors in found}
        return found

    def _factors_in_turn(self, cutoff: float | None) -> Iterator[tuple[Layer, tuple[Tensor, ...]]]:
        with_modules(self.model)
        self.found_ranks = {}
        for layer, factors in agreed_in_turn(
            self.layers, self.wire, lambda layer: self.context.find_factors(layer, cutoff)
        ):
            self.found_ranks[layer.label] = factors[0].shape[1]
            yield layer, factors

    def give_factors(self, layer: Layer, *factors: Tensor) -> None:
        """Replace a weight, or its factors, by these; where the model is sharded, they are."""
        old = layer.parameters
        to_factors(layer, *factors)
        shard_again(self.model, layer, old)

    def give_weight(self, layer: Layer) -> None:
        """Multiply a factored layer out; collective inside a group that shards it."""
        old = layer.parameters
        to_full(layer, gathered_layer(layer, self.wire).factors)
        shard_again(self.model, layer, old)

    def cut(self, cutoff: float) -> None:
        """Cut every layer that becomes smaller by it, and note those that do not."""
        for layer, factors in self.agreed_factors(cutoff):
            self.give_factors(layer, *factors)
        why = f"rank too high at cutoff {cutoff}"
        self.kept = [*self.kept, *(Kept(layer.key, why) for layer in self.layers if not layer.is_factored)]
