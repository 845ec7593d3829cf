"""What a method consists of: exchanges, a shape and update rules, which its phases name and the runner asks.

    exchange       what crosses the wire, and when: gradients at every step, parameters from time to time
    shape          what the model looks like: full, as factors, in a basis
    update rule    what bends the optimizers' updates

All have a beginning and an end by phase, and a state; each says what a run cannot use beside it. A part that is named
in two phases in a row stays, with its state.
"""

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.comm.replicate import Replicated
from thinwire.comm.topology import Topology
from thinwire.comm.wire import Wire
from thinwire.config.common import parse_code
from thinwire.exchange.masters import Masters
from thinwire.factor.convert import Layer
from thinwire.factor.optimizers import Optimizers
from thinwire.factor.ranks import find_basis, find_factors, ranks_within


@dataclass
class Saved:
    """A method's part of a checkpoint."""

    shared: dict[str, Any]
    """What is the same on all workers of a group."""
    everyone: Sequence[dict[str, Any]]
    """Each worker's own part, by rank."""
    own: int | None
    """Which of these is this worker's; None where groups are not as they were."""
    load_values: Callable[[], None]
    """Fills model and optimizers, which must have their shapes by then."""
    stays: bool = False
    """Whether this worker goes on by itself, beside other groups than before: its own part is not cut as theirs is."""

    @property
    def local(self) -> dict[str, Any] | None:
        """This worker's own part, if there is one."""
        return None if self.own is None else self.everyone[self.own]


@dataclass
class MethodContext:
    """What a method works with."""

    model: nn.Module
    optimizers: Optimizers
    wire: Wire
    ddp: dict[str, Any] = field(default_factory=dict)
    """Further arguments of DistributedDataParallel."""
    replicate: Callable[[nn.Module, Wire, dict[str, Any]], Replicated] = Replicated
    """Makes what averages gradients inside a group; a simulation counts passes instead."""
    has_scaler: bool = False
    scale: Callable[[], float] = lambda: 1.0
    """What the GradScaler multiplies losses by now."""
    after_merge: Callable[[], None] = lambda: None
    """Call it when workers that trained apart hold one model again."""
    find_factors: Callable[[Layer, float | None], tuple[Tensor, ...] | None] = find_factors
    """A layer's factors at a cutoff, or at the highest rank at which they are smaller; None where there are none. A
    simulation predicts them instead."""
    find_basis: Callable[[Layer, float, float], tuple[Tensor, ...]] = find_basis
    """A layer's U, S and Vᵀ at a cutoff, and the largest share of its ranks that may be dropped; predicted likewise."""
    choose_ranks: Callable[[Sequence[tuple[Layer, Tensor, Tensor]], int, float], list[int]] = ranks_within
    """The ranks of layers, given with their factors, at which a model of so many parameters is so many times smaller;
    0 for a layer that stays full. Predicted likewise."""

    # What a method may set or add to, when it is built.

    before_update: list[Callable[[Optimizer], None]] = field(default_factory=list)
    """Called right before an optimizer changes its parameters."""
    after_update: list[Callable[[Optimizer], None]] = field(default_factory=list)
    """Called right after it; not if a scaler skipped the update."""
    on_epoch_end: list[Callable[[float | None], None]] = field(default_factory=list)
    """Called with this worker's mean loss, or None for that of the losses observed."""
    on_release: list[Callable[[], None]] = field(default_factory=list)
    """Called when the method lets go of the model."""
    lr_factor: Callable[[], float] = lambda: 1.0
    """What the scheduled learning rate is multiplied by in the next update."""
    users_optimizers: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered while a checkpoint reads the optimizers, which then have all of the user's settings."""
    clips: bool = False
    """Whether the method clips gradients itself, before they are averaged; a loop then must not."""


if TYPE_CHECKING:
    from thinwire.exchange.agreement import Agreement
    from thinwire.exchange.averaged import AveragedTensors
    from thinwire.exchange.gradients import GradientAveraging
    from thinwire.exchange.meetings import Counters


class Run(Protocol):
    """What a part knows of the run that it belongs to."""

    config: Any
    context: MethodContext
    model: nn.Module
    optimizers: Optimizers
    wire: Wire
    masters: Masters
    counters: "Counters"
    gradients: "GradientAveraging"
    """How gradients are averaged now: at every step by the world, or inside each group alone."""
    phase: str
    step: int
    """Steps that are over."""
    forwards: int
    observed: Tensor
    """The sum of the losses that were observed since groups last met, and how many."""
    absent: frozenset[int]
    """Groups that have trained nothing since the last average, and have no weight in the next one: in `join()`."""
    events: list[dict[str, Any]]
    """Decisions during the run, as plain values with their steps, for the summary."""

    @property
    def parts(self) -> "Sequence[Part]":
        """Those of this phase."""

    @property
    def topology(self) -> Topology:
        """The layout, as it is now."""

    @property
    def weight(self) -> float:
        """This group's share in a mean over workers; none if it is `absent`."""

    @property
    def in_sync(self) -> bool:
        """Whether all workers hold the same model between steps."""

    @property
    def phase_end(self) -> int:
        """The step at which this phase ends, if that is known."""

    def check_counters(self) -> None:
        """Refuse workers at different steps or learning rates; collective."""


class Feature(Enum):
    """What a run may use beside its method, and parts may refuse by their settings."""

    FAULTS = "faults=…"
    """Groups may be lost at any step: the others go on, and take back what was under way."""
    JOIN = "join()"
    """Some workers have fewer batches: they take part in what others wait for, with nothing new."""
    SHARDS = "sharded models"
    """Members of a group hold different parts of each weight."""
    COLUMNS = "models sharded by columns"
    """Those parts are not rows."""


class PartState(NamedTuple):
    """What a part needs to go on, as plain values and tensors."""

    shared: dict[str, Any] = {}
    """The same on all workers of a group; plain values on all workers."""
    local: dict[str, Any] | None = {}
    """This worker's own; None where groups are not as they were when it was saved."""


class Cycle(NamedTuple):
    """A place in a cycle of steps, for plans: equal steps from equal places send the same."""

    place: Hashable
    """Counted from the present step."""
    end: int = sys.maxsize
    """The step at which this stops being true."""


class Schedule:
    """When a part is due, for plans, for `join()` and where groups may be lost; by default never."""

    of: Any

    def __init__(self, of: "Part") -> None:
        self.of, self.run = of, of.run

    @property
    def next_event(self) -> int:
        """The next step that may be unlike the one before it; a plan simulates those before it by one of them."""
        return sys.maxsize

    @property
    def meets_next(self) -> bool:
        """Whether the end of the next step is more than agreeing on buffers; where groups may be lost, all do it."""
        return self.next_event <= self.run.step + 1

    @property
    def last_average(self) -> int | None:
        """The step of the last average of what the end of the next step averages; None is when groups last met."""
        return None

    @property
    def holds_one_model(self) -> bool:
        """Whether all workers hold the same parameters now, although they train apart."""
        return False

    @property
    def cycle(self) -> Cycle | None:
        """The place in a cycle of steps that repeats, if there is one."""
        return None

    def shift(self, steps: int) -> None:
        """Be as if everything so far had happened so many steps later."""

    @property
    def averaged(self) -> "Sequence[AveragedTensors]":
        """What is averaged between groups, for the memory it takes."""
        return ()

    @property
    def assumes(self) -> str:
        """What has to be true for a run to send what a plan says, in words."""
        return ""

    @property
    def missed(self) -> str:
        """What has not happened by the end of a run, for the log."""
        return ""


class Part:
    """An exchange, a shape or an update rule."""

    run: Run
    schedule: Schedule

    def attach(self, run: Run) -> None:
        """The run begins, or this worker joins one; nothing may be sent here."""
        self.run = run
        self.schedule = Schedule(self)

    def begin(self, *, again: bool) -> None:
        """A phase begins that names this part; `again` if the one before did too."""

    def end(self, *, again: bool) -> None:
        """A phase that names this part is over, or the run is; `again` if the next phase names it too."""

    def after_step(self) -> None:
        """A step of such a phase is over; do what is due."""

    def refuses(self, feature: Feature, config: Any) -> str | None:
        """Why a run cannot use a feature, and what to do instead; None if it can. Asked before the run begins."""
        return None

    def state_dict(self) -> PartState:
        """What a save needs, and a group that joins; what is under way is waited for."""
        return PartState()

    def load_state_dict(self, state: PartState, *, stays: bool) -> None:
        """Go on from a state; `stays` if it is this worker's own, beside other groups than before."""


class UpdateRule(Part):
    """Something that happens around updates: `attach` adds hooks to `run.context`."""


class AnyStep(Schedule):
    """Something may be due at the end of every step: slow to plan, and never wrong."""

    @property
    def next_event(self) -> int:
        return self.run.step + 1


class Every(Schedule):
    """Something is due after every so many steps."""

    def __init__(self, of: Part, *intervals: int) -> None:
        super().__init__(of)
        self.intervals = intervals

    @property
    def next_event(self) -> int:
        return min((self.run.step // steps + 1) * steps for steps in self.intervals)


class Exchange(Part):
    """Something that crosses the wire."""

    trains_apart: ClassVar[bool] = True
    """Whether groups hold different models between steps; their gradients are then averaged inside a group alone."""
    leaves_out_diverged: bool = False
    """Whether a group whose values are not finite is left out of averages; else the run stops."""
    averages_moments: bool = False
    """Whether groups average their optimizers' state."""
    leaves_moments: ClassVar[bool] = True
    """Whether optimizers' state may differ when it ends; it is averaged then if the world trains on together."""
    agreement: "Agreement | None" = None
    """How far groups agreed at averages, where that is measured."""

    def attach(self, run: Run) -> None:
        super().attach(run)
        self.schedule = AnyStep(self)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Give every worker, for a while, the model that an average would give now."""
        yield

    def forget(self, how: Literal["drop", "abandon", "restart"]) -> None:
        """Forget what was sent and has not arrived: wait for it and drop it, or do not wait since groups are others.

        `restart` also forgets what earlier averages left: all hold values that were loaded, and go on from them.
        """

    def role(self, topology: Topology) -> Hashable:
        """The same for workers that do the same, where their groups have the same size; by default each is unlike."""
        return len(topology.groups), topology.group_index


def joins_not(what: str) -> str:
    """The words for settings that `join()` cannot have."""
    return f"join() is not for {what}; give all workers equally many batches"


def needs_every_group(feature: Feature, config: Any, averages: str) -> str | None:
    """Why a run cannot use `join()` where all groups count alike, or a code of the config that shards cannot have."""
    if feature is Feature.JOIN:
        return joins_not(f"{type(config).__name__}, whose {averages} that have trained nothing")
    codes = [getattr(config, name) for name in ("wire", "warmup_wire") if getattr(config, name, None)]
    return next(filter(None, (refuses_code(code, feature, config) for code in codes)), None)


def refuses_code(code: str, feature: Feature, config: Any) -> str | None:
    """Why this code cannot carry the parts of a model that is sharded by columns."""
    kind = parse_code(code).kind
    name = next((name for name in ("wire", "warmup_wire") if getattr(config, name, None) == code), "wire")
    if feature is Feature.COLUMNS and kind == "lowrank":
        return f"{refuses_columns(name, code)}, or use 'int8'"
    return None


def refuses_columns(name: str, value: str) -> str:
    """The words for settings that want a worker to have whole rows."""
    return (
        f"`{name}`={value!r} is for models sharded by rows, and shard_placement_fn chose another dimension: leave it "
        "out of fully_shard()"
    )
