"""Averages over groups that trained apart: parameters, buffers and optimizer state."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from thinwire.comm.fsdp import local
from thinwire.comm.wire import Wire
from thinwire.config.common import Nesterov, Radial
from thinwire.exchange.diverged import refuse_diverged
from thinwire.factor.matrix import wide
from thinwire.factor.moments import moments_of
from thinwire.factor.optimizers import Optimizers


def average_model(wire: Wire, model: nn.Module, observed: Tensor, step: int, weight: float | None = None) -> None:
    """Trained parameters and buffers by their exact mean over groups; refuses groups that diverged.

    Without a `weight` a group has that of its workers.
    """
    refuse_diverged(wire, model, observed, step)
    weight = len(wire.topology.group) / wire.topology.world_size if weight is None else weight
    average(wire, [p for p in model.parameters() if p.requires_grad], weight, "merge")
    average_buffers(wire, model.buffers(), weight)


@contextmanager
def restored(model: nn.Module, *more: Tensor) -> Iterator[None]:
    """Restore the model's parameters and buffers at the end, and what more there is."""
    tensors = [*model.parameters(), *model.buffers(), *more]
    before = [t.detach().clone() for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for t, value in zip(tensors, before, strict=True):
                t.copy_(value)


def average_buffers(wire: Wire, buffers: Iterable[Tensor], weight: float) -> None:
    """Running statistics by their mean, counters by their maximum, anything else as rank 0 has it.

    Only buffers that differ travel: constants such as position tables would come back rounded.
    """
    buffers = [b for b in buffers if b.numel()]
    if not buffers:
        return
    apart = [buffers[i] for i in wire.differing([[b] for b in buffers], "checksums")]
    statistics = [b for b in apart if b.is_floating_point()]
    average(wire, statistics, weight, "buffers")
    counters = [b for b in apart if b.numel() == 1 and not (b.is_floating_point() or b.is_complex())]
    if counters:
        agreed = wire.all_reduce_max(torch.stack([c.reshape(()).to(torch.int64) for c in counters]), "buffers")
        for counter, value in zip(counters, agreed.tolist(), strict=True):
            counter.fill_(value)
    known = {id(b) for b in (*statistics, *counters)}
    wire.broadcast([b for b in apart if id(b) not in known], "buffers")


def average_moments(
    wire: Wire,
    optimizers: Optimizers,
    parameters: Sequence[nn.Parameter],
    weight: float,
    code: str = "fp32",
    average_states: Callable[[], None] | None = None,
) -> None:
    """Moments by their mean, steps by their maximum; state that not every group has starts again.

    The mean is exact or rounded to bf16, unless `average_states` takes it.
    """
    absent = wire.differing([_fingerprint(optimizers.state_of(p)) for p in parameters], "moments")
    optimizers.reset([parameters[i] for i in absent])
    states = [state for p in parameters if (state := optimizers.state_of(p))]
    if average_states is not None:
        average_states()
    else:
        average(wire, [local(state[name]) for state in states for name in moments_of(state)], weight, "moments", code)
    steps = [state for state in states if "step" in state]
    if steps and len(wire.topology.groups) > 1:
        own = torch.tensor([float(state["step"]) for state in steps], dtype=torch.float64)
        agreed = wire.all_reduce_max(own, "moments")
        for state, value in zip(steps, agreed.tolist(), strict=True):
            step = state["step"]
            state["step"] = step.fill_(value) if isinstance(step, Tensor) else type(step)(value)


def average(wire: Wire, tensors: Sequence[Tensor], weight: float, purpose: str, code: str = "fp32") -> None:
    """Replace tensors by their mean over groups, exactly or rounded to bf16.

    A group without weight may hold anything: it only takes the mean.
    """
    means = [wide(t.detach()).mul_(weight) if weight else torch.zeros_like(wide(t.detach())) for t in tensors]
    wire.sum_over_groups(means, purpose, code)
    for t, mean in zip(tensors, means, strict=True):
        t.detach().copy_(mean)


def _fingerprint(state: Mapping[str, Any]) -> list[Tensor]:
    """What must be the same on all workers for moments to be averaged: their names, and scalars other than the step."""
    names = moments_of(state)
    scalars = [v for k, v in sorted(state.items()) if isinstance(v, Tensor) and k not in (*names, "step")]
    return [torch.frombuffer(bytearray(",".join(names).encode() or b"-"), dtype=torch.uint8), *scalars]


_LEAST = 1e-12


class OuterStatistics:
    """The outer step of all running means and variances of a model; the first average only sets where they start.

    An outer step moves weights further than any group did. Statistics that are only averaged belong to weights that
    nobody has any more, and a model evaluated in the next ten steps or so fails. So they take the same outer step:
    means as they are, variances by their logarithms, which keeps them positive.
    """

    def __init__(self, model: nn.Module, outer: Nesterov | Radial | None) -> None:
        self.model = model
        self.outer = outer
        self.restart()

    def restart(self) -> None:
        """Begin again, without momentum."""
        self.agreed: list[Tensor] = []
        self.momentum: list[Tensor] = []

    @torch.no_grad()
    def step(self) -> None:
        """Move statistics that were just averaged, and so are the same on all workers."""
        norms = [m for m in self.model.modules() if isinstance(m, _NormBase) and m.running_var is not None]
        if not isinstance(self.outer, Nesterov) or not norms:
            return
        means = [_values(norm) for norm in norms]
        if len(self.agreed) != len(means):
            self.agreed, self.momentum = means, [torch.zeros_like(mean) for mean in means]
            return
        mu = self.outer.momentum or 0.0
        for i, (norm, mean) in enumerate(zip(norms, means, strict=True)):
            change = mean - self.agreed[i]
            self.momentum[i] = mu * self.momentum[i] + change
            self.agreed[i] = self.agreed[i] + self.outer.lr * (change + mu * self.momentum[i])
            norm.running_mean.copy_(self.agreed[i][0])  # type: ignore[union-attr]
            norm.running_var.copy_(self.agreed[i][1].exp())  # type: ignore[union-attr]

    def tensors(self) -> list[Tensor]:
        """What it holds, the same on all workers."""
        return [*self.agreed, *self.momentum]

    def state_dict(self) -> dict[str, Any]:
        return {"agreed": self.agreed, "momentum": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.agreed, self.momentum = list(state["agreed"]), list(state["momentum"])


def _values(norm: _NormBase) -> Tensor:
    """Means, and logarithms of variances, (2, channels)."""
    assert norm.running_mean is not None and norm.running_var is not None
    return torch.stack([norm.running_mean, norm.running_var.clamp_min(_LEAST).log()]).float()
