"""A wire that counts what would be sent and sends nothing, for workers that do not exist.

A method runs on it as on the real one, so a plan uses the method's own arithmetic. Tensors may be on
the meta device: nothing is ever read from them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.comm.buckets import WIRES, by_dtype, size_of
from thinwire.comm.collectives import Pending, Wire
from thinwire.comm.layout_views import LayoutViews, SentByView
from thinwire.comm.ledger import Ledger
from thinwire.comm.sent import Ranks, Sent
from thinwire.comm.topology import Topology


class Call(NamedTuple):
    """A collective that all workers wait for."""

    phase: str
    purpose: str
    sent: Sent
    calls: int
    """Calls that it consists of."""
    overlap: int = 0
    """Steps taken before any worker waits for it."""


class Exchange(NamedTuple):
    """A collective in parts that start while the backward pass still computes."""

    phase: str
    parts: tuple[Sent, ...]


@dataclass
class Booked:
    """What was counted, and how often. It is kept by message shape, because its time depends on links chosen later.

    Each is for all views of the layout at once.
    """

    opening: Counter[Call] = field(default_factory=Counter)
    """Before any worker waits for anything."""
    calls: Counter[Call] = field(default_factory=Counter)
    exchanges: Counter[tuple[str, Exchange]] = field(default_factory=Counter)
    """By their purposes."""

    def add(self, more: "Booked", times: int = 1) -> None:
        """Count all of `more`, `times` times."""
        for own, others in ((self.opening, more.opening), (self.calls, more.calls), (self.exchanges, more.exchanges)):
            for what, count in others.items():
                own[what] += count * times  # type: ignore[index]

    def seen_from(self, view: int) -> tuple[Ledger, Counter[Call], Counter[Exchange]]:
        """The ledger of one view, and what it waits for."""
        ledger, calls, exchanges = Ledger(), Counter[Call](), Counter[Exchange]()
        for call, times in (*self.opening.items(), *self.calls.items()):
            ledger.phase = call.phase
            ledger.record(call.purpose, _of_view(call.sent, view), call.calls, times)
        for call, times in self.calls.items():
            calls[call._replace(sent=_of_view(call.sent, view))] += times
        for (purpose, exchange), times in self.exchanges.items():
            parts = tuple(_of_view(sent, view) for sent in exchange.parts)
            exchanges[Exchange(exchange.phase, parts)] += times
            ledger.phase = exchange.phase
            for sent in parts:
                ledger.record(purpose, sent, 1, times)
        return ledger, calls, exchanges


class SimulatedWire(Wire):
    """The wire of one simulated worker, or of several that do the same."""

    is_simulated = True

    def __init__(self, views: Sequence[Topology]) -> None:
        self.topology = LayoutViews.of(views)
        self.ledger = Ledger()
        """Holds phase and purpose; what is sent goes to `booked`."""
        self._group = self._cross = self._control = None
        self.changing: set[int] = set()
        """Identities of tensors that training makes different on different workers."""
        self.repeat = 1
        """How often what is counted now would happen."""
        self.overlap = 0
        """Steps taken before any worker waits for what is counted now."""
        self.booked = Booked()

    @contextmanager
    def booking(self) -> Iterator[Booked]:
        """What is counted inside, separately; it is added to the total as well."""
        whole, self.booked = self.booked, Booked()
        try:
            yield self.booked
        finally:
            whole.add(self.booked)
            self.booked = whole

    def count_opening(self) -> None:
        """Count the all-gather of machines and settings, which no phase waits for."""
        sent = self.topology.gather_ring(self.topology.world, 16)
        self.booked.opening[Call(self.ledger.phase, "control", sent, 1)] += 1

    def count(self, purpose: str, sent: Sent, calls: int = 1) -> None:
        call = Call(self.ledger.phase, self.ledger.booked_as(purpose), sent, calls, self.overlap)
        self.booked.calls[call] += self.repeat

    def count_overlapped(self, purpose: str, parts: Sequence[Sent]) -> None:
        exchange = Exchange(self.ledger.phase, tuple(parts))
        self.booked.exchanges[self.ledger.booked_as(purpose), exchange] += self.repeat

    # Other workers send nothing here, so tensors are measured and not packed.

    def sum_over_groups(self, tensors: Sequence[Tensor], purpose: str, wire: str = "fp32") -> None:
        """Count the shares that cross, and their broadcast inside the group."""
        topology = self.topology
        if len(topology.groups) == 1:
            return
        for bucket in by_dtype(tensors):
            numbers, width = sum(t.numel() for t in bucket), bucket[0].element_size()
            width = width if wire == "fp32" else WIRES[wire].itemsize
            least, longer = divmod(numbers, topology.shares)
            sizes = [(least + (j < longer)) * width for j in range(topology.shares)]  # as tensor_split cuts
            self.count(purpose, topology.at_once([(topology.crossing(j), size) for j, size in enumerate(sizes)]))
            for j, size in enumerate(sizes):
                if len(topology.group) > 1 and size:
                    self.count(purpose, topology.tree(topology.group, size, topology.group[j]))

    def _broadcast(
        self,
        tensors: Sequence[Tensor],
        purpose: str,
        members: Ranks,
        root: int,
        group: Any,
        size: int | None = None,
    ) -> None:
        if len(members) > 1:
            for bucket in by_dtype(tensors):
                whole = sum(size_of(t) for t in bucket) if size is None else size
                self.count(purpose, self.topology.tree(members, whole, root))

    def differing(self, contents: Sequence[Sequence[Tensor]], purpose: str) -> list[int]:
        """Those that training makes different."""
        if self.topology.world_size == 1:
            return []
        self._reduce(torch.empty(2 * len(contents), dtype=torch.int64), None, purpose)
        return [i for i, tensors in enumerate(contents) if any(id(t) in self.changing for t in tensors)]

    def checksum(self, tensors: Sequence[Tensor]) -> tuple[int, int]:
        """There are no values."""
        return 0, 0

    def _reduce(self, tensor: Tensor, op: Any, purpose: str) -> Tensor:
        if self.topology.world_size > 1:
            self.count(purpose, self.topology.all_reduce(self.topology.world, size_of(tensor)))
        return tensor

    def _gather_rows(self, rows: Tensor, mine: Tensor) -> Any:
        return None  # all workers send the same, and the rows hold it already

    def _gather_objects(self, gathered: list[Any], what: Any) -> None:
        gathered[:] = [what] * len(gathered)

    def _begin(self, call: Any, result: Tensor, sent: Sent, purpose: str) -> Pending:
        self.count(purpose, sent)
        return Pending(result, None, self.ledger, purpose, sent, self.watch)

    def _timed(self, call: Any, sent: Sent, purpose: str) -> None:
        self.count(purpose, sent)


def _of_view(sent: Sent, view: int) -> Sent:
    assert isinstance(sent, SentByView), "what a simulated wire counts comes from its own topology"
    return sent.views[view]
