"""What a method is given: the model, its optimizers, the wire, and lists of callbacks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.comm.replicate import Replicated
from thinwire.comm.wire import Wire
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
