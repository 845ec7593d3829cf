"""Groups that freeze, leave, come back and start again; stores that go away; calls that differ between groups."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

import gang
import small
import thinwire
from covering import few
from launchers import Launchers, free_port, held, note, start_store
from patience import until
from test_faults import STEPS, WAYS, _die, one_model, part_of_the_slow, survivors, trained
from thinwire import AllReduce, ConfigError, Faults, LocalSGD
from thinwire.elastic.membership import Membership
from thinwire.elastic.store import Store, StoreLostError

TIMEOUT = 24.0
"""Much more than anything here should take, but for what waits until the end of one."""


def short() -> int:
    """A timeout for what waits until the end of one."""
    return round(gang.patient(6))


# Groups that freeze.


@pytest.mark.parametrize(
    ("name", "where", "when"),
    [
        ("allreduce", "backward", 9),
        *part_of_the_slow(
            ("allreduce", "vote", 9),
            ("ab", "backward", 3),
            ("ab", "vote", 4),
            ("ab", "check", 12),
            ("ab", "cut", 16),
            ("coded", "check", 9),
            ("diloco", "vote", 7),
            ("plain", "forward", 13),
            ("daso", "vote", 11),
            ("pending", "check", 11),
            ("paper", "compare", 6),
            ("oialr", "compare", 11),
            ("topk", "vote", 9),
            ("powersgd", "backward", 20),
            ("onebit", "vote", 12),
        ),
    ],
)
def test_two_groups_go_on_without_one_that_is_frozen(name: str, where: str, when: int) -> None:
    launchers = Launchers(trained, 3, 1, name, {1: (where, when)}, (), TIMEOUT, signal.SIGSTOP)
    found = survivors(launchers.collect(timeout=STEPS, frozen=[1]))
    assert len(found) == 2
    assert [event["lost"] for event in found[0].events] == [[1]]


@pytest.mark.parametrize(
    ("name", "where", "when", "hold"),
    [
        pytest.param("ab", "check", 12, 15, marks=pytest.mark.slow),
        *part_of_the_slow(
            ("allreduce", "backward", 9, 12),
            ("int8", "vote", 9, 12),
            ("plain", "forward", 13, 17),
            ("coded", "check", 9, 12),
            ("diloco", "vote", 7, 9),
            ("shared", "check", 6, 8),
            ("split", "check", 16, 22),
            ("both", "forward", 22, 27),
            ("ab", "cut", 16, 19),
            ("ab", "backward", 3, 20),
            ("paper", "check", 6, 14),
            ("paper", "forward", 4, 8),
            ("pending", "vote", 8, 12),
            ("daso", "forward", 11, 16),
            ("topk", "vote", 3, 9),
            ("powersgd", "backward", 4, 12),
            ("onebit", "vote", 12, 14),
            ("oialr", "compare", 5, 16),
        ),
    ],
)
def test_a_group_that_wakes_up_joins_again_by_itself(name: str, where: str, when: int, hold: int) -> None:
    launchers = Launchers(trained, 3, 1, name, {1: (where, when)}, [hold], TIMEOUT, signal.SIGSTOP)
    for group in (0, 2):
        launchers.wait_for(f"held/{group}")
    launchers.thaw(1)
    found = one_model(launchers.collect())
    assert len(found) == 3
    for value in found:
        assert [(e["lost"], e["came"]) for e in value.events] == [([1], []), ([], [1])]
        assert value.step == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(2, range(16)))
def test_freezes_at_any_moment_leave_one_model(seed: int) -> None:
    """For a time that is shorter or longer than what a group is given up after."""
    import random

    draw = random.Random(seed)
    launchers = Launchers(trained, 3, 1, draw.choice(sorted(WAYS)), {}, (), TIMEOUT)
    for group in range(3):
        launchers.wait_for(f"training/{group}")
    time.sleep(draw.uniform(0, 1))
    group = draw.randrange(3)
    launchers.freeze(group)
    time.sleep(draw.uniform(0.5, 8))
    launchers.thaw(group)
    found = {slot: v for slot, v in launchers.collect().items() if "the run has ended without" not in str(v)}
    assert len(one_model(found)) >= 2


def opens_late(group: int, worker: int, out: str) -> Any:
    """Group 0 dies in a save, and group 1 is frozen when it is on the new list and opens no connections yet."""
    torch.set_num_threads(1)
    opened = Membership.opened_world

    def late(self: Membership) -> Any:
        if group == 1 and self.generation == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return opened(self)

    Membership.opened_world = late  # type: ignore[method-assign]
    model = small.mlp()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, AllReduce(), faults=Faults(timeout=TIMEOUT))
    while replica.step < 20:
        if replica.step == 6 and not replica.joined_late:
            if group == 0:
                _die("barrier", replica)
            replica.save(out)
        if replica.step == 12:
            held(replica)
        small.step(replica, optimizer, group, replica.step)
    return {"bits": small.model_bits(replica.finish()), "events": replica.events}


@pytest.mark.slow
def test_a_group_that_has_no_connections_any_more_trains_until_it_can_join_again(tmp_path: Path) -> None:
    launchers = Launchers(opens_late, 3, 1, str(tmp_path / "save"))
    launchers.wait_for("held/2")
    launchers.thaw(1)
    found = one(launchers.collect(timeout=100), 2)
    assert [(e["lost"], e["came"]) for e in found[1]["events"]] == [([0, 1], []), ([], [1])]


def two_in_a_group(group: int, worker: int) -> Any:
    """Group 0 dies while group 1, of two workers, is in a backward pass whose gradients it averages itself."""
    torch.set_num_threads(1)
    model = small.mlp()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=6), faults=Faults(timeout=TIMEOUT))
    while replica.step < 18:
        if replica.step == 8 and group == 0 and worker == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if replica.step == 8 and group == 1 and worker == 1:  # late, so that the other one waits inside its group
            while not replica._recovery.membership.heartbeat.is_called:
                time.sleep(0.05)
            time.sleep(1.5)
        small.step(replica, optimizer, 10 * group + worker, replica.step)
    return small.model_bits(replica.finish())


@pytest.mark.slow
def test_a_group_in_its_own_backward_pass_is_not_disturbed_by_the_loss_of_another() -> None:
    found = Launchers(two_in_a_group, 3, 2).collect()
    alive = {slot: value for slot, value in found.items() if slot[0] != 0}
    assert len(alive) == 4 and len(set(alive.values())) == 1, alive


def late_to_hear(group: int, worker: int) -> Any:
    """Group 0 dies and group 1 waits, while group 2 trains apart; its workers hear of it at different times."""
    torch.set_num_threads(1)
    model = small.mlp()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=20), faults=Faults(timeout=TIMEOUT))
    heartbeat = replica._recovery.membership.heartbeat
    hear, heard = heartbeat.call, []

    def hear_late(generation: int) -> None:
        heard.append(time.monotonic())
        if time.monotonic() > heard[0] + 1:
            hear(generation)

    if group == 2 and worker == 1:
        heartbeat.call = hear_late
    for step in replica.steps(40):
        if group == 0 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if group == 2 and worker == 0 and step == 9:
            until(lambda: heartbeat.is_called, "the call")
        small.step(replica, optimizer, 10 * group + worker, step)
    return {"bits": small.model_bits(replica.finish()), "events": replica.events}


@pytest.mark.slow
def test_workers_of_a_group_follow_others_after_the_same_step() -> None:
    found = one(Launchers(late_to_hear, 3, 2).collect(timeout=100), 4)
    assert [(event["lost"], event["came"]) for event in found[0]["events"]] == [([0], [])]


def two_optimizers(group: int, worker: int) -> Any:
    """They step in another order than they were attached in; group 1 dies before its gradients are exchanged."""
    torch.set_num_threads(1)
    model = small.mlp()
    parameters = list(model.parameters())
    optimizers = [AdamW(parameters[:4], 3e-3), AdamW(parameters[4:], 3e-3)]
    replica = thinwire.attach(model, optimizers, AllReduce(), faults=Faults(timeout=TIMEOUT))
    for step in replica.steps(12):
        loss = F.cross_entropy(replica(small.batch(group, step)[0]), small.batch(group, step)[1])
        model.zero_grad()
        if group == 1 and step == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        for optimizer in reversed(optimizers):
            optimizer.step()
    return {"bits": small.model_bits(replica.finish())}


@pytest.mark.slow
def test_a_step_is_skipped_by_all_optimizers_in_whatever_order() -> None:
    one(Launchers(two_optimizers, 3, 1).collect(), 2)


# Errors that are not of lost peers.


def fails_always(group: int, worker: int) -> Any:
    model = small.mlp()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=2), faults=Faults(timeout=TIMEOUT))

    def broken(*_: Any) -> None:
        raise RuntimeError("this dtype is not supported")

    if group == 1:
        replica.wire._gather_rows = broken
        store = replica._recovery.membership.store
        first = store.first
        store.first = lambda *a, **k: time.sleep(1) or first(*a, **k)  # others see what follows, and might call first
    for number in range(8):
        small.step(replica, optimizer, group, number)


@pytest.mark.slow
def test_an_error_without_a_lost_group_is_raised_and_not_tried_for_ever() -> None:
    found = Launchers(fails_always, 3, 1).collect(timeout=120)
    assert found[1, 0].startswith("RuntimeError: this dtype is not supported")
    for group in (0, 2):
        assert "although all groups were there: group 1: this dtype is not supported" in found[group, 0]


# Groups in different calls.


def different_calls(group: int, worker: int, config: Any, out: str) -> Any:
    """Group 0 saves after a step, as the others do not."""
    model = small.mlp()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, config, faults=Faults(timeout=300))
    for number in range(20):
        small.step(replica, optimizer, group, number)
        if number == 4 and group == 0:
            replica.save(out)


@pytest.mark.parametrize(
    "config", [pytest.param(AllReduce(), marks=pytest.mark.slow), LocalSGD(every=5)], ids=["allreduce", "apart"]
)
def test_groups_in_different_calls_are_refused_by_name_on_all(config: Any, tmp_path: Path) -> None:
    began = time.monotonic()
    found = Launchers(different_calls, 3, 1, config, str(tmp_path / "save")).collect(timeout=500)
    assert len(found) == 3
    for said in found.values():
        assert said.startswith("DisagreementError: groups wait for each other in different calls: group 0 is in save()")
        assert "group 1 is in a step" in said
    assert time.monotonic() - began < 290, "not at the deadline of 300 s, but as soon as it was known"


def looped(
    group: int, worker: int, config: Any, total: int, out: str, hold: int = -1, dies: dict[int, int] | None = None
) -> Any:
    """The loop that users write; a group dies before a step."""
    torch.set_num_threads(1)
    model = small.net()
    optimizer = AdamW(model.parameters(), 3e-3)
    scheduler = ExponentialLR(optimizer, 0.97)  # goes on from the rate that is there, right or wrong
    replica = thinwire.attach(model, optimizer, config, faults=Faults(timeout=TIMEOUT))
    note(replica, "training")
    ema = thinwire.EMA(replica, 0.5)
    first, rates, merged, averaged = replica.step, {}, {}, {}
    for step in replica.steps(total, folder=out, save_every=5, scheduler=scheduler):
        if (dies or {}).get(group) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == hold:
            held(replica)
        rates[step] = optimizer.param_groups[0]["lr"]
        small.step(replica, optimizer, replica.data_rank, step)
        ema.update_parameters()
        averaged[step] = small.model_bits(ema.module)
        if replica.step % 3 == 0:  # after the step, as many loops do
            with replica.merged():
                merged[replica.step] = small.model_bits(model)
    bits, sent = small.model_bits(replica.finish()), replica.baseline()
    found = {"bits": bits, "first": first, "rates": rates, "merged": merged, "events": replica.events}
    return found | {"averaged": averaged, "sent": sent}


def one(found: dict[tuple[int, int], Any], count: int) -> list[dict[str, Any]]:
    """What groups returned, who must be so many and have one model."""
    for slot, value in found.items():
        assert isinstance(value, dict), f"{slot}: {value}"
    assert len(found) == count and len({value["bits"] for value in found.values()}) == 1
    return [found[slot] for slot in sorted(found)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        LocalSGD(every=4, warmup=3),
        AllReduce(),
        WAYS["ab"],
    ],
    ids=["localsgd", "allreduce", "ab"],
)
def test_a_loop_over_steps_saves_sets_rates_and_ends_for_a_joiner_too(config: Any, tmp_path: Path) -> None:
    launchers = Launchers(looped, 3, 1, config, 24, str(tmp_path), 14, {1: 8})
    for group in (0, 2):
        launchers.wait_for(f"held/{group}")
    launchers.restart(1)
    launchers.args = (*launchers.args[:4], {})
    found = one(launchers.collect(), 3)
    joiner = found[1]
    assert joiner["first"] == min(joiner["rates"]) > 8
    assert joiner["sent"] == found[0]["sent"], "what all-reduce would have sent, also before it came"
    alike = ("averaged",) if isinstance(config, AllReduce) else ()  # others' moving averages are each group's own
    for what in ("rates", "merged", *alike):
        assert joiner[what] == {step: found[0][what][step] for step in joiner[what]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000015", "step-000020"]


# One store, many runs.


@pytest.mark.slow
def test_all_groups_die_and_start_again_on_the_same_store(tmp_path: Path) -> None:
    config = LocalSGD(every=4, warmup=3)
    whole = one(Launchers(looped, 2, 1, config, 24, str(tmp_path / "whole")).collect(), 2)
    launchers = Launchers(looped, 2, 1, config, 24, str(tmp_path / "broken"), -1, {0: 13, 1: 13})
    time.sleep(0.1)
    while any(process.exitcode is None for own in launchers.processes.values() for process in own):
        time.sleep(0.05)
    launchers.args = (*launchers.args[:4], {})
    for group in range(2):
        launchers.start(group)
    found = one(launchers.collect(), 2)
    assert [value["first"] for value in found] == [0, 0] and min(found[0]["rates"]) == 10
    assert found[0]["bits"] == whole[0]["bits"]


@pytest.mark.slow
def test_a_second_run_begins_where_the_first_is_over(tmp_path: Path) -> None:
    launchers = Launchers(looped, 2, 1, LocalSGD(every=4), 10, str(tmp_path / "first"))
    while not all(launchers.results[slot].poll() for slot in launchers.results):
        time.sleep(0.05)
    first = {slot: receiver.recv() for slot, receiver in launchers.results.items()}
    launchers.args = (LocalSGD(every=4), 10, str(tmp_path / "second"))
    for group in range(2):
        launchers.start(group)
    assert one(launchers.collect(), 2)[0]["bits"] == one(first, 2)[0]["bits"]


def attached(group: int, worker: int, config: Any, environment: dict[str, str], hold: bool) -> Any:
    """Attach, and train until told otherwise."""
    os.environ.update(environment)
    model = small.mlp()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, config, faults=Faults(timeout=TIMEOUT))
    note(replica, "training")
    store = replica._recovery.membership.store
    while hold and store.get("go on") is None:
        time.sleep(0.05)
    for number in range(6):
        small.step(replica, optimizer, group, number)
    return small.model_bits(replica.finish())


@pytest.mark.parametrize(
    ("config", "environment", "said"),
    [
        pytest.param(LocalSGD(every=2), {}, "worker 0 of group 1 is running already", marks=pytest.mark.slow),
        pytest.param(
            *(LocalSGD(every=2), {"THINWIRE_GROUP": "2", "THINWIRE_GROUPS": "3"}),
            "group 2 cannot join the run on this store: its THINWIRE_GROUPS is 3, the run has 2",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(AllReduce(), {"THINWIRE_GROUP": "1", "dead": "yes"}),
            "group 1 cannot join the run on this store: its config is AllReduce",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["twin", "out of range", "another config"],
)
def test_a_group_that_does_not_belong_is_refused_before_it_disturbs(
    config: Any, environment: dict[str, str], said: str
) -> None:
    launchers = Launchers(attached, 2, 1, LocalSGD(every=2), {}, True)
    for group in range(2):
        launchers.wait_for(f"training/{group}")
    before = dict(launchers.results), dict(launchers.processes)
    if environment.pop("dead", None):
        launchers.kill(1)
    launchers.args = (config, environment, False)
    launchers.start(1)
    stranger = launchers.results[1, 0]
    assert stranger.poll(60) and said in stranger.recv()
    launchers.results, launchers.processes = before
    launchers.store.set("/go on", "")
    found = launchers.collect()
    assert all(len(value) == 64 for value in found.values()), found


# A store that goes away.


def with_store(group: int, worker: int, total: int, timeout: float, dies: int = -1, hold: int = -1) -> Any:
    torch.set_num_threads(1)
    model = small.mlp()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=3), faults=Faults(timeout=timeout))
    note(replica, "training")
    for step in replica.steps(total):
        if step == dies and group == 1 and not replica.joined_late:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == hold:
            held(replica)
        small.step(replica, optimizer, group, step)
        time.sleep(0.1)
    return {"bits": small.model_bits(replica.finish()), "events": replica.events}


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_store_that_comes_back_goes_unnoticed(how: int) -> None:
    launchers = Launchers(with_store, 3, 1, 80, TIMEOUT, 60, 66, port=(port := free_port()))
    for group in range(3):
        launchers.wait_for(f"training/{group}")
    os.kill(launchers.server.pid, how)
    time.sleep(3)
    if how == signal.SIGKILL:
        launchers.server = start_store(port)  # empty: members register again
    else:
        os.kill(launchers.server.pid, signal.SIGCONT)
    launchers.store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    for group in (0, 2):  # they can still lose a group, and let one in
        launchers.wait_for(f"held/{group}")
    launchers.restart(1)
    found = one(launchers.collect(), 3)
    assert [(e["lost"], e["came"]) for e in found[0]["events"]] == [([1], []), ([], [1])]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_model_is_finished_without_the_store(how: int) -> None:
    launchers = Launchers(with_store, 3, 1, 60, short(), port=free_port())
    for group in range(3):
        launchers.wait_for(f"training/{group}")
    os.kill(launchers.server.pid, how)
    one(launchers.collect(), 3)


@pytest.mark.slow
def test_without_store_and_group_a_worker_stops_and_says_why() -> None:
    launchers = Launchers(with_store, 3, 1, 100, timeout := short(), 80, port=free_port())
    for group in range(3):
        launchers.wait_for(f"training/{group}")
    launchers.server.kill()
    found = launchers.collect()
    assert len(found) == 2
    for said in found.values():
        assert f"has not answered for {timeout} s" in said and "start its group again to join" in said


def lost_in_finish(group: int, worker: int, port: int, timeout: int) -> Any:
    """The store is gone, and group 1 dies in `finish`."""
    model = small.mlp()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=3), faults=Faults(timeout=timeout))
    for number in range(7):
        small.step(replica, optimizer, group, number)
    note(replica, "trained")
    if group == 1:
        replica.wire.barrier = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    while _answers(port):
        time.sleep(0.05)
    return small.model_bits(replica.finish())


def _answers(port: int) -> bool:
    try:
        return Store("127.0.0.1", port, timeout=1.0, patience=0.0).get("anything") is None
    except StoreLostError:
        return False


@pytest.mark.slow
def test_finish_throws_no_model_away(tmp_path: Path) -> None:
    port = free_port()
    launchers = Launchers(lost_in_finish, 3, 1, port, short(), port=port)
    for group in range(3):
        launchers.wait_for(f"trained/{group}")
    launchers.server.kill()
    found = launchers.collect()
    assert len(found) == 2
    for said in found.values():
        assert "finish() could not complete" in said
        path = Path(said.split(" is in ")[1].split()[0])
        assert path.is_file() and "step7" in path.name


def _is_frozen(pid: int) -> bool:
    states = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def test_a_store_is_not_waited_for_longer_than_asked() -> None:
    """Frozen it still accepts connections, and nobody answers there."""
    port = free_port()
    server = start_store(port)
    store = Store("127.0.0.1", port, timeout=2.0, patience=2.0)
    store.set("key", "value")
    os.kill(server.pid, signal.SIGSTOP)
    until(lambda: _is_frozen(server.pid), "the store to freeze")  # the signal comes later than it is sent
    began = time.monotonic()
    with pytest.raises(StoreLostError, match=f"the store at 127.0.0.1:{port} has not answered for 2 s"):
        store.get("key")
    assert time.monotonic() - began < 20
    os.kill(server.pid, signal.SIGCONT)
    assert store.get("key") == "value"
    server.kill()
    server.join()
    server = start_store(port)
    assert store.get("key") is None and store.first("key", "other") == "other"
    assert store.first("key", "third") == "other" and store.first("key", "third", instead_of="other") == "third"
    server.kill()


# Signals.


def signalled(group: int, worker: int, config: Any, out: str, faults: Any, total: int = 2000) -> Any:
    torch.set_num_threads(1)
    model = small.mlp()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, config, faults=faults)
    note(replica, "training")
    try:
        for step in replica.steps(total, folder=out):
            small.step(replica, optimizer, group, step)
            if replica.events:
                note(replica, "regrouped")
            time.sleep(0.01)
    except SystemExit as stop:
        return {"step": replica.step, "code": stop.code, "bits": ""}
    return {"step": replica.step, "code": 0, "bits": small.model_bits(replica.finish())}


@pytest.mark.parametrize(
    "config", [LocalSGD(every=8), pytest.param(AllReduce(), marks=pytest.mark.slow)], ids=["apart", "in step"]
)
def test_a_signal_stops_all_after_the_same_step_also_when_groups_have_changed(config: Any, tmp_path: Path) -> None:
    launchers = Launchers(signalled, 3, 1, config, str(tmp_path), Faults(timeout=TIMEOUT))
    for group in range(3):
        launchers.wait_for(f"training/{group}")
    launchers.kill(1)
    for group in (0, 2):
        launchers.wait_for(f"regrouped/{group}")
    launchers.kill(2, signal.SIGTERM)
    found = launchers.collect()
    (step,) = {value["step"] for value in found.values()}
    assert {value["code"] for value in found.values()} == {75} and step < 2000
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{step:06}"]


@pytest.mark.slow
@pytest.mark.parametrize("every", [8, 100_000], ids=["at an average", "without one"])
def test_a_group_can_leave_and_the_others_go_on(every: int, tmp_path: Path) -> None:
    faults = Faults(timeout=TIMEOUT, on_term="leave", min_groups=2)
    launchers = Launchers(signalled, 3, 1, LocalSGD(every=every), str(tmp_path), faults, 600)
    for group in range(3):
        launchers.wait_for(f"training/{group}")
    launchers.kill(1, signal.SIGTERM)
    found = launchers.collect()
    assert found[1, 0]["code"] == 75 and found[1, 0]["step"] < 600
    assert one({slot: value for slot, value in found.items() if slot[0] != 1}, 2)[0]["step"] == 600
    assert not list(tmp_path.iterdir())


def two_leave(group: int, worker: int) -> Any:
    """Of the two workers of group 1 only one is told."""
    torch.set_num_threads(1)
    model = small.mlp()
    optimizer = AdamW(model.parameters(), 3e-3)
    faults = Faults(timeout=TIMEOUT, on_term="leave")
    replica = thinwire.attach(model, optimizer, LocalSGD(every=8), faults=faults)
    try:
        for step in replica.steps(500):
            if (group, worker, step) == (1, 1, 5):
                os.kill(os.getpid(), signal.SIGTERM)
            small.step(replica, optimizer, replica.data_rank, step)
            time.sleep(0.01)
    except SystemExit as left:
        return left.code, replica.step
    return small.model_bits(replica.finish())


@pytest.mark.slow
def test_all_workers_of_a_group_leave_after_the_same_step() -> None:
    found = Launchers(two_leave, 3, 2).collect()
    assert found[1, 0] == found[1, 1] and found[1, 0][0] == 75
    assert len({value for (group, _), value in found.items() if group != 1}) == 1


@pytest.mark.slow
def test_groups_that_are_all_told_to_leave_save_and_stop(tmp_path: Path) -> None:
    faults = Faults(timeout=TIMEOUT, on_term="leave")
    launchers = Launchers(signalled, 3, 1, LocalSGD(every=8), str(tmp_path), faults)
    for group in range(3):
        launchers.wait_for(f"training/{group}")
    for group in range(3):
        launchers.kill(group, signal.SIGTERM)
    found = launchers.collect()
    (step,) = {value["step"] for value in found.values()}
    assert [value["code"] for value in found.values()] == [75] * 3
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{step:06}"]


def stops_early(rank: int, config: Any) -> tuple[int, str]:
    """Rank 1 asks for a stop after its step 7; another replica of the same process is not meant."""
    for asks in (True, False):
        model = small.mlp()
        optimizer = small.sgd(model)
        replica = thinwire.attach(model, optimizer, config)
        for step in replica.steps(10_000 if asks else 20):
            small.step(replica, optimizer, rank, step)
            if asks and rank == 1 and step == 7:
                replica.stop("the loss rose")
        found = replica.stopped_by, replica.step, small.model_bits(replica.finish())
        if asks:
            assert found[0] == "the loss rose"
            first = found[1:]
    assert found[:2] == (None, 20)
    return first


@pytest.mark.parametrize(
    "config", [pytest.param(AllReduce(), marks=pytest.mark.slow), LocalSGD(every=50)], ids=["in step", "apart"]
)
def test_early_stopping_ends_all_workers_after_the_same_step(config: Any) -> None:
    (first, model), (second, other) = gang.run(stops_early, 2, config)
    assert 8 <= first == second < 10_000 and model == other


def resumes(rank: int, out: str, until: int) -> tuple[str, list[float]]:
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=4))
    scheduler = CosineAnnealingLR(optimizer, 25)
    rates = []
    for step in replica.steps(until, folder=out, save_every=6, keep=1, scheduler=scheduler):
        rates.append(optimizer.param_groups[0]["lr"])
        small.step(replica, optimizer, rank, step)
    replica.detach()
    return small.bits(*model.parameters()), rates


def test_steps_resume_from_the_newest_save(tmp_path: Path) -> None:
    (whole, rates), _ = gang.run(resumes, 2, str(tmp_path / "whole"), 20)
    gang.run(resumes, 2, str(tmp_path / "cut"), 15)
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["step-000012"]
    (resumed, later), _ = gang.run(resumes, 2, str(tmp_path / "cut"), 20)
    assert resumed == whole and later == rates[12:]


def test_steps_refuse_what_cannot_work() -> None:
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, AllReduce())
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    for fields, said in (
        ({"total": 0}, "`total`=0 of steps\\(\\) must be a whole number"),
        ({"total": 5, "save_every": 2}, "`save_every`=2 of steps\\(\\) needs a `folder`"),
        ({"total": 5, "scheduler": plateau}, "cannot bring ReduceLROnPlateau to a step"),
    ):
        with pytest.raises(ConfigError, match=said):
            replica.steps(**fields)
    with pytest.raises(ConfigError, match="`on_term`='go' must be 'stop' or 'leave'"):
        Faults(on_term="go")
    with pytest.raises(ConfigError, match=r"`heartbeat_timeout`=0\.1 must be a number"):
        Faults(heartbeat_timeout=0.1)


# Groups that are slow; saves.


def slow_group(group: int, worker: int, timeout: int) -> Any:
    """Group 1 stands still for longer than others wait, once; it is alive all the while."""
    torch.set_num_threads(1)
    model = small.mlp()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=4), faults=Faults(timeout=timeout))
    for step in replica.steps(40):
        if group == 1 and step == 9:
            time.sleep(2.5 * timeout)
        if step == 20:
            held(replica)
        small.step(replica, optimizer, group, step)
    return {"bits": small.model_bits(replica.finish()), "events": replica.events}


@pytest.mark.slow
def test_a_group_that_is_too_slow_is_given_up_and_comes_back() -> None:
    found = one(Launchers(slow_group, 3, 1, short()).collect(), 3)
    assert [(e["lost"], e["came"]) for e in found[0]["events"]] == [([1], []), ([], [1])]


def saves_while_one_joins(group: int, worker: int, out: str, by_steps: bool, dies: int) -> Any:
    """A save is begun, nobody waits for it, and a group joins."""
    torch.set_num_threads(1)
    model = small.mlp()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=4), faults=Faults(timeout=TIMEOUT))
    for step in replica.steps(24) if by_steps else range(replica.step, 24):
        if step == dies and group == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step in (10, 22):
            replica.save(f"{out}/{step}", wait=False)
        if step == 11:
            held(replica)
        small.step(replica, optimizer, group, step)
    replica.wait_for_save()
    return {"bits": small.model_bits(replica.finish()), "events": replica.events}


@pytest.mark.slow
@pytest.mark.parametrize("by_steps", [False, True])
def test_a_group_joins_while_a_save_is_written(by_steps: bool, tmp_path: Path) -> None:
    launchers = Launchers(saves_while_one_joins, 3, 1, str(tmp_path), by_steps, 5)
    for group in (0, 2):
        launchers.wait_for(f"held/{group}")
    launchers.args = (*launchers.args[:2], -1)
    launchers.restart(1)
    found = one(launchers.collect(), 3)
    assert [(event["lost"], event["came"]) for event in found[0]["events"]] == [([1], []), ([], [1])]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "22"]


def saves_meanwhile(group: int, worker: int, out: str, wait: bool, dies: int) -> Any:
    """A group dies while the files of a save are being written."""
    torch.set_num_threads(1)
    model = small.mlp()
    optimizer = AdamW(model.parameters(), 3e-3)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=4), faults=Faults(timeout=TIMEOUT))
    said: list[str] = []
    thinwire.checkpoint.saves.log.addFilter(lambda record: bool(said.append(record.getMessage())) or True)
    while replica.step < 24:
        if replica.step == 6 and group == dies:
            thinwire.checkpoint.saves._write = lambda *_: (time.sleep(0.5), os.kill(os.getpid(), signal.SIGKILL))
        if replica.step in (6, 18):
            replica.save(f"{out}/{replica.step}", wait=wait)
        small.step(replica, optimizer, group, replica.step)
    replica.wait_for_save()
    return {"bits": small.model_bits(replica.finish()), "events": replica.events, "said": said}


@pytest.mark.slow
@pytest.mark.parametrize(("wait", "dies"), [(False, 1), (True, 1), (False, 0)])
def test_a_group_that_dies_while_files_are_written_costs_at_most_that_save(
    wait: bool, dies: int, tmp_path: Path
) -> None:
    found = one(Launchers(saves_meanwhile, 3, 1, str(tmp_path), wait, dies).collect(), 2)
    assert [event["lost"] for event in found[0]["events"]] == [[dies]]
    assert sorted(path.name for path in tmp_path.iterdir()) == (["18", "6"] if wait else ["18"])
    lost = [text for text in found[0]["said"] if "a group was lost while it was written" in text]
    assert len(lost) == (not wait) and all("6` was not written" in text for text in lost)
    state = json.loads((tmp_path / "18" / "state.json").read_text())
    assert state["world_size"] == 2


def places(group: int, worker: int) -> Any:
    model = small.mlp()
    replica = thinwire.attach(model, AdamW(model.parameters()), LocalSGD(every=2), faults=Faults(timeout=TIMEOUT))
    place = replica.data_rank, replica.data_world_size
    replica.finish()
    return place


@pytest.mark.slow
def test_data_is_shared_out_by_numbers_that_stay() -> None:
    found = Launchers(places, 2, 2).collect()
    assert found == {(0, 0): (0, 4), (0, 1): (1, 4), (1, 0): (2, 4), (1, 1): (3, 4)}
