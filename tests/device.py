"""Where shared models and batches are: on the CPU, or with THINWIRE_TEST_DEVICE=cuda on a GPU (`make test-gpu`).

Values are drawn on the CPU and then moved, so that they are the same everywhere.
"""

import dataclasses
import os
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

DEVICE = torch.device(os.environ.get("THINWIRE_TEST_DEVICE", "cpu"))
_SHARED = "NCCL_MULTI_RANK_GPU_ENABLE" in os.environ
_MOST_WORKERS = 4
_BY_NCCL = DEVICE.type == "cuda" and (_SHARED or torch.cuda.device_count() >= _MOST_WORKERS)
BACKEND = "cpu:gloo,cuda:nccl" if _BY_NCCL else "gloo"
"""Of gangs: several workers share a GPU, which nccl does only if it is told to, or each has its own."""


def take(rank: int) -> None:
    """Make one of the GPUs a worker's own, if there are several."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())


def here(what: T) -> T:
    """Return it with all its tensors on that device."""
    if DEVICE.type == "cpu":
        return what
    moved: Any = what
    if isinstance(what, Tensor | nn.Module):
        moved = what.to(DEVICE)
    elif dataclasses.is_dataclass(what) and not isinstance(what, type):
        moved = dataclasses.replace(what, **{name: here(value) for name, value in vars(what).items()})
    elif isinstance(what, dict):
        moved = type(what)((name, here(value)) for name, value in what.items())
    elif isinstance(what, tuple) and hasattr(what, "_fields"):
        moved = type(what)(*map(here, what))
    elif isinstance(what, list | tuple):
        moved = type(what)(map(here, what))
    return moved
