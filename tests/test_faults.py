"""Groups that die while others train."""

import os
import random
import signal
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.optim import AdamW

import small
import thinwire
from launchers import TIMEOUT, Launchers, held
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
    "shared": LocalSGD(every=4, warmup=3, second_moment="shared", rows="seen"),
}
OPTIMIZERS: dict[str, Any] = {}
"""Those that are not AdamW."""


def trained(group: int, worker: int, name: str, deaths: dict[int, tuple[str, int]], hold: int = -1) -> Any:
    """Train until the end, or until this group's death: before a step, in its backward pass, or as it ends.

    A group that comes to step `hold` waits there for another one.
    """
    torch.set_num_threads(1)
    model = small.net()
    optimizer = OPTIMIZERS.get(name, AdamW)(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, WAYS[name], faults=Faults(timeout=TIMEOUT))
    where, when = deaths.get(group, ("", -1))
    seen: list[Any] = []
    sent, sent_at = 0, 0
    while replica.step < STEPS:
        if replica.step == when and worker == 0:
            _die(where, replica)
        if replica.step == hold:
            held(replica)
        if replica.step % 16 == 9:
            with replica.merged():
                seen.append(small.model_bits(model))
        x, y = small.batch(10 * group + worker, replica.step)
        loss = F.cross_entropy(replica(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (now := sum(map(replica.traffic.slow_bytes_for, ("merge", "gradients")))) > sent:
            sent, sent_at = now, replica.step
    replica.finish()
    return Trained(small.model_bits(model), replica.step, replica.describe()["events"], seen, sent_at)


class Trained(NamedTuple):
    """What a worker came to."""

    bits: str
    step: int
    events: list[dict[str, Any]]
    seen: list[str]
    """The merged model, in some steps."""
    sent_at: int
    """The last step in which groups sent one another gradients or parameters."""


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
    assert len({tuple(value.seen) for value in values}) == 1
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
    for value in survivors(Launchers(trained, 3, 1, name, {1: (where, when)}).collect()):
        assert value.step == STEPS
        (event,) = value.events
        assert (event["lost"], event["groups"]) == ([1], 2)


@pytest.mark.slow
def test_a_group_of_two_is_lost_whole() -> None:
    found = Launchers(trained, 3, 2, "coded", {0: ("backward", 11)}).collect()
    alive = {seat: value for seat, value in found.items() if seat[0] != 0}
    assert len(survivors(alive)) == 4


@pytest.mark.slow
def test_one_group_after_another_is_lost() -> None:
    found = Launchers(trained, 4, 1, "diloco", {0: ("forward", 2), 3: ("forward", 12), 1: ("forward", 24)}).collect()
    (value,) = survivors(found)
    assert [event["lost"] for event in value.events] == [[0], [3], [1]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_kills_at_any_moment_leave_one_model(seed: int) -> None:
    """From outside, at a random time, in all phases."""
    draw = random.Random(seed)
    name = draw.choice(sorted(WAYS))
    launchers = Launchers(trained, 4, 1, name, {})
    launchers.wait_for("0/groups")
    for group in draw.sample(range(4), 2):
        time.sleep(draw.uniform(0, 1))
        launchers.kill(group)
    assert survivors(launchers.collect())


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
    found = Launchers(few, 3, 1, {2: ("forward", 5)}).collect()
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


def joined(name: str, groups: int, dies: int, hold: int) -> list[Trained]:
    """Group 0 is killed before a step, and started again once the others have come to another."""
    launchers = Launchers(trained, groups, 1, name, {0: ("forward", dies)}, hold)
    for group in range(1, groups):
        launchers.wait_for(f"held/{group}")
    launchers.start(0)
    found = one_model(launchers.collect())
    assert len(found) == groups
    *_, last = found[-1].events
    assert (last["came"], last["groups"]) == ([0], groups)
    assert found[-1].sent_at > last["step"]  # it is not finish() that has made them one
    return found


@pytest.mark.parametrize(
    ("name", "dies", "hold"),
    [
        ("diloco", 6, 12),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("plain", 7, 14),
                ("coded", 1, 3),
                ("coded", 8, 13),
                ("int8", 5, 9),
                ("powersgd", 2, 8),
                ("onebit", 2, 8),
            )
        ),
    ],
)
def test_a_group_that_is_started_again_joins(name: str, dies: int, hold: int) -> None:
    joined(name, 3, dies, hold)


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(n, marks=pytest.mark.slow) for n in ("diloco", "allreduce", "powersgd"))]
)
def test_a_group_that_was_left_alone_is_joined(name: str) -> None:
    found = joined(name, 2, 6, 25)
    assert found[1].events[0]["groups"] == 1


def one_model(found: dict[tuple[int, int], Any]) -> list[Trained]:
    """What groups returned, in their order; they must have come to the same model."""
    for seat, value in found.items():
        assert not isinstance(value, str), f"{seat}: {value}"
    assert len({value.bits for value in found.values()}) == 1
    return [found[seat] for seat in sorted(found)]
