"""What a worker holds in memory: model and optimizer, and what its method keeps beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from thinwire.codecs.aggregate import Aggregator
from thinwire.codecs.quantized import CompressedSum
from thinwire.comm.buckets import size_of
from thinwire.exchange.averaged import AveragedTensors, ChangeNotes, PendingAverage
from thinwire.exchange.change_scales import ChangeScales, SeenRows
from thinwire.exchange.gradients import GradientAveraging
from thinwire.exchange.second_moment import FrozenSecondMoment, SecondMoment
from thinwire.methods.runner import Runner

_PARTS = {"agreed": "agreed values", "momentum": "outer momentum", "scratch": "scratch", "aggregator": "residuals"}
"""What a tensor of an average is called."""
_OTHER = "other"
_WITHOUT = ("wire", "like", "method", "parts", "mine", "pieces", "own_pieces")
"""What holds no tensors of its own; the parts of a sum over many groups are long lists."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker, when it holds most of them."""

    model: int = 0
    """Parameters, buffers, gradients and their buckets."""
    optimizer: int = 0
    method: Mapping[str, int] = field(default_factory=dict)
    """What the method keeps beside them, by what it is."""
    offloaded: int = 0
    """Of the method's, what the CPU holds between averages."""
    passing: int = 0
    """During an average: the mean before it is applied. What travels in few bits is left out."""

    @property
    def held(self) -> int:
        """All of it, wherever it is."""
        return self.model + self.optimizer + sum(self.method.values())

    @property
    def in_step(self) -> int:
        """On the device during a step, without activations."""
        return self.held - self.offloaded

    @property
    def in_average(self) -> int:
        """On the device during an average."""
        return self.held + self.passing

    def peak(self, activations: int) -> int:
        """Activations are gone when an average begins."""
        return max(self.in_step + activations, self.in_average)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "model_bytes": self.model,
            "optimizer_bytes": self.optimizer,
            "method_bytes": sum(self.method.values()),
            "method": dict(self.method),
            "offloaded_bytes": self.offloaded,
            "held_bytes": self.held,
            "step_bytes": self.in_step,
            "average_bytes": self.in_average,
        }


def memory_of(method: Runner, known: tuple[int, int]) -> Memory:
    """What a worker holds now; `known` are the bytes of the model and of the optimizer's state."""
    held = held_by(method)
    sizes = {name: sum(size_of(t) for t in tensors) for name, tensors in sorted(held.items())}
    moved = sum(size_of(t) for t in offloaded_by(method)) if getattr(method.config, "offload", False) else 0
    passing = max((size_of(fragment.scratch) for fragment in method.averaged_tensors), default=0)
    return Memory(*known, {name: size for name, size in sizes.items() if size}, moved, passing)


def model_and_optimizer(method: Runner) -> tuple[int, int]:
    """Bytes of parameters, buffers, gradients and their buckets, and of the optimizer's state."""
    model = method.context.model
    parameters = list(model.parameters())
    gradients = [p for p in parameters if p.requires_grad]
    buckets = gradients if len(method.gradients.replicated.members) > 1 else []
    kept = (values for optimizer in method.optimizers for values in optimizer.state.values())
    state = [v for values in kept for v in values.values() if isinstance(v, Tensor)]
    whole = sum(size_of(t) for t in [*parameters, *model.buffers(), *gradients, *buckets])
    return whole, sum(size_of(t) for t in state)


def held_by(method: Runner) -> dict[str, list[Tensor]]:
    """Tensors that a method holds besides the model and the optimizers, by what they are."""
    held = [(_OTHER, value) for part in method.parts for value in vars(part).values()]
    return _walk([(_OTHER, method.gradients), *held])


def offloaded_by(method: Runner) -> list[Tensor]:
    """Of these, what the CPU would hold between averages."""
    found: list[Tensor] = []
    for fragment in method.averaged_tensors:
        found += [t for t in (fragment.agreed, fragment.momentum, fragment.scratch) if t is not None]
        sums = _walk([(_OTHER, getattr(fragment.aggregator, "sum", None))])  # others stay where they are
        found += [t for tensors in sums.values() for t in tensors]
    return found


def _walk(todo: Iterable[tuple[str, Any]]) -> dict[str, list[Tensor]]:
    left, found, seen = list(todo), defaultdict[str, list[Tensor]](list), set[Any]()
    while left:
        name, each = left.pop()
        is_tensor = isinstance(each, Tensor)
        if is_tensor and isinstance(each, nn.Parameter):
            continue
        key = each.untyped_storage()._cdata if is_tensor else id(each)
        if key in seen:
            continue
        seen.add(key)
        if is_tensor:
            found[name].append(each)
        else:
            left += _inside(name, each)
    return dict(found)


def _inside(name: str, each: Any) -> list[tuple[str, Any]]:
    if isinstance(each, dict):
        return [(name, value) for value in each.values()]
    if isinstance(each, list | tuple):
        return [(name, value) for value in each]
    if isinstance(each, GradientAveraging):
        return [("residuals", value) for value in each.buckets]
    if isinstance(each, AveragedTensors):
        own_parts = (own for own in vars(each) if own not in ("wire", "_shapes"))
        return [(_PARTS.get(own, _OTHER), vars(each)[own]) for own in own_parts]
    if isinstance(each, ChangeScales):
        return [(name, each.moments), (name, each.rows)]
    if isinstance(each, SecondMoment):
        return [("residuals of moments", value) for value in each.coded.aggregators]
    if isinstance(each, FrozenSecondMoment):
        return [("frozen second moments", value) for value in each.kept.values()]
    if isinstance(each, SeenRows):
        return [("counts of rows", value) for value in each.counts.values()]
    if isinstance(each, PendingAverage | Aggregator | ChangeNotes | CompressedSum):
        return [(name, value) for own, value in vars(each).items() if own not in _WITHOUT]
    return []
