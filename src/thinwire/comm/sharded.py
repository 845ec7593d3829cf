"""A wire between groups that shard their model: worker i of a group exchanges with worker i of every other group.

Members of a group hold different parts of the model, so each of them carries all that it has, over its own link, and
nothing is handed around inside the group. What workers agree on, such as counters and checksums, is for all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.base.errors import ConfigError
from thinwire.comm.buckets import size_of
from thinwire.comm.collectives import ProcessGroupWire
from thinwire.comm.topology import Ranks, Sent, Topology
from thinwire.comm.wire import Pending

_REMEDY = 'fully_shard(model, mesh=init_device_mesh(device, (groups, workers), mesh_dim_names=("between", "in"))["in"])'


class ShardedWire(ProcessGroupWire):
    """What a method may do with workers that hold other shards, and with those that hold the same one."""

    is_sharded = True
    find_share: Callable[[], float] = staticmethod(lambda: 1.0)
    """This worker's share of its group's model, as it is now: the ledger counts what all members send."""
    _in_columns = False

    def lay_out(self, topology: Topology) -> None:
        """In what methods see, each worker carries everything for its group."""
        self._whole = topology
        super().lay_out(topology)
        self.topology = topology.carried_by(topology.member)

    def _crossing_group(self, thread: str = "") -> Any:
        """Every worker makes the process groups of all shards, in one order."""
        if len(self._whole.groups) == 1:
            return None
        return self._process_group_of([self._whole.crossing(j) for j in range(self._whole.shares)], thread)

    # What members send that hold different shards.

    def count(self, purpose: str, sent: Sent, calls: int = 1) -> None:
        """All members send at once; each knows only how large its own shard is."""
        if self._in_columns and (share := self.find_share()):
            sizes = {name: round(getattr(sent, name) / share) for name in ("slow", "fast", "slow_queue")}
            sent = replace(sent, **sizes)
        super().count(purpose, sent, calls)

    @contextmanager
    def _columns(self) -> Iterator[None]:
        before, self._in_columns = self._in_columns, True
        try:
            yield
        finally:
            self._in_columns = before

    def _begin(self, call: Callable[[], Any], result: Tensor, sent: Sent, purpose: str) -> Pending:
        with self._columns():
            return super()._begin(call, result, sent, purpose)

    def _reduce_shares(self, flat: Tensor, purpose: str) -> None:
        column = self.topology.crossing(0)
        with self._columns():
            sent = self.topology.all_reduce(column, size_of(flat))
            self._timed(lambda: dist.all_reduce(flat, group=self._cross), sent, purpose)

    def swap(self, flat: Tensor, partner: int, purpose: str) -> Tensor:
        """Its own shard with the member of that group who holds the same one."""
        with self._columns():
            return super().swap(flat, partner, purpose)

    def broadcast(
        self, tensors: Sequence[Tensor], purpose: str, members: Ranks | None = None, root: int | None = None
    ) -> None:
        """Buffers are not sharded, and go from one member to all; shards go to those that hold the same one."""
        members = tuple(sorted(members or self.topology.world))
        if purpose == "buffers":
            super().broadcast(tensors, purpose, members, root)
        elif members == self.topology.world and len(self.topology.groups) > 1:
            column = self.topology.crossing(0)
            with self._columns():
                self._broadcast(tensors, purpose, column, column[0], self._cross)

    def broadcast_in_group(self, tensors: Sequence[Tensor], owner: int, purpose: str, size: int | None = None) -> None:
        """Factors that one member found are for all of them; of a shard nobody else in the group holds the same."""
        if purpose == "decomposition":
            self._broadcast(tensors, purpose, self._whole.group, self._whole.group[owner], self._group)

    # What all members agree on, or need of one another.

    @property
    def member(self) -> int:
        return self._whole.member

    def gathered(self, t: Tensor, purpose: str) -> Tensor:
        part: Any = t
        if not hasattr(t, "device_mesh"):
            return t
        longest = -(-len(t) // len(self._whole.group)) * (t.numel() // max(1, len(t)))
        found: list[Tensor] = []
        sent = self._whole.gather_ring(self._whole.group, longest * t.element_size())
        self._timed(lambda: found.append(part.full_tensor()), sent, purpose)
        return found[0]

    def gather_in_group(self, part: Tensor, purpose: str, sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Each member's flat tensor, in their order; `sizes` are their lengths, where they differ."""
        sizes = sizes or [len(part)] * len(self._whole.group)
        padded = part.new_zeros(max(sizes))
        padded[: len(part)] = part
        rows = padded.repeat(len(sizes), 1)
        sent = self._whole.gather_ring(self._whole.group, size_of(padded))
        self._timed(lambda: dist.all_gather(list(rows), padded, group=self._group), sent, purpose)
        return [row[:size] for row, size in zip(rows, sizes, strict=True)]

    def checksum(self, tensors: Sequence[Tensor]) -> tuple[int, int]:
        """Of all shards of a group."""
        halves = torch.tensor(super().checksum(tensors), dtype=torch.float64)
        self.sum_in_group(halves, "checksums")
        high, low = halves.tolist()
        return int(high), int(low)

    def _checksums(self, contents: Sequence[Sequence[Tensor]]) -> Tensor:
        sums = super()._checksums(contents)
        self.sum_in_group(sums, "checksums")
        return sums

    def norms_of_group(self, norms: Tensor) -> Tensor:
        squares = norms.double().square()
        self.sum_in_group(squares, "control")
        return squares.sqrt().to(norms.dtype)

    def all_of_group(self, sound: bool) -> bool:
        """Whether all members of the group say so."""
        unsound = torch.tensor([float(not sound)])
        self.sum_in_group(unsound, "control")
        return not bool(unsound)


def group_size_of(model: nn.Module) -> int:
    """Workers that share a model, which must be the workers of a group."""
    whole = next((name for name, p in model.named_parameters() if not hasattr(p, "device_mesh")), None)
    if whole is not None:
        raise ConfigError(
            f"parameter {whole!r} is not sharded and others are: call fully_shard() on the model itself, after its "
            "layers, so that it takes what is left"
        )
    meshes = list({getattr(p, "device_mesh") for p in model.parameters()})  # noqa: B009
    mesh: Any = meshes[0]
    if len(meshes) > 1 or mesh.ndim != 1:
        raise ConfigError(
            f"the model is sharded over {mesh.ndim} dimensions of {len(meshes)} meshes, and would be averaged between "
            f"groups by FSDP itself: shard over the workers of a group alone, {_REMEDY}"
        )
    size, world = mesh.size(), dist.get_world_size()
    if size == world and world > 1:
        raise ConfigError(
            f"the model is sharded over all {world} workers, so there are no groups to train apart, and FSDP sends "
            f"all of it over the slow link: shard over the workers of a group, {_REMEDY}"
        )
    ranks, first = mesh.mesh.flatten().tolist(), dist.get_rank() // size * size
    if ranks != [*range(first, first + size)] or world % size:
        raise ConfigError(
            f"the model is sharded over ranks {ranks} of {world}: a group is as many ranks in a row as all others "
            f"are, {_REMEDY}"
        )
    return int(size)


def own_part(t: Tensor, whole: Any) -> Tensor:
    """This worker's part of all of a tensor, cut as `whole` is: FSDP's way; the others' memory is let go."""
    # In rows, unless the user chose another dimension, which FSDP wants to be even.
    parts = t.chunk(whole.device_mesh.size(), whole.placements[0].dim)
    member = whole.device_mesh.get_local_rank()
    return (parts[member] if member < len(parts) else t[:0]).clone(memory_format=torch.contiguous_format)


def like_whole(part: Tensor, whole: Any) -> Tensor:
    """A tensor that is cut as `whole` is, of which this is the worker's part; unchanged if `whole` is not cut."""
    if not hasattr(whole, "device_mesh"):
        return part
    from torch.distributed.tensor import DTensor  # loading it takes a while, and whoever shards has it

    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
