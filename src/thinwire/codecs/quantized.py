"""Means over groups in a few bits per element, with error feedback at both ends."""

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.codecs.aggregate import Aggregator, Exact, State
from thinwire.codecs.quantize import BLOCK, Own, Quantizer, Rows, add, cut, elements, longest, quantizer
from thinwire.comm.buckets import unpack_into
from thinwire.comm.wire import Pending, Wire


class Quantized(Aggregator):
    """Matrices in a few bits per element in both directions; what has one dimension stays exact."""

    rounds = 2

    def __init__(
        self,
        wire: Wire,
        like: Sequence[Tensor],
        purpose: str,
        code: Quantizer,
        rows: Callable[[Sequence[Tensor]], list[Rows]] | None = None,
    ) -> None:
        super().__init__(wire, like, purpose)
        self.coded = [i for i, t in enumerate(like) if t.dim() > 1 and t.numel()]
        self.plain = [i for i in range(len(like)) if i not in set(self.coded)]
        self.exact = Exact(wire, [like[i] for i in self.plain], purpose, flagged=not self.coded)
        self.sum: CompressedSum | None = None
        if self.coded:
            coded = [like[i] for i in self.coded]
            self.size = sum(t.numel() for t in coded)
            its_rows = rows(coded) if rows else [Rows(-(-self.size // BLOCK), BLOCK)]
            self.sum = CompressedSum(wire, its_rows, code, coded[0].device, purpose)
            sizes = [t.numel() for t in coded]
            self.pieces = [pieces(sizes, span) for span in self.sum.spans]
            """What falls into each part of this worker's share."""
        self._steps = 0
        self._halfway = False

    def begin(self, tensors: Sequence[Tensor], *, healthy: bool = True, again: bool = False, steps: int = 0) -> None:
        """Add to what was left out, and send its code."""
        self._steps, self._halfway, self._again = steps, False, again
        if self.sum is not None:
            values = functools.partial(self._values, [tensors[i] for i in self.coded]) if healthy else None
            with self.wire.hidden_behind((steps + 1) // 2):
                self.sum.begin(values, again)
        if self.plain:
            self.exact.begin([tensors[i] for i in self.plain], healthy=healthy, steps=steps)

    def _values(self, coded: Sequence[Tensor]) -> list[list[Tensor]]:
        """What falls into each part of this worker's share, flat."""
        flat = [t.reshape(-1) for t in coded]  # once: what is not contiguous is copied
        return [[piece.of(flat) for piece in part] for part in self.pieces]

    def middle(self) -> None:
        """Send the code of the sums on."""
        if self.sum is not None and not self._halfway:
            self._halfway = True
            with self.wire.hidden_behind(self._steps // 2):
                self.sum.middle(self._again)

    def end(self, out: Sequence[Tensor]) -> bool:
        """What the code of the sums says."""
        self.middle()
        coded = [out[i] for i in self.coded]
        direct = self.sum is not None and len(coded) == 1 and self._fits(coded[0])
        total = self.sum.end(coded[0].view(-1) if direct else None) if self.sum is not None else None
        if total is not None and not direct:
            self.wire.compute(functools.partial(unpack_into, total[: self.size], coded))
        healthy = self.exact.end([out[i] for i in self.plain]) if self.plain else True
        return healthy and (self.sum is None or total is not None)

    def _fits(self, out: Tensor) -> bool:
        """Whether the sum can be decoded right into a tensor."""
        whole = self.sum is not None and out.numel() == self.sum.size
        return whole and out.is_contiguous() and out.dtype == torch.float32

    def choose_senders(self, groups: Sequence[int] | None) -> None:
        """The others keep what they left out before."""
        if self.sum is not None:
            self.sum.senders = groups

    def refine(self) -> bool:
        """Both errors travel in int8."""
        return self.sum is not None and self.sum.refine(quantizer("int8"))

    def move(self, device: torch.device) -> None:
        """Both errors."""
        if self.sum is not None:
            self.sum.move(device)

    def commit(self) -> None:
        """Both errors: this group's, and that of the sums this worker owns."""
        if self.sum is not None:
            self.sum.commit()

    def forget(self) -> None:
        """This group's own error; that of the sums is of all groups."""
        if self.sum is not None:
            self.sum.residual.zero_()

    def residuals(self) -> list[Tensor]:
        """Both errors."""
        return [self.sum.residual, self.sum.owned] if self.sum is not None else []

    def workspace(self) -> list[Tensor]:
        """Both errors as they will be."""
        return self.sum.workspace() if self.sum is not None else []

    def local(self) -> State:
        """Both errors."""
        return self.sum.state() if self.sum is not None else {}

    def load(self, shared: State, local: State) -> None:
        """Take both back."""
        if self.sum is not None and local:
            self.sum.load_state(local)

    def keep(self, shared: State, local: State) -> None:
        """This group's own error, and with it that of the sums this worker owned."""
        if self.sum is not None and local:
            self.sum.keep(local)

    def adopt(self, shared: State, everyone: Sequence[State]) -> None:
        """All that the old world had not sent yet, divided among the new one."""
        if self.sum is not None and everyone[0]:
            self.sum.adopt(everyone)
        else:
            for t in self.residuals():
                t.zero_()


class Piece(NamedTuple):
    """A part of one tensor, and where it lies in a worker's share."""

    tensor: int
    start: int
    end: int
    place: int

    @property
    def slice(self) -> slice:
        """Where it lies in the share."""
        return slice(self.place, self.place + self.end - self.start)

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The part itself, flat."""
        return tensors[self.tensor].reshape(-1)[self.start : self.end]


def pieces(sizes: Sequence[int], span: tuple[int, int]) -> list[Piece]:
    """What of tensors that lie one after the other falls into a span."""
    found, begin = [], 0
    for i, size in enumerate(sizes):
        start, end = max(begin, span[0]), min(begin + size, span[1])
        if start < end:
            found.append(Piece(i, start - begin, end - begin, start - span[0]))
        begin += size
    return found


_FLAG = 4


class CompressedSum:
    """One flat vector per worker, summed over groups again and again by the groups' weights.

    1. Every group cuts its values into as many parts as there are groups, and sends each part's code to its owner.
    2. An owner adds up what it received and sends the sum's code to everyone.

    What either code leaves out is kept and sent the next time: in `residual` by each group, in `owned` by each owner.
    What an owner has of its own part is not coded on its way to the sum. Both change only when a sum is committed. One
    that nobody used, because a step was skipped or its gradients were thrown away, leaves no trace in later ones.
    The bytes do not grow with the number of groups. Members of a group carry a share of the values each.
    """

    def __init__(
        self,
        wire: Wire,
        rows: Sequence[Rows],
        quantizer: Quantizer,
        device: torch.device,
        purpose: str,
    ) -> None:
        topology = wire.topology
        self.wire = wire
        self.rows = rows
        self.purpose = purpose
        self.groups = len(topology.groups)
        parts = cut(rows, topology.shares * self.groups)
        self.parts = [parts[j * self.groups : (j + 1) * self.groups] for j in range(topology.shares)]
        starts = [0]
        for share in self.parts:
            starts.append(starts[-1] + sum(elements(part) for part in share))
        place = topology.member if wire.carries else topology.shares
        ends = (*starts, starts[-1])
        self.span = ends[place], ends[place + 1]
        """Where this worker's share of the values begins and ends."""
        self.mine = self.parts[topology.member] if wire.carries else [[] for _ in topology.groups]
        self.spans = list(pairwise(accumulate(map(elements, self.mine), initial=self.span[0])))
        """Where each of its parts begins and ends, one for each group."""
        self.residual = torch.zeros(self.span[1] - self.span[0], dtype=torch.float32, device=device)
        self.owned = torch.zeros(elements(self.mine[topology.group_index]), dtype=torch.float32, device=device)
        self.next_residual, self.next_owned = torch.zeros_like(self.residual), torch.zeros_like(self.owned)
        """What takes their place when the sum under way is committed."""
        self.size = starts[-1]
        """Values in all rows."""
        self.senders: Sequence[int] | None = None
        """The groups that have something to send; None is all of them."""
        self._pending: Pending | None = None
        self._use(quantizer)

    def _use(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        length = functools.cache(self._length)
        self.length = self.wire.topology.by_groups(length)
        """Bytes of the longest part, and whether the sender is well."""
        self.gathered = self.wire.topology.by_groups(lambda groups: groups * length(groups))
        """Bytes of the parts of all groups."""

    def _length(self, groups: int) -> int:
        most = max(self.quantizer.size(part) for part in longest(self.rows, len(self.parts) * groups))
        return -(-most // 4) * 4 + _FLAG

    @property
    def _sends(self) -> bool:
        return self.senders is None or self.wire.topology.group_index in self.senders

    def begin(self, values: Callable[[], Sequence[Sequence[Tensor]]] | None, again: bool = False) -> None:
        """Add values to this worker's share of what was left out, and send its code.

        Called, they are flat tensors that lie one after the other in each of `spans`; None of an unhealthy worker,
        which sends only that it is. `again` they are added to the share that was sent last.
        """
        sent = torch.zeros(self.groups, self.length, dtype=torch.uint8, device=self.residual.device)
        if values is None:
            sent[:, -_FLAG:] = 1
        else:
            self.wire.compute(lambda: self._encode(values(), sent, again))
        self._pending = self.wire.all_to_all(sent, self.purpose, self.senders, self.length)

    def _encode(self, values: Sequence[Sequence[Tensor]], sent: Tensor, again: bool) -> None:
        before, left = self._split(self.next_residual if again else self.residual), self._split(self.next_residual)
        for g, part in enumerate(self.mine):
            if self._sends and g != self.wire.topology.group_index:
                self.quantizer.add_and_encode(before[g], values[g], left[g], part, sent[g])
            else:  # its own part it adds exactly
                add(before[g], values[g], left[g])

    def middle(self, again: bool = False) -> None:
        """Add up the part this worker owns, and send it on."""
        assert self._pending is not None, "nothing was begun"
        received = self._pending.wait()
        out = torch.zeros(self.length, dtype=torch.uint8, device=self.owned.device)
        self.wire.compute(lambda: self._add_up(received, out, again))
        self._pending = self.wire.all_gather(out, self.purpose, [self.length] * len(self.parts))

    def _add_up(self, received: Tensor, out: Tensor, again: bool) -> None:
        topology = self.wire.topology
        senders = list(range(self.groups) if self.senders is None else self.senders)
        weights = [len(topology.groups[g]) / topology.world_size for g in senders]
        own = None
        if topology.group_index in senders:
            own = Own(senders.index(topology.group_index), self._split(self.next_residual)[topology.group_index])
        before, part = self.next_owned if again else self.owned, self.mine[topology.group_index]
        self.quantizer.sum_and_encode(before, received, weights, own, self.next_owned, part, out)
        out[-_FLAG:] = received[:, -_FLAG:].amax(0)

    def end(self, out: Tensor | None = None) -> Tensor | None:
        """The sum, the same bits on all workers; None if anyone was unhealthy, and then it must not be committed.

        It is written to `out`, if given: as many values as all rows have.
        """
        shape, device = (self.groups, self.length), self.residual.device
        blocks = [torch.empty(shape, dtype=torch.uint8, device=device) for _ in self.parts]
        assert self._pending is not None, "nothing was begun"
        if self.wire.carries:
            blocks[self.wire.topology.member] = self._pending.wait()
        self._pending = None
        for j, block in enumerate(blocks):
            self.wire.broadcast_in_group([block], j, self.purpose, self.gathered)
        result = torch.empty(self.size, dtype=torch.float32, device=device) if out is None else out
        if self.wire.read(lambda: bool(blocks[0][0, -1]), False):
            return None
        self.wire.compute(lambda: self._decode(blocks, result))
        return result

    def _decode(self, blocks: Sequence[Tensor], result: Tensor) -> None:
        place = 0
        for block, share in zip(blocks, self.parts, strict=True):
            for payload, part in zip(block, share, strict=True):
                size = elements(part)
                self.quantizer.decode(payload, part, result[place : place + size])
                place += size

    def commit(self) -> None:
        """The last sum was used: what it left out is sent the next time."""
        self.residual, self.next_residual = self.next_residual, self.residual
        self.owned, self.next_owned = self.next_owned, self.owned

    def refine(self, quantizer: Quantizer) -> bool:
        """From the next sum on use this code, if it is finer; both errors go with it."""
        finer = quantizer.size(self.rows) > self.quantizer.size(self.rows)
        if finer:
            self._use(quantizer)
        return finer

    def move(self, device: torch.device) -> None:
        """Hold both errors on a device, while no sum is under way."""
        for name in ("residual", "owned", "next_residual", "next_owned"):
            setattr(self, name, getattr(self, name).to(device))

    def workspace(self) -> list[Tensor]:
        """What it holds beside its state and the result."""
        return [self.next_residual, self.next_owned]

    def state(self) -> dict[str, Tensor]:
        """Both errors, where they belong, and the weight of this worker's group."""
        topology = self.wire.topology
        weight = len(topology.group) / topology.world_size
        before = sum(elements(part) for part in self.mine[: topology.group_index])
        place = torch.tensor([*self.span, self.span[0] + before, weight], dtype=torch.float64)
        return {"residual": self.residual, "owned": self.owned, "place": place}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from a state."""
        self.residual.copy_(state["residual"])
        self.owned.copy_(state["owned"])

    def keep(self, state: dict[str, Tensor]) -> None:
        """Continue from this worker's state, if its share of the values is the same beside other groups.

        Another part may be its own now, so what it had left out of the sums it sends as a part of its own values.
        """
        start, end, own, _ = state["place"].tolist()
        if (int(start), int(end)) == self.span:
            weight = len(self.wire.topology.group) / self.wire.topology.world_size
            place = int(own - start)
            self.residual.copy_(state["residual"])
            self.residual[place : place + len(state["owned"])].add_(state["owned"], alpha=1 / weight)

    def adopt(self, everyone: Sequence[dict[str, Tensor]]) -> None:
        """Continue from the states of all workers of another world: each group starts from their mean."""
        whole = unsent(everyone, self.size)
        self.residual.copy_(whole[self.span[0] : self.span[1]])
        self.owned.zero_()

    def _split(self, share: Tensor) -> list[Tensor]:
        return list(share.split([elements(part) for part in self.mine]))


def unsent(everyone: Sequence[dict[str, Tensor]], size: int) -> Tensor:
    """What the next sums will bring beyond what is added to them, from the states of all workers."""
    whole = everyone[0]["residual"].new_zeros(size)
    for state in everyone:
        start, end, own, weight = state["place"].tolist()
        whole[int(start) : int(end)].add_(state["residual"], alpha=weight)
        whole[int(own) : int(own) + len(state["owned"])].add_(state["owned"])
    return whole
