"""What groups say about their changes with each average: how long they are, and a sketch of each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.aggregate import Exact
from thinwire.comm.wire import Wire
from thinwire.methods.sketch import SIZE, sketch


class ChangeNotes:
    """Means over groups, small enough to arrive before the average itself does."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.values: Tensor | None = None
        """After `receive`, for each tensor the mean length of its changes and the mean of their sketches, (1 + 64,
        tensors)."""
        self._sum = Exact(wire, [], "control")
        self._sum.weighted = True

    def send(self, changes: Sequence[Tensor], weights: Sequence[float] | None, overlap: int) -> None:
        """This group's, times its weight in the mean of each tensor."""
        topology, first = self.wire.topology, changes[0]
        if len(topology.groups) == 1:
            self.values = None  # those of a pending average, which others have sent
            return
        self.values = self.wire.read(lambda: self._own(changes, weights), first.new_empty(1 + SIZE, len(changes)))
        self._sum.begin([self.values], steps=overlap)

    def _own(self, changes: Sequence[Tensor], weights: Sequence[float] | None) -> Tensor:
        topology, first = self.wire.topology, changes[0]
        sketches = torch.stack([sketch(change) for change in changes], dim=1)  # (sketch, tensors)
        values = torch.cat([torch.stack(torch._foreach_norm(list(changes)))[None], sketches])
        share = len(topology.group) / topology.world_size
        return values.mul_(share if weights is None else first.new_tensor(weights))

    def receive(self) -> None:
        """Wait for those of all groups."""
        if self.values is not None:
            self._sum.end([self.values])
