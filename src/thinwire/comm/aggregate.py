"""Means over groups of lists of tensors, again and again, in a code.

    begin     send what this group has; nobody waits
    middle    where a code takes two rounds: use what came in, and send on
    end       wait, and write the mean, the same bits on all workers

All members of a group hold the same tensors and carry one share each over the slow link. What a code leaves out is kept
and sent the next time: error feedback. It changes only at `commit`, so a mean that nobody used leaves no trace. The
ledger has the bytes when they are sent, and of the time only what is waited for.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.buckets import WIRES, pack_wide, size_of, unpack_into
from thinwire.comm.collectives import Pending, Wire
from thinwire.comm.compressed import CompressedSum
from thinwire.comm.quantize import Quantizer, Rows
from thinwire.comm.simulated import SimulatedWire

BLOCK = 256

State = dict[str, Tensor]


class Aggregator(ABC):
    """One way of averaging tensors like these over groups."""

    rounds: ClassVar[int] = 1

    def __init__(self, wire: Wire, like: Sequence[Tensor], purpose: str) -> None:
        self.wire = wire
        self.like = list(like)
        self.purpose = purpose

    @abstractmethod
    def begin(self, tensors: Sequence[Tensor], *, healthy: bool = True, again: bool = False, steps: int = 0) -> None:
        """Send tensors, whose mean is waited for `steps` steps later; an unhealthy worker sends only that it is.

        `again` is one more exchange of the same step: the last mean is in these tensors, and more.
        """

    @abstractmethod
    def end(self, out: Sequence[Tensor]) -> bool:
        """Write the mean; False if any worker was unhealthy, and then `out` is undefined."""

    def take_back(self, tensors: Sequence[Tensor]) -> None:  # noqa: B027
        """Before one more exchange of the same step: subtract the last mean, where more than a sum is made of it."""

    def middle(self) -> None:  # noqa: B027
        """The second round, if there is one; `end` makes up for a call that was left out."""

    def turn(self, steps: int) -> int | None:
        """How many steps after `begin` to call `middle`, if all may take `steps`; None if there is no second round."""
        return (steps + 1) // 2 if self.rounds > 1 else None

    def run(self, tensors: Sequence[Tensor], *, healthy: bool = True, again: bool = False) -> bool:
        """Replace tensors by their mean."""
        self.begin(tensors, healthy=healthy, again=again)
        return self.end(tensors)

    def commit(self) -> None:  # noqa: B027
        """The last mean was used: keep what it left out."""

    def residuals(self) -> list[Tensor]:
        """What is kept from one mean to the next, in the units of the tensors."""
        return []

    def workspace(self) -> list[Tensor]:
        """What it holds beside its state."""
        return []

    def shared(self) -> State:
        """What is the same on all workers."""
        return {}

    def local(self) -> State:
        """What is this worker's own."""
        return {}

    def load(self, shared: State, local: State) -> None:  # noqa: B027
        """Continue from a state."""

    def adopt(self, shared: State, everyone: Sequence[State]) -> None:  # noqa: B027
        """Continue from the states of all workers of another world."""


class Exact(Aggregator):
    """An all-reduce, in fp32 or wider, or rounded to bf16."""

    def __init__(
        self, wire: Wire, like: Sequence[Tensor], purpose: str, rounding: str = "fp32", flagged: bool = False
    ) -> None:
        super().__init__(wire, like, purpose)
        self.rounding = rounding
        self.weighted = False
        """Whether tensors come with their group's weight; else that is its share of all workers."""
        self.flagged = flagged
        """Whether it says if the sender is healthy; else non-finite values are for the caller to find."""
        self._flat = torch.empty(0)
        self._shares: list[Tensor] = []
        self._pending: Pending | None = None

    def begin(self, tensors: Sequence[Tensor], *, healthy: bool = True, again: bool = False, steps: int = 0) -> None:
        """Send each tensor times the group's weight."""
        topology = self.wire.topology
        if len(topology.groups) == 1:
            self._flat = pack_wide(tensors)
            return
        self._flat = self._weigh(tensors, healthy)
        self._shares = list(self._flat.tensor_split(topology.shares))
        sent = topology.at_once([(topology.crossing(j), size_of(share)) for j, share in enumerate(self._shares)])
        with hidden_behind(self.wire, steps):
            self._pending = self.wire._begin(self._cross, self._flat, sent, self.purpose)

    def _weigh(self, tensors: Sequence[Tensor], healthy: bool) -> Tensor:
        topology = self.wire.topology
        share = 1.0 if self.weighted else len(topology.group) / topology.world_size
        is_flat = len(tensors) == 1 and tensors[0].dtype in (torch.float32, torch.float64)
        values = tensors[0].detach().reshape(-1) if is_flat else pack_wide(tensors)
        dtype = values.dtype if self.rounding == "fp32" else WIRES[self.rounding]
        count = values.numel()
        flat = values.new_empty(count + self.flagged, dtype=torch.promote_types(dtype, WIRES[self.rounding]))
        if self.wire.carries:  # the others receive it from those that do
            torch.mul(values, share, out=flat[:count])
            flat[count:] = float(not healthy)
        return flat

    def end(self, out: Sequence[Tensor]) -> bool:
        """Receive the sum and hand it around inside the group."""
        if self._pending is not None:
            self._pending.wait()
            for j, share in enumerate(self._shares):
                if share.numel():
                    self.wire.broadcast_in_group([share], j, self.purpose)
        flat, self._flat, self._pending, self._shares = self._flat, torch.empty(0), None, []
        flagged = self.flagged and len(self.wire.topology.groups) > 1
        if flagged and not flat.is_meta and bool(flat[-1]):
            return False
        unpack_into(flat[: len(flat) - flagged], out)
        return True

    def _cross(self) -> Any:
        member = self.wire.topology.member
        if member < len(self._shares) and self._shares[member].numel():
            return dist.all_reduce(self._shares[member], group=self.wire._cross, async_op=True)
        return None


class Quantized(Aggregator):
    """Matrices in a few bits per element in both directions; what has one dimension stays exact."""

    rounds = 2

    def __init__(
        self,
        wire: Wire,
        like: Sequence[Tensor],
        purpose: str,
        quantizer: Quantizer,
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
            cut = rows(coded) if rows else [Rows(-(-self.size // BLOCK), BLOCK)]
            self.sum = CompressedSum(wire, cut, quantizer, coded[0].device, purpose)
            self.pieces = pieces([t.numel() for t in coded], self.sum.span)
            self.covered = sum(p.end - p.start for p in self.pieces)
            """Of this worker's share; what fills up the last block is behind it."""
        self._steps = 0
        self._halfway = False

    def begin(self, tensors: Sequence[Tensor], *, healthy: bool = True, again: bool = False, steps: int = 0) -> None:
        """Add to what was left out, and send its code."""
        self._steps, self._halfway, self._again = steps, False, again
        if self.sum is not None:
            coded = [tensors[i] for i in self.coded]
            if healthy:
                self.sum.add([piece.of(coded) for piece in self.pieces], [p.slice for p in self.pieces], again)
                self.sum.next_residual[self.covered :] = 0.0  # a code may say something else of it, which nobody needs
            with hidden_behind(self.wire, (steps + 1) // 2):
                self.sum.begin(healthy)
        if self.plain:
            self.exact.begin([tensors[i] for i in self.plain], healthy=healthy, steps=steps)

    def middle(self) -> None:
        """Send the code of the sums on."""
        if self.sum is not None and not self._halfway:
            self._halfway = True
            with hidden_behind(self.wire, self._steps // 2):
                self.sum.middle(self._again)

    def end(self, out: Sequence[Tensor]) -> bool:
        """What the code of the sums says."""
        self.middle()
        coded = [out[i] for i in self.coded]
        direct = self.sum is not None and len(coded) == 1 and self._fits(coded[0])
        total = self.sum.end(coded[0].view(-1) if direct else None) if self.sum is not None else None
        if total is not None and not direct:
            unpack_into(total[: self.size], coded)
        healthy = self.exact.end([out[i] for i in self.plain]) if self.plain else True
        return healthy and (self.sum is None or total is not None)

    def _fits(self, out: Tensor) -> bool:
        """Whether the sum can be decoded right into a tensor."""
        whole = self.sum is not None and out.numel() == self.sum.size
        return whole and out.is_contiguous() and out.dtype == torch.float32

    def commit(self) -> None:
        """Both errors: this group's, and that of the sums this worker owns."""
        if self.sum is not None:
            self.sum.commit()

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

    def adopt(self, shared: State, everyone: Sequence[State]) -> None:
        """All that the old world had not sent yet, divided among the new one."""
        if self.sum is not None and everyone[0]:
            self.sum.adopt(everyone)
        else:
            for t in self.residuals():
                t.zero_()


class Rotating(Aggregator):
    """One member of each group carries everything, another one each time; each keeps what it left out itself."""

    def __init__(self, wire: Wire, make: Callable[[], Aggregator]) -> None:
        self.turns: list[Aggregator] = []
        for member in range(wire.topology.shares):
            with wire.carried_by(member):
                self.turns.append(make())
        super().__init__(wire, self.turns[0].like, self.turns[0].purpose)
        self.number = -1

    @property
    def _member(self) -> int:
        return self.number % len(self.turns)

    def begin(self, tensors: Sequence[Tensor], *, healthy: bool = True, again: bool = False, steps: int = 0) -> None:
        """Send by the member whose turn it is."""
        self.number += 1
        with self.wire.carried_by(self._member):
            self.turns[self._member].begin(tensors, healthy=healthy, again=again, steps=steps)

    def middle(self) -> None:
        """Of the one under way."""
        with self.wire.carried_by(self._member):
            self.turns[self._member].middle()

    def turn(self, steps: int) -> int | None:
        """As of any of them."""
        return self.turns[0].turn(steps)

    def end(self, out: Sequence[Tensor]) -> bool:
        """The mean, handed on to its group by the member that carried it."""
        with self.wire.carried_by(self._member):
            return self.turns[self._member].end(out)

    def commit(self) -> None:
        """Of the last one."""
        self.turns[self._member].commit()

    def workspace(self) -> list[Tensor]:
        """Of all of them."""
        return [t for each in self.turns for t in each.workspace()]

    def shared(self) -> State:
        """Whose turn it is, and what all of them share."""
        return {"number": torch.tensor(self.number), **self._numbered([each.shared() for each in self.turns])}

    def local(self) -> State:
        """Of all of them."""
        return self._numbered([each.local() for each in self.turns])

    def load(self, shared: State, local: State) -> None:
        """Take it back."""
        self.number = int(shared["number"])
        for i, each in enumerate(self.turns):
            start = f"{i}/"
            own = ({n.removeprefix(start): t for n, t in s.items() if n.startswith(start)} for s in (shared, local))
            each.load(*own)

    @staticmethod
    def _numbered(states: Sequence[State]) -> State:
        return {f"{i}/{name}": t for i, state in enumerate(states) for name, t in state.items()}


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


@contextmanager
def hidden_behind(wire: Wire, steps: int) -> Iterator[None]:
    """In a simulation: nobody waits for what is sent here before so many steps are over."""
    if not isinstance(wire, SimulatedWire):
        yield
        return
    before, wire.overlap = wire.overlap, steps
    try:
        yield
    finally:
        wire.overlap = before
