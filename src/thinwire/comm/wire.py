"""What a method may do with the other workers: collectives, each counted.

`Wire` knows what each collective sends. Whether it is sent is for its kinds: `ProcessGroupWire` does it by torch's
process groups, and a plan only counts it. In a single process every call is the identity and nothing is counted.
"""

import functools
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.base.errors import CollectiveError
from thinwire.comm import process_groups
from thinwire.comm.buckets import size_of
from thinwire.comm.ledger import Ledger, mean_over_nodes
from thinwire.comm.topology import Ranks, Sent, Topology, all_in_parallel

_PIECE = 16 << 20
"""Bytes that are handed over at a time: a slow link carries them well within any timeout."""
_NOTHING: AbstractContextManager[None] = nullcontext()


class Watch:
    """The seam between a wire and whoever watches its peers; this one watches nothing.

    A wire says here when it makes process groups, when it waits in a collective, and in which call all groups take
    part. By default errors pass as they are. Where a run goes on without groups that are lost (`thinwire.elastic`),
    every failure of a collective becomes a `CollectiveError`, whatever its text says: who is gone is not for the error
    to decide.
    """

    def collective(self) -> AbstractContextManager[None]:
        """Enter around each call of torch.distributed that waits for others."""
        return _NOTHING

    def joint(self, call: str) -> AbstractContextManager[None]:
        """Enter around what all groups do together, under the name that a user knows."""
        return _NOTHING

    def check(self) -> None:
        """Raise a `CollectiveError` if it is in vain to wait for others; for waits that are no collectives."""

    def opening(self, *, within: bool = False) -> AbstractContextManager[None]:
        """Enter around the making of process groups; `within` this worker's own group, or between groups."""
        return _NOTHING


def attempt(work: Callable[[], Any]) -> CollectiveError | None:
    """Do it; return the error if a collective failed in it.

    The error comes without its traceback, which would keep process groups alive, and with them the connections by
    whose end others notice that this worker has left.
    """
    try:
        work()
    except CollectiveError as error:
        error.__context__ = None
        error.original.__context__ = error.original.__cause__ = None
        error.original.__traceback__ = None
        return error.with_traceback(None)
    return None


T = TypeVar("T")


class Pending:
    """A collective in progress; only waiting for it takes time from training."""

    def __init__(
        self, result: Tensor, work: Any, ledger: Ledger | None, purpose: str, sent: Sent, watch: Watch
    ) -> None:
        self.result = result
        self._work = work
        self._booking = ledger, purpose, sent
        self._watch = watch

    def wait(self) -> Tensor:
        """Wait for the result and return it."""
        ledger, purpose, sent = self._booking
        work, self._work = self._work, None
        if work is not None:
            start = ledger.clock.mark() if ledger is not None else None
            with self._watch.collective():
                work.wait()
            if ledger is not None:
                ledger.waited(purpose, sent, start, ledger.clock.mark())
        return self.result


class Wire(ABC):
    """What a method may do with the other workers."""

    topology: Topology
    ledger: Ledger
    is_sharded = False
    """Whether workers of a group hold different parts of a model."""
    by_nccl = False
    """Whether nccl carries what crosses the slow link."""
    outlives_groups = False
    """Whether workers go on when a group is lost; a step must then be whole before anybody takes it."""
    watch = Watch()
    """Whoever watches the other workers, if groups may be lost."""
    _world: Any = None
    _group: Any = None
    _cross: Any = None
    _control: Any = None

    def lay_out(self, topology: Topology) -> None:
        """Take another layout in place of the one before; collective."""
        self.topology = topology

    # Collectives.

    @abstractmethod
    def sum_over_groups(self, tensors: Sequence[Tensor], purpose: str, wire: str = "fp32") -> None:
        """Replace floating tensors by their sum over groups; the caller has weighted its group's copy.

        All members of a group hold the same values. Member j of every group carries share j over the slow
        link, then each group broadcasts its shares over its fast one.
        """

    def begin_sum(self, flat: Tensor, purpose: str) -> Pending:
        """Begin to sum a flat tensor over groups, in place; afterwards each member has its share of the sum."""
        topology, shares = self.topology, list(flat.tensor_split(self.topology.shares))
        sent = topology.at_once([(topology.crossing(j), size_of(share)) for j, share in enumerate(shares)])

        def cross() -> Any:
            mine = shares[topology.member] if topology.member < len(shares) else flat[:0]
            return dist.all_reduce(mine, group=self._cross, async_op=True) if mine.numel() else None

        return self._begin(cross, flat, sent, purpose)

    def share_in_group(self, flat: Tensor, purpose: str) -> None:
        """Overwrite each share of a flat tensor by that of the member who carries it."""
        for j, share in enumerate(flat.tensor_split(self.topology.shares)):
            if share.numel():
                self.broadcast_in_group([share], j, purpose)

    def process_group(self, members: Ranks) -> Any:
        """torch's process group of the world or of this worker's group."""
        return (self._world or dist.group.WORLD) if members == self.topology.world else self._group

    def sum_in_group(self, tensor: Tensor, purpose: str) -> None:
        """Replace a tensor by its sum over this worker's group."""
        group = self.topology.group
        if len(group) > 1:
            sent = self.topology.all_reduce(group, size_of(tensor))
            self._timed(functools.partial(dist.all_reduce, tensor, group=self._group), sent, purpose)

    def gathered(self, t: Tensor, purpose: str) -> Tensor:
        """All of a tensor, where members of a group hold parts of it; collective inside the group."""
        return t

    @property
    def member(self) -> int:
        """This worker's place in its group."""
        return self.topology.member

    @property
    def carries(self) -> bool:
        """Whether this worker carries a share over the slow link; in a group larger than the smallest not all do."""
        return self.topology.member < self.topology.shares

    @contextmanager
    def carried_by(self, member: int) -> Iterator[None]:
        """Let one member of each group carry all that crosses the slow link inside."""
        before, self.topology = self.topology, self.topology.carried_by(member)
        try:
            yield
        finally:
            self.topology = before

    def all_to_all(
        self, parts: Tensor, purpose: str, senders: Sequence[int] | None = None, size: int | None = None
    ) -> Pending:
        """Row g of `parts` to group g, from each member that carries a share to the one there that carries the same.

        All workers call it, to count it; those that carry no share send and receive nothing. Where only some groups
        are `senders`, there is a row for each of these. `size` is a row's bytes, where they depend on the layout.
        """
        topology, count = self.topology, len(self.topology.groups)
        sends = list(range(count)) if senders is None else list(senders)
        received = parts.new_empty(len(sends), *parts.shape[1:])
        given = parts if topology.group_index in sends else parts[:0]
        sizes = [int(g in sends) for g in range(count)], [int(topology.group_index in sends)] * count
        sending = None if senders is None else tuple(senders)
        size = size_of(parts[0]) if size is None else size
        each = [topology.mesh(topology.crossing(j), size, sending) for j in range(topology.shares)]
        return self._begin(
            lambda: dist.all_to_all_single(received, given, *sizes, group=self._cross, async_op=True),
            received,
            all_in_parallel(each),
            purpose,
        )

    def all_gather(self, payload: Tensor, purpose: str, sizes: Sequence[int] | None = None) -> Pending:
        """The payloads of all groups as rows, from each member that carries a share to those that carry the same.

        All workers call it, to count it. `sizes` are the bytes of each share, where they are not those of this one.
        """
        topology = self.topology
        received = payload.new_empty(len(topology.groups), *payload.shape)
        sizes = sizes or [size_of(payload)] * topology.shares
        each = [topology.gather_ring(topology.crossing(j), size) for j, size in enumerate(sizes)]
        return self._begin(
            lambda: dist.all_gather(list(received), payload, group=self._cross, async_op=True),
            received,
            all_in_parallel(each),
            purpose,
        )

    def swap(self, flat: Tensor, partner: int, purpose: str) -> Tensor:
        """Send a flat vector to a group, which sends its own at the same time, and return that; all members call it.

        Member j of both groups exchanges share j, then each group broadcasts its shares.
        """
        topology, received = self.topology, torch.empty_like(flat)
        pairs = [(topology.group[j], topology.groups[partner][j]) for j in range(topology.shares)]
        mine, theirs = (list(t.tensor_split(topology.shares)) for t in (flat, received))
        sent = all_in_parallel(topology.mesh(pair, size_of(share)) for pair, share in zip(pairs, mine, strict=True))
        self._timed(lambda: self._swap_share(mine, theirs, partner), sent, purpose)
        for j, share in enumerate(theirs):
            self.broadcast_in_group([share], j, purpose)
        return received

    def _swap_share(self, mine: list[Tensor], theirs: list[Tensor], partner: int) -> None:
        if self.carries:
            j = self.topology.member
            other = self.topology.groups[partner][j]
            send = dist.P2POp(dist.isend, mine[j], other, self._cross)
            receive = dist.P2POp(dist.irecv, theirs[j], other, self._cross)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()

    def broadcast(
        self, tensors: Sequence[Tensor], purpose: str, members: Ranks | None = None, root: int | None = None
    ) -> None:
        """Overwrite tensors with those of one member, by default the first."""
        members = members or self.topology.world
        root = members[0] if root is None else root
        self._broadcast(tensors, purpose, members, root, self.process_group(members))

    def broadcast_in_group(self, tensors: Sequence[Tensor], owner: int, purpose: str, size: int | None = None) -> None:
        """Overwrite tensors inside this worker's group with those of its member `owner`.

        `size` is the bytes of a single tensor, where they depend on the layout.
        """
        group = self.topology.group
        self._broadcast(tensors, purpose, group, group[owner], self._group, size)

    def broadcast_bytes(self, payload: Tensor | None, members: Ranks, purpose: str) -> Tensor | None:
        """What the first member has, as bytes on the CPU, to the others; all workers call it, for some of them.

        It crosses a slow link once for each node, in pieces between which all workers meet: however long that takes,
        none of them waits for a single call longer than for a piece.
        """
        topology, takes_part = self.topology, self.topology.rank in members
        parts = topology.relay(members)
        groups = [process_groups.process_group(part) for part in parts]
        # To all workers: each counts what its node sends, also for others of the node.
        size = int(self.all_reduce_max(torch.tensor([0 if payload is None else len(payload)]), purpose))
        content = torch.empty(size * takes_part, dtype=torch.uint8) if payload is None else payload
        for start in range(0, size, _PIECE):
            if start:
                self.all_reduce_max(torch.zeros(1), purpose)
            piece = content[start : start + _PIECE]
            for part, group in zip(parts, groups, strict=True):
                sent = topology.broadcast(part, min(_PIECE, size - start), part[0])
                if topology.rank in part:
                    self._timed(functools.partial(dist.broadcast, piece, part[0], group=group), sent, purpose)
                else:
                    self.count(purpose, sent)
        return content if takes_part else None

    def all_reduce_sum(self, tensor: Tensor, purpose: str) -> Tensor:
        """The sum over all workers."""
        return self._reduce(tensor, dist.ReduceOp.SUM, purpose)

    def all_reduce_max(self, tensor: Tensor, purpose: str) -> Tensor:
        """The largest value over all workers, element by element."""
        return self._reduce(tensor, dist.ReduceOp.MAX, purpose)

    def all_gather_scalars(self, values: Sequence[float], purpose: str) -> list[list[float]]:
        """Each worker's few numbers, by rank, to every worker."""
        return self.all_gather_scalars_async(values, purpose).wait().tolist()

    def all_gather_scalars_async(self, values: Sequence[float], purpose: str) -> Pending:
        """The same without waiting: its result has one row per worker."""
        mine = torch.tensor(values, dtype=torch.float64)
        rows = mine.repeat(self.topology.world_size, 1)
        if self.topology.world_size == 1:
            return Pending(rows, None, self.ledger, purpose, Sent(), self.watch)
        sent = self.topology.gather_ring(self.topology.world, size_of(mine))
        self.count(purpose, sent)
        with self.watch.collective():
            work = self._gather_rows(rows, mine)
        return Pending(rows, work, self.ledger, purpose, sent, self.watch)

    def all_of_group(self, sound: bool) -> bool:
        """Whether all members of the group say so, where they may see different values."""
        return sound

    def norms_of_group(self, norms: Tensor) -> Tensor:
        """Norms of whole tensors, by those of what this worker has of each; collective inside a group of shards."""
        return norms

    def agree(self, tensors: Sequence[Tensor], purpose: str) -> bool:
        """Whether all workers hold the same bits."""
        return not self.differing([tensors], purpose)

    def all_gather_object(self, what: Any) -> list[Any]:
        """Each worker's small object, to every worker."""
        if self.topology.world_size == 1:
            return [what]
        gathered: list[Any] = [None] * self.topology.world_size
        start = self.ledger.clock.mark()
        with self.watch.collective():
            self._gather_objects(gathered, what)
        # torch gathers the sizes first, then everything padded to the longest.
        longest = max(len(pickle.dumps(each)) for each in gathered)
        sent = self.topology.gather_ring(self.topology.world, 8)
        sent += self.topology.gather_ring(self.topology.world, longest)
        self.count("control", sent, calls=2)
        self.ledger.waited("control", sent, start, self.ledger.clock.mark())
        return gathered

    def node_mean(self) -> Ledger:
        """The ledger as the mean over nodes, before this call's own bytes; collective."""
        states = self.all_gather_object(self.ledger.state())
        return mean_over_nodes([states[node[0]] for node in self.topology.nodes])

    @abstractmethod
    def differing(self, contents: Sequence[Sequence[Tensor]], purpose: str) -> list[int]:
        """Which of these lists of tensors do not hold the same bits on all workers."""

    @abstractmethod
    def checksum(self, tensors: Sequence[Tensor]) -> tuple[int, int]:
        """A number that changes with any bit of these tensors, in two halves that doubles hold exactly."""

    def barrier(self, call: str, failed: BaseException | None = None) -> None:
        """Wait for all workers, no longer than the process group's own timeout.

        A worker that could not do its part passes its error as `failed`; the others raise it, with its rank.
        """
        if self.topology.world_size > 1:
            sent = self.topology.star(self.topology.world, 4)
            self._timed(lambda: self._meet(call, failed), sent, "control")

    # What a plan has otherwise than a run.

    def read(self, value: Callable[[], T], usually: T) -> T:
        """Read something from the values of tensors; a plan, which has none, takes what it usually is."""
        return value()

    def compute(self, work: Callable[[], object]) -> None:
        """Do work that sends nothing and only changes values; a plan leaves it out."""
        work()

    def stands_for(self, member: int) -> bool:
        """Whether this worker does what that member of its group does; in a plan one stands for all of them."""
        return member == self.member

    def hidden_behind(self, steps: int) -> AbstractContextManager[None]:
        """Enter around what nobody waits for before so many steps are over; a plan has no other way to know."""
        return nullcontext()

    def broadcast_integers(
        self, numbers: Sequence[int], device: torch.device, purpose: str, member: int | None = None
    ) -> list[int]:
        """Those of a member of this worker's group, or of rank 0 of the world."""
        sent = torch.tensor(numbers, device=device)
        if member is None:
            self.broadcast([sent], purpose)
        else:
            self.broadcast_in_group([sent], member, purpose)
        return sent.tolist()

    def in_background(self) -> "Wire":
        """The same wire for another thread."""
        return self

    # Counting.

    @abstractmethod
    def count(self, purpose: str, sent: Sent, calls: int = 1) -> None:
        """Record what a call sends, or what torch itself does."""

    @abstractmethod
    def count_overlapped(self, purpose: str, parts: Sequence[Sent]) -> None:
        """Record what is sent in parts while the backward pass is still running."""

    def count_opening(self) -> None:
        """Count the all-gather of machines and settings at the start of a job."""
        self.count("control", self.topology.gather_ring(self.topology.world, 16))

    # How it is done.

    @abstractmethod
    def _timed(self, call: Callable[[], Any], sent: Sent, purpose: str) -> None:
        """Do a call that is waited for."""

    @abstractmethod
    def _begin(self, call: Callable[[], Any], result: Tensor, sent: Sent, purpose: str) -> Pending:
        """Begin a call of the members that carry a share."""

    @abstractmethod
    def _reduce(self, tensor: Tensor, op: Any, purpose: str) -> Tensor:
        """Reduce over all workers."""

    @abstractmethod
    def _broadcast(
        self, tensors: Sequence[Tensor], purpose: str, members: Ranks, root: int, group: Any, size: int | None = None
    ) -> None:
        """Overwrite tensors of members by those of one of them."""

    @abstractmethod
    def _gather_rows(self, rows: Tensor, mine: Tensor) -> Any:
        """Begin to gather each worker's row."""

    @abstractmethod
    def _gather_objects(self, gathered: list[Any], what: Any) -> None:
        """Gather each worker's object."""

    @abstractmethod
    def _meet(self, call: str, failed: BaseException | None) -> None:
        """Wait for all workers in a call."""
