"""Who trains together: generations of groups on a real store. Each worker is a thread with a heartbeat of its own.

Nothing is trained here, so that what groups decide can be looked at one by one; `test_faults.py` has whole runs.
"""

import functools
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import gang
import small
import thinwire
from launchers import free_port
from patience import until
from thinwire import AB, Faults, LocalSGD
from thinwire.base.errors import CollectiveError, DisagreementError, GivenUpError, LostError, OtherRankError
from thinwire.checkpoint.state import Undo
from thinwire.comm.connections import Connections
from thinwire.comm.tcp_store import serve
from thinwire.elastic.heartbeat import Beat
from thinwire.elastic.membership import _ATTEMPTS, Membership, Report, _Wait
from thinwire.elastic.recovery import _TRIES, Recovery
from thinwire.elastic.stopping import ElasticStop
from thinwire.elastic.store import Meeting, Slot, Store, StoreLostError

TIMEOUT = 20.0


class Run:
    """A store, and members of a run on it, in this process."""

    def __init__(self, silence: float, groups: int, workers: int, **faults: Any) -> None:
        self.server = serve("127.0.0.1", 0)
        self.groups, self.workers = groups, workers
        self.faults = Faults(timeout=TIMEOUT, heartbeat_timeout=silence, **faults)
        self.members = [self.member(group, worker) for group in range(groups) for worker in range(workers)]
        for outcome in at_once(functools.partial(member.begin, nothing) for member in self.members):
            assert outcome is None, outcome

    def member(self, group: int, worker: int, config: str = "same") -> Membership:
        store = Store("127.0.0.1", self.server.port, timeout=TIMEOUT)
        about = {"workers": str([self.workers] * self.groups), "config": config}
        return Membership(Meeting(store, Slot(group, worker, self.workers), self.groups), self.faults, about)

    def of(self, *groups: int) -> list[Membership]:
        return [member for member in self.members if member.slot.group in groups]


def nothing() -> None:
    """What a group that begins or joins does with the others."""


def nothing_of(**fields: Any) -> None:
    """What a worker says that nobody hears."""


def at_once(works: Any) -> list[Any]:
    """What each returned or raised."""
    works = list(works)
    with ThreadPoolExecutor(len(works)) as pool:
        running = [pool.submit(work) for work in works]
        return [each.exception() or each.result() for each in running]


def report(member: Membership, **fields: Any) -> Report:
    return Report(member.process, member.slot.workers, **fields)


def renewed(members: Sequence[Membership], **fields: Any) -> list[Any]:
    return at_once(functools.partial(member.renew, report(member, **fields)) for member in members)


def seen(members: Sequence[Membership]) -> list[Any]:
    """What they know, which must be the same, and their own places."""
    known = {
        (m.generation, tuple(sorted(m.groups)), m.layout, tuple(sorted(m.joined)), m.caller in (-1, *m.groups))
        for m in members
    }
    assert len(known) == 1, known
    return [*known.pop(), [m.topology.rank for m in members], [m.data_place for m in members]]


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """In a process of its own: members listen until it ends."""
    return gang.run(function, 1, gang.patient(2.0), *args, fresh=True)[0]


def comings_and_goings(rank: int, silence: float) -> dict[str, Any]:
    """Group 1 of three falls silent, then comes back."""
    run = Run(silence, 3, 2)
    found: dict[str, Any] = {"begun": seen(run.members)}
    for member in run.of(1):
        member.heartbeat._stop.set()  # no more beats, and no last words
    left = run.of(0, 2)
    reports = renewed(left, votes=3, call="step", step=7)
    found["lost"] = seen(left)
    found["reports"] = [{slot: (r.votes, r.call, r.step) for slot, r in each.items()} for each in reports]
    found["words"] = [sorted(member.last_words) == sorted(m.process for m in run.of(1)) for member in left]
    back = [run.member(1, worker) for worker in range(2)]
    with ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(member.begin, nothing) for member in back]
        until(lambda: all(member.wanted > member.generation for member in left), "the others to notice")
        busy = renewed(left)  # one that has not ended its step cannot let anybody in
        found["busy"] = (seen(left), [sorted(each) for each in busy])
        until(lambda: all(member.wanted > member.generation for member in left), "the others to notice")
        at_once(functools.partial(m.renew, report(m, admits=True)) for m in left)
        for each in joining:
            each.result(60)
    found["back"] = seen([*left, *back])
    found["gives"] = [member.donor_and_new for member in (*left, *back)]
    found["joins"] = [member.joins for member in (*left, *back)]
    left[0].testify(9)
    found["seen"] = [back[0].was_seen(9), back[0].was_seen(8)]
    return found


def test_groups_go_and_come() -> None:
    found = alone(comings_and_goings)
    six = [(number, 6) for number in range(6)]
    assert found["begun"] == [0, (0, 1, 2), ((0, 1), (2, 3), (4, 5)), (), True, [*range(6)], six]
    fewer = [(0, 2), ((0, 1), (2, 3)), (), True, [*range(4)], [six[i] for i in (0, 1, 4, 5)]]
    assert found["lost"] == [1, *fewer]
    assert found["reports"] == [{(g, w): (3, "step", 7) for g in (0, 2) for w in range(2)}] * 4
    assert any(found["words"])  # of whoever wrote down the list
    assert found["busy"][0] == [2, *fewer]
    # Those that were there first, then those that came; each with its own rank and its own part of the data.
    assert found["back"][:4] == [3, (0, 1, 2), ((0, 1), (2, 3), (4, 5)), (1,)]
    assert found["back"][5:] == [[0, 1, 4, 5, 2, 3], [six[i] for i in (0, 1, 4, 5, 2, 3)]]
    assert found["gives"] == [(0, 2, 3)] * 6
    assert found["joins"] == [False] * 4 + [True] * 2
    assert found["seen"] == [True, False]


def refusals(rank: int, silence: float) -> dict[str, Any]:
    run = Run(silence, 3, 1, min_groups=2)
    first, second, third = run.members
    found: dict[str, Any] = {"twin": str(at_once([functools.partial(run.member(0, 0).begin, nothing)])[0])}
    second.heartbeat.close("finished")
    run.members.append(run.member(1, 0, config="another"))
    found["another"] = str(at_once([functools.partial(run.members[-1].begin, nothing)])[0])
    assert not any(isinstance(each, Exception) for each in renewed([first, third]))
    third.heartbeat.close("finished")
    (lost,) = renewed([first])
    found["few"] = lost
    run.members += [run.member(2, 0) for _ in range(2)]
    found["twins"] = sorted(map(str, at_once(member._claim_slot for member in run.members[-2:])))
    return found


def test_whoever_does_not_belong_is_refused_and_too_few_stop() -> None:
    found = alone(refusals)
    assert "worker 0 of group 0 is running already" in found["twin"]
    assert "group 1 cannot join the run on this store: its config is another, the run has same" in found["another"]
    assert isinstance(found["few"], LostError) and "1 of 2 groups are left" in str(found["few"])
    assert found["twins"][0] == "None" and "worker 0 of group 2 is running already" in found["twins"][1]


def decisions(rank: int, silence: float) -> dict[str, Any]:
    """What one member makes of the reports of others."""
    run = Run(silence, 3, 1)
    here = run.members[0]
    own = {member.slot.group: member for member in run.members}
    groups = here.groups

    def reports(**by_group: Report) -> dict[tuple[int, int], Report]:
        return {(int(name[1:]), 0): value for name, value in by_group.items()}

    waits = {g: report(own[g], votes=5, call="step", waited=0.95 * TIMEOUT) for g in own}
    trains = {g: report(own[g], votes=5) for g in own}
    late = reports(g0=waits[0], g1=trains[1], g2=waits[2])
    found: dict[str, Any] = {
        "slow": sorted(here._without_slow(groups, late)),
        "most are slow": sorted(here._without_slow(groups, reports(g0=waits[0], g1=trains[1], g2=trains[2]))),
        "nobody waited": sorted(here._without_slow(groups, reports(g0=trains[0], g1=trains[1], g2=trains[2]))),
        "behind by a vote": sorted(
            here._without_slow(groups, reports(g0=waits[0], g1=trains[1]._replace(votes=4), g2=waits[2]))
        ),
        "impatient": sorted(
            here._without_slow(groups, reports(g0=waits[0]._replace(waited=0.5 * TIMEOUT), g1=trains[1], g2=trains[2]))
        ),
    }
    two = {g: groups[g] for g in (0, 2)}
    wants = Report("new", 1, joins=True)
    admits = {g: trains[g]._replace(admits=True) for g in own}
    found["wanting"] = [
        here._wanting(two, reports(g0=admits[0], g1=wants, g2=admits[2])),
        here._wanting(two, reports(g0=admits[0], g1=wants, g2=trains[2])),
        here._wanting(two, reports(g0=admits[0], g1=wants._replace(workers=2), g2=admits[2])),
        here._wanting(two, reports(g0=admits[0], g1=trains[1], g2=admits[2])),
        here._wanting(two, reports(g0=admits[0], g2=admits[2])),
    ]
    found["reported"] = [
        here._has_reported(1, groups[1], late),
        here._has_reported(1, ["another"], late),
        here._has_reported(1, groups[1], reports(g1=trains[1]._replace(joins=True))),
        here._has_reported(1, groups[1], {}),
    ]
    found["gone"] = [here._is_gone(1, groups[1], {}), here._is_gone(1, groups[1], reports(g1=wants))]
    own[1].heartbeat.close("it failed: disk full")
    until(lambda: here.heartbeat.gone(own[1].process), "its last words")
    found["gone"].append(here._is_gone(1, groups[1], {}))
    return found


def test_what_is_made_of_reports() -> None:
    found = alone(decisions)
    assert found["slow"] == [0, 2]
    assert found["most are slow"] == found["nobody waited"] == found["impatient"] == [0, 1, 2]
    assert found["behind by a vote"] == [0, 1, 2]
    assert found["wanting"] == [{1: ["new"]}, {}, {}, {}, {}]
    assert found["reported"] == [True, False, False, False]
    assert found["gone"] == [False, True, True]


def waits_and_stops(rank: int, silence: float) -> dict[str, Any]:
    run = Run(silence, 3, 1, skip_after=0.5, on_term="leave", min_groups=2)
    first, second, third = run.members
    found: dict[str, Any] = {"before": second.holds_up(8)}
    first.arrive(8)
    until(lambda: second._awaited is not None, "word of who waits")
    found["early"] = second.holds_up(8) and time.monotonic() - second._awaited[1] < 0.5  # type: ignore[index]
    found["late"] = until(lambda: second.holds_up(8), "its patience to end")
    found["another step"] = second.holds_up(9)

    stops = [ElasticStop(member) for member in run.members]
    stops[0]._signal_at = time.monotonic() - 60
    found["leaves"] = [stops[0].leaves(after_average=True), stops[1].leaves(after_average=True)]
    third.heartbeat.say(leaving=True)
    until(lambda: (beat := first.heartbeat.of(third.process)) is not None and beat.leaving, "that it leaves")
    found["too few would stay"] = stops[0].leaves(after_average=True)
    third.heartbeat.say(leaving=False)
    until(lambda: (beat := first.heartbeat.of(third.process)) is not None and not beat.leaving, "that it stays")
    stops[0]._signal_at = time.monotonic() - 2.5
    found["soon"] = [stops[0].leaves(after_average=after) for after in (True, False)]

    def loop(stop: ElasticStop, step: int) -> int:
        while stop.now(step) is not True:
            step += 1
            time.sleep(0.01)
        return step

    stops[1].asked = "early stopping"
    found["ended"] = at_once(functools.partial(loop, stop, 10 * i) for i, stop in enumerate(stops))
    found["last"] = [stop._last for stop in stops]
    found["why"] = [stop.why for stop in stops]
    return found


def test_groups_that_wait_that_leave_and_that_stop() -> None:
    found = alone(waits_and_stops)
    assert not found["before"] and not found["early"] and found["late"] and not found["another step"]
    assert found["leaves"] == [True, False] and not found["too few would stay"]
    assert found["soon"] == [True, False]  # without an average it waits for a sixth of the timeout
    assert len(set(found["last"])) == 1 and found["ended"] == found["last"]
    assert found["last"][0] >= 20 and set(found["why"]) == {"early stopping"}


def forgotten(run: Run) -> None:
    """The store comes back empty."""
    store, base = run.members[0].store, run.members[0].run
    for number in range(4):
        for group in range(run.groups):
            store.delete(f"{base}/{number}/report/{group}/0")
        for name in ("groups", "wants", "called"):
            store.delete(f"{base}/{number}/{name}")
    for key in ("run", f"{base}/about", f"{base}/now", *(f"slot/{group}/0" for group in range(run.groups))):
        store.delete(key)


def requests_that_are_forgotten(rank: int, silence: float) -> dict[str, Any]:
    """Group 1 has asked to be let in when the store comes back empty; group 2 asks just then."""
    run = Run(silence, 3, 1)
    first, _, third = run.members
    run.of(1)[0].heartbeat.close("it failed")
    found: dict[str, Any] = {"lost": [isinstance(each, Exception) for each in renewed([first, third])]}
    back = run.member(1, 0)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(back.begin, nothing)
        request = f"{first.run}/2/report/1/0"
        until(lambda: first.wanted == 2, "the others to notice")
        forgotten(run)
        until(lambda: first.store.get(request) is not None, "it to ask again")
        renewed([first, third], admits=True)
        joining.result(60)
    found["back"] = seen([first, third, back])[:2]
    third.heartbeat.say(left="for a moment")
    until(lambda: first.heartbeat.gone(third.process) and back.heartbeat.gone(third.process), "word of it")
    renewed([first, back])
    third.heartbeat.say(left="")
    with ThreadPoolExecutor(1) as pool:
        forgotten(run)
        joining = pool.submit(third.join_and, nothing)
        until(lambda: joining.done() or first.wanted == back.wanted == 4, "the others to notice")
        if not joining.done():
            renewed([first, back], admits=True)
        found["again"] = joining.exception(60)
    return found


@pytest.mark.slow
def test_groups_are_let_in_also_when_the_store_has_forgotten_all() -> None:
    found = alone(requests_that_are_forgotten)
    assert found["lost"] == [False, False]
    assert found["back"] == [2, (0, 1, 2)]
    assert found["again"] is None


def test_nobody_waits_for_ever_for_a_store_that_stays_away() -> None:
    beats = SimpleNamespace(
        gone=lambda _: None, is_beating=lambda _: False, say=nothing_of, on_look=[], is_called=False, any_gone=False
    )
    fake = SimpleNamespace(store=Store("127.0.0.1", free_port(), timeout=1.0, patience=0.1), heartbeat=beats)
    stop = ElasticStop(fake)  # type: ignore[arg-type]
    stop._noted = 3
    for wait in (lambda: Membership._is_alive(fake, ["other"]), lambda: stop.now(3)):  # type: ignore[arg-type]
        with pytest.raises(StoreLostError, match=r"has not answered for 0\.1 s"):
            wait()


def test_a_joiner_waits_as_long_as_the_run_makes_progress() -> None:
    beats = {"p": Beat(votes=1, at=5)}
    fake = SimpleNamespace(
        faults=SimpleNamespace(start=0.0),
        slot=Slot(1, 0, 1),
        heartbeat=SimpleNamespace(of=beats.get),
        mates_reported=lambda number: True,
    )
    wait = _Wait(fake)  # type: ignore[arg-type]
    for beat in (beats["p"], Beat(votes=1, at=6), Beat(votes=2, at=6), Beat(votes=2, at=7)):
        beats["p"] = beat
        wait.check(1, ["p", "unheard of"], [])
    with pytest.raises(LostError, match="group 1 has asked to be let in, and for 0 s the run has not taken a step"):
        wait.check(1, ["p", "unheard of"], [])
    beats["mate"] = Beat(left="it failed: disk full")
    with pytest.raises(LostError, match=r"a worker of group 1 is gone \(it failed: disk full\)"):
        wait.check(1, ["p"], ["mate"])


# What cannot be helped by trying again.


def recovery(group: int, caller: int = 1) -> Any:
    groups = {0: ["p"], 1: ["q"]}
    membership = SimpleNamespace(caller=caller, groups=groups, slot=Slot(group, 0, 1))
    fake = SimpleNamespace(membership=membership, _in_vain=0)
    fake._refuse = functools.partial(Recovery._refuse, fake)
    return fake


def test_groups_in_different_calls_are_refused_by_name() -> None:
    mine, other = Report("p", 1, call="save", step=4, votes=2), Report("q", 1, call="step", step=5, votes=2)
    check = functools.partial(Recovery._refuse_what_cannot_help, recovery(0), None)
    with pytest.raises(DisagreementError, match="group 0 is in save after step 4; group 1 is in step after step 5"):
        check({(0, 0): mine, (1, 0): other}, {})
    for harmless in (
        other._replace(call="save", step=4),
        other._replace(votes=1),  # it has yet to see what the other has seen
        other._replace(call=""),
        other._replace(joins=True),
    ):
        check({(0, 0): mine, (1, 0): harmless}, {})


@pytest.mark.parametrize(("group", "error"), [(1, ValueError), (0, OtherRankError)])
def test_a_collective_that_fails_again_and_again_is_an_error_where_nobody_is_lost(group: int, error: type) -> None:
    fake, lost = recovery(group), CollectiveError("out of memory", ValueError("the original"))
    reports = {(0, 0): Report("p", 1, why="Connection closed"), (1, 0): Report("q", 1, why="out of memory")}
    check = functools.partial(Recovery._refuse_what_cannot_help, fake, lost, reports)
    for _ in range(2 * _TRIES):
        check({0: ["p"], 1: ["q"], 2: ["r"]})  # a group was lost: that is why
    for _ in range(_TRIES - 1):
        check(fake.membership.groups)
    with pytest.raises(error, match="the original" if group else rf"failed {_TRIES} times in a row .* group 1: out of"):
        check(fake.membership.groups)


def test_what_groups_did_together_is_taken_back() -> None:
    model = small.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=2, warmup=0))
    small.step(replica, optimizer, 0, 0)
    model.stem.weight.requires_grad_(False)
    before = small.model_bits(model), small.optimizer_bits(optimizer)
    undo = Undo(replica._method)
    model.stem.weight.requires_grad_(True)
    for number in (1, 2):
        small.step(replica, optimizer, 0, number)
    assert (small.model_bits(model), small.optimizer_bits(optimizer)) != before
    undo.restore()
    assert (small.model_bits(model), small.optimizer_bits(optimizer)) == before
    assert not model.stem.weight.requires_grad
    optimizer.state.clear()
    empty = Undo(replica._method)
    model.stem.weight.requires_grad_(True)
    small.step(replica, optimizer, 0, 3)
    empty.restore()
    assert not any(optimizer.state.values()), "a parameter without state has none again"
    replica.detach()


def test_settings_that_change_by_group_are_taken_back() -> None:
    """As Schedule-Free's, which say what weights are there, and steps that packages count by group."""
    model = small.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=2, warmup=0))
    (group,) = optimizer.param_groups
    group |= {"step": 3, "train_mode": True, "function": len}
    rate, undo = group["lr"], Undo(replica._method)
    group |= {"step": 0, "train_mode": False}
    rate.fill_(0.5)
    undo.restore()
    assert (group["step"], group["train_mode"], group["betas"]) == (3, True, (0.9, 0.999))
    assert group["lr"] is rate and float(rate) == pytest.approx(0.01) and group["function"] is len
    replica.detach()


def test_a_group_that_joins_takes_all_that_a_run_consists_of() -> None:
    def attached(rate: float) -> Any:
        model = small.net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        config = AB(total_steps=20, warmup=1, every=2, factor_at=3, redecompose=9, cutoff=0.6)
        return thinwire.attach(model, optimizer, config), optimizer

    giver, optimizer = attached(0.01)
    averages = [thinwire.EMA(giver, decay) for decay in (0.5, 0.9)]
    for number in range(6):
        small.step(giver, optimizer, 0, number)
        [average.update_parameters() for average in averages]
    giver._baseline.begin({"allreduce_fp32": 7, "ideal_fp32": 5}, 6)
    optimizer.param_groups[0] |= {"step": 6, "weight_decay": 0.5}  # the optimizer counts, a script sets
    assert giver.ranks(), "nothing was factored"
    taker, other = attached(0.5)
    early = thinwire.EMA(taker, 0.5)
    assert taker._state.take(giver._state.packed(votes=4))["votes"] == 4
    late = thinwire.EMA(taker, 0.9)  # as in a script that has just begun
    for mine, theirs in zip((early, late), averages, strict=True):
        assert small.same(dict(mine.state_dict()), dict(theirs.state_dict()))
    assert small.model_bits(taker.module) == small.model_bits(giver.module)
    assert (taker.step, taker.phase, taker.ranks()) == (6, giver.phase, giver.ranks())
    assert (taker.decompositions, taker.found_ranks) == (giver.decompositions, giver.found_ranks)
    assert taker.baseline() == {"allreduce_fp32": 7, "ideal_fp32": 5}
    (group,) = other.param_groups
    assert (group["step"], group["lr"], group["weight_decay"]) == (6, 0.5, 0.01)
    mine, theirs = (o.state_dict()["state"] for o in (other, optimizer))
    assert mine.keys() == theirs.keys() and all(small.same(mine[i], theirs[i]) for i in mine)
    giver.detach()
    taker.detach()


@pytest.mark.parametrize(
    ("error", "last", "restored"),
    [
        (OtherRankError("it failed again and again"), False, True),
        (GivenUpError("others went on"), False, False),  # it takes over what the others have
        (GivenUpError("others went on"), True, True),
    ],
)
def test_what_cannot_be_done_with_any_groups_is_taken_back(error: Exception, last: bool, restored: bool) -> None:
    model = small.mlp()
    replica = thinwire.attach(model, small.sgd(model), LocalSGD(every=2, warmup=0))
    before = small.model_bits(model)

    def half() -> None:
        with torch.no_grad():
            next(model.parameters()).zero_()
        raise CollectiveError("connection closed", RuntimeError())

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    fake = SimpleNamespace(method=replica._method, _regroup=refuse)
    with pytest.raises(type(error)):
        Recovery._tried_together(fake, half, changes=True, commits=True, last=last)  # type: ignore[arg-type]
    assert (small.model_bits(model) == before) == restored
    replica.detach()


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (LostError("too few are left"), LostError, "too few are left"),
        (OtherRankError("failed 3 times"), LostError, "failed 3 times"),
        (RuntimeError("out of memory"), LostError, "RuntimeError: out of memory"),
        (DisagreementError("one saves"), DisagreementError, "one saves"),
    ],
)
def test_finish_writes_the_model_whatever_keeps_groups_from_ending_together(
    error: Exception, raised: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = small.mlp()
    replica = thinwire.attach(model, small.sgd(model), LocalSGD(every=2, warmup=0))

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    replica._recovery = SimpleNamespace(together=refuse, close=nothing)  # type: ignore[assignment]
    with pytest.raises(raised, match=rf"finish\(\) could not complete: {said}. This worker's model") as caught:
        replica.finish()
    kept = load_file(str(caught.value).split(" is in ")[1])
    assert all(torch.equal(kept[name], t) for name, t in model.state_dict().items())
    replica.detach()


# Single parts, without a store or threads.


class Keys(dict[str, str]):
    """A store that is there."""

    def set(self, key: str, value: str) -> None:
        self[key] = value


@pytest.mark.parametrize(("skip_after", "worker", "says"), [(None, 0, None), (2.0, 1, None), (2.0, 0, "7")])
def test_a_group_says_where_it_waits_if_others_may_skip_steps(
    skip_after: float | None, worker: int, says: str | None
) -> None:
    store = Keys()
    fake = SimpleNamespace(
        faults=Faults(skip_after=skip_after), slot=Slot(0, worker, 2), store=store, run="r", generation=3
    )
    Membership.arrive(fake, 7)  # type: ignore[arg-type]
    assert store.get("r/3/at") == says


@pytest.mark.parametrize(("called", "gone"), [(True, False), (False, True)])
def test_nobody_waits_for_an_answer_about_the_end_when_groups_change(called: bool, gone: bool) -> None:
    """Also when only one of both is known: that others have left, or that somebody is silent."""
    heartbeat = SimpleNamespace(on_look=[], is_called=called, any_gone=gone, say=lambda **_: None)
    stop = ElasticStop(SimpleNamespace(heartbeat=heartbeat))  # type: ignore[arg-type]
    stop._noted = 5
    assert stop.now(5) is None


def test_an_answer_about_the_end_is_the_same_step_for_all() -> None:
    heartbeat = SimpleNamespace(on_look=[], is_called=False, any_gone=False, say=lambda **_: None)
    stop = ElasticStop(SimpleNamespace(heartbeat=heartbeat))  # type: ignore[arg-type]
    stop._noted, stop._last = 5, 6
    assert (stop.now(5), stop.now(6)) == (False, True)


@pytest.mark.parametrize(("tries", "fails"), [(1, 0), (3, 2), (_ATTEMPTS, _ATTEMPTS)])
def test_a_group_asks_to_be_let_in_again_but_not_for_ever(tries: int, fails: int) -> None:
    asked: list[int] = []
    fake = SimpleNamespace(slot=Slot(1, 0, 1), leave_world=lambda: None)
    fake._join = lambda: asked.append(len(asked)) is None

    def work() -> None:
        if len(asked) <= fails:
            raise CollectiveError("Connection closed by peer", RuntimeError())

    if fails < _ATTEMPTS:
        assert Membership._joined_and(fake, work)  # type: ignore[arg-type]
    else:
        with pytest.raises(LostError, match=f"was let in {_ATTEMPTS} times and lost the others each time"):
            Membership._joined_and(fake, work)  # type: ignore[arg-type]
    assert len(asked) == tries


def test_a_group_that_comes_to_a_run_that_is_over_does_nothing() -> None:
    fake = SimpleNamespace(slot=Slot(1, 0, 1), _join=lambda: False)
    assert not Membership._joined_and(fake, lambda: pytest.fail("it has no part in it"))  # type: ignore[arg-type]
    fake._joined_and = lambda work: False
    with pytest.raises(LostError, match="the run has ended without group 1, which was given up before"):
        Membership.join_and(fake, lambda: None)  # type: ignore[arg-type]


def test_only_what_was_opened_is_hung_up() -> None:
    connections = Connections()
    with connections.noted():
        ours, theirs = socket.socketpair()
        gone, other = socket.socketpair()
    number = gone.fileno()
    gone.close()
    later, far = socket.socketpair()  # takes the number of the one that was closed
    assert later.fileno() == number
    connections.hang_up()
    theirs.settimeout(5)
    far.settimeout(5)
    assert theirs.recv(1) == b"", "whoever waits there learns of it"
    later.send(b"x")
    assert far.recv(1) == b"x", "it is another's by now"
    for each in (ours, theirs, other, later, far):
        each.close()
