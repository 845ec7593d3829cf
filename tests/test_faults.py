"""Groups that die while others train."""

import functools
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import SGD, AdamW

import covering
import gang
import small
import thinwire
from launchers import TIMEOUT, Launchers, held, note
from thinwire import AB, DASO, OIALR, AllReduce, ConfigError, DiLoCo, Faults, LocalSGD, Nesterov, OneBit, PowerSGD, TopK
from thinwire.base.errors import CollectiveError
from thinwire.comm import process_groups
from thinwire.comm.wire import Wire
from thinwire.elastic.membership import Membership
from thinwire.elastic.store import meeting

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
FIELDS: dict[str, Any] = {"total_steps": STEPS, "warmup": 5, "warmup_wire": "lowrank:2", "every": 4, "cutoff": 0.6}
"""Warm-up to step 5; averages at 9, 13 and so on; factors from 17 on, decomposed again at 25 and 33."""
WAYS |= {
    "ab": AB(**FIELDS, factor_at=16, redecompose=2),
    "split": AB(**FIELDS, factor_at=16, redecompose=3, train="split", outer=None, wire="int4"),
    "both": AB(**FIELDS, factor_at=16, redecompose=2, train="both", moments="average", target=1.5),
    "paper": AB.paper(total_steps=STEPS, warmup=3, every=4, rebound=2, lr_rebound=3, cutoff=0.6, wire="int8"),
    "pending": LocalSGD(every=6, warmup=3, overlap=3, wire="int4"),
    "daso": DASO(total_steps=STEPS, warmup=6, cooldown=6, every=4, overlap=2, plateau_patience=None, wire="int8"),
    "topk": TopK(density=0.05, warmup=4, ramp=8, momentum=None),
    "oialr": OIALR(total_steps=STEPS, factor_at=6, redecompose=6, cutoff=0.3, layer_fraction=0.5, wire="int8"),
}
OPTIMIZERS: dict[str, Any] = {"topk": functools.partial(SGD, momentum=0.9, weight_decay=1e-3)}
"""Those that are not AdamW."""


def trained(
    group: int,
    worker: int,
    name: str,
    deaths: dict[int, tuple[str, int]],
    holds: Sequence[int] = (),
    timeout: float = TIMEOUT,
    how: int = signal.SIGKILL,
) -> Any:
    """Train until the end, or until this group's death: before a step, in its backward pass, or as it ends.

    It is killed, or with SIGSTOP frozen.

    A group that comes to one of the steps `holds` waits there until all groups are in or another one wants in.
    """
    torch.set_num_threads(1)
    model = small.net()
    optimizer = OPTIMIZERS.get(name, AdamW)(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, WAYS[name], faults=Faults(timeout=timeout))
    note(replica, "training")
    where, when = deaths.get(group, ("", -1))
    seen: list[Any] = []
    sent, sent_at = 0, 0
    while replica.step < STEPS:
        if replica.step == when and worker == 0:
            when = -1
            _die(where, replica, how)
        if replica.step in holds:
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
    assert replica.ranks() or name not in ("ab", "split", "both", "oialr"), "nothing was factored"
    bits = small.model_bits(replica.finish())
    return Trained(bits, replica.step, replica.describe()["events"], seen, sent_at)


class Trained(NamedTuple):
    """What a worker came to."""

    bits: str
    step: int
    events: list[dict[str, Any]]
    seen: list[str]
    """The merged model, in some steps."""
    sent_at: int
    """The last step in which groups sent one another gradients or parameters."""


def _die(where: str, replica: Any, how: int = signal.SIGKILL) -> None:
    def now(*_: Any) -> None:
        os.kill(os.getpid(), how)

    if where == "forward":
        now()
    elif where == "backward":
        handle = next(replica.parameters()).register_hook(lambda _: (handle.remove(), now())[1])
    elif where == "cut":  # when weights are decomposed, and nobody knows that the others have come so far
        _replace_once(replica._method.shape, "_agreed_factors", now, first=False)
    else:  # in the middle of what groups do together
        name = {"vote": "all_reduce_max", "check": "all_gather_scalars", "compare": "differing"}.get(where, where)
        _replace_once(replica.wire, name, now)


def _replace_once(owner: Any, name: str, now: Callable[[], None], *, first: bool = True) -> None:
    """At its next call do this first, or after it; a frozen worker then goes on as if nothing had been."""
    real = getattr(owner, name)

    def once(*args: Any, **kwargs: Any) -> Any:
        delattr(owner, name)
        if first:
            now()
        found = real(*args, **kwargs)
        if not first:
            now()
        return found

    setattr(owner, name, once)


def survivors(found: dict[tuple[int, int], Any]) -> list[Any]:
    """What those that were left came to; they must hold the same model."""
    values = one_model(found)
    assert len({tuple(value.seen) for value in values}) == 1
    return values


def part_of_the_slow(*cases: tuple[Any, ...]) -> list[Any]:
    """So many that each place occurs: a case takes ten seconds and more."""
    return slow(covering.each(cases, place=1))


def slow_few(*cases: tuple[Any, ...]) -> list[Any]:
    """The first four: one of each engine."""
    return slow(covering.few(4, cases))


def slow(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    ("name", "where", "when"),
    [
        ("ab", "cut", 16),
        pytest.param("diloco", "check", 7, marks=pytest.mark.slow),
        *part_of_the_slow(
            ("allreduce", "vote", 9),
            ("coded", "backward", 3),
            ("shared", "vote", 14),
            ("int8", "backward", 6),
            ("powersgd", "forward", 3),
            ("powersgd", "backward", 20),
            ("onebit", "vote", 12),
            ("plain", "forward", 2),
            ("plain", "forward", 13),
            ("coded", "vote", 2),
            ("coded", "check", 9),
            ("diloco", "vote", 7),
            ("shared", "check", 6),
            ("plain", "check", 39),
            ("ab", "forward", 0),
            ("ab", "backward", 3),
            ("ab", "vote", 4),
            ("ab", "check", 12),
            ("ab", "compare", 16),
            ("ab", "forward", 19),
            ("ab", "check", 20),
            ("ab", "cut", 24),
            ("ab", "cut", 39),
            ("split", "check", 16),
            ("split", "forward", 19),
            ("split", "check", 24),
            ("both", "cut", 16),
            ("both", "forward", 22),
            ("paper", "vote", 2),
            ("paper", "forward", 4),
            ("paper", "check", 6),
            ("paper", "compare", 6),
            ("paper", "backward", 7),
            ("pending", "vote", 8),
            ("pending", "forward", 10),
            ("pending", "check", 11),
            ("pending", "forward", 39),
            ("daso", "forward", 2),
            ("daso", "check", 5),
            ("daso", "vote", 9),
            ("daso", "forward", 11),
            ("daso", "vote", 11),
            ("daso", "forward", 36),
            ("topk", "forward", 2),
            ("topk", "vote", 3),
            ("topk", "backward", 7),
            ("topk", "vote", 9),
            ("topk", "forward", 20),
            ("oialr", "backward", 3),
            ("oialr", "compare", 5),
            ("oialr", "vote", 11),
            ("oialr", "compare", 11),
            ("oialr", "forward", 14),
        ),
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


def dies_while_opening(group: int, worker: int, name: str, deaths: dict[int, tuple[str, int]]) -> Any:
    """Group 1 is there when others decide to go on without group 0, and then it is not."""
    if group == 1:
        opened = Membership.opened_world
        Membership.opened_world = lambda self: _die("forward", None) if self.generation else opened(self)
    return trained(group, worker, name, deaths)


@pytest.mark.slow
def test_a_group_dies_while_connections_are_opened() -> None:
    found = survivors(Launchers(dies_while_opening, 4, 1, "coded", {0: ("forward", 9)}).collect())
    assert len(found) == 2
    (event,) = found[0].events
    assert (event["lost"], event["groups"]) == ([0, 1], 2)


@pytest.mark.slow
def test_one_group_after_another_is_lost() -> None:
    found = Launchers(trained, 4, 1, "diloco", {0: ("forward", 2), 3: ("forward", 12), 1: ("forward", 24)}).collect()
    (value,) = survivors(found)
    assert [event["lost"] for event in value.events] == [[0], [3], [1]]


@pytest.mark.slow
@pytest.mark.parametrize("seed", covering.few(3, range(24)))
def test_kills_at_any_moment_leave_one_model(seed: int) -> None:
    """From outside, at a random time, in all phases."""
    draw = random.Random(seed)
    name = draw.choice(sorted(WAYS))
    launchers = Launchers(trained, 4, 1, name, {})
    for group in range(4):
        launchers.wait_for(f"training/{group}")
    for group in draw.sample(range(4), 2):
        time.sleep(draw.uniform(0, 1))
        launchers.kill(group)
    assert survivors(launchers.collect())


@pytest.mark.slow
@pytest.mark.parametrize("seed", covering.few(2, range(12)))
def test_groups_that_come_back_at_any_moment_have_the_same_model(seed: int) -> None:
    """A group that is started again right after it was killed, or later; if it is too late, it waits for others."""
    draw = random.Random(100 + seed)
    launchers = Launchers(trained, 3, 1, draw.choice(sorted(WAYS)), {})
    for group in range(3):
        launchers.wait_for(f"training/{group}")
    time.sleep(draw.uniform(0, 0.6))
    killed = draw.randrange(3)
    launchers.kill(killed)
    time.sleep(draw.uniform(0, 3))
    launchers.start(killed)
    found = launchers.collect(may_wait={killed})
    assert len(one_model(found)) >= 2


CALLS: dict[str, tuple[Any, str, Any]] = {
    "factor_now": (
        AB(warmup=2, every=4, factor_at=None, cutoff=0.6),
        "barrier",
        lambda replica, _: replica.factor_now(),
    ),
    "epoch_end": (DASO(total_steps=24, warmup=2, cooldown=2), "check", lambda replica, _: replica.epoch_end(1.0)),
    "save": (DiLoCo(every=4), "compare", lambda replica, out: replica.save(out)),
}


def calling(group: int, worker: int, name: str, out: str) -> Any:
    """Group 1 dies in a call before step 11."""
    torch.set_num_threads(1)
    config, where, call = CALLS[name]
    model = small.net()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, config, faults=Faults(timeout=TIMEOUT))
    while replica.step < 24:
        if replica.step == 11 and group == 1:
            _die(where, replica)
        if replica.step == 11:
            call(replica, out)
        small.step(replica, optimizer, group, replica.step)
    assert replica.ranks() or name != "factor_now"
    return Trained(small.model_bits(replica.finish()), replica.step, replica.describe()["events"], [], 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_repeated_without_a_group_that_dies_in_it(name: str, tmp_path: Path) -> None:
    found = survivors(Launchers(calling, 3, 1, name, str(tmp_path / "save")).collect())
    assert [value.step for value in found] == [24, 24]
    assert [event["lost"] for event in found[0].events if event.get("event") == "groups"] == [[1]]


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


@pytest.mark.slow
def test_with_too_few_groups_it_stops() -> None:
    found = Launchers(few, 3, 1, {2: ("forward", 5)}).collect()
    assert len(found) == 2
    for said in found.values():
        assert said.startswith("LostError: 2 of 3 groups are left: too few to go on (`min_groups`=3")


def waits(group: int, worker: int) -> list[float]:
    model = small.mlp()
    replica = thinwire.attach(model, SGD(model.parameters()), LocalSGD(every=2), faults=Faults(timeout=45))
    groups = [dist.group.WORLD, replica.wire._control, replica.wire._cross]
    found = [process_groups.timeout_of(each).total_seconds() for each in groups]
    replica.finish()
    return found


def test_all_waits_follow_from_one_number() -> None:
    """Connections are opened with a shorter one."""
    faults = Faults(timeout=45)
    assert (faults.start, faults.silence, faults.opening) == (450, 3, 15)
    assert Launchers(waits, 2, 1).collect() == dict.fromkeys([(0, 0), (1, 0)], [45.0] * 3)


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
        (AB(warmup=1, every=4, overlap=1, factor_at=None), "`overlap`=1 of AB with faults=… is not supported"),
    ):
        with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
            thinwire.attach(model, optimizer, config, faults=Faults())
    with pytest.raises(ConfigError, match="GradScaler with faults=… is not supported"):
        thinwire.attach(model, optimizer, LocalSGD(every=2), faults=Faults(), scaler=torch.amp.GradScaler("cpu"))
    for name, value in (("STORE", "nowhere"), ("GROUP", "0"), ("GROUPS", "2")):
        monkeypatch.setenv(f"THINWIRE_{name}", value)
    with pytest.raises(ConfigError, match="THINWIRE_STORE='nowhere'"):
        thinwire.attach(model, optimizer, LocalSGD(every=2), faults=Faults())


def joined(name: str, groups: int, dies: int, hold: int, others: Sequence[int] = ()) -> list[Trained]:
    """Group 0 is killed before a step, as `others` are, and started again once those left have come to another one."""
    launchers = Launchers(trained, groups, 1, name, dict.fromkeys([0, *others], ("forward", dies)), [hold])
    for group in range(1, groups):
        if group not in others:
            launchers.wait_for(f"held/{group}")
    launchers.restart(0)
    found = one_model(launchers.collect())
    assert len(found) == groups - len(others)
    *_, last = found[-1].events
    assert (last["came"], last["groups"]) == ([0], len(found))
    assert found[-1].sent_at > last["step"]  # it is not finish() that has made them one
    assert found[0].seen == found[-1].seen[-len(found[0].seen) :] or not found[0].seen
    return found


def joins_at_the_second_try(group: int, worker: int, fails: str, timeout: float, *args: Any) -> Any:
    """As `trained`, but a group that joins loses the others once: as it connects, or as it is handed the model."""
    store = meeting(timeout).store
    if store.get(f"{store.get('run')}/0/groups") is not None:
        where, name = (dist, "init_process_group") if fails == "opening" else (Wire, "broadcast_bytes")
        real, calls = getattr(where, name), []

        def once(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == 1:
                raise CollectiveError("Connection closed by peer", RuntimeError())
            return real(*args, **kwargs)

        setattr(where, name, once)
    return trained(group, worker, *args, timeout=timeout)


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["opening", "taking over"])
def test_a_group_that_cannot_join_at_once_asks_again(fails: str) -> None:
    launchers = Launchers(joins_at_the_second_try, 3, 1, fails, gang.patient(12), "ab", {0: ("forward", 7)}, [10, 22])
    for group in (1, 2):
        launchers.wait_for(f"held/{group}")
    launchers.restart(0)
    found = one_model(launchers.collect())
    assert len(found) == 3
    assert found[-1].events[-1]["came"] == [0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dies", "hold"),
    [
        ("diloco", 6, 12),
        *slow_few(
            ("powersgd", 2, 8),
            ("pending", 4, 10),
            ("oialr", 8, 16),
            ("daso", 7, 16),
            ("plain", 7, 14),
            ("coded", 1, 3),
            ("coded", 8, 13),
            ("int8", 5, 9),
            ("onebit", 2, 8),
            ("ab", 1, 3),
            ("ab", 7, 10),
            ("ab", 7, 22),
            ("split", 7, 11),
            ("split", 18, 22),
            ("both", 18, 27),
            ("topk", 1, 6),
            ("topk", 9, 20),
            ("oialr", 1, 4),
            ("paper", 1, 8),
            ("paper", 5, 14),
            ("daso", 2, 4),
            ("daso", 20, 35),
        ),
    ],
)
def test_a_group_that_is_started_again_joins(name: str, dies: int, hold: int) -> None:
    joined(name, 3, dies, hold)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ab", "onebit"])
def test_a_group_joins_fewer_than_it_has_left(name: str) -> None:
    joined(name, 4, 10, 14, others=[3])  # where steps depend on the number of groups, all have the same one


@pytest.mark.slow
@pytest.mark.parametrize("name", covering.few(2, ["allreduce", "ab", "plain", "diloco", "powersgd"]))
def test_a_group_that_was_left_alone_is_joined(name: str) -> None:
    found = joined(name, 2, 6, 25)
    assert found[1].events[0]["groups"] == 1


def one_model(found: dict[tuple[int, int], Any]) -> list[Trained]:
    """What groups returned, in their order; they must have come to the same model."""
    for seat, value in found.items():
        assert not isinstance(value, str), f"{seat}: {value}"
    assert len({value.bits for value in found.values()}) == 1
    return [found[seat] for seat in sorted(found)]
