"""Collectives, each through the ledger.

`Wire` is one worker's end of it: the layout, the process groups and the ledger. In a single process
every call is the identity and nothing is counted.
"""

import copy
import functools
import operator
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.base.errors import OtherRankError, one_line
from thinwire.comm import missing, process_groups
from thinwire.comm.buckets import by_dtype, checksum, pack, rounded, size_of, unpack_into, unrounded
from thinwire.comm.ledger import Ledger, mean_over_nodes
from thinwire.comm.sent import Ranks, Sent, all_in_parallel
from thinwire.comm.topology import Topology, discover
from thinwire.comm.watch import Watch


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


class Wire:
    """What a method may do with the other workers."""

    is_simulated = False
    """Whether it only counts, for workers that do not exist."""
    is_sharded = False
    """Whether workers of a group hold different parts of a model."""
    outlives_groups = False
    """Whether workers go on when a group is lost; a step must then be whole before anybody takes it."""
    watch = Watch()
    """Whoever watches the other workers, if groups may be lost."""

    def __init__(self, topology: Topology, ledger: Ledger, watch: Watch | None = None) -> None:
        self.ledger = ledger
        if watch is not None:
            self.watch, self.outlives_groups = watch, True
        self._in_background = False
        self.lay_out(topology)

    def lay_out(self, topology: Topology) -> None:
        """Make the process groups for a layout, in place of those before; collective."""
        self.topology = topology
        with self.watch.opening(within=True):
            self._group = self._process_group_of(topology.groups)
        self._control = None
        with self.watch.opening():
            self._cross = self._crossing_group()
            if topology.world_size > 1:
                self._control = process_groups.control_group()
        if topology.world_size > 1:
            process_groups.register_holder(self)
            if not self.outlives_groups:  # whose heartbeat says where it is, and why it ends
                self.ledger.times.on_step = process_groups.step_notes(topology.rank)
                missing.explain_uncaught(topology, self.ledger.times)

    def in_background(self) -> "Wire":
        """The same wire for another thread: its own process group between groups, and waiting for it is not timed."""
        other = copy.copy(self)
        other._in_background = True
        other._cross = self._crossing_group("background")
        process_groups.register_holder(other)
        return other

    def release_groups(self) -> None:
        """Release all process groups; the process ends."""
        self._group = self._cross = self._control = None

    @classmethod
    def open(
        cls,
        group_size: int | str | None,
        settings: str,
        device: torch.device,
        ledger: Ledger,
        groups: tuple[Ranks, ...] | None = None,
        watch: Watch | None = None,
    ) -> "Wire":
        """Lay out the running job, whose workers must all have the same settings; collective.

        Where launchers made the groups, these are given, and somebody watches them.
        """
        wire = cls(discover(group_size, settings, device, groups), ledger, watch)
        wire.count_opening()
        return wire

    def count_opening(self) -> None:
        """Count the all-gather of machines and settings at the start of a job."""
        self.ledger.record("control", self.topology.gather_ring(self.topology.world, 16))

    def process_group(self, members: Ranks) -> Any:
        """torch's process group of the world or of this worker's group."""
        return dist.group.WORLD if members == self.topology.world else self._group

    def sum_over_groups(self, tensors: Sequence[Tensor], purpose: str, wire: str = "fp32") -> None:
        """Replace floating tensors by their sum over groups; the caller has weighted its group's copy.

        All members of a group hold the same values. Member j of every group carries share j over the slow
        link, then each group broadcasts its shares over its fast one.
        """
        if len(self.topology.groups) == 1:
            return
        for bucket in by_dtype(tensors):
            flat = pack(bucket)
            travelling = rounded(flat, wire) if wire != "fp32" else flat
            self._reduce_shares(travelling, purpose)
            unpack_into(unrounded(travelling, flat.dtype), bucket)

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
        """What the first member has, as bytes on the CPU, to the others; all workers call it, for some of them."""
        group = process_groups.process_group(members)
        # To all workers: each counts what its node sends, also for others of the node.
        size = int(self.all_reduce_max(torch.tensor([0 if payload is None else len(payload)]), purpose))
        sent = self.topology.tree(members, size, members[0])
        if self.topology.rank not in members:
            self.count(purpose, sent)
            return None
        content = torch.empty(size, dtype=torch.uint8) if payload is None else payload
        self._timed(lambda: dist.broadcast(content, members[0], group=group), sent, purpose)
        return content

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
        return Pending(rows, self._watched(self._gather_rows, rows, mine), self.ledger, purpose, sent, self.watch)

    def differing(self, contents: Sequence[Sequence[Tensor]], purpose: str) -> list[int]:
        """Which of these lists of tensors do not hold the same bits on all workers."""
        if self.topology.world_size == 1:
            return []
        mine = self._checksums(contents)
        extremes = self._reduce(torch.cat([mine, -mine]), dist.ReduceOp.MAX, purpose)
        high, low = extremes.chunk(2)
        return [i for i, same in enumerate((high == -low).tolist()) if not same]

    def checksum(self, tensors: Sequence[Tensor]) -> tuple[int, int]:
        """A number that changes with any bit of these tensors, in two halves that doubles hold exactly."""
        total = checksum(tensors)
        return total >> 31, total & 0x7FFFFFFF

    def _checksums(self, contents: Sequence[Sequence[Tensor]]) -> Tensor:
        return torch.tensor([checksum(tensors) for tensors in contents], dtype=torch.int64)

    def all_of_group(self, sound: bool) -> bool:
        """Whether all members of the group say so, where they may see different values."""
        return sound

    def agree(self, tensors: Sequence[Tensor], purpose: str) -> bool:
        """Whether all workers hold the same bits."""
        return not self.differing([tensors], purpose)

    def all_gather_object(self, what: Any) -> list[Any]:
        """Each worker's small object, to every worker."""
        if self.topology.world_size == 1:
            return [what]
        gathered: list[Any] = [None] * self.topology.world_size
        start = self.ledger.clock.mark()
        self._watched(self._gather_objects, gathered, what)
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

    def count(self, purpose: str, sent: Sent, calls: int = 1) -> None:
        """Record what a call sends, or what torch itself does."""
        self.ledger.record(purpose, sent, calls)

    def count_overlapped(self, purpose: str, parts: Sequence[Sent]) -> None:
        """Record what is sent in parts while the backward pass is still running."""
        self.ledger.record(purpose, functools.reduce(operator.add, parts), len(parts))

    def barrier(self, call: str, failed: BaseException | None = None) -> None:
        """Wait for all workers, no longer than the process group's own timeout.

        A worker that could not do its part passes its error as `failed`; the others raise it, with its rank.
        """
        if self.topology.world_size == 1:
            return
        if self.outlives_groups:  # without the store, which may be away, and without torch's advice
            self._reduce(torch.zeros(1), dist.ReduceOp.MAX, "control")
            return
        sent = self.topology.star(self.topology.world, 4)
        self._timed(lambda: self._meet(call, failed), sent, "control")

    def _meet(self, call: str, failed: BaseException | None) -> None:
        steps, why = self.ledger.times.steps, None if failed is None else one_line(failed)
        timeout = process_groups.timeout_of(self._control)
        with missing.meeting(call, self.topology, steps, why, timeout) as (number, left):
            dist.monitored_barrier(self._control, timeout=left, wait_all_ranks=True)
        if failed is None and (found := process_groups.failure(number)):
            raise OtherRankError(f"{call} failed on rank {found[0]}: {found[1]}")

    def _crossing_group(self, thread: str = "") -> Any:
        if len(self.topology.groups) == 1:
            return None
        return self._process_group_of([self.topology.crossing(j) for j in range(self.topology.shares)], thread)

    def _process_group_of(self, parts: Sequence[Ranks], thread: str = "") -> Any:
        """The process group of the part this worker is in; every worker makes all of them, in one order."""
        if self.topology.world_size == 1:
            return None
        mine = None
        for part in parts:
            group = process_groups.process_group(part, thread)
            mine = group if self.topology.rank in part else mine
        return mine

    def _reduce(self, tensor: Tensor, op: Any, purpose: str) -> Tensor:
        if self.topology.world_size == 1:
            return tensor
        result = tensor.detach().clone().cpu()
        sent = self.topology.all_reduce(self.topology.world, size_of(result))
        self._timed(lambda: dist.all_reduce(result, op, group=self._control), sent, purpose)
        return result.to(tensor.device)

    def _reduce_shares(self, flat: Tensor, purpose: str) -> None:
        shares = list(flat.tensor_split(self.topology.shares))
        sent = self.topology.at_once([(self.topology.crossing(j), size_of(share)) for j, share in enumerate(shares)])
        member = self.topology.member

        def cross() -> None:
            if member < len(shares) and shares[member].numel():
                dist.all_reduce(shares[member], group=self._cross)

        self._timed(cross, sent, purpose)
        for j, share in enumerate(shares):
            if len(self.topology.group) > 1 and share.numel():
                self.broadcast_in_group([share], j, purpose)

    def _broadcast(
        self,
        tensors: Sequence[Tensor],
        purpose: str,
        members: Ranks,
        root: int,
        group: Any,
        size: int | None = None,
    ) -> None:
        if len(members) == 1:
            return
        for bucket in by_dtype(tensors):
            flat = pack(bucket)
            sent = self.topology.tree(members, size_of(flat) if size is None else size, root)
            self._timed(functools.partial(dist.broadcast, flat, root, group=group), sent, purpose)
            unpack_into(flat, bucket)

    def _gather_rows(self, rows: Tensor, mine: Tensor) -> Any:
        return dist.all_gather(list(rows), mine, group=self._control, async_op=True)

    def _gather_objects(self, gathered: list[Any], what: Any) -> None:
        dist.all_gather_object(gathered, what, group=self._control)

    def _begin(self, call: Callable[[], Any], result: Tensor, sent: Sent, purpose: str) -> Pending:
        self.count(purpose, sent)
        ledger = None if self._in_background else self.ledger
        work = self._watched(call) if self.carries else None
        return Pending(result, work, ledger, purpose, sent, self.watch)

    def _timed(self, call: Callable[[], Any], sent: Sent, purpose: str) -> None:
        start = self.ledger.clock.mark()
        self._watched(call)
        self.count(purpose, sent)
        self.ledger.waited(purpose, sent, start, self.ledger.clock.mark())

    def _watched(self, call: Callable[..., Any], *args: Any) -> Any:
        with self.watch.collective():
            return call(*args)
