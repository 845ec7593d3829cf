"""torch's process groups: made once for the same ranks, asked who is missing, and left in order."""

import gc
import itertools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from thinwire.comm.sent import Ranks

# Process groups cost connections, and a process that attaches twice wants the same ones again.
_process_groups: dict[Ranks, Any] = {}
_CONTROL: Ranks = ()


def leave() -> None:
    """End `torch.distributed` in order.

    A process group's threads live as long as somebody holds it. Those that the interpreter's own end finds running
    abort the process now and then ("terminate called without an active exception"), when all work is done.
    """
    _process_groups.clear()
    gc.collect()  # replicas that are gone but for cycles
    if dist.is_initialized():
        dist.destroy_process_group()


# Only rank 0 hears from a barrier who is missing, and nobody if it is rank 0. So each rank leaves a note first.
_barriers = itertools.count(1)


def sign_in(rank: int) -> int:
    """Leave a note that this rank has come to its next barrier, and say which."""
    number = next(_barriers)
    _store().set(f"thinwire/barrier/{rank}", str(number))
    return number


def not_signed_in(world: Ranks, number: int) -> list[int]:
    """Ranks that left no note of that barrier."""
    keys = {rank: f"thinwire/barrier/{rank}" for rank in world}
    try:
        return [r for r, key in keys.items() if not _store().check([key]) or int(_store().get(key)) < number]
    except RuntimeError:  # whoever kept the notes has left
        return []


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def process_group(members: Ranks) -> Any:
    """The one of these ranks; all workers make them in one order."""
    known = _known_groups()
    if members not in known:
        known[members] = dist.new_group(list(members), timeout=timeout_of(dist.group.WORLD))
    return known[members]


def control_group() -> Any:
    """A gloo group of the world, for small numbers on the CPU and for noticing who is missing."""
    known = _known_groups()
    if _CONTROL not in known:
        known[_CONTROL] = dist.new_group(backend="gloo", timeout=timeout_of(dist.group.WORLD))
    return known[_CONTROL]


def _known_groups() -> dict[Ranks, Any]:
    """This world's groups; those of a world that was destroyed are forgotten."""
    world = tuple(range(dist.get_world_size()))
    if _process_groups.get(world) is not dist.group.WORLD:
        _process_groups.clear()
        _process_groups[world] = dist.group.WORLD
    return _process_groups


def timeout_of(group: Any) -> timedelta:
    """How long its collectives wait for a missing rank."""
    device = "cpu" if "cpu" in dist.get_backend_config(group) else "cuda"
    options = group._get_backend(torch.device(device)).options
    return options._timeout
