"""Gradients that a user throws away leave no trace: what compression keeps changes only when a step is taken."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gang
import small
import thinwire
from selection import first_of

METHODS: dict[str, Callable[[], Any]] = {
    "allreduce": thinwire.AllReduce,
    "int8": lambda: thinwire.AllReduce(wire="int8"),
    "powersgd": lambda: thinwire.PowerSGD(rank=2),
    "topk": lambda: thinwire.TopK(density=0.1),
    "onebit": thinwire.OneBit,
}


def backward(replica: Any, rank: int, number: int, scale: float = 1.0) -> None:
    x, y = small.batch(rank, number)
    (scale * F.cross_entropy(replica(x), y)).backward()


def nothing(replica: Any, optimizer: Any, rank: int, number: int) -> None:
    """As if there had been no bad batch."""


def skip(replica: Any, optimizer: Any, rank: int, number: int) -> None:
    """A guard against bad batches."""
    backward(replica, rank, 1000 + number, 50.0)
    optimizer.zero_grad()


def skip_in_place(replica: Any, optimizer: Any, rank: int, number: int) -> None:
    backward(replica, rank, 1000 + number, 50.0)
    optimizer.zero_grad(set_to_none=False)


def skip_several(replica: Any, optimizer: Any, rank: int, number: int) -> None:
    """Accumulated first, without `no_sync`."""
    backward(replica, rank, 1000 + number, 50.0)
    backward(replica, rank, 2000 + number, 50.0)
    optimizer.zero_grad()


def skip_then_accumulate(replica: Any, optimizer: Any, rank: int, number: int) -> None:
    """A bad batch before micro-batches that only the last exchanges."""
    skip(replica, optimizer, rank, number)
    with replica.no_sync():
        backward(replica, rank, 3000 + number, 0.0)


class Box:
    """What no tree of tensors is, so that its gradients come unannounced."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small.mlp()

    def forward(self, x: torch.Tensor) -> Box:
        return Box(self.inner(x))


def skip_boxed(replica: Any, optimizer: Any, rank: int, number: int) -> None:
    x, y = small.batch(rank, 1000 + number)
    (50.0 * F.cross_entropy(replica(x).logits, y)).backward()
    optimizer.zero_grad()


def train(rank: int, config: Any, waste: Callable[..., None], boxed: bool = False) -> list[str]:
    torch.manual_seed(0)
    model = Boxed() if boxed else small.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    replica = thinwire.attach(model, optimizer, config)
    trail = []
    for number in range(8):
        waste(replica, optimizer, rank, number)
        x, y = small.batch(rank, number)
        outputs = replica(x)
        loss = F.cross_entropy(outputs.logits if boxed else outputs, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trail.append(small.model_bits(model))
    replica.detach()
    return trail


def waste_all(rank: int, methods: list[str]) -> dict[Any, bool]:
    same = {}
    for name in methods:
        config = METHODS[name]
        expected = train(rank, config(), nothing)
        for waste in (skip, skip_in_place, skip_several, skip_then_accumulate):
            same[name, waste.__name__] = train(rank, config(), waste) == expected
        expected = train(rank, config(), nothing, True)
        same[name, "boxed"] = train(rank, config(), skip_boxed, True) == expected
    return same


def waste_one(rank: int) -> bool:
    config = thinwire.AllReduce(wire="int8", group_size=1)
    return train(rank, config, skip) == train(rank, config, nothing)


def test_what_a_code_left_out_of_a_batch_that_is_thrown_away_is_not_kept() -> None:
    assert gang.run(waste_one, 2) == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("workers", first_of([2, 3]))
def test_a_batch_that_is_thrown_away_never_moves_a_parameter(workers: int) -> None:
    # A backward pass more makes DDP fill its buckets in another order, and three numbers have more than one sum.
    methods = [name for name in METHODS if workers == 2 or name != "allreduce"]
    for same in gang.run(waste_all, workers, methods):
        assert [case for case, is_same in same.items() if not is_same] == []


# A discriminator has gradients from the generator's pass too, which its own step must not use.


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    for p in model.parameters():
        p.requires_grad_(False)
    yield
    for p in model.parameters():
        p.requires_grad_(True)


def train_gan(rank: int, config: Any, freeze: bool) -> str:
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 16), nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 1))
    for_generator, for_critic = small.sgd(generator), small.sgd(critic)
    g = thinwire.attach(generator, for_generator, thinwire.AllReduce())
    d = thinwire.attach(critic, for_critic, config)
    for number in range(8):
        noise = torch.Generator().manual_seed(100 * rank + number)
        real, z = torch.randn(8, 16, generator=noise), torch.randn(8, 4, generator=noise)
        for_generator.zero_grad()
        with frozen(critic) if freeze else nullcontext():
            (-(critic if freeze else d)(g(z)).mean()).backward()
        for_generator.step()
        for_critic.zero_grad()
        fake = g(z).detach()
        (d(fake) - d(real)).mean().backward()
        for_critic.step()
    found = small.model_bits(critic)
    g.detach()
    d.detach()
    return found


def gan_both_ways(rank: int) -> dict[str, tuple[str, str]]:
    return {
        name: (train_gan(rank, config(), False), train_gan(rank, config(), True)) for name, config in METHODS.items()
    }


@pytest.mark.slow
def test_a_discriminator_in_its_generators_pass_learns_nothing_from_it() -> None:
    here, there = gang.run(gan_both_ways, 2)
    assert here == there
    assert [name for name, (plain, expected) in here.items() if plain != expected] == []


# A step that a scaler skips.


def train_scaled(rank: int, config: Any, overflow: bool) -> str:
    model = small.mlp()
    optimizer = small.sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000, backoff_factor=1.0 - 1e-9)
    replica = thinwire.attach(model, optimizer, config, scaler=scaler)
    for number in range(8):
        if overflow and number in (3, 5):
            optimizer.zero_grad()
            x, y = small.batch(rank, 1000 + number)
            loss = F.cross_entropy(replica(x), y)
            scaler.scale(loss * (float("inf") if rank == number % 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update(8.0)
        optimizer.zero_grad()
        x, y = small.batch(rank, number)
        scaler.scale(F.cross_entropy(replica(x), y)).backward()
        scaler.step(optimizer)
        scaler.update(8.0)
    replica.detach()
    return small.model_bits(model)


def scaled_both_ways(rank: int) -> dict[str, tuple[str, str]]:
    return {
        name: (train_scaled(rank, config(), True), train_scaled(rank, config(), False))
        for name, config in METHODS.items()
    }


def test_a_step_that_a_scaler_skips_leaves_no_trace() -> None:
    here, there = gang.run(scaled_both_ways, 2)
    assert here == there
    assert [name for name, (skipped, expected) in here.items() if skipped != expected] == []
