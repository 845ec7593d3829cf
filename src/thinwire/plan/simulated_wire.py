"""A wire that counts what would be sent and sends nothing, for workers that do not exist.

A method runs on it as on the real one, so a plan uses the method's own arithmetic. Tensors may be on
the meta device: nothing is ever read from them.

A layout is seen from several workers at once, and one worker stands for all that do the same. What a collective sends
differs from node to node even where workers do the same (the root of a tree sends more than its leaves), and with the
number of nodes. So everything is counted for each of the views.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.comm.buckets import WIRES, by_dtype, size_of
from thinwire.comm.ledger import Ledger
from thinwire.comm.topology import Ranks, Sent, Topology
from thinwire.comm.wire import Pending, T, Wire


@dataclass(frozen=True)
class SentByView(Sent):
    """What a collective sends from each of several nodes; its own fields are those of the first."""

    views: tuple[Sent, ...] = ()

    def __add__(self, other: Sent) -> Sent:
        return by_view([mine + its for mine, its in zip(self.views, self._of(other), strict=True)])

    def in_parallel(self, other: Sent) -> Sent:
        return by_view([mine.in_parallel(its) for mine, its in zip(self.views, self._of(other), strict=True)])

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.views)

    def _of(self, other: Sent) -> tuple[Sent, ...]:
        return other.views if isinstance(other, SentByView) else (other,) * len(self.views)


class SizeByView(int):
    """Bytes that differ from view to view; the number itself is that of the first."""

    views: tuple[int, ...]

    @classmethod
    def of(cls, views: Sequence[int]) -> "SizeByView":
        found = cls(views[0])
        found.views = tuple(views)
        return found


def by_view(views: Sequence[Sent]) -> SentByView:
    """One value for all views."""
    return SentByView(**vars(views[0]), views=tuple(views))


def _from_each_view(count: Callable[..., Sent]) -> Callable[..., Sent]:
    """The same arithmetic for every view, with that view's members."""

    def counted(self: "LayoutViews", members: Ranks, size: int, *more: Any) -> Sent:
        def seen(view: Topology, size: int) -> Sent:
            return count(view, self._members_of(view, members), size, *more)

        return self._seen((count.__name__, members, *more), size, seen)

    return counted


@dataclass(frozen=True)
class LayoutViews(Topology):
    """The layout of a worker that stands for all in `views`, of this layout or of others; the first is its own."""

    views: tuple[Topology, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, views: Sequence[Topology]) -> "LayoutViews":
        """From the views of workers that are alike."""
        own = {name: value for name, value in vars(views[0]).items() if name in Topology.__dataclass_fields__}
        return cls(**own, views=tuple(views))

    def carried_by(self, member: int) -> "Topology":
        """The same layout, from each view, with one member of each group that carries everything."""
        if member not in self._carried:
            views = tuple(view.carried_by(member) for view in self.views)
            self._carried[member] = replace(self, groups=views[0].groups, carriers=1, views=views)
        return self._carried[member]

    def at_once(self, parts: Sequence[tuple[Ranks, int]]) -> Sent:
        return self._seen(
            ("at_once", tuple(parts)),
            0,
            lambda view, _: view.at_once([(self._members_of(view, members), size) for members, size in parts]),
        )

    def by_groups(self, count: Callable[[int], int]) -> int:
        return SizeByView.of([view.by_groups(count) for view in self.views])

    ring = _from_each_view(Topology.ring)
    gather_ring = _from_each_view(Topology.gather_ring)
    star = _from_each_view(Topology.star)
    mesh = _from_each_view(Topology.mesh)
    double_tree = _from_each_view(Topology.double_tree)

    def broadcast(self, members: Ranks, size: int, root: int) -> Sent:
        """A broadcast from a root, which has the same index among the members of each view."""
        place = members.index(root)

        def seen(view: Topology, size: int) -> Sent:
            its = self._members_of(view, members)
            return view.broadcast(its, size, its[place])

        return self._seen(("broadcast", members, root), size, seen)

    def _seen(self, what: tuple[Any, ...], size: int, look: Callable[[Topology, int], Sent]) -> SentByView:
        """Counted once: a run repeats a few collectives a thousand times."""
        sizes = size.views if isinstance(size, SizeByView) else (size,) * len(self.views)
        if (what, sizes) not in self._known:
            self._known[what, sizes] = by_view([look(*pair) for pair in zip(self.views, sizes, strict=True)])
        return self._known[what, sizes]

    def _members_of(self, view: Topology, members: Ranks) -> Ranks:
        """Members for another view: its group, its world, or its ranks that carry the same share."""
        if members == self.group:
            return view.group
        if members == self.world:
            return view.world
        share = next((j for j in range(self.shares) if self.crossing(j) == members), None)
        if share is not None:
            return view.crossing(share)
        assert (view.rank, view.groups) == (self.rank, self.groups), "these members are known to the worker itself only"
        return members

    @cached_property
    def _known(self) -> dict[tuple[Any, ...], SentByView]:
        return {}


def kind(view: Topology) -> Hashable:
    """What workers must have in common for one to stand for the others, whatever the method."""
    alone = all(len(group) == 1 for group in view.groups)
    return len(view.group), view.member, len(view.groups) > 1, view.shares, alone, view.algorithm


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

    def __init__(self, views: Sequence[Topology]) -> None:
        self.topology = LayoutViews.of(views)
        self.ledger = Ledger()
        """Holds phase and purpose; what is sent goes to `booked`."""
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
                    self.count(purpose, topology.broadcast(topology.group, size, topology.group[j]))

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
                self.count(purpose, self.topology.broadcast(members, whole, root))

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
            self.count(purpose, self.topology.ring(self.topology.world, size_of(tensor)))
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

    def _meet(self, call: str, failed: BaseException | None) -> None:
        """There is nobody to wait for."""

    # There are no values either.

    def read(self, value: Callable[[], T], usually: T) -> T:
        """Take what it usually is."""
        return usually

    def compute(self, work: Callable[[], object]) -> None:
        """There is nothing to change."""

    def broadcast_integers(
        self, numbers: Sequence[int], device: torch.device, purpose: str, member: int | None = None
    ) -> list[int]:
        """All workers have the same."""
        return super().broadcast_integers(numbers, torch.device("cpu"), purpose, member)

    def stands_for(self, member: int) -> bool:
        """One worker stands for all members of its group."""
        return True

    @contextmanager
    def hidden_behind(self, steps: int) -> Iterator[None]:
        """Count what is sent inside as waited for so many steps later."""
        before, self.overlap = self.overlap, steps
        try:
            yield
        finally:
            self.overlap = before


def _of_view(sent: Sent, view: int) -> Sent:
    assert isinstance(sent, SentByView), "what a simulated wire counts comes from its own topology"
    return sent.views[view]
