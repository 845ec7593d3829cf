"""Models whose forward pass is out of the ordinary: shared, branching, checkpointed, talkative."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo import WIDE, Model, images, mlp, pull, rows, shape


class Cells(nn.Module):
    """A recurrent cell in a loop of its own, with a projection that is used at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.cell = nn.Linear(WIDE, WIDE), nn.GRUCell(WIDE, WIDE)
        self.step, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(x.shape[0], WIDE)
        for _ in range(4):
            hidden = self.step(self.cell(self.enter(x), hidden))
        return self.head(hidden)


shape("cells in a loop")(Cells)


class Shared(nn.Module):
    """One module under two names and used three times, another used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.again, self.own = self.block, nn.Linear(WIDE, WIDE)
        self.head = nn.Linear(WIDE, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(torch.tanh(self.enter(x)))
        return self.head(self.own(torch.tanh(self.own(self.again(torch.tanh(self.block(x)))))))


shape("shared module")(Shared)


class Branches(nn.Module):
    """Three branches; which is used depends on worker and step, and one never is."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 5)
        self.branches = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(3))

    def forward(self, x: Tensor, which: int = 0) -> Tensor:
        return self.head(torch.tanh(self.branches[which](torch.tanh(self.enter(x)))))


def branch_loss(model: Model, batch: Any, rank: int, step: int) -> Tensor:
    """Another branch for another worker, at every other step."""
    return pull(model(batch, which=(rank + step // 2) % 2))


shape("unused branches", loss=branch_loss, ddp={"find_unused_parameters": True})(Branches)


class Experts(nn.Module):
    """Rows go to experts by what they hold, so some experts see nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gate, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 4), nn.Linear(WIDE, 5)
        self.experts = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        share, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if (mask := chosen == i).any():
                out[mask] = share[mask, None] * expert(x[mask])
        return self.head(out)


shape("experts", batch=lambda rng: rows(rng, batch=3), ddp={"find_unused_parameters": True})(Experts)


def siamese_loss(model: Model, batch: Any, rank: int, step: int) -> Tensor:
    """Both of a pair through the same model, then one backward pass."""
    left, right = model(batch), model(batch.flip(0))
    return (left - right.detach()).square().mean() + pull(left) + pull(right)


shape("siamese", loss=siamese_loss)(mlp)
shape(
    "siamese with batch norm", loss=siamese_loss, batch=images
)(lambda: nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(),
    nn.Linear(512, 24), nn.ReLU(), nn.Linear(24, 5),
))  # fmt: skip


class Checkpointed(nn.Module):
    """Activations of the middle are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.head = nn.Linear(WIDE, WIDE), mlp(), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.middle, torch.tanh(self.enter(x)), use_reentrant=False))


shape("checkpointed")(Checkpointed)


class Buffers(nn.Module):
    """Buffers of every kind, some of which training changes, and differently on each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = mlp(), nn.BatchNorm1d(WIDE)
        self.instance = nn.BatchNorm1d(WIDE, momentum=None, affine=False)
        self.register_buffer("table", torch.linspace(0, 1, WIDE))
        self.register_buffer("mask", torch.arange(WIDE) % 2 == 0)
        self.register_buffer("seen", torch.zeros(5, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDE), persistent=False)
        self.register_buffer("phase", torch.exp(1j * torch.linspace(0, 1, 4)))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("rounded", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("scalar", torch.tensor(0.0))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("small", torch.zeros(2, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.instance(self.norm(x * (1 + self.table)).masked_fill(self.mask, 0.5))
        out = self.net(x)
        if self.training:
            with torch.no_grad():
                self.seen.add_(torch.bincount(out.argmax(1), minlength=5))
                self.mean.lerp_(x.mean(0), 0.1)
                self.scalar.add_(out.mean())
                self.rounded.mul_(0.9)
                self.flag.logical_not_()
                self.small.add_(1)
                self.phase.mul_(torch.exp(torch.tensor(1j)))
        return out


shape("buffers of every kind")(Buffers)


class Codebook(nn.Module):
    """A table of codes that is a buffer, moved by the batch and not by a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.one, self.two = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.register_buffer("codes", torch.randn(8, WIDE))
        self.register_buffer("uses", torch.zeros(8, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(torch.tanh(self.enter(x))))
        chosen = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                self.codes = self.codes.index_add(0, chosen, 0.1 * (x - self.codes[chosen]))
                self.uses += torch.bincount(chosen, minlength=8).int()
        return self.two(x + (self.codes[chosen] - x).detach())


shape("a codebook that is rebound")(Codebook)


@dataclass
class Answer:
    """What a model may return."""

    logits: Tensor
    hidden: list[Tensor]
    name: str = "answer"


class Talkative(nn.Module):
    """Takes keywords only and returns whatever it likes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.kind, self.head = kind, nn.Linear(WIDE, 5)

    def forward(self, *, x: Tensor, note: str | None = None) -> Any:
        hidden = torch.tanh(self.two(torch.tanh(self.one(x))))
        logits = self.head(hidden)
        if self.kind == "dict":
            return {"logits": logits, "parts": {"hidden": [hidden]}, "note": note, "loss": None}
        return Answer(logits, [hidden]) if self.kind == "dataclass" else (logits, (hidden, None), 3)


for _kind in ("dict", "dataclass", "tuple"):
    shape(f"returns a {_kind}", batch=lambda rng: {"x": rows(rng), "note": "hello"})(
        functools.partial(Talkative, _kind)
    )


class Thrifty(nn.Module):
    """Its own loss inside, as Hugging Face's models have it; outputs alone are no use."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_noise = mlp(), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.net(x) - 1).square().mean() * torch.exp(-self.log_noise) + self.log_noise


shape("returns a scalar loss")(Thrifty)
