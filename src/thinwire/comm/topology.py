"""The layout: the world, its nodes, its groups, and what a collective sends over which link.

The slow link is between nodes; a group is the workers that train together. `group_size=None` makes each node a
group. When all workers are on one machine, a group stands for a node, and without a group size each
worker does. Groups are contiguous ranks and never split a node.
"""

import hashlib
import itertools
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from typing import NamedTuple

import torch
import torch.distributed as dist

from thinwire.base.errors import ConfigError, DisagreementError
from thinwire.comm import backends, process_groups, slurm

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Sent:
    """What a collective sends from one node, by link, and how much of it must be sent one after the other."""

    slow: int = 0
    """Bytes that leave the node."""
    fast: int = 0
    """Bytes sent between workers of the node."""
    slow_queue: int = 0
    """Bytes in a row over the slow link of the node that sends most."""
    fast_queue: int = 0
    """Bytes in a row from one worker to the next inside a node."""
    slow_rounds: int = 0
    """Messages between nodes that wait for one another."""
    fast_rounds: int = 0
    """Messages inside a node that wait for one another."""

    def __add__(self, other: "Sent") -> "Sent":
        """One collective after the other."""
        return Sent(
            self.slow + other.slow,
            self.fast + other.fast,
            self.slow_queue + other.slow_queue,
            self.fast_queue + other.fast_queue,
            self.slow_rounds + other.slow_rounds,
            self.fast_rounds + other.fast_rounds,
        )

    def in_parallel(self, other: "Sent") -> "Sent":
        """Both at the same time: they share the links' bandwidth, but do not wait for one another."""
        both = self + other
        slow_rounds = max(self.slow_rounds, other.slow_rounds)
        return replace(both, slow_rounds=slow_rounds, fast_rounds=max(self.fast_rounds, other.fast_rounds))


def all_in_parallel(parts: Iterable[Sent]) -> Sent:
    """All of these at once."""
    return _at_once(tuple(parts))


@lru_cache(maxsize=256)
def _at_once(parts: tuple[Sent, ...]) -> Sent:
    """Counted once: a run repeats a few collectives a thousand times."""
    return reduce(lambda one, other: one.in_parallel(other), parts)


class Edges(NamedTuple):
    """How many messages of one pattern leave each node, stay in each, and leave the busiest one."""

    leaving: Mapping[int, int]
    staying: Mapping[int, int]
    busiest: int


def ring_pairs(members: Ranks) -> Iterable[tuple[int, int]]:
    """Each member sends to the next."""
    return zip(members, (*members[1:], members[0]), strict=True)


def tree_pairs(members: Ranks) -> Iterable[tuple[int, int]]:
    """A member receives from the one whose index lacks its own highest bit."""
    for place in range(1, len(members)):
        yield members[place - (1 << (place.bit_length() - 1))], members[place]


def chain_pairs(members: Ranks) -> Iterable[tuple[int, int]]:
    """Each member but the last sends to the next."""
    return itertools.pairwise(members)


def star_pairs(members: Ranks) -> Iterable[tuple[int, int]]:
    """Each member sends to the first, which answers."""
    for member in members[1:]:
        yield member, members[0]
        yield members[0], member


PATTERNS: dict[str, Callable[[Ranks], Iterable[tuple[int, int]]]] = {
    "ring": ring_pairs,
    "tree": tree_pairs,
    "chain": chain_pairs,
    "star": star_pairs,
}
"""Who sends to whom."""


def count_edges(pattern: str, members: Ranks, node_of: Mapping[int, int], senders: Ranks | None = None) -> Edges:
    """The messages of one pattern, by the node that sends them; in a mesh perhaps only some are `senders`."""
    leaving, staying = Counter[int](), Counter[int]()
    if pattern == "mesh":  # too many pairs to look at each
        sending = Counter(node_of[rank] for rank in (members if senders is None else senders))
        for node, here in Counter(node_of[rank] for rank in members).items():
            leaving[node] = sending[node] * (len(members) - here)
            staying[node] = sending[node] * (here - 1)
    else:
        for source, target in PATTERNS[pattern](members):
            node = node_of[source]
            (staying if node == node_of[target] else leaving)[node] += 1
    return Edges(leaving, staying, max(leaving.values(), default=0))


log = logging.getLogger("thinwire")


@dataclass(frozen=True)
class Topology:
    """The layout of a run, seen from one worker."""

    rank: int
    nodes: tuple[Ranks, ...]
    groups: tuple[Ranks, ...]
    algorithm: str = "ring"
    """How all-reduces and broadcasts are done: "ring" as gloo does them, or "tree" as nccl between nodes."""
    is_one_machine: bool = False
    """Whether nodes are parts of one machine, between which no link is slow."""
    carriers: int | None = None
    """Members of a group that carry what it sends over the slow link; None is as many as the smallest group has."""

    @cached_property
    def world(self) -> Ranks:
        return tuple(range(self.world_size))

    @cached_property
    def world_size(self) -> int:
        return sum(len(node) for node in self.nodes)

    @cached_property
    def group_index(self) -> int:
        return next(i for i, group in enumerate(self.groups) if self.rank in group)

    @property
    def group(self) -> Ranks:
        """The ranks of this worker's group."""
        return self.groups[self.group_index]

    @property
    def member(self) -> int:
        """This worker's index in its group."""
        return self.group.index(self.rank)

    @cached_property
    def shares(self) -> int:
        """Into how many shares a merge is cut: the smallest group's size, unless fewer carry it."""
        return self.carriers or min(len(group) for group in self.groups)

    def crossing(self, share: int) -> Ranks:
        """The ranks that carry one share over the slow link: one member of every group."""
        if share not in self._crossings:
            self._crossings[share] = tuple(group[share] for group in self.groups)
        return self._crossings[share]

    def spans_machines(self, members: Ranks) -> bool:
        """Whether these ranks are on several."""
        return not self.is_one_machine and len({self._node_of[rank] for rank in members}) > 1

    def by_groups(self, count: Callable[[int], int]) -> int:
        """A size that depends on the number of groups."""
        return count(len(self.groups))

    def seen_from(self, rank: int) -> "Topology":
        """The same layout seen from another worker."""
        return self._sharing_counts(replace(self, rank=rank))

    def carried_by(self, member: int) -> "Topology":
        """The same layout with one member of each group that carries everything, and stands first in it."""
        if member not in self._carried:
            groups = tuple(group[member:] + group[:member] for group in self.groups)
            self._carried[member] = self._sharing_counts(replace(self, groups=groups, carriers=1))
        return self._carried[member]

    def _sharing_counts(self, other: "Topology") -> "Topology":
        """Share what was counted: workers and nodes are the same."""
        other.__dict__.update(_node_of=self._node_of, _counted=self._counted, _queues=self._queues, world=self.world)
        return other

    @cached_property
    def _carried(self) -> dict[int, "Topology"]:
        return {}

    @cached_property
    def _crossings(self) -> dict[int, Ranks]:
        return {}

    @cached_property
    def _own_node(self) -> int:
        return self._node_of[self.rank]

    @cached_property
    def _node_of(self) -> dict[int, int]:
        return {rank: i for i, node in enumerate(self.nodes) for rank in node}

    def all_reduce(self, members: Ranks, size: int) -> Sent:
        """An all-reduce of `size` bytes by the algorithm in use."""
        return self.ring(members, size) if self.algorithm == "ring" else self.double_tree(members, size)

    def at_once(self, parts: Sequence[tuple[Ranks, int]]) -> Sent:
        """Several all-reduces side by side: they share the links of nodes that they leave, not the waiting."""
        sents = [self.all_reduce(members, size) for members, size in parts]
        if self.algorithm != "ring" or not sents:
            return reduce(Sent.in_parallel, sents, Sent())
        return replace(reduce(Sent.in_parallel, sents), slow_queue=self._queue(tuple(parts)))

    def _queue(self, parts: tuple[tuple[Ranks, int], ...]) -> int:
        """Bytes that concurrent rings put on the link of the node that sends most."""
        if parts not in self._queues:
            leaving: Counter[int] = Counter()
            for members, size in parts:
                each = round(2 * (len(members) - 1) * size / len(members))
                for node, edges in self._edges("ring", members).leaving.items():
                    leaving[node] += edges * each
            self._queues[parts] = max(leaving.values(), default=0)
        return self._queues[parts]

    @cached_property
    def _queues(self) -> dict[tuple[tuple[Ranks, int], ...], int]:
        return {}

    def ring(self, members: Ranks, size: int) -> Sent:
        """An all-reduce by a ring: every member sends 2(W−1)/W of it to the next, in as many rounds."""
        count = len(members)
        return self._around(members, round(2 * (count - 1) * size / count), 2 * (count - 1))

    def gather_ring(self, members: Ranks, size: int) -> Sent:
        """An all-gather of `size` bytes from each member: each passes on all parts but one."""
        return self._around(members, (len(members) - 1) * size, len(members) - 1)

    def star(self, members: Ranks, size: int) -> Sent:
        """Each member sends to the first, which answers, as in gloo's monitored barrier."""
        edges = self._edges("star", members)
        slow, fast = self._own(edges)
        queue = edges.busiest * size
        inner = size if fast else 0
        return Sent(slow * size, fast * size, queue, inner, 2 * bool(queue), 2 * bool(inner))

    def mesh(self, members: Ranks, size: int, senders: tuple[int, ...] | None = None) -> Sent:
        """Each member, or only those at the places `senders`, sends every other one a part of `size` bytes."""
        sending = None if senders is None else tuple(members[place] for place in senders)
        edges, rounds = self._edges("mesh", members, sending), len(members) - 1
        slow, fast = self._own(edges)
        inner = size * rounds if fast else 0
        queue = edges.busiest * size
        return Sent(slow * size, fast * size, queue, inner, rounds * bool(queue), rounds * bool(inner))

    def double_tree(self, members: Ranks, size: int) -> Sent:
        """An all-reduce by two trees that carry half of it each, where every inner node of one is a leaf of the other.

        A chain inside the node; between nodes each sends as much as in a ring over nodes, in far fewer rounds.
        """
        on_nodes = Counter(self._node_of[rank] for rank in members)
        nodes, here = len(on_nodes), on_nodes[self._own_node]
        each = round(2 * (nodes - 1) / nodes * size)
        chain = 2 * size if here > 1 else 0
        inner = max(0, here - 1)
        return Sent(each if here else 0, chain * inner, each, chain, 2 * (nodes - 1).bit_length(), 2 * inner)

    def relay(self, members: Ranks) -> list[Ranks]:
        """Who hands something on to whom: the first member to one of each node, and these to the others of theirs."""
        nodes: dict[int, list[int]] = {}
        for rank in members:
            nodes.setdefault(self._node_of[rank], []).append(rank)
        firsts = tuple(own[0] for own in nodes.values())
        return [part for part in (firsts, *map(tuple, nodes.values())) if len(part) > 1]

    def broadcast(self, members: Ranks, size: int, root: int) -> Sent:
        """A broadcast of `size` bytes from rank `root`, along gloo's binomial tree or from one to the next by nccl."""
        start, depth = members.index(root), (len(members) - 1).bit_length()
        edges = self._edges("tree" if self.algorithm == "ring" else "chain", members[start:] + members[:start])
        slow_rounds = depth if edges.busiest else 0
        fast_rounds = depth - slow_rounds
        slow, fast = self._own(edges)
        queues = edges.busiest * size, fast_rounds * size
        return Sent(slow * size, fast * size, *queues, slow_rounds, fast_rounds)

    def _around(self, members: Ranks, each: int, rounds: int) -> Sent:
        if len(members) == 1:
            return Sent()
        edges = self._edges("ring", members)
        slow, fast = self._own(edges)
        waits = (rounds, 0) if edges.busiest else (0, rounds)
        queues = edges.busiest * each, each if fast else 0
        return Sent(slow * each, fast * each, *queues, *waits)

    def _edges(self, pattern: str, members: Ranks, senders: Ranks | None = None) -> Edges:
        """Counted once: a run repeats a few patterns a thousand times."""
        if (pattern, members, senders) not in self._counted:
            self._counted[pattern, members, senders] = count_edges(pattern, members, self._node_of, senders)
        return self._counted[pattern, members, senders]

    def _own(self, edges: Edges) -> tuple[int, int]:
        """Messages that leave this worker's node, and that stay in it."""
        return edges.leaving.get(self._own_node, 0), edges.staying.get(self._own_node, 0)

    @cached_property
    def _counted(self) -> dict[tuple[str, Ranks, Ranks | None], Edges]:
        return {}


class Place(NamedTuple):
    """Where a launcher put this process."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int


def place() -> Place | None:
    """This process's place in a job of torchrun or srun; None where it was started by hand.

    A shell inside an allocation, or a batch script, has SLURM's variables too: only srun sets those of a step.
    """
    e = os.environ
    if "RANK" in e and "WORLD_SIZE" in e:
        local = int(e.get("LOCAL_RANK", 0))
        return Place(int(e["RANK"]), int(e["WORLD_SIZE"]), local, int(e.get("LOCAL_WORLD_SIZE", local + 1)))
    if slurm.tasks(e) > 1:
        return Place(int(e["SLURM_PROCID"]), slurm.tasks(e), int(e["SLURM_LOCALID"]), slurm.tasks_here(e))
    return None


def join() -> None:
    """Start `torch.distributed` from torchrun's or srun's environment, unless it runs or there is one worker only."""
    here = place()
    backends.take_interface()
    if dist.is_initialized() or here is None or here.world_size == 1:
        return
    complete_environment(here)
    dist.init_process_group(backend(here))
    process_groups.mark_initialized()


def complete_environment(here: Place) -> None:
    """Set what torch's rendezvous reads, where srun and not torchrun started the workers."""
    e = os.environ
    e.update(RANK=str(here.rank), WORLD_SIZE=str(here.world_size), LOCAL_RANK=str(here.local_rank))
    if "MASTER_ADDR" not in e:
        first = slurm.address(e)
        if first is None:
            raise ConfigError("MASTER_ADDR is not set: start the workers with torchrun, or export it in the job script")
        e["MASTER_ADDR"] = first
    e.setdefault("MASTER_PORT", str(slurm.port(e)) if slurm.tasks(e) > 1 else "29500")


def backend(here: Place) -> str:
    """The backends of this worker's process groups; makes its GPU the current one, if it has one."""
    if not torch.cuda.is_available():
        return "gloo"
    # A launcher may show each worker one GPU of its own, or all workers all of them.
    torch.cuda.set_device(here.local_rank % torch.cuda.device_count())
    # nccl wants a GPU of its own for every worker, unless this setting lets them share; gloo carries CUDA tensors too.
    alone = torch.cuda.device_count() >= here.local_size or "SLURM_GPUS_PER_TASK" in os.environ
    return "cpu:gloo,cuda:nccl" if alone or "NCCL_MULTI_RANK_GPU_ENABLE" in os.environ else "gloo"


def machine() -> str:
    """This worker's machine: torchrun's or SLURM's node number, else the host's name."""
    return os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or socket.gethostname()


def discover(
    group_size: int | str | None, settings: str, device: torch.device, groups: tuple[Ranks, ...] | None = None
) -> Topology:
    """The layout of the running job, whose workers must all have the same settings; collective."""
    if not dist.is_initialized():
        return arrange(0, [0], group_size)
    machines, given = zip(*_gather_hashes(device, machine(), settings), strict=True)
    odd = [rank for rank, other in enumerate(given) if other != given[0]]
    if odd:
        # Checked before anything depends on it: workers with other groups would wait for one another forever.
        raise DisagreementError(
            f"workers were attached with different settings: ranks {', '.join(map(str, odd))} differ from rank 0, "
            f"here is {settings}; give the same config on every worker"
        )
    return (
        arrange(dist.get_rank(), machines, group_size) if groups is None else Topology(dist.get_rank(), groups, groups)
    )


def arrange(rank: int, machines: Sequence[int], group_size: int | str | None) -> Topology:
    """The layout of workers, given the machine of each rank as a number."""
    size = len(machines)
    if isinstance(group_size, int) and group_size > size:
        raise ConfigError(
            f"`group_size`={group_size} exceeds the world of {size} worker{'s' if size > 1 else ''}; "
            f'use 1 to {size}, or "world"'
        )
    nodes = _runs(machines)
    if one := len(nodes) == 1:
        nodes = _chunks(size, group_size if isinstance(group_size, int) else 1)
        if group_size is None and rank == 0 and size > 1:
            log.info("all %d workers are on one machine: each is its own group and stands for a node", size)
    if group_size == "world":
        groups: tuple[Ranks, ...] = (tuple(range(size)),)
    else:
        groups = nodes if group_size is None else _chunks(size, int(group_size))
    _refuse_cut_nodes(nodes, groups, group_size)
    return Topology(rank, nodes, groups, is_one_machine=one)


def _gather_hashes(device: torch.device, *texts: str) -> list[list[int]]:
    """Every rank's hashes of these texts."""
    numbers = [int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest()) for text in texts]
    mine = torch.tensor(numbers, dtype=torch.int64)
    if "cpu" not in dist.get_backend_config():
        mine = mine.to(device)
    rows = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [row.tolist() for row in rows]


def _runs(machines: Sequence[int]) -> tuple[Ranks, ...]:
    """Ranks on one machine, which must follow one another."""
    nodes: list[list[int]] = []
    for rank, machine in enumerate(machines):
        if rank and machine == machines[rank - 1]:
            nodes[-1].append(rank)
        else:
            nodes.append([rank])
    if len(nodes) != len(set(machines)):
        raise ConfigError(
            "the ranks of one machine do not follow one another; start the job with block placement of ranks "
            "(srun --distribution=block)"
        )
    return tuple(tuple(node) for node in nodes)


def _chunks(size: int, length: int) -> tuple[Ranks, ...]:
    return tuple(tuple(range(start, min(start + length, size))) for start in range(0, size, length))


def _refuse_cut_nodes(nodes: tuple[Ranks, ...], groups: tuple[Ranks, ...], group_size: int | str | None) -> None:
    group_of = {rank: group for group in groups for rank in group}
    for node in nodes:
        inside = {group_of[rank] for rank in node}
        if len(inside) > 1 and any(group[0] < node[0] or group[-1] > node[-1] for group in inside):
            raise ConfigError(
                f"`group_size`={group_size} splits the node of ranks {node[0]} to {node[-1]}; use a divisor or a "
                f"multiple of {len(node)} workers, or None for one group per node"
            )
