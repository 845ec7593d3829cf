"""Copies of the parameters that some optimizers keep in their state and train instead of them, often in fp32.

Such an optimizer writes the parameter anew at every step, from its copy, which knows nothing of averages. So it is the
copies that are averaged, in all of their bits, and parameters follow. They have no name in common. A copy is known by
its values: those of the parameter, rounded to its type, after each step. An average of parameters that begins later
looks the same until then, so copies are compared at every step.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.comm.buckets import checksum
from thinwire.comm.fsdp import local, whole_of
from thinwire.factor.optimizers import Optimizers, State


class Masters:
    """Looks for copies after each step, and finds those of a parameter."""

    def __init__(self, optimizers: Optimizers) -> None:
        self.optimizers = optimizers
        self.names: set[str] = set()
        """What optimizers call all that may be one now."""
        self.trained: set[str] = set()
        """Those of them that are more than where a parameter began, or its value again."""
        self.outside: Optimizer | None = None
        """An optimizer that keeps its copies elsewhere than in its state, where nobody can reach them."""
        self._has_none = False
        self._looks = 0
        self._steps = 0
        """Looks at which there was state."""
        self._first: int | None = None

    def look(self) -> None:
        """A step is over, and parameters are as the optimizers left them."""
        if self._has_none:
            return
        own = [o for o in self.optimizers if not type(o).__module__.startswith("torch.optim")]  # torch's have none
        self._looks += 1
        self.outside = next((o for o in own if _keeps_outside(o)), None) if self._looks <= _FIRST_STEPS else None
        states = [(p, o.state[p]) for o in own for p in Optimizers(o).parameters if p in o.state and p.numel()]
        if own and not states:  # a GradScaler skipped the step
            return
        known = {name for _, state in states for name in state} if not self._steps else self.names
        self.names = {name for name in known if _are_copies(name, states)}
        moved = checksum([local(p) for p, _ in states])
        # What equals a parameter that has not moved may be where it began.
        has_moved = self._first is not None and moved != self._first
        self.trained = {name for name in self.names if _is_wide(name, states, has_moved=has_moved)}
        self._first = moved if self._first is None else self._first
        self._steps += 1
        self._has_none = not self.names and self._steps >= (_FIRST_STEPS if own else 1)

    def stop_looking(self) -> None:
        """There is nothing to find."""
        self._has_none = True

    def of(self, tensor: Tensor) -> list[Tensor]:
        """All copies of a parameter, the widest first, in the same order on all workers; none of any other tensor."""
        if not self.names or not isinstance(tensor, nn.Parameter):
            return []
        state = self.optimizers.state_of(whole_of(tensor))
        copies = [local(state[name]) for name in sorted(self.names & state.keys())]
        return sorted(copies, key=lambda copy: -copy.element_size())

    @torch.no_grad()
    def follow(self) -> None:
        """Parameters have other values now, and copies take them."""
        for p in self.optimizers.parameters:
            own = local(p)
            for copy in self.of(p):
                if not torch.equal(copy.to(own.dtype), own):
                    copy.copy_(own)


def _are_copies(name: str, states: list[tuple[nn.Parameter, State]]) -> bool:
    """Whether this is a copy in every state that has it; zeros say nothing."""
    found = [(local(p.detach()), state[name]) for p, state in states if name in state]
    found = [(p, local(value) if isinstance(value, Tensor) else value) for p, value in found]
    alike = all(
        isinstance(value, Tensor)
        and value.is_floating_point() == p.is_floating_point()
        and value.shape == p.shape
        and torch.equal(value.to(p.dtype), p)
        for p, value in found
    )
    return alike and any(bool(p.any()) for p, _ in found)


def _is_wide(name: str, states: list[tuple[nn.Parameter, State]], *, has_moved: bool) -> bool:
    """Whether a copy holds more than its parameter can, or is of the same type and has moved with it."""
    found = [(local(p.detach()), local(state[name])) for p, state in states if name in state]
    return any(has_moved if value.dtype == p.dtype else not torch.equal(p.to(value.dtype), value) for p, value in found)


_FIRST_STEPS = 3


def _keeps_outside(optimizer: Optimizer) -> bool:
    """Whether a wider copy of each parameter, that holds more than it, is among the optimizer's attributes."""
    parameters = [local(p.detach()) for p in Optimizers(optimizer).parameters if p.dtype in _NARROW and p.numel()]
    if not parameters:
        return False
    values = [value for key, value in vars(optimizer).items() if key not in ("state", "param_groups", "defaults")]
    kept = [local(t.detach()) for value in values for t in _tensors(value, 3) if t.dtype not in _NARROW]

    def copies(p: Tensor) -> list[Tensor]:
        return [t for t in kept if t.shape == p.shape and t.is_floating_point() and torch.equal(t.to(p.dtype), p)]

    found = [(p, copies(p)) for p in parameters] if kept else []
    return bool(found) and all(of for _, of in found) and any(not torch.equal(of[0], p.to(of[0])) for p, of in found)


_NARROW = (torch.bfloat16, torch.float16)


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    """Tensors in lists, dicts and inner optimizers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Optimizer):
        yield from Optimizers(value).parameters
    elif depth and isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part, depth - 1)
