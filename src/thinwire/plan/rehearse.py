"""A run without workers, data or values: the method itself, on a dry wire and a model on the meta device.

Every step that is unlike the one before it is taken; the quiet ones between them are counted by one of them.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from thinwire.admission import check_optimizers, check_same_architecture, check_same_data, spread_first_values
from thinwire.comm.codec import size_of
from thinwire.comm.dry import Call, DryWire, Exchange
from thinwire.comm.ledger import Ledger
from thinwire.comm.topology import Topology
from thinwire.errors import ConfigError
from thinwire.factor.convert import Layer
from thinwire.factor.optimizers import Optimizers
from thinwire.methods.agree import decomposers
from thinwire.methods.base import Ground, Method
from thinwire.methods.registry import make, name_of
from thinwire.plan.foresight import Foresight, basis, factors
from thinwire.replica import Replica

# A shape that no optimizer's state has for another reason.
_PROBE = torch.Size((2, 3))
# DDP sends the order of its buckets with the second backward pass after it was wrapped.
_RESTLESS = 2


_CHANGES = ("copy_", "add_", "sub_", "mul_", "div_", "lerp_", "zero_", "fill_", "addcmul_", "addcdiv_", "bernoulli_")
"""Changes in place that leave a tensor's shape; those of lists of tensors are called _foreach_NAME."""


class _Still(TorchDispatchMode):
    """Changes values of tensors that have none: not at all, instead of checking shapes at length."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name.removeprefix("_foreach_") in _CHANGES:
            several = isinstance(args[0], list)
            if all(t.is_meta for t in (args[0] if several else args[:1])):
                return None if several else args[0]
        return func(*args, **(kwargs or {}))


@dataclass(kw_only=True)
class Subject:
    """What is planned for."""

    name: str
    model: nn.Module
    """On the CPU, as it starts, or without values on the meta device; left as it is."""
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    """Builds the optimizer."""
    steps: int
    """Optimizer steps of the run."""
    values: Callable[[], nn.Module] | None = None
    """Builds the model as it starts, where `model` may have no values: a step is timed with them."""
    inputs: tuple[Any, ...] = ()
    """A worker's batch, as the model is called; nothing where it is not known."""
    keywords: dict[str, Any] = field(default_factory=dict)
    """The same by name."""
    loss: Callable[[Any], Tensor] | None = None
    """What is trained on, from the model's outputs."""
    clip: float | None = None
    """Largest gradient norm."""
    recipe: str | None = None
    """The recipe it comes from."""
    eval_every: int | None = None
    """Steps between evaluations; None for a run without them."""
    epochs: int = 30
    """Epochs of a run, for methods that go by them."""
    suited: Mapping[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = field(default_factory=dict)
    """Other optimizers, by the methods that have one of their own."""

    def suited_to(self, config: Any) -> "Subject":
        """The same with the optimizer of this config's method."""
        own = self.suited.get(name_of(config))
        return self if own is None else replace(self, optimizer=own)

    @cached_property
    def with_values(self) -> nn.Module:
        """The model on the CPU, as it starts."""
        return self.model if self.values is None else self.values()

    @cached_property
    def without_values(self) -> nn.Module:
        """The model on the meta device; what was tied stays tied, which `model.to("meta")` would not see to."""
        return copy_with(self.model, lambda name, t: t.to("meta"))

    @cached_property
    def state(self) -> dict[str, Tensor | Any]:
        """What the optimizer keeps for a parameter, seen on a small one."""
        probe = nn.Parameter(torch.zeros(_PROBE))
        optimizer = self.optimizer([probe])
        probe.grad = torch.ones_like(probe)
        optimizer.step()
        return dict(optimizer.state[probe])

    def call(self, model: nn.Module, device: torch.device) -> Any:
        """A forward pass of one worker's batch."""
        args, kwargs = tree_map_only(Tensor, lambda t: t.to(device), (self.inputs, self.keywords))
        return model(*args, **kwargs)

    @property
    def has_inputs(self) -> bool:
        """Whether it can be called."""
        return bool(self.inputs or self.keywords)


@dataclass
class Rehearsal:
    """What one node's first worker would have counted and held."""

    ledger: Ledger
    calls: Counter[Call]
    exchanges: Counter[Exchange]
    steps: Counter[str] = field(default_factory=Counter)
    """Steps of each phase."""
    shapes: dict[str, nn.Module] = field(default_factory=dict)
    """The model on the meta device as it was in each phase; of the many times it comes, one from the middle."""
    times: Counter[str] = field(default_factory=Counter)
    """How often each phase began."""
    decomposed: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Shapes of the weights this worker decomposed; where there are any, what is sent depends on ranks."""
    sharers: int = 1
    """Workers that share the decompositions out among themselves."""
    assumes: str = ""
    """What is taken for granted of the run."""
    state_bytes: int = 0
    """The most that parameters, gradients, their buckets, buffers, the optimizer's and the method's state took."""

    def note_shape(self, phase: str, model: nn.Module) -> None:
        """Keep the model's shape the 1st, 2nd, 4th, 8th … time: the last of these is near the middle."""
        self.times[phase] += 1
        if self.times[phase].bit_count() == 1:
            self.shapes[phase] = copy.deepcopy(model)


def rehearse(subject: Subject, config: Any, topology: Topology, foresee: Foresight) -> Rehearsal:
    """Go through a whole run as one worker of `topology`."""
    model = copy.deepcopy(subject.without_values)
    optimizers = Optimizers(subject.optimizer(model.parameters()))
    check_optimizers(model, optimizers)
    wire = DryWire(topology, Ledger())
    wire.count_opening()
    check_same_architecture(model, optimizers, wire)
    spread_first_values(model, wire)
    wire.changing = _statistics(model)
    found = Rehearsal(wire.ledger, wire.calls, wire.exchanges, sharers=decomposers(topology))

    def find_factors(layer: Layer, cutoff: float) -> tuple[Tensor, ...] | None:
        found.decomposed[layer.view.tall] += 1
        return factors(layer, foresee(layer, method.step / subject.steps))

    def find_basis(layer: Layer, cutoff: float, max_shrink: float) -> tuple[Tensor, ...]:
        found.decomposed[(layer.rank, layer.rank) if layer.rank else layer.view.tall] += 1
        return basis(layer, foresee(layer, method.step / subject.steps) if cutoff else None, max_shrink)

    method = make(config, Ground(model, optimizers, wire, find_factors=find_factors, find_basis=find_basis))
    found.assumes = method.assumes
    stage = _Stage(subject, method, Replica(method), wire, found)
    if subject.recipe:
        check_same_data((), wire)  # workers send a digest, of one length whatever their data
    stage.play()
    return found


@dataclass
class _Stage:
    subject: Subject
    method: Method
    replica: Replica
    wire: DryWire
    found: Rehearsal

    def play(self) -> None:
        """Every step, every evaluation, the end."""
        # After the method's own: an update by the gradients it may have left is slow without values, and shows nothing.
        self.method.optimizers[0].register_step_pre_hook(lambda optimizer, *_: optimizer.zero_grad())
        restless, place = 0, None
        while self.replica.step < self.subject.steps:
            if place != (self.replica.phase, self.replica.decompositions):
                restless, place = 0, (self.replica.phase, self.replica.decompositions)
                self._show_model()
                self.found.note_shape(self.replica.phase, self.replica.module)
            # The step before a change is taken alone: the change happens at its end.
            quiet = self._quiet_steps() - 1 if restless >= _RESTLESS else 1
            epoch = self._next_epoch
            with _Still():
                self._step(max(1, quiet))
            restless += 1
            if self.replica.step == epoch:
                # A plan believes in losses that fall: when they stop is not known before.
                self.replica.epoch_end(-(2.0 ** (1000 * epoch / self.subject.steps)))
            self._evaluate_if_due()
        self.replica.finish()
        self._sum_of_evaluation()

    def _quiet_steps(self) -> int:
        """Steps up to and with the next that is unlike the others."""
        step, every = self.replica.step, self.subject.eval_every or self.subject.steps
        next_evaluation = (step // every + 1) * every
        return min(self.method.quiet_until, next_evaluation, self._next_epoch, self.subject.steps) - step

    @property
    def _next_epoch(self) -> int:
        """The next step that ends an epoch, as a loop over data counts them; the last one where no method cares."""
        steps, epochs = self.subject.steps, self.subject.epochs
        if type(self.method).epoch_end is Method.epoch_end:
            return steps
        over = self.replica.step * epochs // steps
        return -(-(over + 1) * steps // epochs)

    def _show_model(self) -> None:
        """One real forward pass in each shape, for the order of layers and the weights they read; others only count."""
        model = self.replica.module
        model.__dict__.pop("forward", None)
        if self.subject.has_inputs:
            try:
                with torch.no_grad():
                    self.subject.call(model.train(), torch.device("meta"))
            except Exception as error:
                raise ConfigError(
                    f"{self.subject.name} cannot be called without values ({type(error).__name__}: {error}); "
                    "plan it without inputs, and give its seconds by --compute"
                ) from error
        model.forward = lambda *args, **kwargs: None

    def _step(self, times: int) -> None:
        """One step that stands for several."""
        self.wire.repeat = times
        phase = self.replica.phase
        self.replica.train()
        self.replica()
        self.replica.observe(1.0)
        self._make_state()
        self.method.skip(times - 1)
        self.method.optimizers[0].step()  # no gradients: only its hooks run
        self.wire.repeat = 1
        self.found.steps[phase] += times
        if self.replica.phase == phase:
            self.found.state_bytes = max(self.found.state_bytes, self._state_bytes())

    def _make_state(self) -> None:
        """The state that an update would make; updating itself is slow without values, and shows nothing more."""
        optimizer = self.method.optimizers[0]
        for p in self.method.optimizers.parameters:
            if p.requires_grad and not optimizer.state.get(p):
                optimizer.state[p] = {name: _state_like(value, p) for name, value in self.subject.state.items()}

    def _evaluate_if_due(self) -> None:
        step, every = self.replica.step, self.subject.eval_every
        if every and (step % every == 0 or step == self.subject.steps):
            with nullcontext() if self.replica.spans_world else self.replica.merged():
                self._sum_of_evaluation()

    def _sum_of_evaluation(self) -> None:
        if self.subject.eval_every:
            self.wire.sum(torch.empty(3, dtype=torch.float64), "evaluate")

    def _state_bytes(self) -> int:
        model = self.replica.module
        held = [*model.parameters(), *model.buffers()]
        gradients = [p for p in model.parameters() if p.requires_grad]
        state = [
            v for values in self.method.optimizers[0].state.values() for v in values.values() if isinstance(v, Tensor)
        ]
        buckets = gradients if len(self.method.replicated.members) > 1 else []
        kept = [*self.method.tensors().values(), *self.method.own_tensors().values(), *self.method.workspace()]
        return sum(size_of(t) for t in [*held, *gradients, *state, *buckets, *kept])


def _statistics(model: nn.Module) -> set[int]:
    """Buffers that follow the data: running statistics."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    return {id(b) for norm in norms for b in norm.buffers() if b.is_floating_point()}


def _state_like(value: Any, parameter: nn.Parameter) -> Any:
    """State of this kind for another parameter: one value an element, or as it is."""
    if isinstance(value, Tensor):
        return torch.empty_like(parameter) if value.shape == _PROBE else value.clone()
    return value


def copy_with(model: nn.Module, change: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A copy whose parameters and buffers are changed ones; those with several names stay one."""
    changed: dict[int, Any] = {}
    for name, p in model.named_parameters():
        changed[id(p)] = nn.Parameter(change(name, p.detach()), requires_grad=p.requires_grad)
    for name, b in model.named_buffers():
        changed[id(b)] = change(name, b)
    return copy.deepcopy(model, changed)
