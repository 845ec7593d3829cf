"""Buckets of gradients that are sent while the backward pass goes on."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gang
import small
import thinwire
from thinwire.base.errors import ThinwireError
from thinwire.exchange import gradients
from thinwire.exchange.gradients import Background, EarlyBuckets


def test_work_is_done_in_order_and_its_first_failure_raised() -> None:
    background, done = Background(), []
    for number in range(5):
        background.submit(lambda number=number: done.append(number))
    background.join()
    assert done == list(range(5))
    background.submit(lambda: done.append(1 / 0))
    background.submit(lambda: done.append("after"))
    with pytest.raises(ZeroDivisionError):
        background.join()
    background.join()
    assert done[-1] == "after"
    background.stop()


def test_a_bucket_is_sent_when_its_gradients_are_there() -> None:
    sent: list[int] = []
    early = EarlyBuckets([[2, 3], [0, 1]], sent.append, torch.device("cpu"))
    for i in (3, 2, 1, 0):  # the first pass only counts
        early.arrived(i, f"p{i}")
    early.finish()
    assert sent == [0, 1]
    early.arrived(3, "p3")
    early.arrived(2, "p2")
    assert sent == [0, 1], "other hooks of this gradient may still run"
    early.arrived(1, "p1")
    early._background.join()
    assert sent == [0, 1, 0]
    with pytest.raises(ThinwireError, match="'p3' arrived again"):
        early.arrived(3, "p3")
    early.finish()
    assert sent == [0, 1, 0, 1]
    early.stop()


class Awkward(nn.Module):
    """A weight used in two checkpointed parts, one that is used at times, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.sometimes, self.never = nn.Linear(32, 32), nn.Linear(4, 4)
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x.flatten(1)))
        for _ in range(2):
            x = checkpoint(self._part, x, use_reentrant=True)
        self.number += 1
        return self.last(self.sometimes(x) if self.number % 3 == 0 else x)

    def _part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(x))


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def trained(rank: int, early: bool, code: str) -> tuple[str, list[float], bool]:
    """An awkward model with accumulation, skipped steps and hooks that change gradients late."""
    gradients._BUCKET = dict.fromkeys(gradients._BUCKET, 1 << 10)
    torch.manual_seed(0)
    model = Awkward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kept = gradients.GradientAveraging._can_begin_early
    if not early:
        gradients.GradientAveraging._can_begin_early = property(lambda self: False)  # type: ignore[method-assign]
    replica = thinwire.attach(model, optimizer, thinwire.AllReduce(wire=code))
    gradients.GradientAveraging._can_begin_early = kept  # type: ignore[method-assign]
    model.last.weight.register_post_accumulate_grad_hook(_halve)
    losses = []
    for number in range(12):
        x, y = small.batch(rank, number)
        optimizer.zero_grad()
        if number % 4 == 1:
            with replica.no_sync():
                F.cross_entropy(replica(x), y).backward()
        loss = F.cross_entropy(replica(x), y)
        loss.backward()
        if number % 5 == 3:  # a second exchange of the same step
            F.cross_entropy(replica(x), y).backward()
        if number % 6 != 5:  # else its gradients are thrown away
            optimizer.step()
        losses.append(float(loss.detach()))
    return small.model_bits(model), losses, replica._method.gradients._early is not None


def both_ways(rank: int) -> dict[str, Any]:
    return {code: [trained(rank, early, code) for early in (True, False)] for code in ("int8", "lowrank:2", "topk:0.1")}


@pytest.mark.slow
def test_early_and_late_exchanges_are_the_same_bit_for_bit() -> None:
    found = gang.run(both_ways, 2, fresh=True)
    for code, (early, late) in found[0].items():
        assert early[2] and not late[2]
        assert early[:2] == late[:2], code
        assert early[0] == found[1][code][0][0], "workers agree"
