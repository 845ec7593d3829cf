"""The contract between a method and the replica that drives it.

The replica calls, in this order:

    attach()                   once, when every worker holds the same model
    forward(…)                 for each training batch
    lr_factor                  right before the optimizer's update, which it scales and which is put back after it
    before_update(optimizer), after_update(optimizer)    right around each update; a scaler may skip it
    after_step()               when a step is over; the only place where phase or shape may change
    epoch_end(loss)            when the user's loop says that an epoch is over
    lend_merged()              around an evaluation while workers hold different models
    finish(cutoff)             once, at the end: one model on all workers, as small as the method makes it
    settle()                   before a checkpoint: what is under way must have arrived
    state() / load_state(…)    what a checkpoint needs beyond model and optimizer

A method changes the model and its optimizers in place, and talks to other workers only through its wire.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.comm.collectives import Pending, Wire
from thinwire.comm.replicate import Replicated
from thinwire.comm.topology import Topology
from thinwire.errors import ConfigError, DisagreementError
from thinwire.factor.convert import Kept, Layer, find_layers, to_factors
from thinwire.factor.optimizers import Optimizers
from thinwire.methods.agree import agreed_factors, find_basis, find_factors


@dataclass
class Ground:
    """What a method stands on."""

    model: nn.Module
    optimizers: Optimizers
    wire: Wire
    ddp: dict[str, Any] = field(default_factory=dict)
    has_scaler: bool = False
    after_merge: Callable[[], None] = lambda: None
    """Called when workers that trained apart are one again."""
    find_factors: Callable[[Layer, float], tuple[Tensor, ...] | None] = find_factors
    """A layer's factors at a cutoff, or None where they would not be smaller; a rehearsal foresees them instead."""
    find_basis: Callable[[Layer, float, float], tuple[Tensor, ...]] = find_basis
    """A layer's U, S and Vᵀ at a cutoff, with the share of its ranks that may be dropped at most; foreseen likewise."""
    scale: Callable[[], float] = lambda: 1.0
    """What the GradScaler multiplies losses by now."""


class Cycle(NamedTuple):
    """A place in a cycle of steps: from equal places on, equal steps send the same."""

    place: Hashable
    """Counted from the present step."""
    end: int
    """The step from which on this is not so any more."""


class Method(ABC):
    """One way of training over a slow link."""

    phases: ClassVar[tuple[str, ...]]
    """Every name that `phase` may have."""
    complex_wires: ClassVar[tuple[str, ...]] = ("fp32", "bf16")
    """Wires that carry complex parameters, which codes of real numbers do not."""
    cuts_at_end: ClassVar[bool] = False
    """Whether `finish` without a cutoff cuts every layer at the config's."""

    def __init__(self, config: Any, ground: Ground) -> None:
        self.config = config
        self.ground = ground
        self.model = ground.model
        self.optimizers = ground.optimizers
        self.wire = ground.wire
        self.topology = ground.wire.topology
        self._refuse_complex()
        self.replicated = Replicated(ground.model, ground.wire, self.gradient_wire, ground.ddp)
        self.step = 0
        self.forwards = 0
        self.decompositions = 0
        self.found_ranks: dict[str, int] = {}
        self.events: list[dict[str, Any]] = []
        """What it decided on the way and a run's summary tells, as plain values with their steps."""
        # Counters must not be traced: every step would look like another program to torch.compile.
        self.forward = torch.compiler.disable(self.forward, recursive=False)  # type: ignore[method-assign]
        self.watch = torch.compiler.disable(self.replicated.watch)
        self.observed = torch.zeros(2, dtype=torch.float64)  # sum of losses, how many
        self.layers: list[Layer] = []
        self.kept: list[Kept] = []
        self._set_phase(self.phases[0])

    @classmethod
    def role(cls, config: Any, topology: Topology) -> Hashable:
        """What a worker does depends on this and on its own group; a plan runs one for all that have the same."""
        return len(topology.groups), topology.group_index

    @abstractmethod
    def attach(self) -> None:
        """Take over the model."""

    @abstractmethod
    def after_step(self) -> None:
        """A step is over."""

    @property
    def gradient_wire(self) -> str:
        """What DistributedDataParallel rounds gradients to while they travel."""
        return "fp32"

    @property
    def clips(self) -> bool:
        """Whether it clips gradients itself, before they are averaged; a loop then must not."""
        return False

    @property
    def spans_world(self) -> bool:
        """Whether all workers hold the same model between steps."""
        return True

    @property
    def assumes(self) -> str:
        """What a plan takes for granted that a run may decide otherwise."""
        return ""

    @property
    def quiet_until(self) -> int:
        """The next step that may be unlike the one before it; a plan counts those up to it by one of them."""
        return self.step + 1

    @property
    def cycle(self) -> Cycle | None:
        """Where in a cycle it is; None where it is in none. A plan counts cycles by one of them."""
        return None

    @property
    def lr_factor(self) -> float:
        """What the scheduled learning rate is multiplied by in the next update."""
        return 1.0

    def before_update(self, optimizer: Optimizer) -> None:  # noqa: B027 - most leave it to the optimizer
        """An optimizer is about to change the parameters it holds."""

    def after_update(self, optimizer: Optimizer) -> None:  # noqa: B027
        """It has."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A training batch through the model."""
        self.forwards += self.replicated.syncs
        outputs = self.replicated.forward(*args, **kwargs)
        self.watch(outputs)
        return outputs

    def observe(self, loss: float | Tensor) -> None:
        """Hear of a training loss; never waits for the device."""
        value = loss.detach().to(torch.float64).mean() if isinstance(loss, Tensor) else float(loss)
        self.observed = self.observed.to(value.device) if isinstance(value, Tensor) else self.observed
        self.observed[0] += value
        self.observed[1] += 1

    def epoch_end(self, loss: float | None) -> None:  # noqa: B027 - most do not go by epochs
        """An epoch is over; `loss` is this worker's mean, None that of the losses observed."""

    def skip(self, steps: int) -> None:
        """Count quiet steps that a plan does not take."""
        self.step += steps
        self.forwards += steps

    def shift(self, steps: int) -> None:
        """Count whole cycles that a plan does not take: everything it noted by its step is so many steps later."""
        self.step += steps
        self.forwards += steps

    @contextmanager
    def lend_merged(self) -> Iterator[None]:
        """Lend every worker the model that a merge would give now."""
        yield

    def finish(self, cutoff: float | None) -> None:
        """Leave one model on all workers; cut it where a cutoff is given."""
        if cutoff is not None:
            self.layers, self.kept = find_layers(self.model, trained=self.optimizers.parameters)
            self._cut(cutoff)
        self.replicated.unwrap()

    def settle(self) -> None:  # noqa: B027 - most have nothing under way
        """Wait for what is under way, before a checkpoint; collective."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as plain values, the same on all workers."""
        return {"step": self.step, "phase": self.phase}

    def own_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this worker alone, as plain values."""
        return {"forwards": self.forwards, "observed": self.observed.tolist()}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, as tensors beside the model's."""
        return {}

    def own_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of this worker alone, as tensors."""
        return {}

    def workspace(self) -> list[Tensor]:
        """What it holds beside that, for good; a plan counts it as memory."""
        return []

    def users_optimizer(self) -> AbstractContextManager[None]:
        """Around a checkpoint's look at the optimizer, which has all of its user's settings there."""
        return nullcontext()

    def load_state(self, state: dict[str, Any]) -> None:
        """Bring counters, phase and the model's shape to those of `state`; values follow."""
        self.step = state["step"]
        self._set_phase(state["phase"])

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Go on from this worker's own part of a checkpoint."""
        self.forwards = state["forwards"]
        self.observed = torch.tensor(state["observed"], dtype=torch.float64)

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `tensors` gave."""
        assert not tensors, "a method that saves tensors must load them"

    def load_own_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `own_tensors` gave."""
        assert not tensors, "a method that saves tensors must load them"

    def load_others_tensors(self, everyone: list[dict[str, Tensor]]) -> None:
        """Go on, in other groups, from what each worker of the old ones gave as `own_tensors`."""
        assert not any(everyone), "a method that saves tensors must load them"

    def release(self) -> None:
        """Let go of the model, in whatever shape it is."""
        self.replicated.unwrap()

    def rewrap(self) -> None:
        """Wrap the model anew, as a checkpoint does on both of its sides."""
        self.replicated.wrap(self.replicated.members)

    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters in a fixed order."""
        return list(self.model.parameters())

    def check_counters(self) -> None:
        """All workers must have come equally far; a worker that skipped a step unseen has run one batch more."""
        self.compare_counters(self.ask_counters().wait().tolist())

    def ask_counters(self) -> Pending:
        """How far everyone has come, for `compare_counters`, without waiting for it."""
        return self.wire.ask_everyone([self.step, self.forwards], "control")

    def compare_counters(self, rows: list[list[float]]) -> None:
        """Refuse workers that have not come equally far."""
        # Of two equally common, the one with fewer batches: whoever skipped a step has run one more.
        counted = Counter((step, batches) for step, batches in rows)
        common = list(max(counted.items(), key=lambda item: (item[1], -item[0][1]))[0])
        odd = [rank for rank, row in enumerate(rows) if row != common]
        if odd:
            told = ", ".join(f"rank {r} ran {int(rows[r][1])} batches in {int(rows[r][0])} steps" for r in odd)
            remedy = "; give every rank the same batches to train on, and evaluate in eval() or under no_grad()"
            if not self.ground.has_scaler:
                remedy += "; if a GradScaler skips steps, pass it to attach(…, scaler=scaler)"
            raise DisagreementError(
                f"workers disagree at step {self.step}: {told}, the others {int(common[1])} in {int(common[0])}{remedy}"
            )

    def agreed_factors(self, cutoff: float) -> list[tuple[Layer, tuple[Tensor, ...]]]:
        """Factors of every layer that they make smaller, the same on all workers; collective."""
        found = agreed_factors(self.layers, self.wire, lambda layer: self.ground.find_factors(layer, cutoff))
        self.decompositions += 1
        self.found_ranks = {layer.label: factors[0].shape[1] for layer, factors in found}
        return found

    def _refuse_complex(self) -> None:
        """Here, not in the first backward pass."""
        name = next((name for name, p in self.model.named_parameters() if p.is_complex() and p.requires_grad), None)
        wire = getattr(self.config, "wire", None)
        if name is None or wire in self.complex_wires or self.topology.world_size == 1:
            return
        if wire is not None:
            raise ConfigError(f"`wire`={wire!r} cannot carry the complex parameter {name!r}; use 'fp32'")
        raise ConfigError(
            f"{type(self.config).__name__} cannot compress the gradient of the complex parameter {name!r}; use a "
            "method with wire='fp32', such as AllReduce() or LocalSGD(), or hold both parts as two parameters"
        )

    def _set_phase(self, phase: str) -> None:
        self.phase = phase
        self.wire.ledger.phase = phase

    def _cut(self, cutoff: float) -> None:
        """Cut every layer that becomes smaller by it, and note those that do not."""
        for layer, factors in self.agreed_factors(cutoff):
            to_factors(layer, *factors)
        why = f"rank too high at cutoff {cutoff}"
        self.kept = [*self.kept, *(Kept(layer.key, why) for layer in self.layers if not layer.is_factored)]
