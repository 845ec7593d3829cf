"""Averages over groups that trained apart: parameters, buffers, optimizer state."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.comm.codec import checksum
from thinwire.comm.collectives import Wire
from thinwire.factor.moments import moments_of, reset


def average_parameters(
    wire: Wire, parameters: Sequence[Tensor], weights: Sequence[float], rounding: str, base: Sequence[Tensor]
) -> None:
    """Replace each parameter by the sum over groups, this group's copy times its weight; weights add up to 1.

    A rounded wire carries the difference to `base`, the values all groups started from: rounding
    the parameters themselves would delete small updates.
    """
    starts = base if rounding != "fp32" else [None] * len(parameters)
    values = [
        (p.detach() if start is None else p.detach() - start) * weight
        for p, start, weight in zip(parameters, starts, weights, strict=True)
    ]
    wire.average(values, "merge", rounding)
    with torch.no_grad():
        for p, start, value in zip(parameters, starts, values, strict=True):
            p.copy_(value if start is None else start + value)


def average_buffers(wire: Wire, model: nn.Module, weight: float) -> None:
    """Running statistics by their mean; counters, which agree unless something is wrong, by their maximum."""
    buffers = list(model.buffers())
    statistics = [b for b in buffers if b.is_floating_point()]
    _average(wire, statistics, weight, "buffers")
    # Masks and tables (integer or complex) are the model's constants, the same everywhere.
    counters = [b for b in buffers if b.numel() == 1 and not (b.is_floating_point() or b.is_complex())]
    if counters and len(wire.topology.groups) > 1:
        agreed = wire.largest(torch.stack([c.max().to(torch.int64) for c in counters]), "buffers")
        for counter, value in zip(counters, agreed.tolist(), strict=True):
            counter.fill_(value)


def average_moments(wire: Wire, optimizer: Optimizer, parameters: Sequence[nn.Parameter], weight: float) -> None:
    """Moments by their mean, steps by their maximum; state that not every group has starts again."""
    names = [moments_of(optimizer.state.get(p, {})) for p in parameters]
    absent = wire.differing([_fingerprint(n) for n in names], "moments")
    reset(optimizer, [parameters[i] for i in absent])
    states = [optimizer.state[p] for p in parameters if p in optimizer.state]
    _average(wire, [state[name] for state in states for name in moments_of(state)], weight, "moments")
    steps = [state for state in states if "step" in state]
    if steps and len(wire.topology.groups) > 1:
        agreed = wire.largest(torch.tensor([float(state["step"]) for state in steps], dtype=torch.float64), "moments")
        for state, value in zip(steps, agreed.tolist(), strict=True):
            step = state["step"]
            state["step"] = step.fill_(value) if isinstance(step, Tensor) else type(step)(value)


def _average(wire: Wire, tensors: Sequence[Tensor], weight: float, purpose: str) -> None:
    for t in tensors:
        t.mul_(weight)
    wire.average(tensors, purpose)


def _fingerprint(names: list[str]) -> int:
    return checksum([torch.frombuffer(bytearray(",".join(names).encode() or b"-"), dtype=torch.uint8)])
