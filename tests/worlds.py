"""A tiny model, tiny data and a loop, for tests that compare workers bit by bit."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import thinwire
from device import here
from thinwire.comm.buckets import checksum
from thinwire.factor.optimizers import Optimizers
from thinwire.methods import PaperAB


def small_model(seed: int = 0) -> nn.Sequential:
    """Convolutions with BatchNorm and a wide Linear whose spectrum decays, so that something is cut."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16, 24),
        nn.ReLU(),
        nn.Linear(24, 5),
    )
    with torch.no_grad():
        for layer in (model[3], model[7]):
            matrix = layer.weight.view(layer.weight.shape[0], -1)
            u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
            matrix.copy_(u * torch.logspace(0, -2, u.shape[1]) @ vt)
    return here(model)


def batch(step: int, rank: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """A worker's batch of a step."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    return here((torch.randn(size, 1, 4, 4, generator=g), torch.randint(0, 5, (size,), generator=g)))


def train_step(model: nn.Module, optimizer: Any, step: int, rank: int) -> float:
    """One step of the loop that users have."""
    x, y = batch(step, rank)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The papers' optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def ab(**changes: Any) -> PaperAB:
    """Warm-up 4, then groups 5 and rebound 2 in turn, 24 steps: three cycles less a step or two."""
    settings = {"total_steps": 24, "warmup": 4, "every": 5, "rebound": 2, "lr_rebound": 2}
    return thinwire.AB.paper(**{**settings, "cutoff": 0.2, "group_size": 1, **changes})


def values(model: nn.Module) -> int:
    """A checksum of parameters and buffers."""
    return checksum([*model.parameters(), *model.buffers()])


def optimizer_values(optimizer: Any) -> int:
    """A checksum of every tensor the optimizer keeps, and of its learning rates."""
    tensors = [torch.tensor([group["lr"] for group in optimizer.param_groups])]
    for p in Optimizers(optimizer).parameters:
        state = optimizer.state.get(p, {})
        tensors += [state[k] for k in sorted(state) if isinstance(state[k], torch.Tensor)]
    return checksum(tensors)
