"""A step without the wire: how long its parts take, and when gradients are ready; measured or given."""

import bisect
import copy
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.base.errors import ConfigError, ThinwireError
from thinwire.factor.matrix import decompose_if_smaller
from thinwire.plan.workload import Workload, copy_with
from thinwire.train.first_step import kept_for_backward
from thinwire.train.run import own_device

_LEAST_S, _LEAST_STEPS, _MOST_STEPS = 1.0, 3, 50
# A worker that waits for the wire finds its caches cold: a small model's step takes a third longer after a pause.
_PAUSE_S = 0.05


@dataclass(frozen=True)
class Compute:
    """Seconds of one step on one worker."""

    forward: float
    backward: float
    update: float
    ready: tuple[tuple[float, float], ...] = ((0.0, 0.0), (1.0, 1.0))
    """Pairs: share of the gradients' bytes, and the share of the backward pass after which they are ready."""
    activations: int | None = None
    """Bytes that the forward pass keeps for the backward pass, if measured."""

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.update

    def slower(self, factor: float) -> "Compute":
        """The same on a machine that is slower per worker."""
        forward, backward, update = (part * factor for part in (self.forward, self.backward, self.update))
        return replace(self, forward=forward, backward=backward, update=update)

    def ready_at(self, sizes: Sequence[int]) -> list[float]:
        """When each of these buckets is full, in seconds of the backward pass."""
        whole, shares = sum(sizes), [share for share, _ in self.ready]
        after = (bisect.bisect_left(shares, size / whole) for size in itertools.accumulate(sizes))
        return [self.backward * self.ready[min(place, len(shares) - 1)][1] for place in after]


def given(seconds: float) -> Compute:
    """A step of `seconds`; the backward pass takes twice the forward pass, gradients become ready evenly."""
    if not seconds > 0:
        raise ConfigError(f"`compute`={seconds!r} must be a time above 0, as 120ms: a full-rank step without the wire")
    return Compute(forward=seconds / 3, backward=seconds * 2 / 3, update=0.0)


def measure(workload: Workload, shape: nn.Module | None = None) -> Compute:
    """Steps of the workload's model, or of one with another's shape, on one thread as workers have it."""
    model = copy.deepcopy(workload.with_values) if shape is None else _filled(shape, workload.with_values)
    device = own_device()
    with _threads():
        try:
            return _Bench(workload, model.to(device).train(), device).run()
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"a step of {workload.name} cannot be timed here ({type(error).__name__}: {error}); "
                "fix its inputs, or give its seconds with --compute"
            ) from error


def decomposition_seconds(tall: tuple[int, int], cutoff: float = 0.15) -> float:
    """One decomposition of a weight of this shape."""
    device = own_device()
    with _threads():
        matrix = torch.randn(*tall, device=device)
        seconds = []
        for _ in range(2):  # the first one loads libraries
            start = time.perf_counter()
            decompose_if_smaller(matrix, cutoff)
            _wait(matrix.device)
            seconds.append(time.perf_counter() - start)
    return seconds[-1]


class _Bench:
    def __init__(self, workload: Workload, model: nn.Module, device: torch.device) -> None:
        self.workload = workload
        self.model = model
        self.device = device
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = workload.optimizer(self.trained)

    def run(self) -> Compute:
        """Enough steps for a median, after one to warm up."""
        self.step()
        activations = self.kept_bytes()
        ready = self.ready_curve()
        laps: list[tuple[float, float, float]] = []
        start = time.perf_counter()
        while len(laps) < _LEAST_STEPS or (time.perf_counter() - start < _LEAST_S and len(laps) < _MOST_STEPS):
            laps.append(self.step())
        forward, backward, update = (statistics.median(part) for part in zip(*laps, strict=True))
        return Compute(forward, backward, update, ready, activations)

    def step(self) -> tuple[float, float, float]:
        marks = [self.now()]
        loss = self.loss()
        marks.append(self.now())
        loss.backward()
        marks.append(self.now())
        time.sleep(_PAUSE_S)
        resumed = self.now()
        if self.workload.clip is not None:
            nn.utils.clip_grad_norm_(self.trained, self.workload.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return marks[1] - marks[0], marks[2] - marks[1], self.now() - resumed

    def loss(self) -> Tensor:
        outputs = self.workload.call(self.model, self.device)
        return self.workload.loss(outputs) if self.workload.loss else _first_tensor(outputs).float().mean()

    def now(self) -> float:
        _wait(self.device)
        return time.perf_counter()

    def kept_bytes(self) -> int:
        """What autograd keeps, each storage counted once, without the parameters themselves."""
        with kept_for_backward(self.model) as kept:
            loss = self.loss()
        loss.backward()
        self.optimizer.zero_grad()
        return sum(kept.values())

    def ready_curve(self) -> tuple[tuple[float, float], ...]:
        """When gradients are ready, from the last parameter to the first, as DDP fills its buckets."""
        seen: dict[int, float] = {}
        hooks = [p.register_post_accumulate_grad_hook(lambda p: seen.update({id(p): self.now()})) for p in self.trained]
        loss = self.loss()
        start = self.now()
        loss.backward()
        whole = max(self.now() - start, 1e-9)
        for hook in hooks:
            hook.remove()
        self.optimizer.zero_grad()
        size, total, latest, curve = 0, sum(p.numel() for p in self.trained), 0.0, [(0.0, 0.0)]
        for p in reversed(self.trained):
            size += p.numel()
            latest = max(latest, (seen.get(id(p), start) - start) / whole)
            curve.append((size / total, min(1.0, latest)))
        return tuple(curve)


def _filled(shape: nn.Module, source: nn.Module) -> nn.Module:
    """A model of that shape with the source's values where they fit, and small ones elsewhere."""
    values = {**dict(source.named_parameters()), **dict(source.named_buffers())}

    def fill(name: str, t: Tensor) -> Tensor:
        known = values.get(name)
        if known is not None and known.shape == t.shape and not known.is_meta:
            return known.detach().clone()
        empty = torch.zeros(t.shape, dtype=t.dtype)
        return empty.normal_(std=0.02) if t.is_floating_point() else empty

    model = copy_with(shape, fill)
    model.__dict__.pop("forward", None)  # a simulation's
    return model


def _first_tensor(outputs: Any) -> Tensor:
    if isinstance(outputs, Tensor):
        return outputs
    parts = outputs.values() if hasattr(outputs, "values") else outputs
    for part in parts:
        if isinstance(part, Tensor) and part.is_floating_point():
            return part
    raise ThinwireError("the model returns no tensor to train on; give `compute` instead of measuring it")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _threads() -> Iterator[None]:
    """Use as many threads as a worker gets from the launcher."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
