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
BACKEND = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" and "NCCL_MULTI_RANK_GPU_ENABLE" in os.environ else "gloo"
"""Of gangs: several workers share the GPU, which nccl does only if it is told to."""


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
