"""Copies of the parameters that some optimizers keep in their state and train instead of them, often in fp32.

Such an optimizer writes the parameter anew at every step, from its copy, which knows nothing of averages. So it is the
copies that are averaged, in all of their bits, and parameters follow. They have no name in common. A copy is known by
its values: those of the parameter, rounded to its type, after each step.
"""

import torch
from torch import Tensor, nn

from thinwire.comm.buckets import checksum
from thinwire.factor.optimizers import Optimizers, State
from thinwire.shards import local, whole_of


class Masters:
    """Looks for copies in the first steps, and finds that of a parameter."""

    def __init__(self, optimizers: Optimizers) -> None:
        self.optimizers = optimizers
        self.names: set[str] = set()
        """What optimizers call them; until it is certain, all that may be one."""
        self._looked = False
        self._is_certain = False
        self._first: int | None = None

    def look(self) -> None:
        """A step is over, and parameters are as the optimizers left them."""
        if self._is_certain:
            return
        states = [(p, self.optimizers.state_of(p)) for p in self.optimizers.parameters]
        states = [(p, state) for p, state in states if state and p.numel()]
        known = {name for _, state in states for name in state} if not self._looked else self.names
        self.names = {name for name in known if _are_copies(name, states)}
        moved = checksum([local(p) for p, _ in states])
        # What equals a parameter that has not moved may be where it began.
        self._is_certain = not self.names or (self._first is not None and moved != self._first)
        self._first = moved if self._first is None else self._first
        self._looked = True

    def of(self, tensor: Tensor) -> Tensor:
        """The copy of a parameter; any other tensor itself."""
        if not self.names or not isinstance(tensor, nn.Parameter):
            return tensor
        state = self.optimizers.state_of(whole_of(tensor))
        return next((local(state[name]) for name in self.names if name in state), tensor)

    @torch.no_grad()
    def follow(self) -> None:
        """Parameters have other values now, and copies take them."""
        for p in self.optimizers.parameters:
            copy, own = self.of(p), local(p)
            if copy is not p and not torch.equal(copy.to(own.dtype), own):
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
