"""The wire of a worker in a job: torch's process groups, and a ledger of what they send."""

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.base.errors import OtherRankError, one_line
from thinwire.comm import missing, process_groups
from thinwire.comm.backends import Backends
from thinwire.comm.buckets import by_dtype, checksum, pack, rounded, size_of, unpack_into, unrounded
from thinwire.comm.ledger import Ledger
from thinwire.comm.topology import Ranks, Sent, Topology, discover
from thinwire.comm.wire import Pending, Watch, Wire


class ProcessGroupWire(Wire):
    """One worker's end of it: the layout, the process groups and the ledger."""

    def __init__(
        self, topology: Topology, ledger: Ledger, watch: Watch | None = None, backends: Backends | None = None
    ) -> None:
        self.ledger = ledger
        self.backends = backends or Backends()
        self.by_nccl = self.backends.between == "nccl"
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
            world = self._process_group_of([topology.world])
            self._world = None if world is dist.group.WORLD else world  # that one is not ours to keep
            if topology.world_size > 1:
                self._control = process_groups.control_group()
        if topology.world_size > 1:
            process_groups.register_holder(self)
            if not self.outlives_groups:  # whose heartbeat says where it is, and why it ends
                self.ledger.times.on_step = process_groups.step_notes(topology.rank)
                missing.explain_uncaught(topology, self.ledger.times)

    def in_background(self) -> "ProcessGroupWire":
        """The same wire for another thread: its own process group between groups, and waiting for it is not timed."""
        other = copy.copy(self)
        other._in_background = True
        other._cross = self._crossing_group("background")
        process_groups.register_holder(other)
        return other

    def release_groups(self) -> None:
        """Release all process groups; the process ends."""
        self._world = self._group = self._cross = self._control = None

    @classmethod
    def open(
        cls,
        group_size: int | str | None,
        settings: str,
        device: torch.device,
        ledger: Ledger,
        groups: tuple[Ranks, ...] | None = None,
        watch: Watch | None = None,
        backends: Backends | None = None,
    ) -> "ProcessGroupWire":
        """Lay out the running job, whose workers must all have the same settings; collective.

        Where launchers made the groups, these are given, and somebody watches them.
        """
        topology = discover(group_size, settings, device, groups)
        if backends is not None and not topology.is_one_machine:
            topology = replace(topology, algorithm=backends.algorithm)
        wire = cls(topology, ledger, watch, backends)
        wire.count_opening()
        return wire

    def sum_over_groups(self, tensors: Sequence[Tensor], purpose: str, wire: str = "fp32") -> None:
        if len(self.topology.groups) == 1:
            return
        for bucket in by_dtype(tensors):
            flat = pack(bucket)
            travelling = rounded(flat, wire) if wire != "fp32" else flat
            self._reduce_shares(travelling, purpose)
            unpack_into(unrounded(travelling, flat.dtype), bucket)

    def _reduce_shares(self, flat: Tensor, purpose: str) -> None:
        shares = list(flat.tensor_split(self.topology.shares))
        sent = self.topology.at_once([(self.topology.crossing(j), size_of(share)) for j, share in enumerate(shares)])
        member = self.topology.member

        def cross() -> None:
            if member < len(shares) and shares[member].numel():
                dist.all_reduce(shares[member], group=self._cross)

        self._timed(cross, sent, purpose)
        self.share_in_group(flat, purpose)

    def differing(self, contents: Sequence[Sequence[Tensor]], purpose: str) -> list[int]:
        if self.topology.world_size == 1:
            return []
        mine = self._checksums(contents)
        extremes = self._reduce(torch.cat([mine, -mine]), dist.ReduceOp.MAX, purpose)
        high, low = extremes.chunk(2)
        return [i for i, same in enumerate((high == -low).tolist()) if not same]

    def checksum(self, tensors: Sequence[Tensor]) -> tuple[int, int]:
        total = checksum(tensors)
        return total >> 31, total & 0x7FFFFFFF

    def _checksums(self, contents: Sequence[Sequence[Tensor]]) -> Tensor:
        return torch.tensor([checksum(tensors) for tensors in contents], dtype=torch.int64)

    def count(self, purpose: str, sent: Sent, calls: int = 1) -> None:
        self.ledger.record(purpose, sent, calls)

    def count_overlapped(self, purpose: str, parts: Sequence[Sent]) -> None:
        self.ledger.record(purpose, functools.reduce(operator.add, parts), len(parts))

    def barrier(self, call: str, failed: BaseException | None = None) -> None:
        if self.outlives_groups:  # without the store, which may be away, and without torch's advice
            self._reduce(torch.zeros(1), dist.ReduceOp.MAX, "control")
        else:
            super().barrier(call, failed)

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
            far = self.topology.spans_machines(part)
            backend = self.backends.across(far=far) if len(part) > 1 else None
            opened = functools.partial(self.backends.connect, far=far) if backend else None
            group = process_groups.process_group(part, thread, backend, opened)
            mine = group if self.topology.rank in part else mine
        return mine

    def _reduce(self, tensor: Tensor, op: Any, purpose: str) -> Tensor:
        if self.topology.world_size == 1:
            return tensor
        result = tensor.detach().clone().cpu()
        sent = self.topology.ring(self.topology.world, size_of(result))  # by gloo
        self._timed(lambda: dist.all_reduce(result, op, group=self._control), sent, purpose)
        return result.to(tensor.device)

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
            sent = self.topology.broadcast(members, size_of(flat) if size is None else size, root)
            self._timed(functools.partial(dist.broadcast, flat, root, group=group), sent, purpose)
            unpack_into(flat, bucket)

    def _gather_rows(self, rows: Tensor, mine: Tensor) -> Any:
        return dist.all_gather(list(rows), mine, group=self._control, async_op=True)

    def _gather_objects(self, gathered: list[Any], what: Any) -> None:
        dist.all_gather_object(gathered, what, group=self._control)

    def _begin(self, call: Callable[[], Any], result: Tensor, sent: Sent, purpose: str) -> Pending:
        self.count(purpose, sent)
        ledger = None if self._in_background else self.ledger
        with self.watch.collective():
            work = call() if self.carries else None
        return Pending(result, work, ledger, purpose, sent, self.watch)

    def _timed(self, call: Callable[[], Any], sent: Sent, purpose: str) -> None:
        start = self.ledger.clock.mark()
        with self.watch.collective():
            call()
        self.count(purpose, sent)
        self.ledger.waited(purpose, sent, start, self.ledger.clock.mark())
