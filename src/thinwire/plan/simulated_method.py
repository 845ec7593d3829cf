"""A method on a simulated wire, attached to a model on the meta device, whose ranks are predicted."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.comm.replicate import Replicated
from thinwire.exchange.parts import MethodContext
from thinwire.factor.convert import Layer
from thinwire.factor.optimizers import Optimizers
from thinwire.methods.registry import make
from thinwire.methods.runner import Runner
from thinwire.plan.ranks import RankPredictor, Recorded, basis, factors, most, uniform
from thinwire.plan.simulated_wire import SimulatedWire
from thinwire.plan.workload import Workload
from thinwire.replica.preflight import broadcast_initial_values, check_optimizers, check_same_architecture
from thinwire.replica.replica import Replica


class CountedPasses(Replicated):
    """Counts what passes would send; there is no backward pass, and buffers stay the same."""

    _buffers_of_model: list[Tensor]

    def wrap(self, members: tuple[int, ...]) -> None:
        super().wrap(members)
        self._buffers_of_model = list(self.model.buffers())

    def _follow_model(self, members: tuple[int, ...]) -> None:
        """There are no gradients to hook into."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass, and what the backward pass after it sends."""
        if self.syncs:
            if self._over_norms > 1:
                self._count_norms()
            if len(self.members) > 1:
                self._count_backward()
            if self.after_backward is not None:
                self.after_backward()
        return self.model(*args, **kwargs)

    def broadcast_buffers(self, members: tuple[int, ...] = ()) -> None:
        self.wire.broadcast(self._buffers_of_model, "buffers", members or self.members, self.buffers_from)

    def watch(self, outputs: Any) -> None:
        """There are no gradients."""


class SimulatedReplica(Replica):
    """Says nothing to a user, who has no such model."""

    def _watch_evaluations(self) -> None:
        """There are no evaluations of a loop's own."""

    def _guard_averages(self) -> None:
        """There are no moving averages."""

    def _log_finished(self) -> None:
        """The plan has its own words."""


class Asked(NamedTuple):
    """A rank that was asked for, and the answer."""

    layer: Layer
    cutoff: float | None
    rank: int | None


@dataclass
class Ranks:
    """A predictor that notes what it is asked."""

    predict: RankPredictor
    asked: list[Asked] = field(default_factory=list)

    def __call__(self, layer: Layer, progress: float, cutoff: float | None) -> int | None:
        self.asked.append(Asked(layer, cutoff, self.predict(layer, progress, cutoff)))
        return self.asked[-1].rank

    def still_are(self, asked: Sequence[Asked], progress: float) -> bool:
        """Whether the answers would be the same."""
        return all(self.predict(layer, progress, cutoff) == rank for layer, cutoff, rank in asked)


def make_method(
    workload: Workload,
    config: Any,
    model: nn.Module,
    wire: SimulatedWire,
    ranks: Ranks,
    decomposed: Counter[tuple[int, int]],
) -> Runner:
    """Attach the method to a model, as `attach` does."""
    optimizers = Optimizers(workload.optimizer(model.parameters()))
    check_optimizers(model, optimizers)
    wire.count_opening()
    check_same_architecture(model, optimizers, wire)
    broadcast_initial_values(model, wire)
    wire.changing = _statistics(model)

    def predicted(layer: Layer, cutoff: float | None) -> int | None:
        return ranks(layer, method.step / workload.steps, cutoff)

    def find_factors(layer: Layer, cutoff: float | None) -> tuple[Tensor, ...] | None:
        decomposed[layer.view.tall] += 1
        return factors(layer, most(layer) if cutoff is None else predicted(layer, cutoff))

    def find_basis(layer: Layer, cutoff: float, max_shrink: float) -> tuple[Tensor, ...]:
        decomposed[(layer.rank, layer.rank) if layer.rank else layer.view.tall] += 1
        return basis(layer, predicted(layer, cutoff) if cutoff else None, max_shrink)

    def choose_ranks(given: Sequence[tuple[Layer, Tensor, Tensor]], parameters: int, target: float) -> list[int]:
        layers = [layer for layer, *_ in given]
        if isinstance(ranks.predict, Recorded):
            return [predicted(layer, None) or 0 for layer in layers]
        return uniform(layers, parameters, target)

    set_rate(optimizers[0], workload, 0)
    found_by = {"find_factors": find_factors, "find_basis": find_basis, "choose_ranks": choose_ranks}
    method = make(config, MethodContext(model, optimizers, wire, replicate=CountedPasses, **found_by))  # type: ignore[arg-type]
    method.masters.stop_looking()
    return method


def set_rate(optimizer: Optimizer, workload: Workload, step: int) -> None:
    """The learning rate of a step, as a scheduler sets it."""
    if workload.rate is not None:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * workload.rate(step)


def grows(config: Any) -> bool:
    """Whether the steps between two averages depend on the learning rate."""
    return getattr(config, "every_max", None) is not None


def assumed(workload: Workload, method: Runner, predict: RankPredictor) -> Iterator[str]:
    """What has to be true for a run to send what is simulated."""
    if method.assumes:
        yield method.assumes
    if getattr(method.config, "target", None) is not None and not isinstance(predict, Recorded):
        yield "every layer keeps the same share of its ranks"
    if grows(method.config) and workload.rate is None:
        yield "the learning rate stays constant, so that `every` does not grow"


def _statistics(model: nn.Module) -> set[int]:
    """Ids of buffers that depend on the data: running statistics."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    return {id(b) for norm in norms for b in norm.buffers() if b.is_floating_point()}
