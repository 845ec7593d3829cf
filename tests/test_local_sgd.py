"""LocalSGD and DiLoCo, against PyTorch's own post-local SGD and against references that fit a page."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import gang
import small
import thinwire
from selection import first_of
from thinwire import ConfigError, DiLoCo, DivergedError, LocalSGD, Nesterov
from thinwire.comm.topology import arrange
from thinwire.exchange.averaged import SIZE
from thinwire.exchange.merging import OuterStatistics
from thinwire.exchange.parameters import Rounds, fragments_of
from thinwire.methods import PaperAB
from thinwire.plan import ranks as predicted
from thinwire.plan.compute import given
from thinwire.plan.forecast import Forecast, Layout, Links
from thinwire.plan.simulate import Workload, simulate
from under_way import leaves, waits

RAGGED = ((0, 1), (2,))
STREAM = {"every": 6, "fragments": 3, "overlap": 2, "outer": Nesterov(0.7, 0.6)}


def train(rank: int, config: Any, steps: int, model: nn.Module, momentum: float = 0.0) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=momentum)
    replica = thinwire.attach(model, optimizer, config)
    for number in range(steps):
        small.step(replica, optimizer, rank, number)
    return replica


def gap(left: nn.Module | list[Tensor], right: nn.Module | list[Tensor]) -> float:
    pairs = [list(side.parameters()) if isinstance(side, nn.Module) else side for side in (left, right)]
    return max(float((a - b).abs().max()) for a, b in zip(*pairs, strict=True))


# Against one another, PyTorch, and references.


def compare(rank: int, group_size: int) -> dict[str, Any]:
    """Models that must be alike, and the parameters of those that a reference is held against."""
    every_step = train(rank, LocalSGD(every=1, group_size=group_size), 6, small.mlp())
    plain = train(rank, thinwire.AllReduce(), 6, small.mlp())
    local = train(rank, LocalSGD(every=4, group_size=group_size), 10, small.net(), 0.9)
    outer = train(rank, DiLoCo(every=4, outer=Nesterov(1.0, 0.0), group_size=group_size), 10, small.net(), 0.9)
    same = [gap(every_step, plain), gap(local, outer), gap(local.finish(), outer.finish())]
    found = {"same": same, "phases": [local.phase, plain.phase]}
    for name, settings in (("whole", {"every": 3}), ("stream", STREAM)):
        replica = train(rank, DiLoCo(group_size=group_size, **settings), 17, small.mlp(), 0.5)
        found[name] = [p.detach().clone() for p in replica.parameters()]
        with replica.merged():
            lent = [p.detach().clone() for p in replica.parameters()]
        assert gap(found[name], replica) == 0
        found[f"{name} merged"] = [p.detach() for p in replica.finish().parameters()]
        assert gap(found[f"{name} merged"], lent) == 0
    coded = train(rank, DiLoCo(every=3, wire="int8", group_size=group_size), 17, small.mlp(), 0.5)
    found["coded"] = gap(coded, found["whole"])
    return found


def reference(config: DiLoCo, groups: tuple[tuple[int, ...], ...], steps: int) -> list[list[Tensor]]:
    """DiLoCo by all groups in one process: each group's parameters, and what a merge makes of them."""
    models = [small.mlp() for _ in groups]
    inner = [torch.optim.SGD(model.parameters(), 0.05, momentum=0.5) for model in models]
    weights = [len(group) / sum(map(len, groups)) for group in groups]
    outer = small.mlp()
    parts = list(zip(*(fragments_of(model, config.fragments) for model in (outer, *models)), strict=True))
    momentum = {"momentum": config.outer.momentum, "nesterov": True} if config.outer.momentum else {}
    outers = [torch.optim.SGD(part[0], config.outer.lr, **momentum) for part in parts]
    under_way = set()

    def send(i: int) -> None:
        under_way.add(i)
        for p, *own in zip(*parts[i], strict=True):
            p.grad = sum(w * (p - q) for w, q in zip(weights, own, strict=True)).detach()

    def receive(i: int, mix: float) -> None:
        under_way.discard(i)
        outers[i].step()
        for p, *own in zip(*parts[i], strict=True):
            for q in own:
                q.data = mix * q.data + (1 - mix) * p.data

    for step in range(1, steps + 1):
        for group, model, optimizer in zip(groups, models, inner, strict=True):
            optimizer.zero_grad()
            for rank in group:
                x, y = small.batch(rank, step - 1)
                (F.cross_entropy(model(x), y) / len(group)).backward()
            optimizer.step()
        for i in range(len(parts)):
            into = step - config.every * (i + 1) // config.fragments
            if config.overlap and into >= config.overlap and (into - config.overlap) % config.every == 0:
                receive(i, config.mix)
            if into >= 0 and into % config.every == 0:
                send(i)
                if config.overlap == 0:
                    receive(i, 0.0)
    own = [[p.detach().clone() for p in model.parameters()] for model in models]
    for i in list(under_way):
        receive(i, config.mix)
    copies = zip(*(model.parameters() for model in models), strict=True)
    return [*own, [sum(w * p.detach() for w, p in zip(weights, each, strict=True)) for each in copies]]


@pytest.mark.parametrize(("workers", "groups"), first_of([(2, ((0,), (1,))), (3, RAGGED)]))
def test_they_are_what_they_should_be(workers: int, groups: tuple[tuple[int, ...], ...]) -> None:
    found = gang.run(compare, workers, len(groups[0]))
    for name, settings in (("whole", {"every": 3}), ("stream", STREAM)):
        expected = reference(DiLoCo(**settings), groups, 17)
        for group, own in zip(groups, expected, strict=False):
            for rank in group:
                assert gap(found[rank][name], own) < 2e-6, (name, rank)
        assert all(gap(mine[f"{name} merged"], found[0][f"{name} merged"]) == 0 for mine in found)
        assert gap(found[0][f"{name} merged"], expected[-1]) < 2e-6
        assert gap(found[0][name], found[-1][name]) > 1e-3
    for mine in found:
        assert max(mine["same"]) < 1e-6
        assert 0 < mine["coded"] < 3e-3  # of weights that moved by more than 0.1
        assert mine["phases"] == ["finished", "train"]


WARMUP, EVERY = 3, 4


def post_local_sgd(rank: int) -> list[float]:
    """Two groups of two; the gap to PyTorch's after each step."""
    theirs, ours = small.mlp(), small.mlp()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = DistributedDataParallel(theirs)
    ddp.register_comm_hook(post_local.PostLocalSGDState(None, groups[rank // 2], WARMUP), post_local.post_localSGD_hook)
    # It averages for the first time right after `warmup_steps`; ours only when groups have been apart for a while.
    averager = PeriodicModelAverager(period=EVERY, warmup_steps=WARMUP + EVERY - 1)
    their_optimizer: Any = PostLocalSGDOptimizer(small.sgd(theirs), averager)
    optimizer = small.sgd(ours)
    replica = thinwire.attach(ours, optimizer, LocalSGD(every=EVERY, warmup=WARMUP, group_size=2))
    gaps = []
    for number in range(WARMUP + 3 * EVERY + 1):
        small.step(ddp, their_optimizer, rank, number)
        small.step(replica, optimizer, rank, number)
        gaps.append(gap(theirs, ours))
    return gaps


def test_with_momentum_kept_it_is_pytorchs_post_local_sgd() -> None:
    for gaps in gang.run(post_local_sgd, 4):
        assert max(gaps) < 1e-6


# All workers hold the same bits after an average, and the ledger counts what an average sends.


def trace(rank: int, config: Any, steps: int) -> dict[str, Any]:
    model = small.net(seed=rank)
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, config)
    seen = []
    for _ in small.walk(replica, optimizer, rank, steps):
        seen.append((small.model_bits(model), small.optimizer_bits(optimizer), replica.traffic.slow_bytes_for("merge")))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {"seen": seen, "size": size, "fast": replica.traffic.by_purpose["merge"]["fast_bytes"]}


def scales(rank: int, config: Any) -> list[dict[str, Any]]:
    """A GradScaler that backs off in one group alone, after each step."""
    model = small.mlp()
    optimizer = small.sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    replica = thinwire.attach(model, optimizer, config, scaler=scaler)
    seen = []
    for number in range(5):
        x, y = small.batch(rank, number)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(replica(x), y)).backward()
        if rank == 2 and number == 1:
            model[1].weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), small.bits(*model.parameters())))
    return seen


def average_equals(rank: int, config: Any) -> tuple[bool, bool]:
    """Whether a bf16 model is itself after averages of what did not change, and was counted as the fp32 it went in."""
    model = small.mlp().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    replica, before = thinwire.attach(model, optimizer, config), small.clone(model)
    for number in range(2):
        x, y = small.batch(rank, number)
        F.cross_entropy(replica(x.bfloat16()), y).backward()
        optimizer.step()
    ring = round(2 * 2 / 3 * 4 * sum(p.numel() for p in model.parameters()))
    return small.same(before, small.clone(model)), replica.traffic.slow_bytes_for("merge") == 2 * ring


def traces(rank: int) -> list[Any]:
    apart = {"every": 3, "warmup": 2}
    return [
        trace(rank, LocalSGD(**apart, moments="average"), 9),
        trace(rank, LocalSGD(**apart, moments="reset", wire="bf16", group_size=2), 9),
        trace(rank, LocalSGD(**apart), 9),
        trace(rank, DiLoCo(**apart), 9),
        trace(rank, DiLoCo(**apart, fragments=2, wire="bf16", group_size=2), 9),
        scales(rank, LocalSGD(every=3, group_size=2)),
        scales(rank, DiLoCo(every=3, group_size=2)),
        average_equals(rank, LocalSGD(every=1)),
    ]


def test_workers_agree_after_an_average_and_its_bytes_are_a_rings() -> None:
    everyone = gang.run(traces, 3)
    for i, (agrees_on_moments, count, width) in enumerate([(1, 3, 4), (1, 2, 2), (0, 3, 4), (0, 3, 4), (0, 2, 2)]):
        for step, seen in enumerate(zip(*(mine[i]["seen"] for mine in everyone), strict=True), start=1):
            alike = len({model for model, _, _ in seen}) == 1
            averaged = step > 2 and (step - 2) % 3 == 0
            assert alike == (step <= 2 or (averaged and i < 4)), (i, step)  # parts of a stream are never all alike
            if averaged:
                assert (len({moments for _, moments, _ in seen}) == 1) == agrees_on_moments
        mine = everyone[0][i]
        sent = [now - before for before, now in itertools.pairwise([0, *(merge for _, _, merge in mine["seen"])])]
        ideal = round(2 * (count - 1) / count * mine["size"] * width / 4)
        if i < 4:
            assert sent == [0, 0, 0, 0, ideal, 0, 0, ideal, 0]
        else:  # one part a step into a round, the other at its end
            assert sent[:2] == [0, 0] and sum(sent[2:5]) == ideal and all(0 < n < ideal for n in (sent[2], sent[4]))
        assert mine["fast"] == (0 if count == 3 else 2 * ideal + (0 if i < 4 else sent[8]))
    for i in (5, 6):
        first, _, other = (mine[i] for mine in everyone)
        assert [scale for scale, _ in first] == [1024, 1024, 512, 512, 512]
        assert [scale for scale, _ in other] == [1024, 512, 512, 512, 512]
        assert first[2] == other[2] and first[3] != other[3]
    assert all(mine[7] == (True, True) for mine in everyone)


# Alone.


def test_alone_local_sgd_is_the_bare_optimizer_bit_for_bit() -> None:
    bare, model = small.net(), small.net()
    bare_optimizer, optimizer = small.sgd(bare), small.sgd(model)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=2, warmup=3, moments="reset", wire="bf16"))
    for number in range(9):
        small.step(bare, bare_optimizer, 0, number)
        small.step(replica, optimizer, 0, number)
        assert small.model_bits(bare) == small.model_bits(model)
    assert replica.phase == "local" and replica.in_sync
    assert small.model_bits(replica.finish()) == small.model_bits(bare)
    assert replica.traffic.slow_bytes == replica.traffic.fast_bytes == 0


def one_group(rank: int) -> tuple[str, str, float]:
    """All workers in one group: plain data-parallel training, whatever the phase is called."""
    plain = train(rank, thinwire.AllReduce(), 7, small.net(), 0.9)
    local = train(rank, LocalSGD(every=2, warmup=2, group_size="world"), 7, small.net(), 0.9)
    outer = train(rank, DiLoCo(every=3, group_size="world"), 7, small.net(), 0.9)
    assert "merge" not in {**local.traffic.by_purpose, **outer.traffic.by_purpose}
    return small.model_bits(plain.module), small.model_bits(local.module), gap(plain, outer)


def test_one_group_is_data_parallel_training() -> None:
    for plain, local, outer in gang.run(one_group, 3):
        assert plain == local
        assert outer > 1e-3, "an outer step of momentum is more than none"


# Streaming.


class Blocks(nn.Module):
    """As a transformer is built: a table, equal blocks in a list, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(6))
        self.head = nn.Linear(8, 10)


def test_fragments_are_whole_layers_from_the_whole_depth() -> None:
    model = Blocks()
    names = {id(p): name for name, p in model.named_parameters()}
    parts = fragments_of(model, 3)
    assert sorted(names[id(p)] for part in parts for p in part) == sorted(names.values())
    homes = [{names[id(p)].split(".")[1] for p in part if names[id(p)].startswith("h.")} for part in parts]
    assert homes == [{"0", "3"}, {"1", "4"}, {"2", "5"}]
    sizes = [sum(p.numel() for p in part) for part in parts]
    assert max(sizes) - min(sizes) <= 90
    model.table.weight.requires_grad_(False)
    assert id(model.table.weight) not in {id(p) for part in fragments_of(model, 2) for p in part}
    assert len(fragments_of(model, 13)) == 13  # by modules where there are too few blocks
    with pytest.raises(ConfigError, match="`fragments`=14 is more than the 13 layers"):
        fragments_of(model, 14)
    with pytest.raises(ConfigError, match="`fragments`=5 is more than the 4 layers"):
        train(0, DiLoCo(fragments=5, warmup=9), 0, small.mlp())


def streaming(rank: int) -> tuple[list[int], list[int], str]:
    plain = waits(rank, DiLoCo(**STREAM, wire="fp32"), "fp32", 0, 2)
    coded = waits(rank, DiLoCo(**STREAM, wire="int8"), "int8", 0, 1)
    return plain, coded, leaves(rank, DiLoCo(**STREAM), 2)


def test_training_goes_on_while_a_fragment_is_under_way() -> None:
    (plain, coded, noticed), (_, _, left) = gang.run(streaming, 2, patience=60)
    assert plain == [4, 6, 8, 10, 12]
    assert sorted({*coded}) == list(range(3, 14))  # a way each step
    assert (noticed, left) == ("noticed", "left")


# Stopping and resuming.

STOPS = (4, 7, 9)
SAVED = {
    "local": LocalSGD(every=5, warmup=2, moments="average", wire="bf16", group_size=2),
    "whole": DiLoCo(every=5, warmup=2, group_size=2),
    "stream": DiLoCo(**{**STREAM, "overlap": 3}, group_size=2),
    "coded": DiLoCo(**{**STREAM, "overlap": 3}, wire="int8", group_size=2),
}


def build(config: Any, seed: int = 0) -> tuple[Any, Any]:
    model = small.net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    return thinwire.attach(model, optimizer, config), optimizer


def stop_and_resume(rank: int, config: Any, folder: str) -> list[tuple[str, ...]]:
    """A run that saves at every stop and continues, and from each of its saves one that resumes."""
    replica, optimizer = build(config)
    under_way = []
    for number in range(12):
        small.step(replica, optimizer, rank, number)
        if number + 1 in STOPS:
            under_way.append([f.pending is not None for f in replica._method.exchanges[0].fragments])
            replica.save(Path(folder) / f"at-{number + 1}")
    results = [fingerprint(replica, optimizer)]
    for stop in STOPS:
        other, optimizer = build(config, seed=3)
        for number in range(7 if stop == STOPS[0] else 0):
            small.step(other, optimizer, rank, number)  # a load takes them back
        other.load(Path(folder) / f"at-{stop}")
        for number in range(stop, 12):
            small.step(other, optimizer, rank, number)
            if number + 1 in STOPS:
                other.save(Path(folder) / "again")
        results.append(fingerprint(other, optimizer))
    assert any(map(any, under_way)) == bool(config.overlap)
    return results


def fingerprint(replica: Any, optimizer: Any) -> tuple[str, ...]:
    own = small.model_bits(replica.module), small.optimizer_bits(optimizer)
    with replica.merged():
        lent = small.model_bits(replica.module)
    return *own, lent, small.model_bits(replica.finish())


def unsaved(rank: int, config: Any) -> tuple[str, ...]:
    replica, optimizer = build(config)
    for number in range(12):
        small.step(replica, optimizer, rank, number)
    return fingerprint(replica, optimizer)


def every_save(rank: int, folder: str) -> dict[str, Any]:
    found = {name: stop_and_resume(rank, config, f"{folder}/{name}") for name, config in SAVED.items()}
    return found | {"unsaved": [unsaved(rank, SAVED["stream"]), unsaved(rank, SAVED["coded"])]}


@pytest.mark.slow
def test_resuming_equals_never_having_stopped(tmp_path: Path) -> None:
    for found in gang.run(every_save, 3, str(tmp_path)):
        for name in SAVED:
            assert len(set(found[name])) == 1, name
        # Two members sum in either order, so here not even wrapping DDP anew for a save leaves a trace.
        assert found["unsaved"] == [found["stream"][0], found["coded"][0]]
        assert all(lent == finished for _, _, lent, finished in (found[name][0] for name in SAVED))


@pytest.fixture(scope="module")
def two(tmp_path_factory: Any) -> list[tuple[list[str], list[list[str]]]]:
    """What two workers found in one job: a lone worker's saves resumed, and what was said of frozen layers."""
    folder = tmp_path_factory.mktemp("lone")
    for config in (LocalSGD(every=4, wire="bf16"), DiLoCo(every=4)):
        replica, optimizer = build(config)
        for number in range(9):
            small.step(replica, optimizer, 0, number)
        replica.save(folder / type(config).__name__)
    return gang.run(become_two, 2, str(folder))


def become_two(rank: int, folder: str) -> tuple[list[str], list[list[str]]]:
    return become_several(rank, folder), every_change(rank, f"{folder}/save")


def test_a_lone_group_may_become_several(two: Any) -> None:
    (first, _), (second, _) = two
    assert first == second and len(first) == 2


def become_several(rank: int, folder: str) -> list[str]:
    """A lone worker has rounds only where it has an outer step; else the first one begins where the others come."""
    found = []
    for config, average in ((LocalSGD(every=4, wire="bf16"), 13), (DiLoCo(every=4), 12)):
        replica, optimizer = build(config, seed=1)
        replica.load(Path(folder) / type(config).__name__)
        for number in range(9, average):
            small.step(replica, optimizer, rank, number)
        found.append(small.model_bits(replica.module))
    return found


# Freezing.


def change_flags(rank: int, config: Any, folder: str) -> list[str]:
    """What is said when parameters are frozen or unfrozen while they are attached; detached, they may be."""
    model = small.mlp()
    model[3].weight.requires_grad_(False)
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, config)
    small.step(replica, optimizer, rank, 0)
    model[3].requires_grad_(True)
    calls = [lambda: replica.save(folder)] + ([] if replica.in_sync else [replica.finish])
    said = [said_by(call) for call in calls]
    model[3].weight.requires_grad_(False)
    small.step(replica, optimizer, rank, 1)
    model[1].requires_grad_(False)
    said.append(said_by(lambda: small.step(replica, optimizer, rank, 2)))
    replica.detach()
    if not isinstance(config, PaperAB):  # which leaves its factors behind
        replica = thinwire.attach(model, optimizer, config)
        before = model[1].weight.clone()
        for number in range(4):
            small.step(replica, optimizer, rank, number)
        assert torch.equal(before, model[1].weight)
    return said


def said_by(call: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def every_change(rank: int, folder: str) -> list[list[str]]:
    configs = [thinwire.AllReduce(), thinwire.AllReduce(wire="int8"), thinwire.PowerSGD(rank=2), small.ab(warmup=1)]
    configs += [LocalSGD(every=3, wire="bf16"), DiLoCo(every=2)]
    return [change_flags(rank, config, folder) for config in configs]


def test_what_is_trained_cannot_change_on_the_way(two: Any) -> None:
    for _, found in two:
        for i, said in enumerate(found):
            assert len(said) == 2 + (i > 2)
            assert all("parameter '3.weight' was unfrozen after step 1" in message for message in said[:-1])
            assert "parameter '1.weight' and 1 more was frozen after step 2" in said[-1]
            assert "detach(), freeze or unfreeze, and attach() again" in said[-1]


def test_alone_anything_may_be_frozen() -> None:
    for config in (thinwire.AllReduce(), LocalSGD(every=2), DiLoCo(every=2), DiLoCo(every=2, overlap=1)):
        model = small.mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        replica = thinwire.attach(model, optimizer, config)
        for number in range(12):
            if number == 5:
                model[1].weight.requires_grad_(False)
                before = model[1].weight.clone()
            small.step(replica, optimizer, 0, number)
        assert torch.equal(model[1].weight, before)


# Divergence.


def diverge(rank: int, config: Any, folder: str) -> str:
    """What is said of a gradient that is not finite; then the save of before can be loaded."""
    model = small.net()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, config)
    with pytest.raises(DivergedError) as caught:
        for number in range(20):
            x, y = small.batch(rank, number)
            if number == 3:
                replica.save(folder)
            if number == 4:
                before = small.model_bits(model)
            optimizer.zero_grad()
            F.cross_entropy(replica(x), y).backward()
            if number == 4 and rank == 2:
                model.middle.weight.grad[0, 0] = math.nan
            optimizer.step()
    replica.load(folder)
    small.step(replica, optimizer, rank, 3)
    assert small.model_bits(model) == before
    return str(caught.value)


def every_divergence(rank: int, folder: str) -> list[str]:
    wires = [DiLoCo(**STREAM, wire=wire, group_size=2) for wire in ("fp32", "int8")]
    configs = (LocalSGD(every=5, group_size=2), DiLoCo(every=5), *wires)
    return [diverge(rank, config, f"{folder}/{i}") for i, config in enumerate(configs)]


def test_a_group_that_diverged_stops_everyone_by_name(tmp_path: Path) -> None:
    for said in gang.run(every_divergence, 3, str(tmp_path), patience=20):
        for i, message in enumerate(said):
            group = 2 if i == 1 else 1
            assert f"group {group} (ranks 2 to 2) has parameter" in message and "not finite at step" in message
            assert "nothing was merged; lower the learning rate" in message
        assert all("'middle.weight'" in message and "at step 5" in message for message in said[:2])


# Plans.


def workload(steps: int = 40) -> Workload:
    x, _ = small.batch(0, 0)
    return Workload(name="net", model=small.net(), optimizer=torch.optim.AdamW, steps=steps, inputs=(x,), eval_every=7)


@pytest.mark.parametrize("config", [LocalSGD(every=5, warmup=6), DiLoCo(**STREAM), DiLoCo(**STREAM, wire="int8")])
def test_steps_that_are_alike_count_as_if_they_were_taken(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for workers, group_size in ((2, None), (3, 2)):
        config = dataclasses.replace(config, group_size=group_size)
        layout = arrange(0, [0] * workers, group_size)
        quick = simulate(workload(), config, layout, predicted.typical)
        with monkeypatch.context() as patched:
            patched.setattr(Rounds, "next_event", property(lambda self: self.run.step + 1))
            slow = simulate(workload(), config, layout, predicted.typical)
        assert quick.calls == slow.calls and quick.exchanges == slow.exchanges and quick.steps == slow.steps
        assert quick.state_bytes == slow.state_bytes


def test_a_plan_hides_what_is_under_way_behind_steps() -> None:
    what, links = workload(steps=36), Links(bandwidth=1e7)

    def wire(config: DiLoCo, step: float) -> float:
        forecast = Forecast(what, config, Layout(workers=2), predicted.typical, lambda r, p: given(step), lambda r: 0.0)
        return forecast.seconds(links)["wire"]

    # Without a delay, steps of any length leave all of it to be waited for; with one, long steps leave nothing.
    for wire_name in ("fp32", "int8"):
        late, blocking = (DiLoCo(every=10, overlap=overlap, wire=wire_name) for overlap in (4, 0))
        assert wire(blocking, 1.0) == pytest.approx(wire(blocking, 1e-6))
        assert wire(late, 1e-6) == pytest.approx(wire(blocking, 1e-6), rel=0.01)
        assert wire(late, 1.0) < 0.6 * wire(late, 1e-6)


def test_a_plan_knows_what_outer_values_take() -> None:
    local, outer = (
        simulate(workload(), config, arrange(0, [0, 0], None), predicted.typical).state_bytes
        for config in (LocalSGD(every=5), DiLoCo(every=5))
    )
    parameters = list(small.net().parameters())
    notes = (1 + SIZE) * 4 * len(parameters)  # how far groups came
    assert outer - local == 2 * sum(p.numel() * 4 for p in parameters) + notes


def test_statistics_follow_an_outer_step() -> None:
    """Weights shrink by a factor per round, and an outer step goes on: variances stay those of the weights."""
    torch.manual_seed(0)
    x, w = torch.randn(4096, 8), torch.randn(8, 8)
    norm = nn.BatchNorm1d(8, momentum=None)
    statistics = OuterStatistics(norm, Nesterov(1.0, 0.5))

    def seen(scale: float) -> Tensor:
        norm.reset_running_stats()
        norm(x @ w * scale)
        return norm.running_var.clone()

    scale, b = 1.0, 0.0
    for _ in range(5):
        seen(math.exp(scale - 0.3))  # what groups come to: 0.3 less
        statistics.step()
        b = 0.5 * b - 0.3 if statistics.momentum[0].any() else 0.0
        scale = scale - 0.3 + 0.5 * b
        found = norm.running_var.clone()
        torch.testing.assert_close(found, seen(math.exp(scale)), rtol=1e-4, atol=1e-6)
