"""Groups that are slower than others: who waits for whom, and steps that a slow group leaves out."""

import logging
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.optim import AdamW

import gang
import small
import thinwire
from launchers import TIMEOUT, Launchers
from thinwire import AB, ConfigError, DiLoCo, Faults, LocalSGD
from thinwire.exchange.meetings import Late, Waits

STEPS = 40
WAYS: dict[str, Any] = {
    "plain": LocalSGD(every=8, warmup=4),
    "coded": DiLoCo(every=6, warmup=4, wire="int2", fragments=2),
    "shared": LocalSGD(every=8, warmup=4, second_moment="shared", every_max=12),
    "ab": AB(total_steps=STEPS, warmup=4, every=6, factor_at=16, cutoff=0.6),
}


def test_waits_are_differences_from_the_longest() -> None:
    waits = Waits()
    assert waits.own[1] == 0.0
    groups = [[0, 1], [2, 3], [4]]
    waits.arrive()
    waits.meet([[1.0, 0], [1.5, 0], [4.0, 3], [2.0, 3], [3.0, 0]], groups, 0)
    assert waits.latest == Late(1, 2.5)
    waits.arrive()
    waits.meet([[2.0, 0], [1.5, 0], [1.0, 0], [1.0, 0], [1.0, 0]], groups, 0)
    assert waits.latest == Late(0, 1.0)
    assert waits.summary() == {
        "averages": 2,
        "groups": [
            {"group": 0, "waited_s": 2.5, "last": 1},
            {"group": 1, "waited_s": 1.0, "last": 1, "steps_left_out": 3},
            {"group": 2, "waited_s": 2.0, "last": 0},
        ],
    }


def test_alone_nobody_waits() -> None:
    waits = Waits()
    waits.arrive()
    waits.meet([[3.0, 0]], [[0]], 0)
    assert waits.summary() is None and waits.latest is None


@pytest.mark.parametrize(("slow", "told"), [(1.1, 0), (2.0, 1)])
def test_one_that_is_always_late_is_named_once(slow: float, told: int, caplog: pytest.LogCaptureFixture) -> None:
    waits = Waits()
    with caplog.at_level(logging.WARNING, "thinwire"):
        for _ in range(20):
            waits.arrive()
            waits.meet([[1.0, 0], [slow, 0]], [[0], [1]], 0)
    said = [record.message for record in caplog.records]
    assert len(said) == told
    assert all("group 1 is slow: in the last 8 averages others waited for it 50 % of the time" in line for line in said)


def watched(rank: int) -> dict[str, Any] | None:
    """The second worker sleeps in each step."""
    model = small.mlp()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=4, group_size=1))
    for number in range(8):
        train(replica, optimizer, rank, number)
        time.sleep(0.3 * rank)
    found = replica.describe()["waits"]
    replica.finish()
    return found  # type: ignore[no-any-return]


def test_all_workers_know_who_was_last() -> None:
    first, second = gang.run(watched, 2)
    assert first == second
    assert first["averages"] == 2
    assert [each["last"] for each in first["groups"]] == [0, 2]
    assert first["groups"][0]["waited_s"] > 0.5 > first["groups"][1]["waited_s"] == 0


class Trained(NamedTuple):
    """What a worker came to."""

    bits: str
    batches: int
    seen: list[str]
    waits: Any


def train(replica: Any, optimizer: Any, rank: int, number: int) -> None:
    x, y = small.batch(rank, number)
    loss = F.cross_entropy(replica(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def skipping(group: int, worker: int, name: str) -> Trained:
    """The second group takes a third of a second longer for each step; all look at the merged model now and then."""
    torch.set_num_threads(1)
    model = small.net()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, WAYS[name], faults=Faults(timeout=TIMEOUT, skip_after=0.1))
    batches, seen = 0, []
    while replica.step < STEPS:
        if replica.step % 16 == 9:
            with replica.merged():
                seen.append(small.model_bits(model))
        train(replica, optimizer, 10 * group + worker, replica.step)
        batches += 1
        if group == 1 and replica.phase != "warmup":
            time.sleep(0.35)
    waits = replica.describe()["waits"]
    return Trained(small.model_bits(replica.finish()), batches, seen, waits)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "workers"), [("plain", 1), ("coded", 1), ("shared", 1), ("ab", 1), ("ab", 2)])
def test_a_slow_group_leaves_out_steps(name: str, workers: int) -> None:
    found = Launchers(skipping, 2, workers, name).collect()
    for seat, value in found.items():
        assert not isinstance(value, str), f"{seat}: {value}"
    assert len({value.bits for value in found.values()}) == 1
    assert len({tuple(value.seen) for value in found.values()}) == 1
    fast, slow = found[0, 0], found[1, 0]
    assert fast.batches == STEPS
    left_out = slow.waits["groups"][1]["steps_left_out"]
    assert 0 < left_out == STEPS - slow.batches
    assert fast.waits["groups"][1]["steps_left_out"] == left_out


@pytest.mark.parametrize("value", [-1, 60, "soon"])
def test_bad_input(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"`skip_after`={value!r} must be None or a number of seconds from 0 to below"
    ):
        Faults(skip_after=value)
