"""Groups that die while others train."""

import os
import random
import signal
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import AdamW

import small
import thinwire
from clans import TIMEOUT, Clans
from thinwire import AllReduce, ConfigError, DiLoCo, Faults, LocalSGD, Nesterov, OneBit, PowerSGD

STEPS = 40
WAYS: dict[str, Any] = {
    "plain": LocalSGD(every=6, warmup=4),
    "coded": LocalSGD(every=4, warmup=6, warmup_wire="int8", wire="int2"),
    "diloco": DiLoCo(every=5, warmup=3, outer=Nesterov(lr=0.7, momentum=0.9), wire="int4"),
    "allreduce": AllReduce(),
    "int8": AllReduce(wire="int8"),
    "powersgd": PowerSGD(rank=2, warmup=5),
    "onebit": OneBit(warmup=5, freeze_second_moment=True),
    "shared": LocalSGD(every=4, warmup=3, second_moment="shared"),
}


def trained(group: int, worker: int, name: str, deaths: dict[int, tuple[str, int]], slow: float = 0.0) -> Any:
    """Train until the end, or until this group's death: before a step, in its backward pass, or as it ends."""
    torch.set_num_threads(1)
    model = small.net()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, WAYS[name], faults=Faults(timeout=TIMEOUT))
    where, when = deaths.get(group, ("", -1))
    seen: list[Any] = []
    while replica.step < STEPS:
        if replica.step == when and worker == 0:
            _die(where, replica)
        x, y = small.batch(10 * group + worker, replica.step)
        loss = F.cross_entropy(replica(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(slow)
        if replica.step % 16 == 9:
            with replica.merged():
                seen.append(small.model_bits(model))
    replica.finish()
    return small.model_bits(model), replica.step, replica.describe()["events"], seen


def _die(where: str, replica: Any) -> None:
    def now(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "forward":
        now()
    elif where == "backward":
        next(replica.parameters()).register_hook(now)
    else:  # in the middle of what groups do together
        calls = iter(range(1000))
        before = replica.wire.all_reduce_max if where == "vote" else replica.wire.all_gather_scalars

        def called(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == 0:
                now()
            return before(*args, **kwargs)

        setattr(replica.wire, "all_reduce_max" if where == "vote" else "all_gather_scalars", called)


def survivors(found: dict[tuple[int, int], Any]) -> list[Any]:
    """What those that were left came to; they must hold the same model."""
    values = one_model(found)
    assert len({tuple(value[3]) for value in values}) == 1
    return values


@pytest.mark.parametrize(
    ("name", "where", "when"),
    [
        ("coded", "backward", 3),
        ("diloco", "check", 7),
        ("shared", "vote", 14),
        ("allreduce", "vote", 9),
        pytest.param("int8", "backward", 6, marks=pytest.mark.slow),
        pytest.param("powersgd", "forward", 3, marks=pytest.mark.slow),
        pytest.param("powersgd", "backward", 20, marks=pytest.mark.slow),
        pytest.param("onebit", "vote", 12, marks=pytest.mark.slow),
        pytest.param("plain", "forward", 2, marks=pytest.mark.slow),
        pytest.param("plain", "forward", 13, marks=pytest.mark.slow),
        pytest.param("coded", "vote", 2, marks=pytest.mark.slow),
        pytest.param("coded", "check", 9, marks=pytest.mark.slow),
        pytest.param("diloco", "vote", 7, marks=pytest.mark.slow),
        pytest.param("shared", "check", 6, marks=pytest.mark.slow),
        pytest.param("plain", "check", 39, marks=pytest.mark.slow),
    ],
)
def test_two_groups_go_on_without_the_third(name: str, where: str, when: int) -> None:
    for value in survivors(Clans(trained, 3, 1, name, {1: (where, when)}).collect()):
        assert value[1] == STEPS
        (event,) = value[2]
        assert (event["lost"], event["groups"]) == ([1], 2)


@pytest.mark.slow
def test_a_group_of_two_is_lost_whole() -> None:
    found = Clans(trained, 3, 2, "coded", {0: ("backward", 11)}).collect()
    alive = {seat: value for seat, value in found.items() if seat[0] != 0}
    assert len(survivors(alive)) == 4


@pytest.mark.slow
def test_one_group_after_another_is_lost() -> None:
    found = Clans(trained, 4, 1, "diloco", {0: ("forward", 2), 3: ("forward", 12), 1: ("forward", 24)}).collect()
    (value,) = survivors(found)
    assert [event["lost"] for event in value[2]] == [[0], [3], [1]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_kills_at_any_moment_leave_one_model(seed: int) -> None:
    """From outside, at a random time, in all phases."""
    draw = random.Random(seed)
    name = draw.choice(sorted(WAYS))
    clans = Clans(trained, 4, 1, name, {}, 0.02)
    time.sleep(2)
    for group in draw.sample(range(4), 2):
        time.sleep(draw.uniform(0, 2.5))
        clans.kill(group)
    assert survivors(clans.collect())


def few(group: int, worker: int, deaths: dict[int, tuple[str, int]]) -> Any:
    torch.set_num_threads(1)
    model = small.mlp()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=2), faults=Faults(min_groups=3, timeout=TIMEOUT))
    for number in range(12):
        if deaths.get(group) == ("forward", number):
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = small.batch(group, number)
        F.cross_entropy(replica(x), y).backward()
        optimizer.step()
    return "went on"


def test_with_too_few_groups_it_stops() -> None:
    found = Clans(few, 3, 1, {2: ("forward", 5)}).collect()
    assert len(found) == 2
    for said in found.values():
        assert said.startswith("LostError: 2 of 3 groups are left: too few to go on (`min_groups`=3")


def test_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="`timeout`=0 must be a number of seconds"):
        Faults(timeout=0)
    with pytest.raises(ConfigError, match="`min_groups`=0"):
        Faults(min_groups=0)
    model = small.mlp()
    optimizer = AdamW(model.parameters())
    for config, said in (
        (LocalSGD(every=2), "needs THINWIRE_STORE, THINWIRE_GROUP, THINWIRE_GROUPS in the environment"),
        (LocalSGD(every=2, group_size=1), "each launcher's workers are a group; leave `group_size` out"),
        (LocalSGD(every=4, overlap=1), "`overlap`=1 with faults=… is not supported"),
    ):
        with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
            thinwire.attach(model, optimizer, config, faults=Faults())
    for name, value in (("STORE", "nowhere"), ("GROUP", "0"), ("GROUPS", "2")):
        monkeypatch.setenv(f"THINWIRE_{name}", value)
    with pytest.raises(ConfigError, match="THINWIRE_STORE='nowhere'"):
        thinwire.attach(model, optimizer, LocalSGD(every=2), faults=Faults())


@pytest.mark.parametrize(
    "name", ["diloco", *(pytest.param(n, marks=pytest.mark.slow) for n in ("plain", "coded", "int8", "onebit"))]
)
def test_a_group_that_is_started_again_joins(name: str) -> None:
    clans = Clans(trained, 3, 1, name, {}, 0.2)
    time.sleep(3)
    clans.kill(1)
    clans.processes[1][0].join()
    clans.start(1)
    found = clans.collect()
    assert len(one_model(found)) == 3
    assert [1] in [event["came"] for event in found[0, 0][2]]


def one_model(found: dict[tuple[int, int], Any]) -> list[Any]:
    """What groups returned; they must have come to the same model."""
    for seat, value in found.items():
        assert not isinstance(value, str), f"{seat}: {value}"
    assert len({value[0] for value in found.values()}) == 1
    return list(found.values())
