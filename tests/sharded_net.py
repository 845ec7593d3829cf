"""A small model that groups of two workers shard with FSDP2, and steps of it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from device import DEVICE, here


class Net(nn.Module):
    """Rows that two workers cannot share evenly, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(12, 33, bias=False)  # with one, AdamW would train the rounding of a gradient of zero
        self.norm, self.second = nn.BatchNorm1d(33), nn.Linear(33, 12)
        self.last = nn.Linear(12, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.second(F.relu(self.norm(self.first(x))))))


class Words(nn.Module):
    """Weights that are tied, and attention, which reads its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 48, 0.0, batch_first=True) for _ in range(2))
        self.mix, self.head = nn.Linear(16, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.gelu(self.mix(x)))


def columns(p: nn.Parameter) -> Shard | None:
    return Shard(1) if p.ndim == 2 and p.shape[1] % 2 == 0 else None


def sharded(model: nn.Module, workers: int = 2, groups: int = 2, **how: Any) -> nn.Module:
    mesh = init_device_mesh(DEVICE.type, (groups, workers), mesh_dim_names=("between", "in"))["in"]
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh, **how)
    return fully_shard(model, mesh=mesh, **how)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in model.state_dict().items()}


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return here((torch.randn(8, 12, generator=generator), torch.randint(0, 5, (8,), generator=generator)))


def steps(rank: int, model: nn.Module, optimizer: Any, replica: Any, first: int, last: int) -> None:
    for step in range(first, last):
        x, y = batch(rank, step)
        loss = F.cross_entropy(replica(x), y)
        loss.backward()
        replica.observe(loss)
        torch.nn.utils.clip_grad_norm_(replica.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 1:
            with replica.merged(), torch.no_grad():
                replica.eval()(x)
            replica.train()
