"""Finding groups whose values are not finite, before they are averaged with those of others."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from thinwire.base.errors import DivergedError
from thinwire.comm.buckets import all_finite
from thinwire.comm.topology import Ranks
from thinwire.comm.wire import Wire

_LOSS = -1


class Fault(NamedTuple):
    """What is not finite in a group."""

    group: int
    ranks: Ranks
    rank: int
    """The first worker of the group that has it."""
    what: str

    def __str__(self) -> str:
        return f"group {self.group} (ranks {self.ranks[0]} to {self.ranks[-1]}) has {self.what} that is not finite"


def find_faults(
    wire: Wire, model: nn.Module, observed: Tensor, more: Sequence[float] = ()
) -> tuple[list[list[float]], list[Fault]]:
    """Each worker's sum of losses, their number and `more`, by rank; and what is not finite, by group; collective."""
    named = _watched(model)
    loss, count = observed.tolist()
    bad = next((i for i, (_, t) in enumerate(named) if not all_finite([t])), None)
    code = bad + 1 if bad is not None else _LOSS if not math.isfinite(loss) else 0
    rows = wire.all_gather_scalars([loss if math.isfinite(loss) else 0.0, count, code, *more], "control")
    found = []
    for i, group in enumerate(wire.topology.groups):
        codes = {rank: int(rows[rank][2]) for rank in group if rows[rank][2]}
        if codes:
            worst = max(codes.values())
            rank = next(rank for rank, each in codes.items() if each == worst)
            found.append(Fault(i, group, rank, named[worst - 1][0] if worst > 0 else "a loss"))
    return [[*row[:2], *row[3:]] for row in rows], found


def refuse_diverged(wire: Wire, model: nn.Module, observed: Tensor, step: int) -> list[list[float]]:
    """Each worker's sum of losses and their number, by rank; a group that diverged stops the run here, by name."""
    rows, faults = find_faults(wire, model, observed)
    if faults:
        raise diverged(faults, step)
    return rows


def diverged(faults: Sequence[Fault], step: int, remedy: str = "") -> DivergedError:
    """The error that all workers raise."""
    first = faults[0]
    others = f" (and {len(faults) - 1} more groups)" if len(faults) > 1 else ""
    return DivergedError(
        f"{first} at step {step}, first on rank {first.rank}{others}, so nothing was merged; lower the learning rate "
        f"or go back to a checkpoint{remedy}"
    )


def _watched(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and running statistics; other buffers, such as masks, may be infinite."""
    named: list[tuple[str, Tensor]] = [(f"parameter {name!r}", p) for name, p in model.named_parameters()]
    for name, module in model.named_modules():
        if isinstance(module, _NormBase):
            for its, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    named.append((f"a running statistic {f'{name}.{its}'.lstrip('.')!r}", buffer))
    return named
