"""DASO: its equation against a reference that fits a page, its bytes, its pace, and what happens around a transfer."""

import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gang
import small
import thinwire
from selection import first_of
from thinwire import DASO, ConfigError, DisagreementError, DivergedError
from thinwire.comm.buckets import checksum
from thinwire.exchange.nodes import Plateau
from under_way import leaves, waits

PAIRS, RAGGED = ((0, 1), (2, 3)), ((0, 1), (2,))


def daso(**fields: Any) -> DASO:
    """Only cycling, with the pace pinned, unless told otherwise."""
    usual = {"total_steps": 1000, "warmup": 0, "cooldown": 0}
    return DASO(**{**usual, "plateau_patience": None, **fields})


def train(rank: int, config: Any, steps: int, model: nn.Module, momentum: float = 0.0) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=momentum)
    replica = thinwire.attach(model, optimizer, config)
    for number in range(steps):
        small.step(replica, optimizer, rank, number)
    return replica


def floats(model: nn.Module) -> list[Tensor]:
    return [t.detach() for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]


def gap(left: list[Tensor], right: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(left, right, strict=True))


# Eq. 3.2.


def reference(
    groups: tuple[tuple[int, ...], ...], every: int, wait: int, steps: int, compensate: bool
) -> list[list[Tensor]]:
    """What each node holds after so many steps, all of them in one process."""
    models = [
        small.net(smooth=True) if all(len(group) == 1 for group in groups) else small.mlp(smooth=True)
        for group in groups
    ]
    optimizers = [torch.optim.SGD(model.parameters(), 0.05, momentum=0.5) for model in models]
    weights, nodes = [len(group) / sum(map(len, groups)) for group in groups], len(groups)
    sent: dict[int, list[Tensor]] = {}
    own: dict[int, list[list[Tensor]]] = {}
    for step in range(1, steps + 1):
        for group, model, optimizer in zip(groups, models, optimizers, strict=True):
            optimizer.zero_grad()
            for rank in group:
                x, y = small.batch(rank, step - 1)
                (F.cross_entropy(model(x), y) / len(group)).backward()
            optimizer.step()
        if step % every == 0 and wait == 0:
            sent[step] = mean_of(models, weights)
        if step - wait in sent:
            for i, model in enumerate(models):
                for j, (w, mean) in enumerate(zip(floats(model), sent[step - wait], strict=True)):
                    if compensate and wait and j < len(list(model.parameters())):
                        w.copy_(mean + w - own[step - wait][i][j])
                    else:
                        w.copy_((2 * wait * w + nodes * mean) / (2 * wait + nodes))
        if step % every == 0:
            sent[step] = mean_of(models, weights)
            own[step] = [[t.clone() for t in floats(model)] for model in models]
    return [[t.clone() for t in floats(model)] for model in models]


def mean_of(models: list[nn.Module], weights: list[float]) -> list[Tensor]:
    return [sum(w * t for w, t in zip(weights, each, strict=True)) for each in zip(*map(floats, models), strict=True)]


CADENCES = [(*cadence, c) for cadence in ((1, 1), (4, 0), (4, 1), (4, 2), (4, 4)) for c in (False, True)]


def cadences(rank: int, group_size: int) -> dict[tuple[int, int, bool, bool], list[Tensor]]:
    found = {}
    for (every, wait, compensate), sharded in itertools.product(CADENCES, (False, True)):
        fields = {"every": every, "overlap": wait, "compensate": compensate, "sharded": sharded}
        config = daso(**fields, wire="fp32", group_size=group_size)
        model = small.net(smooth=True) if group_size == 1 else small.mlp(smooth=True)
        found[every, wait, compensate, sharded] = floats(train(rank, config, 13, model, 0.5).module)
    return found


@pytest.mark.parametrize("groups", first_of([(((0,), (1,)),), (((0,), (1,), (2,), (3,)),), (PAIRS,), (RAGGED,)]))
def test_what_comes_back_is_mixed_by_the_equation(groups: tuple[tuple[int, ...], ...]) -> None:
    found = gang.run(cadences, sum(map(len, groups)), len(groups[0]))
    for every, wait, compensate in CADENCES:
        expected = reference(groups, every, wait, 13, compensate)
        for group, own in zip(groups, expected, strict=True):
            for rank, sharded in itertools.product(group, (False, True)):
                assert gap(found[rank][every, wait, compensate, sharded], own) < 2e-6, (every, wait, compensate, rank)
        if every > 1:
            assert gap(expected[0], expected[1]) > 1e-4


def blocking(rank: int) -> list[float]:
    """Gaps to all-reduce where parameters are averaged at every step, in each of the phases."""
    cooling = {"total_steps": 7, "cooldown": 7}
    phases: list[dict[str, Any]] = [{"every": 1, "overlap": 0}, {"warmup": 8}, cooling]
    gaps = []
    for momentum, fields in itertools.product((0.0, 0.9), phases):
        plain = train(rank, thinwire.AllReduce(), 7, small.mlp(), momentum)
        ours = train(rank, daso(**fields, wire="fp32", group_size=2), 7, small.mlp(), momentum)
        gaps.append(gap(floats(plain.module), floats(ours.module)))
    return gaps


@pytest.mark.parametrize("workers", first_of([3, 4]))
def test_an_average_at_every_step_equals_all_reduce(workers: int) -> None:
    for gaps in gang.run(blocking, workers):
        assert max(gaps) < 1e-6


def one_node(rank: int) -> tuple[str, str, set[str]]:
    """All workers in one node: plain data-parallel training, whatever the phase is called."""
    plain = train(rank, thinwire.AllReduce(group_size="world"), 9, small.net(), 0.9)
    config = daso(total_steps=9, warmup=3, cooldown=3, group_size="world")
    lone = train(rank, config, 9, small.net(), 0.9)
    lone.epoch_end(1.0)
    return small.model_bits(plain.module), small.model_bits(lone.finish()), set(lone.traffic.by_purpose)


def test_one_node_is_data_parallel_training() -> None:
    for plain, lone, purposes in gang.run(one_node, 3):
        assert plain == lone and "merge" not in purposes


def test_alone_it_is_the_bare_optimizer_bit_for_bit() -> None:
    bare, model = small.net(), small.net()
    bare_optimizer, optimizer = small.sgd(bare), small.sgd(model)
    config = daso(total_steps=9, warmup=3, cooldown=3)
    replica, phases = thinwire.attach(model, optimizer, config), []
    for number in range(9):
        small.step(bare, bare_optimizer, 0, number)
        phases.append(replica.phase)
        small.step(replica, optimizer, 0, number)
        replica.epoch_end(1.0)
        assert small.model_bits(bare) == small.model_bits(model)
    assert phases == ["warmup"] * 3 + ["cycling"] * 3 + ["cooldown"] * 3
    assert small.model_bits(replica.finish()) == small.model_bits(bare)
    assert replica.traffic.slow_bytes == replica.traffic.fast_bytes == 0


# Bytes, turns, agreement.

ROUTES = {
    "bf16": {"wire": "bf16"},
    "fp32": {"wire": "fp32"},
    "sharded": {"wire": "bf16", "sharded": True},
    "int8": {"wire": "int8", "overlap": 2},
    "int8 sharded": {"wire": "int8", "overlap": 2, "sharded": True},
}


def route(rank: int, fields: dict[str, Any], group_size: int) -> dict[str, Any]:
    """14 steps: a warm-up of 2, 10 of cycling, 2 of cool-down; and how often this worker sent over the slow link."""
    length = {"total_steps": 14, "warmup": 2, "cooldown": 2, "every": 2}
    model, calls = small.net(seed=rank), []
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, daso(**length, group_size=group_size, **fields))
    wire, honest = replica.wire, {name: getattr(dist, name) for name in ("all_reduce", "all_gather")}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            large = args[0].numel() > 100 if name == "all_reduce" else True  # statistics go by themselves
            if kwargs.get("group") is wire._cross and kwargs.get("async_op") and large:
                calls.append(name)
            return honest[name](*args, **kwargs)

        return call

    for name in honest:
        setattr(dist, name, counted(name))
    seen = []
    for _ in small.walk(replica, optimizer, rank, 14):
        seen.append((replica.phase, small.model_bits(model), replica.traffic.slow_bytes_for("merge")))
    for name, call in honest.items():
        setattr(dist, name, call)
    size = sum(p.numel() for p in model.parameters())
    last = small.model_bits(model), small.model_bits(replica.finish())
    return {"seen": seen, "size": size, "calls": len(calls), "last": last, "baseline": replica.baseline()}


def routes(rank: int, group_size: int) -> dict[str, dict[str, Any]]:
    return {name: route(rank, fields, group_size) for name, fields in ROUTES.items()}


@pytest.fixture(scope="module")
def pairs() -> list[dict[str, dict[str, Any]]]:
    return gang.run(routes, 4, 2)


@pytest.fixture(scope="module")
def ragged() -> list[dict[str, dict[str, Any]]]:
    return gang.run(routes, 3, 2)


@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("layout", first_of(["pairs", "ragged"]))
def test_after_the_cool_down_all_workers_are_identical(layout: str, name: str, request: Any) -> None:
    everyone = [mine[name] for mine in request.getfixturevalue(layout)]
    for step, seen in enumerate(zip(*(mine["seen"] for mine in everyone), strict=True), start=1):
        assert (len({bits for _, bits, _ in seen}) == 1) == (step <= 2 or step > 12), step
    assert len({bits for mine in everyone for bits in mine["last"]}) == 1


@pytest.mark.parametrize(("name", "width"), [("bf16", 2), ("fp32", 4), ("sharded", 2)])
def test_bytes_are_those_of_a_ring_over_nodes(name: str, width: int, pairs: Any) -> None:
    mine = pairs[0][name]
    sent = [now - before for before, now in itertools.pairwise([0, *(merge for _, _, merge in mine["seen"])])]
    ideal = 2 * (2 - 1) / 2 * (mine["size"] * width + 2 * 8 * 4)  # and BatchNorm's statistics
    # Every second step in cycling, but for the end, where it would come back too late.
    assert sent == [ideal, ideal, 0, ideal, 0, ideal, 0, ideal, 0, ideal, 0, 0, ideal, ideal]
    # A flat ring over four workers puts 1.5 of fp32 gradients on each link: B = 2 in bf16 sends a sixth of it.
    flat = 1.5 * 4 * mine["size"]
    assert mine["baseline"]["allreduce_fp32"] / 14 == pytest.approx(flat, rel=0.01)
    assert ideal / 2 / flat == pytest.approx(width / 12, rel=0.02)


def test_members_take_turns(pairs: Any) -> None:
    assert [mine["bf16"]["calls"] for mine in pairs] == [4, 4, 4, 4]
    assert [mine["sharded"]["calls"] for mine in pairs] == [8, 8, 8, 8]
    assert [mine["int8"]["calls"] for mine in pairs] == [4, 4, 4, 4]


@pytest.mark.slow
def test_as_many_take_turns_as_the_smallest_node_has_workers(ragged: Any) -> None:
    assert [mine["bf16"]["calls"] for mine in ragged] == [8, 0, 8]


def test_both_ways_over_the_slow_link_give_the_same_bits(pairs: Any) -> None:
    assert pairs[0]["bf16"]["last"] == pairs[0]["sharded"]["last"]


# What travels.


def tiny_updates(rank: int) -> dict[str, Any]:
    """Weights of 1 that move by 1e-5 a step on the one node and 2e-5 on the other, which bf16 cannot hold beside 1."""
    found = {}
    for wire, compensate in itertools.product(("fp32", "bf16", "int8"), (False, True)):
        model = nn.Linear(4, 4)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), 1e-5)
        config = daso(every=2, overlap=1, wire=wire, compensate=compensate)
        replica = thinwire.attach(model, optimizer, config)
        for _ in range(40):
            optimizer.zero_grad()
            ((1 + rank) * replica(torch.ones(1, 4)).sum()).backward()
            optimizer.step()
        found[wire, compensate] = float(1 - replica.finish().weight.mean())
    half = small.mlp().to(torch.bfloat16)
    half.register_buffer("table", torch.randn(7, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.SGD(half.parameters(), 0.0)
    before, replica = small.clone(half), thinwire.attach(half, optimizer, daso(every=2, overlap=1))
    for number in range(6):
        x, y = small.batch(rank, number)
        F.cross_entropy(replica(x.bfloat16()), y).backward()
        optimizer.step()
    return found | {"still": small.same(before, small.clone(half)), "half": half_precision(rank)}


def half_precision(rank: int) -> list[int]:
    """A bf16 model with its BatchNorm in fp32, after averages that are waited for and after one that came late."""
    seen = []
    for fields in ({"overlap": 0}, {"overlap": 1}, {"overlap": 1, "compensate": True}):
        model = small.net().to(torch.bfloat16)
        model.norm.float()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        replica = thinwire.attach(model, optimizer, daso(every=2, **fields))
        for number in range(4 + fields["overlap"]):
            x, y = small.batch(rank, number)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                F.cross_entropy(replica(x.bfloat16()).float(), y).backward()
            optimizer.step()
        seen.append(checksum([*model.parameters(), *model.buffers()]))
        assert gap(floats(model), floats(small.net())) > 0.1
    return seen


@pytest.mark.slow
def test_small_updates_survive_rounding_and_what_stands_still_stays() -> None:
    everyone = gang.run(tiny_updates, 2)
    for found in everyone:
        for wire in ("fp32", "bf16", "int8"):
            assert found[wire, True] == pytest.approx(40 * 1.5e-5, rel=0.01)
            # The equation takes P·S / (2S + P) of a step back every B steps: half a step of two.
            assert found[wire, False] == pytest.approx((40 - 19 / 2) * 1.5e-5, rel=0.01)
        assert found["still"]
    (waited, late, kept), (other_waited, other_late, other_kept) = (mine["half"] for mine in everyone)
    assert waited == other_waited and late != other_late and kept != other_kept and late != kept


class Odd(nn.Module):
    """Buffers of every kind: channels of very different size, a mask, an average in a new tensor each time, a count."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.line = nn.Linear(64, 4)
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
        self.register_buffer("table", torch.randn(100, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("wide", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.5 * self.seen + x.detach()[0, :3]
            self.count += int(1 + 10 * x[0, 0].abs())
        return self.line(self.norm(x))


def odd_buffers(rank: int) -> tuple[list[Any], str]:
    """What all of it comes to, by the wire: the finished model, its smallest variance, its bytes.

    And a model whose statistics moved after its last average.
    """
    found = []
    for wire, steps in (("int8", 40), ("bf16", 13), ("fp32", 12)):
        model, table = Odd(), Odd().table
        optimizer = small.sgd(model)
        scale = torch.logspace(-2, 1, 64)
        config = daso(total_steps=12, warmup=2, cooldown=2, wire=wire)
        replica = thinwire.attach(model, optimizer, config if wire != "int8" else daso(every=2, wire=wire))
        for number in range(steps):
            g = torch.Generator().manual_seed(100 * number + rank)
            optimizer.zero_grad()
            (replica(scale * torch.randn(8, 64, generator=g)) ** 2).mean().backward()
            optimizer.step()
        lowest = float(model.norm.running_var.min())
        ended = small.model_bits(model)
        with replica.merged():
            lent = small.model_bits(model)
        done = replica.finish()
        assert torch.equal(done.table, table) and bool(torch.isinf(done.mask).any())
        assert bool(torch.isfinite(done.eval()(scale[None])).all())
        found.append((lent, small.model_bits(done), ended, lowest, replica.traffic.slow_bytes_for("merge")))
    model = small.net()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, daso(every=1, overlap=0))
    small.step(replica, optimizer, rank, 0)
    with torch.no_grad():
        replica(small.batch(rank, 1)[0])  # as `update_bn` does
    moved = small.model_bits(replica.finish())
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="all are frozen"):
        thinwire.attach(frozen, small.sgd(frozen), daso())
    return found, moved


def test_buffers_of_every_kind_agree_in_the_end() -> None:
    (first, moved), (second, other_moved) = gang.run(odd_buffers, 2)
    assert moved == other_moved
    for (lent, done, _, lowest, sent), (other_lent, other_done, *_), width in zip(
        first, second, (1, 2, 4), strict=True
    ):
        assert lent == other_lent == done == other_done
        assert lowest > 0
        if width > 1:  # 5 averages, or 6, of parameters in few bits and of BatchNorm's statistics in fp32
            whole = 2 * 64 + 4 * 65
            assert sent == (6 if width == 2 else 5) * (width * whole + 4 * 2 * 64)
    assert first[2][2] == second[2][2]  # and already when the last step is over


# Pace.


def test_a_plateau_is_reached_by_losses_that_are_not_better() -> None:
    plateau = Plateau(patience=1, threshold=0.1)
    told = [plateau.reached(loss) for loss in (2.0, 1.0, 0.95, 0.91, 0.89, 0.89, 0.89, 0.85, 0.85, -1.0, -1.05, -1.2)]
    assert told == [False, False, False, True, False, False, True, False, True, False, False, False]


def test_its_patience_is_that_of_the_config() -> None:
    model = small.mlp()
    for patience in (0, 3):
        replica = thinwire.attach(model, small.sgd(model), daso(plateau_patience=patience))
        assert replica._method.exchanges[0].plateau.patience == patience
        replica.detach()


def paced(rank: int, losses: list[float], **fields: Any) -> Any:
    settings = {"plateau_patience": 0, "plateau_threshold": 0.0, "every": 8, "overlap": 4}
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, daso(**{**settings, **fields}))
    method, seen = replica._method.exchanges[0], []
    for number, loss in enumerate(losses):
        small.step(replica, optimizer, rank, number)
        # Losses of single workers rise and fall; only their mean counts.
        replica.epoch_end(torch.tensor(loss + (10.0 * number if rank else -10.0 * number)))
        seen.append((method.every, method.overlap))
    assert len({repr(told) for told in replica.wire.all_gather_object(seen)}) == 1
    return seen, replica.describe()["events"], small.model_bits(replica.finish())


def every_pace(rank: int) -> list[Any]:
    flat = [1.0] * 6
    observed = small.mlp()
    optimizer = small.sgd(observed)
    replica = thinwire.attach(observed, optimizer, daso(plateau_patience=0))
    said = []
    for loss in (None, math.nan, math.inf):
        try:
            if loss is not None:
                replica.observe(loss if rank else 1.0)
            replica.epoch_end()
        except thinwire.ThinwireError as error:
            said.append(f"{type(error).__name__}: {error}")
    replica.observe(0.5)
    replica.epoch_end()
    return [
        paced(rank, flat),
        paced(rank, flat, overlap=0),
        paced(rank, flat, plateau_patience=None),
        paced(rank, flat, every=3, overlap=3),
        paced(rank, [2.0, 1.0, 0.5, 0.6, 0.4]),
        paced(rank, flat, warmup=4),
        said,
    ]


def test_b_and_s_are_halved_where_the_loss_stops_falling() -> None:
    found = gang.run(every_pace, 2)
    assert found[0] == found[1]
    flat, blocking, pinned, odd, falling, warm, said = found[0]
    assert flat[0] == [(8, 4), (4, 2), (2, 1), (1, 1), (8, 4), (4, 2)]
    assert flat[1][0] == {"step": 2, "every": 4, "overlap": 2} and len(flat[1]) == 5
    assert blocking[0] == [(8, 0), (4, 0), (2, 0), (1, 0), (8, 0), (4, 0)]
    assert set(pinned[0]) == {(8, 4)} and pinned[1] == []
    assert odd[0] == [(3, 3), (1, 1), (3, 3), (1, 1), (3, 3), (1, 1)]
    assert falling[0] == [(8, 4)] * 3 + [(4, 2)] * 2
    assert warm[0] == [(8, 4)] * 4 + [(4, 2), (2, 1)]  # losses of the warm-up do not count
    assert "given no loss and none was observed" in said[0] and said[0].startswith("ConfigError")
    assert "rank 1 has a loss that is not finite" in said[1] and said[2].startswith("DivergedError")


def alone(rank: int) -> str:
    replica = train(rank, daso(plateau_patience=2), 1, small.mlp())
    try:
        if rank == 0:
            replica.epoch_end(1.0)
    except DisagreementError as error:
        return str(error)
    return ""


def test_the_end_of_an_epoch_is_everybodys() -> None:
    said, _ = gang.run(alone, 2, patience=2)
    assert "epoch_end() is collective: every rank must call it" in said and "rank 1" in said


def unheard(rank: int) -> list[str]:
    """Warnings of a loop that never calls epoch_end."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(rank, daso(plateau_patience=2, total_steps=14), 16, small.mlp())
        train(rank, daso(plateau_patience=None), 16, small.mlp())
    return [str(w.message) for w in caught]


def test_a_loop_that_never_tells_of_epochs_is_told_once() -> None:
    for told in gang.run(unheard, 2):
        assert len(told) == 1
        assert "epoch_end() was not called in 8 steps, so B=4 and S=1 stay" in told[0] and "plateau_patience" in told[0]


# Around a transfer.

STOPS = (3, 5, 9)
SAVED = {
    "rotating": daso(every=3, overlap=3, warmup=2, group_size=2),
    "sharded": daso(every=4, overlap=2, sharded=True, wire="fp32", group_size=2),
    "compensated": daso(every=4, overlap=3, compensate=True, group_size=2),
    "coded": daso(every=4, overlap=3, wire="int8", group_size=2),
    "products": daso(every=4, overlap=3, wire="lowrank:2", warmup=1, warmup_wire="bit", group_size=2),
    "paced": daso(every=4, overlap=4, plateau_patience=0, group_size=2),
}


def build(config: Any, seed: int = 0) -> tuple[Any, Any]:
    model = small.net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    return thinwire.attach(model, optimizer, config), optimizer


def go_on(replica: Any, optimizer: Any, rank: int, saves: str, looks: bool = False) -> list[bool]:
    """Up to 12 steps, with a save at each stop; whether something was under way there."""
    under_way = []
    for number in range(replica.step, 12):
        small.step(replica, optimizer, rank, number)
        if (number + 1) % 4 == 0:
            replica.epoch_end(1.0)
        if number + 1 in STOPS:
            under_way.append(replica._method.exchanges[0].averaged[0].pending is not None)
            if saves:
                replica.save(saves.format(number + 1))
        if looks:
            with replica.merged():
                pass
    return under_way


def fingerprint(replica: Any, optimizer: Any) -> tuple[str, ...]:
    own = small.model_bits(replica.module), small.optimizer_bits(optimizer), str(replica.describe()["events"])
    with replica.merged():
        lent = small.model_bits(replica.module)
    assert small.model_bits(replica.module) == own[0]
    return *own, lent, small.model_bits(replica.finish())


def stop_and_resume(rank: int, config: Any, folder: str) -> tuple[list[tuple[str, ...]], list[bool]]:
    """A run that saves, one that evaluates after every step instead, and from each save one that resumes."""
    replica, optimizer = build(config)
    under_way = go_on(replica, optimizer, rank, f"{folder}/at-{{}}")
    results = [fingerprint(replica, optimizer)]
    replica, optimizer = build(config)
    go_on(replica, optimizer, rank, "", looks=True)
    results.append(fingerprint(replica, optimizer))
    for stop in STOPS:
        other, optimizer = build(config, seed=3)
        go_on(other, optimizer, rank, "") if stop == 9 else None  # a load drops what is under way
        other.load(Path(folder) / f"at-{stop}")
        go_on(other, optimizer, rank, f"{folder}/again")
        results.append(fingerprint(other, optimizer))
    return results, under_way


def every_save(rank: int, folder: str) -> dict[str, Any]:
    return {name: stop_and_resume(rank, config, f"{folder}/{name}") for name, config in SAVED.items()}


@pytest.mark.slow
def test_saves_and_evaluations_leave_no_trace(tmp_path: Path) -> None:
    everyone = gang.run(every_save, 4, str(tmp_path))
    for name in SAVED:
        for found, under_way in (mine[name] for mine in everyone):
            assert len(set(found)) == 1, name
            assert any(under_way)
        ends = [mine[name][0][0] for mine in everyone]
        assert len({end[3:] for end in ends}) == 1 and len({end[0] for end in ends}) == 2, name


def become_two(rank: int, folder: str) -> str:
    replica, optimizer = build(daso(every=2, overlap=0), seed=1)
    replica.load(Path(folder) / "lone")
    for number in range(3, 6):
        small.step(replica, optimizer, rank, number)
    fresh, used = (coded_after(rank, steps, Path(folder) / "coded") for steps in (0, 5))
    assert fresh == used, "what was left to say is forgotten by a load"
    return small.model_bits(replica.module)


def coded_after(rank: int, steps: int, folder: Path) -> str:
    """A lone node's save, resumed by nodes that had trained so many steps before."""
    replica, optimizer = build(daso(every=2, overlap=0, wire="int8"), seed=1)
    for number in range(steps):
        small.step(replica, optimizer, rank, number)
    replica.load(folder)
    for number in range(3, 7):
        small.step(replica, optimizer, rank, number)
    return small.model_bits(replica.module)


@pytest.mark.slow
def test_a_lone_node_may_become_several(tmp_path: Path) -> None:
    for name, wire in (("lone", "bf16"), ("coded", "int8")):
        replica, optimizer = build(daso(every=2, overlap=0, wire=wire))
        for number in range(3):
            small.step(replica, optimizer, 0, number)
        replica.save(tmp_path / name)
    assert len(set(gang.run(become_two, 4, str(tmp_path)))) == 1


def overlapping(rank: int) -> tuple[list[int], list[int], str]:
    """Rank 0 is ahead by the step after the one at whose end it sent."""
    plain, coded = (waits(rank, daso(every=4, overlap=3, wire=wire), wire, 2, 4) for wire in ("bf16", "int8"))
    return plain, coded, leaves(rank, daso(every=4, overlap=4), 5)


def test_training_goes_on_while_parameters_are_under_way() -> None:
    (plain, coded, noticed), (_, _, left) = gang.run(overlapping, 2, patience=60)
    assert plain == [7, 11]
    assert sorted({*coded}) == [6, 7, 10, 11]  # there and back
    assert (noticed, left) == ("noticed", "left")


# Disagreement and divergence.


def skip_unseen(rank: int) -> str:
    """A worker that leaves out an update nobody was told of."""
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, daso(every=3, overlap=2))
    try:
        for number in range(20):
            x, y = small.batch(rank, number)
            optimizer.zero_grad()
            F.cross_entropy(replica(x), y).backward()
            if (rank, number) != (1, 1):
                optimizer.step()
    except DisagreementError as error:
        return str(error)
    return ""


def diverge(rank: int, wire: str) -> list[str]:
    said = []
    for where in ("weights", "loss"):
        model = small.mlp()
        optimizer = small.sgd(model)
        replica = thinwire.attach(model, optimizer, daso(every=2, overlap=1, wire=wire))
        try:
            for number in range(8):
                small.step(replica, optimizer, rank, number)
                if rank == 1 and number == 2:
                    if where == "weights":
                        model[3].weight.data[0, 0] = math.inf
                    else:
                        replica.observe(math.nan)
            replica.finish()
        except DivergedError as error:
            said.append(str(error))
    return said


def trouble(rank: int) -> list[Any]:
    return [skip_unseen(rank), diverge(rank, "bf16"), diverge(rank, "int8")]


def test_disagreement_and_divergence_are_loud() -> None:
    for skipped, *diverged in gang.run(trouble, 2):
        assert "rank 1 ran" in skipped and "scaler=scaler" in skipped
        for weights, loss in diverged:
            assert "group 1 (ranks 1 to 1) has parameter '" in weights and "not finite" in weights
            assert "group 1 (ranks 1 to 1) has a loss that is not finite" in loss


def scaled(rank: int) -> list[tuple[float, str]]:
    """A GradScaler that backs off on one node alone; gradients never leave it, so its scale is its own."""
    model = small.mlp()
    optimizer = small.sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    replica = thinwire.attach(model, optimizer, daso(every=2, overlap=0), scaler=scaler)
    seen = []
    for number in range(6):
        x, y = small.batch(rank, number)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(replica(x), y)).backward()
        if rank == 1 and number == 2:
            model[1].weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), small.model_bits(model)))
    return seen


def test_a_scaler_may_skip_on_one_node_alone() -> None:
    first, other = gang.run(scaled, 2)
    assert [scale for scale, _ in first] == [1024.0] * 6 and other[-1][0] == 512.0
    assert [left == right for (_, left), (_, right) in zip(first, other, strict=True)] == [False, True] * 3


# Bad input.

BAD = {
    "every": [(0, "`every`=0 must be a whole number from 1 on"), (2.5, "2.5"), (True, "True")],
    "overlap": [(-1, "`overlap`=-1 must be a whole number from 0 on"), (5, "`overlap`=5 must be at most `every`=4")],
    "warmup": [(-1, "`warmup`=-1"), (601, "are more than `total_steps`=1000; lower them"), (math.nan, "nan")],
    "cooldown": [("4", "'4'"), (601, "are more than `total_steps`=1000"), (math.inf, "inf")],
    "total_steps": [(0, "`total_steps`=0"), (2.0, "2.0")],
    "plateau_patience": [(-1, "from 0 on"), (1.5, "1.5")],
    "plateau_threshold": [(1, "to below 1"), (-0.1, "-0.1")],
    "sharded": [("yes", "`sharded`='yes' must be True or False")],
    "wire": [("fp8", "choose from: fp32, bf16, int8")],
    "warmup_wire": [("lowrank:0", "`warmup_wire`='lowrank:0' is not a code")],
}


@pytest.mark.parametrize(("field", "value", "sentence"), [(f, *pair) for f, pairs in BAD.items() for pair in pairs])
def test_bad_input(field: str, value: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        daso(**{"warmup": 400, "cooldown": 400, field: value})
    assert sentence in str(caught.value)


def test_all_of_a_run_may_be_warm_up_and_cool_down() -> None:
    for warmup, cooldown in ((5, 2), (0.7, 2), (0.5, 0.5)):
        config = daso(total_steps=7, warmup=warmup, cooldown=cooldown)
        assert config.warmup_length + config.cooldown_length == 7
