"""The largest values of each matrix, by index and value, with error feedback; what has one dimension stays exact."""

import functools
import itertools
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.codecs.aggregate import Aggregator, Exact, State
from thinwire.codecs.quantize import Rows, cut, elements
from thinwire.codecs.quantized import Piece, pieces
from thinwire.comm.buckets import unpack_into
from thinwire.comm.wire import Pending, Wire


class Sparse(Aggregator):
    """Every group receives what all have sent; the rest waits in `v` until it is among the largest."""

    def __init__(self, wire: Wire, like: Sequence[Tensor], purpose: str, density: float) -> None:
        super().__init__(wire, like, purpose)
        topology, device = wire.topology, like[0].device
        self.density = density
        self.sparse = [i for i, t in enumerate(like) if t.dim() > 1]
        self.dense = [i for i, t in enumerate(like) if t.dim() <= 1]
        self.exact = Exact(wire, [like[i] for i in self.dense], purpose, flagged=not self.sparse)
        sizes = [like[i].numel() for i in self.sparse]
        self.spans = _spans(sizes, topology.shares)
        self.pieces = [pieces(sizes, span) for span in self.spans]
        self.span = self.spans[topology.member] if wire.carries else (0, 0)
        self.own_pieces = self.pieces[topology.member] if wire.carries else []
        size = self.span[1] - self.span[0]
        self.v, self.next_v = (torch.zeros(size, dtype=torch.float32, device=device) for _ in range(2))
        self.applied = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        longest = max((p.end - p.start for p in self.own_pieces), default=0)
        self.scratch = torch.empty(longest, dtype=torch.float32, device=device)
        self._counts: list[int] = []
        self._pending: Pending | None = None
        self._again = False

    def begin(self, tensors: Sequence[Tensor], *, healthy: bool = True, again: bool = False, steps: int = 0) -> None:
        """Accumulate, and send the largest."""
        self._again = again
        if self.sparse:
            if healthy:
                self.accumulate([tensors[i] for i in self.sparse], again)
            self._counts = [sum(_count(piece, self.density) for piece in each) for each in self.pieces]
            sizes = [4 * (2 * n + 1) for n in self._counts]
            self._pending = self.wire.all_gather(self._payload(healthy), self.purpose, sizes)
        if self.dense:
            self.exact.begin([tensors[i] for i in self.dense], healthy=healthy, steps=steps)

    def take_back(self, tensors: Sequence[Tensor]) -> None:
        """The last mean is in these tensors; it was sent, and must not be accumulated."""
        sparse = [tensors[i] for i in self.sparse]
        for t, before in zip(sparse, _like(self.applied, sparse) if sparse else (), strict=True):
            t.sub_(before)

    def accumulate(self, tensors: Sequence[Tensor], again: bool) -> None:
        """Add this worker's share to what was not sent."""
        before = self.next_v if again else self.v
        for piece in self.own_pieces:
            torch.add(before[piece.slice], piece.of(tensors), out=self.next_v[piece.slice])

    def sent(self, places: Tensor) -> None:
        """These are sent now."""
        self.next_v[places] = 0.0

    def end(self, out: Sequence[Tensor]) -> bool:
        """The weighted sum of what groups sent."""
        blocks = self._receive() if self.sparse else []
        healthy = not self.wire.read(lambda: any(bool(block[:, -1].any()) for block in blocks[:1]), False)
        if self.dense:
            healthy = self.exact.end([out[i] for i in self.dense]) and healthy
        if healthy and blocks:
            self.wire.compute(lambda: self._add_up(blocks))
            self.wire.compute(lambda: unpack_into(self.applied, [out[i] for i in self.sparse]))
        return healthy

    def _payload(self, healthy: bool) -> Tensor:
        """Values, places, and whether this worker is unhealthy."""
        places, values = self.v.new_zeros(0, dtype=torch.int64), self.v[:0]
        if healthy:
            found = [
                largest(self.next_v[p.slice], _count(p, self.density), self.scratch) + p.place for p in self.own_pieces
            ]
            places = torch.cat([places, *found])
            values = self.next_v[places]
            self.sent(places)
        elif self.wire.carries:
            count = self._counts[self.wire.topology.member]
            places, values = places.new_zeros(count), self.v.new_zeros(count)
        flag = places.new_full((1,), not healthy, dtype=torch.int32)
        return torch.cat([values.view(torch.int32), places.to(torch.int32), flag])

    def _receive(self) -> list[Tensor]:
        """What every group sent: one block per share, with one row per group."""
        assert self._pending is not None, "nothing was begun"
        topology, received = self.wire.topology, self._pending.wait()
        groups, device = len(topology.groups), self.applied.device
        blocks = [torch.empty(groups, 2 * n + 1, dtype=torch.int32, device=device) for n in self._counts]
        if self.wire.carries:
            blocks[topology.member] = received
        for j, (block, n) in enumerate(zip(blocks, self._counts, strict=True)):
            size = topology.by_groups(functools.partial(operator.mul, 4 * (2 * n + 1)))
            self.wire.broadcast_in_group([block], j, self.purpose, size)
        return blocks

    def _add_up(self, blocks: Sequence[Tensor]) -> None:
        """One group after the other, so that all workers round alike."""
        if not self._again:
            self.applied.zero_()
        topology = self.wire.topology
        for (start, end), block in zip(self.spans, blocks, strict=True):
            count = block.shape[1] // 2
            for row, group in zip(block, topology.groups, strict=True):
                values = row[:count].view(torch.float32) * (len(group) / topology.world_size)
                self.applied[start:end].index_add_(0, row[count : 2 * count], values)

    def commit(self) -> None:
        """What was not sent."""
        self.v, self.next_v = self.next_v, self.v

    def residuals(self) -> list[Tensor]:
        """What was not sent."""
        return [self.v]

    def workspace(self) -> list[Tensor]:
        """The same as it will be, and the last mean."""
        return [self.next_v, self.applied, self.scratch]

    def local(self) -> State:
        """What was not sent, where it belongs, and the weight of this worker's group."""
        if not self.wire.carries:
            return {}
        topology = self.wire.topology
        weight = len(topology.group) / topology.world_size
        return {"v": self.v, "place": torch.tensor([*self.span, weight], dtype=torch.float64)}

    def load(self, shared: State, local: State) -> None:
        """Take it back."""
        if local:
            self.v.copy_(local["v"])

    def keep(self, shared: State, local: State) -> None:
        """What this worker has not sent, if it is of the same share of the values."""
        if self._is_mine(local):
            self.v.copy_(local["v"])

    def _is_mine(self, local: State) -> bool:
        return "place" in local and tuple(map(int, local["place"].tolist()[:2])) == self.span

    def adopt(self, shared: State, everyone: Sequence[State]) -> None:
        """Every group starts from the mean of the old ones."""
        self.v.copy_(self.mean_of("v", everyone))

    def mean_of(self, name: str, everyone: Sequence[State]) -> Tensor:
        """This worker's share of the mean over the groups of another world."""
        whole = torch.zeros_like(self.applied)
        for state in everyone:
            if name in state:
                first, last, weight = state["place"].tolist()
                whole[int(first) : int(last)].add_(state[name], alpha=weight)
        return whole[self.span[0] : self.span[1]]


def _count(piece: Piece, density: float) -> int:
    size = piece.end - piece.start
    return min(size, max(1, math.ceil(density * size)))


def _spans(sizes: Sequence[int], shares: int) -> list[tuple[int, int]]:
    """Where each share of the matrices begins and ends."""
    ends = [0]
    for part in cut([Rows(size, 1) for size in sizes], shares):
        ends.append(ends[-1] + elements(part))
    return list(itertools.pairwise(ends))


def _like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    found = [torch.empty_like(t) for t in tensors]
    unpack_into(flat, found)
    return found


# Below this a plain top-k is fast enough.
_SMALL = 1 << 15


def largest(values: Tensor, count: int, scratch: Tensor | None = None) -> Tensor:
    """Indices of the `count` values with the largest magnitude; `scratch` is memory for as many values.

    On a CPU a top-k over millions costs more than a step may take. A sample gives a threshold that a few more than
    `count` values pass; the largest of these are the largest of all.
    """
    if count == len(values):
        return torch.arange(count, device=values.device)
    if values.device.type != "cpu" or len(values) < _SMALL:
        return values.abs().topk(count, sorted=False).indices
    sizes = torch.abs(values, out=None if scratch is None else scratch[: len(values)])
    stride = max(1, min(len(values) // 8192, count // 8))
    sample = sizes[::stride]
    wanted = min(len(sample), math.ceil(1.25 * count / stride) + 8)
    passing = _at_least(sizes, sample.topk(wanted, sorted=True).values[-1])
    if len(passing) < count:
        return sizes.topk(count, sorted=False).indices
    return passing[sizes[passing].topk(count, sorted=False).indices]


def _at_least(sizes: Tensor, threshold: Tensor) -> Tensor:
    """Indices of values that reach a threshold, where few do: first the columns that have any, then the values."""
    height = 16
    rest = len(sizes) % height
    grid = sizes[: len(sizes) - rest].view(height, -1)
    columns = torch.nonzero(grid.amax(0) >= threshold).flatten()
    row, column = torch.nonzero(grid[:, columns] >= threshold, as_tuple=True)
    last = torch.nonzero(sizes[len(sizes) - rest :] >= threshold).flatten() + len(sizes) - rest
    return torch.cat([row * grid.shape[1] + columns[column], last])
