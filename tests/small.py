"""Tiny models, batches and loops that several tests share."""

import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import machine
import thinwire
from device import here
from thinwire.methods import PaperAB

STEPS = 21
"""Three whole cycles of `ab()`."""


class Net(nn.Module):
    """Convolutions, BatchNorm and Linears on 8x8 images; `conv` and `middle` are what gets factored."""

    def __init__(self, bend: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.bend = bend
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 32, 2, stride=2)
        self.middle = nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bend(self.norm(self.stem(x)))
        x = self.bend(self.conv(x)).mean((2, 3))
        return self.head(self.bend(self.middle(x)))


def net(seed: int = 0, *, smooth: bool = False) -> nn.Module:
    """A `Net` with values of its own. A smooth one has no kink that rounding, another on every CPU, could cross."""
    torch.manual_seed(seed)
    return here(Net(torch.tanh if smooth else F.relu))


def mlp(seed: int = 0, *, smooth: bool = False) -> nn.Module:
    """Four Linears and no BatchNorm: a sum of micro-batches is one large batch. "3" and "5" get factored."""
    torch.manual_seed(seed)
    sizes, bend = (64, 32, 32, 32, 10), nn.Tanh if smooth else nn.ReLU
    layers = [part for m, n in itertools.pairwise(sizes) for part in (nn.Linear(m, n), bend())]
    return here(nn.Sequential(nn.Flatten(), *layers[:-1]))


def ab(**fields: Any) -> PaperAB:
    """Warm-up 3, then cycles of 4 steps apart and 2 together; the cutoff is high: random weights are flat."""
    cycle = {
        "total_steps": STEPS,
        "warmup": 3,
        "every": 4,
        "rebound": 2,
        "lr_rebound": 3,
        "cutoff": 0.6,
    }
    return thinwire.AB.paper(**{**cycle, **fields})


def batch(rank: int, step: int, size: int = 6) -> tuple[Tensor, Tensor]:
    """Images and labels that no other worker and no other step has."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return here((torch.randn(size, 1, 8, 8, generator=generator), torch.randint(10, (size,), generator=generator)))


def sgd(model: nn.Module, lr: float = 0.05) -> Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def step(replica: Callable[..., Any], optimizer: Optimizer, rank: int, number: int) -> Tensor:
    """One plain step."""
    x, y = batch(rank, number)
    loss = F.cross_entropy(replica(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def walk(replica: Any, optimizer: Optimizer, rank: int, steps: int = STEPS) -> Iterator[int]:
    """Take plain steps, and stop after each for whoever wants to look."""
    for number in range(steps):
        step(replica, optimizer, rank, number)
        yield number


def strict() -> None:
    """Warnings are errors in this worker too, but for those that are not in a test."""
    warnings.simplefilter("error")
    for action, message, category in machine.FILTERS:
        warnings.filterwarnings(action, message, category)


def whole(t: Tensor) -> Tensor:
    """The tensor, put together from its shards if workers share it."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def bits(*tensors: Tensor) -> str:
    """A digest of values, bit for bit."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(whole(t).detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def model_bits(model: nn.Module) -> str:
    """A digest of all parameters and buffers."""
    return bits(*model.parameters(), *model.buffers())


def optimizer_bits(optimizer: Optimizer) -> str:
    """A digest of the optimizer's state, in the order of its parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [sorted(optimizer.state.get(p, {}).items()) for p in parameters]
    return bits(*(torch.as_tensor(float("nan") if v is None else v) for state in states for _, v in state))


def clone(model: nn.Module) -> dict[str, Tensor]:
    """A copy of everything a model holds."""
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two states agree bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
