"""Wrappers that average or shard the same parameters: DistributedDataParallel and FSDP, inside a model or around it.

What they send is not in the ledger, and they would average over groups that should train apart.
"""

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def wrapper_inside(model: nn.Module) -> str | None:
    """The class name of what already averages or shards parameters of this model."""
    kinds = (DistributedDataParallel, *_classes("torch.distributed.fsdp", "FullyShardedDataParallel", "FSDPModule"))
    found = next((module for module in model.modules() if isinstance(module, kinds)), None)
    if found is not None:
        return next(kind.__name__ for kind in kinds if isinstance(found, kind))
    sharded = _classes("torch.distributed.tensor", "DTensor")
    return "DTensor" if any(isinstance(p, sharded) for p in model.parameters()) else None


def wrapper_around(parameters: Iterable[nn.Parameter]) -> str | None:
    """The class name of a wrapper that averages these parameters and is in a forward pass now."""
    active = DistributedDataParallel._get_active_ddp_module()
    if active is None:
        return None
    ours = {id(p) for p in parameters}
    return type(active).__name__ if any(id(p) in ours for p in active.parameters()) else None


def _classes(module: str, *names: str) -> tuple[Any, ...]:
    """Classes of a torch module, if imported: importing FSDP takes a second, and without it there is no instance."""
    loaded = sys.modules.get(module)
    return tuple(found for name in names if (found := getattr(loaded, name, None)) is not None)
