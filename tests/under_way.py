"""What workers see of a transfer that is under way while they train."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

import small
import thinwire
from thinwire.comm.wire import Pending


def waits(rank: int, config: Any, name: str, held: int, ahead: int) -> list[int]:
    """The steps after which something under way was waited for, of 13.

    Rank 1 holds still after its step `held` until rank 0 has taken its step `ahead`, and so is ahead of it.
    """
    found, honest, store = [], Pending.wait, dist.distributed_c10d._get_default_store()
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, config)

    def wait(self: Pending) -> Tensor:
        if self._booking[1] == "merge":
            found.append(replica.step)
        return honest(self)

    Pending.wait = wait  # type: ignore[method-assign]
    for number in small.walk(replica, optimizer, rank, 13):
        if rank == 1 and number == held:
            store.wait([f"ahead {name}"])
        if rank == 0 and number == ahead:
            store.set(f"ahead {name}", "1")
    Pending.wait = honest  # type: ignore[method-assign]
    return found


def leaves(rank: int, config: Any, step: int) -> str:
    """Rank 1 stops after a step, with something under way; what the other hears."""
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, config)
    try:
        for number in small.walk(replica, optimizer, rank, 30):
            if rank == 1 and number == step:
                return "left"
    except RuntimeError:
        return "noticed"
    return "went on"
