"""A loop that somebody else wrote, such as torchtitan's: a block around it, and nothing in it changes.

    with attached(model, optimizer, thinwire.DiLoCo(every=50)):
        for x, y in batches:
            loss = criterion(model(x), y)
            …

A call of the model is a call of its replica while the block lasts. Hooks are called once, as without it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from thinwire.base.errors import ConfigError
from thinwire.comm.topology import place
from thinwire.config.faults import Faults
from thinwire.replica.attaching import attach
from thinwire.replica.replica import Replica


@contextmanager
def attached(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], config: Any, **given: Any
) -> Iterator[Replica]:
    """Train `model` by the method whose config this is; collective. At the end the replica is finished.

    `given` are further arguments of `thinwire.attach`. If the loop raises, the model is released as it is, since the
    others may not come.
    """
    replica = attach(model, optimizer, config, **given)
    with _calls(model, replica):
        try:
            yield replica
        except BaseException:
            replica.detach()
            raise
    replica.finish()


def refuse_faults(faults: Faults, library: str) -> None:
    """What a library's loop cannot have, which takes each group for a job of its own, in one process."""
    if faults.joins:
        raise ConfigError(
            f"`faults`={faults} with {library}: a group that joins would begin at the loop's first batch; give "
            "Faults(joins=False), or write a loop over `replica.steps()`, which groups can join"
        )
    if (here := place()) is not None:
        raise ConfigError(
            f"a launcher has set RANK={here.rank} and WORLD_SIZE={here.world_size}, by which {library} begins "
            "torch.distributed itself, for the workers of one launcher alone: with faults=… start each group as one "
            "process, `python train.py`, with THINWIRE_GROUP and no torchrun"
        )


@contextmanager
def _calls(model: nn.Module, replica: Replica) -> Iterator[None]:
    """Let the model's calls be the replica's, which calls the model in turn.

    By its class, as FSDP does: a `forward` of its own would call hooks twice.
    """
    kind: Any = type(model)
    inside = False

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside or self is not model:
            return kind.__call__(self, *args, **kwargs)
        inside = True
        try:
            return replica(*args, **kwargs)
        finally:
            inside = False

    model.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
    try:
        yield
    finally:
        model.__class__ = kind
