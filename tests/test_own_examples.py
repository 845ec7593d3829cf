"""`examples/desloc.py` and `examples/slowmo.py` compute what their docstrings say, by one process in plain torch."""

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import gang
import thinwire

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import desloc
import slowmo

pytestmark = pytest.mark.slow
STEPS, GROUPS = 14, 2


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def adamw(model: Any) -> torch.optim.Optimizer:
    return AdamW([{"params": model[0].parameters(), "lr": 0.03}, {"params": model[2].parameters()}], lr=0.01)


def sgd(model: Any) -> torch.optim.Optimizer:
    return SGD([{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters()}], lr=0.1, momentum=0.9)


def update(model: nn.Module, call: Any, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """One step at a rate that falls."""
    for group in optimizer.param_groups:
        group.setdefault("first", group["lr"])
        group["lr"] = group["first"] / (1 + step)
    inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * rank + step)).double()
    optimizer.zero_grad()
    call(inputs).square().sum().backward()
    optimizer.step()


CASES: dict[str, Any] = {
    "desloc": (adamw, desloc.DesLoc(every=2, every_first=3, every_second=4)),
    "desloc with momentum": (sgd, desloc.DesLoc(every=4, every_first=3, every_second=5)),
    "slowmo": (adamw, slowmo.SlowMo(every=4, beta=0.6, alpha=0.8)),
    "slowmo with momentum": (sgd, slowmo.SlowMo(every=3, beta=0.5)),
}


def trained(rank: int) -> list[list[list[float]]]:
    """By case what a group holds after each step, and after `finish`."""
    found = []
    for make, config in CASES.values():
        model = net()
        optimizer = make(model)
        replica = thinwire.attach(model, optimizer, config)
        seen = []
        for step in range(STEPS):
            update(model, replica, optimizer, rank, step)
            seen.append(values(model))
        found.append([*seen, values(replica.finish())])
    return found


def values(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def reference(case: str) -> list[list[list[float]]]:
    """By group the same, of both groups in one process."""
    make, config = CASES[case]
    models = [net() for _ in range(GROUPS)]
    optimizers = [make(model) for model in models]
    pairs = [*zip(*(model.parameters() for model in models), strict=True)]
    start = [first.detach().clone() for first, _ in pairs]
    slow = [torch.zeros_like(p) for p in start]
    found: list[list[list[float]]] = [[], []]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            update(model, model, optimizer, rank, step)
        if case.startswith("desloc"):
            every = {"exp_avg": config.every_first, "momentum_buffer": config.every_first}
            for pair in pairs:
                states = [optimizer.state[p] for optimizer, p in zip(optimizers, pair, strict=True)]
                for name in states[0].keys() - {"step"}:
                    if (step + 1) % every.get(name, config.every_second) == 0:
                        average(*(state[name] for state in states))
        if (step + 1) % config.every == 0:
            for number, pair in enumerate(pairs):
                average(*pair)
                if case.startswith("slowmo"):
                    lr = optimizers[0].param_groups[number // 2]["lr"]
                    slow[number] = config.beta * slow[number] + (start[number] - pair[0].detach()) / lr
                    start[number] = start[number] - config.alpha * lr * slow[number]
                    for p in pair:
                        p.data.copy_(start[number])
        for seen, model in zip(found, models, strict=True):
            seen.append(values(model))
    models = copy.deepcopy(models)
    for pair in zip(*(model.parameters() for model in models), strict=True):
        average(*pair)
    return [[*seen, values(models[0])] for seen in found]


@torch.no_grad()
def average(one: torch.Tensor, other: torch.Tensor) -> None:
    mean = (one + other) / 2
    one.copy_(mean)
    other.copy_(mean)


@pytest.fixture(scope="module")
def runs() -> list[Any]:
    return gang.run(trained, GROUPS)


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_plain_torch_does(case: str, runs: list[Any]) -> None:
    expected, place = reference(case), [*CASES].index(case)
    for rank in range(GROUPS):
        torch.testing.assert_close(torch.tensor(runs[rank][place]), torch.tensor(expected[rank]), rtol=1e-5, atol=1e-7)
    assert expected[0][0] != expected[1][0], "groups train alone"
