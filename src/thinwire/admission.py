"""What is checked once, before the first step: the optimizer, the architecture, the first values, a run's data."""

import hashlib
import logging
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from thinwire.comm.collectives import Wire
from thinwire.errors import ConfigError, DisagreementError
from thinwire.factor.layers import factored_names
from thinwire.methods.base import optimizer_parameters

log = logging.getLogger("thinwire")

_REFUSED = {
    "LBFGS": "its state spans all parameters at once; use SGD or an Adam",
    "SparseAdam": "it takes sparse gradients only; use Adam with dense ones",
}


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that cannot follow, or that trains something else."""
    if any(factored_names(module) for module in model.modules()):
        raise ConfigError(
            "the model has layers in factors, left by an earlier attach: finish() that replica, "
            "or build a new model and load() a save into it"
        )
    kind = type(optimizer).__name__
    if kind in _REFUSED:
        raise ConfigError(f"optimizer {kind} cannot be attached: {_REFUSED[kind]}")
    held = {id(p) for p in optimizer_parameters(optimizer)}
    if not any(id(p) in held for p in model.parameters()):
        raise ConfigError(
            f"the optimizer ({kind}, {len(held)} parameters) holds none of the model's parameters; "
            "build it from this model's parameters(), after any move to a device"
        )


def check_same_architecture(model: nn.Module, optimizer: Optimizer, wire: Wire) -> None:
    """Names, shapes, dtypes and optimizer groups must be the same on all workers."""
    own = _architecture(model, optimizer)
    _check_same(own, wire, "models", "build the same model and optimizer on every worker")


def check_same_data(told: Sequence[str], wire: Wire) -> None:
    """What workers say of their data must be the same; booked as part of attaching, whatever its length."""
    before, wire.ledger.phase = wire.ledger.phase, "attach"
    _check_same(told, wire, "data", "give every worker the same data")
    wire.ledger.phase = before


def _check_same(own: Sequence[str], wire: Wire, what: str, remedy: str) -> None:
    if len(set(wire.tell(_digest(own)))) == 1:
        return
    told = wire.tell(list(own))
    differing = [rank for rank, other in enumerate(told) if other != told[0]]
    here, there = told[0], told[differing[0]]
    place = next((i for i, (x, y) in enumerate(zip(here, there, strict=False)) if x != y), min(len(here), len(there)))
    raise DisagreementError(
        f"workers have different {what}: rank 0 has {_entry(here, place)} where rank {differing[0]} has "
        f"{_entry(there, place)} (ranks that differ from rank 0: {', '.join(map(str, differing))}); {remedy}"
    )


def spread_first_values(model: nn.Module, wire: Wire) -> None:
    """Overwrite parameters and buffers by rank 0's where they differ, as DDP does."""
    tensors = [*(p.detach() for p in model.parameters()), *model.buffers()]
    if not wire.agree(tensors, "checksums"):
        wire.broadcast(tensors, "first values")
        if wire.topology.rank == 0:
            log.info("workers started from different values: all took rank 0's")


def _architecture(model: nn.Module, optimizer: Optimizer) -> list[str]:
    group_of = {id(p): i for i, g in enumerate(optimizer.param_groups) for p in g["params"]}
    lines = [f"optimizer {type(optimizer).__name__} with {len(optimizer.param_groups)} groups"]
    for name, t in [*model.named_parameters(), *model.named_buffers()]:
        frozen = ", frozen" if isinstance(t, nn.Parameter) and not t.requires_grad else ""
        lines.append(f"{name} {list(t.shape)} {t.dtype} in group {group_of.get(id(t), 'none')}{frozen}")
    return lines


def _digest(lines: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def _entry(lines: list[str], place: int) -> str:
    return repr(lines[place]) if place < len(lines) else "nothing more"
