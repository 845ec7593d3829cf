"""Tensors that nodes average while training goes on, and what of them is under way."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.comm.codec import pack_wide
from thinwire.comm.collectives import Pending
from thinwire.comm.transfer import Rotating, Transfer
from thinwire.errors import ConfigError


@dataclass
class Flight:
    """What was sent and is not taken in yet."""

    sent: int
    """The step at which it was sent."""
    wait: int
    """It is due so many steps later."""
    counters: Pending | None = None
    """How far everyone had come then."""
    means: list[Tensor] = field(default_factory=list)
    """What came back, if it was waited for before its time."""
    own: Tensor | None = None
    """The parameters that this node sent, where it is compensated."""
    first: int = 0
    """The first part of the cargo that it carries."""


@dataclass
class Cargo:
    """Tensors that travel together, one after the other in a flat vector."""

    tensors: Callable[[], list[Tensor]]
    """As they are now: a module may put others in their place."""
    transfer: Transfer | Rotating
    base: Tensor
    """What all nodes last agreed on."""
    room: Tensor = field(init=False)
    """For as much again; taking new memory each time costs more than filling it."""

    def __post_init__(self) -> None:
        self.room = torch.empty_like(self.base)

    def send(self, wait: int, number: int) -> None:
        """Send how far this node is from what was agreed on, if it is this worker that carries it."""
        self._check_size()
        if self.transfer.carries(number):
            pack_wide(self.tensors(), out=self.room).sub_(self.base)
        self.transfer.begin(self.room, wait, number)

    def received(self, mean: Tensor) -> Tensor:
        """What nodes held on average, from the mean of how far they were."""
        return torch.add(self.base, mean, out=self.room)

    def agree_on(self, mean: Tensor) -> None:
        """What `received` gave is from now on what differences are to."""
        self.base, self.room = mean, self.base

    def mix(self, weight: float) -> None:
        """Go so far towards what was agreed on; what is there already stays as it is, bit for bit."""
        with self._widened() as wide:
            if weight < 1:
                torch._foreach_lerp_(wide, _views(self.base, wide), weight)
            else:
                torch._foreach_copy_(wide, _views(self.base, wide))

    def shift_from(self, own: Tensor) -> None:
        """Go as far as what was agreed on is from `own`, which is used up."""
        with self._widened() as wide:
            torch._foreach_add_(wide, _views(torch.sub(self.base, own, out=own), wide))

    @contextmanager
    def _widened(self) -> Iterator[list[Tensor]]:
        """The tensors in the base's dtype: themselves where they have it, else copies that are written back."""
        tensors = self.tensors()
        wide = [t.detach().to(self.base.dtype) for t in tensors]
        yield wide
        for t, changed in zip(tensors, wide, strict=True):
            if t.dtype != changed.dtype:
                t.detach().copy_(changed)

    def _check_size(self) -> None:
        """Refuse tensors that have become others than those that were attached."""
        now = sum(t.numel() for t in self.tensors())
        if now != len(self.base):
            raise ConfigError(
                f"what nodes average had {len(self.base)} values when it was attached and has {now}; "
                "detach() before parameters or running statistics change their size, and attach() again"
            )


def _views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A flat vector in the shapes of the tensors that it holds one after the other."""
    pieces = flat.split([t.numel() for t in like])
    return [piece.view(t.shape) for piece, t in zip(pieces, like, strict=True)]
