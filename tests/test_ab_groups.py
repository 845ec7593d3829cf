"""AB training by groups of workers: what they agree on, exact averages, saves, evaluation, codes and overlap.

Cases run one after the other in one world of three workers: three groups, ragged ones, or one. The slow ones have
another world.
"""

import functools
import itertools
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import gang
import small
import thinwire
from selection import slow_but
from test_ab import ab, adamw, factors
from thinwire import AB, ConfigError, DiLoCo, LocalSGD, Nesterov, Radial

WORKERS = 3
STEPS = 14
"""Two decompositions with `ab()`, and one more to come: at 5 and 11."""
EXACT = {"wire": "fp32", "warmup_wire": "fp32", "outer": None}
CASES: dict[bool, dict[str, Callable[[int, Path], Any]]] = {False: {}, True: {}}
"""By whether they are slow, and name."""


def case(function: Callable[[int, Path], Any]) -> Callable[[int, Path], Any]:
    CASES[False][function.__name__] = function
    return function


def _run_all(rank: int, folder: str, slow: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, function in CASES[slow].items():
        try:
            found[name] = function(rank, Path(folder) / name)
        except Exception:
            found[name] = traceback.format_exc()
    return found


@functools.cache
def everything(slow: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return gang.run(_run_all, WORKERS, folder, slow, patience=30)


def found(function: Callable[..., Any] | str) -> list[Any]:
    """What each worker found in a case."""
    name = function if isinstance(function, str) else function.__name__
    each = [worker[name] for worker in everything(name in CASES[True])]
    for rank, value in enumerate(each):
        assert not isinstance(value, str), f"rank {rank}:\n{value}"
    return each


def start(config: Any, model: nn.Module | None = None, make: Any = adamw, **more: Any) -> Any:
    model = small.mlp(smooth=True) if model is None else model
    optimizer = make(model)
    return thinwire.attach(model, optimizer, config, **more), optimizer, model


def plain_sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def alike(values: Any) -> bool:
    return len(set(values)) == 1


# Layouts.

LAYOUTS = {
    f"{train}, {name}": (group_size, train)
    for name, group_size in (("three groups", 1), ("ragged groups", 2), ("one group", "world"))
    for train in ("alternate", "split", "both")
}
QUICK_LAYOUTS = ("alternate, three groups", "split, ragged groups", "both, one group")


def layout(group_size: Any, train: str, rank: int, folder: Path) -> Any:
    """Bits and ranks after each step, and which factors a step moved; the end, and bytes of averages."""
    replica, optimizer, model = start(ab(group_size=group_size, train=train, wire="int4"), small.net())
    rows = []
    for number in range(STEPS):
        before = {side: small.bits(*factors(model, side)) for side in "ab"}
        small.step(replica, optimizer, rank, number)
        moved = "".join(side for side in "ab" if small.bits(*factors(model, side)) != before[side])
        rows.append((small.model_bits(model), replica.ranks(), moved, replica.in_sync))
    finished = replica.finish()
    return rows, small.model_bits(finished), replica.traffic.by_purpose.get("merge")


for name, args in LAYOUTS.items():
    CASES[name not in QUICK_LAYOUTS][name] = functools.partial(layout, *args)


@pytest.mark.parametrize("name", slow_but(QUICK_LAYOUTS, LAYOUTS))
def test_workers_agree_after_each_average_and_ranks_fall(name: str) -> None:
    ranks, (group_size, train) = found(name), LAYOUTS[name]
    for step in range(1, STEPS + 1):
        bits, shapes, moved, in_sync = zip(*(rows[step - 1] for rows, _, _ in ranks), strict=True)
        assert alike(map(str, shapes))
        averaged = step <= 2 or (step - 2) % 3 == 0
        assert in_sync[0] == (group_size == "world" or step < 2)
        assert alike(bits) if averaged or in_sync[0] else not alike(bits), step
        if not averaged and step > 5:
            second = (step - 6) // 3 % 2
            if train == "both":
                expected = ["ab"] * WORKERS
            else:
                half = {1: 2, 2: 2, "world": 3}[group_size]  # workers whose groups are in the first half
                expected = ["ab"[(second + (train == "split" and rank >= half)) % 2] for rank in range(WORKERS)]
            assert list(moved) == expected, step
    seen = [shapes for _, shapes, _, _ in ranks[0][0][4:]]
    for before, after in itertools.pairwise(seen):
        assert before.keys() <= after.keys() and all(after[key] <= before[key] for key in before)
    assert seen[0] and alike(bits for _, bits, _ in ranks)
    assert (ranks[0][2] is None) == (group_size == "world"), "one group averages no parameters"


# Exact averages.


@case
def exact(rank: int, folder: Path) -> Any:
    """Weights that each worker would have had, and those that it had after the average, at steps 8 and 14."""
    rows = []
    for group_size, train in ((1, "alternate"), (2, "alternate"), (1, "split")):
        replica, optimizer, model = start(
            ab(**EXACT, group_size=group_size, train=train, redecompose=9), make=plain_sgd
        )
        for number in range(STEPS):
            x, y = small.batch(rank, number)
            optimizer.zero_grad()
            F.cross_entropy(replica(x), y).backward()
            moved = {
                n: p.detach() - 0.1 * p.grad if p.grad is not None else p.detach().clone()
                for n, p in model.named_parameters()
            }
            optimizer.step()
            if number in (7, 13):
                rows.append((group_size, train, moved, small.clone(model)))
    return rows


def test_an_average_of_one_factor_is_the_mean_of_the_products() -> None:
    """A is trained until step 8, B until 11, A until 14."""
    for rows in zip(*found(exact), strict=True):
        group_size, train = rows[0][:2]
        moved, after = [row[2] for row in rows], rows[0][3]
        names = [name.removesuffix("_a") for name in after if name.endswith("weight_a")]
        assert names
        for name in names:
            if train == "split":  # groups 0 and 1 train A, group 2 trains B
                a = (moved[0][f"{name}_a"] + moved[1][f"{name}_a"]) / 2
                assert torch.allclose(after[f"{name}_a"], a, atol=1e-6)
                assert torch.allclose(after[f"{name}_b"], moved[2][f"{name}_b"], atol=1e-6)
                continue
            mean = sum(m[f"{name}_a"] @ m[f"{name}_b"] for m in moved) / WORKERS
            assert torch.allclose(after[f"{name}_a"] @ after[f"{name}_b"], mean, atol=1e-6), (group_size, name)
        mean = sum(m["1.weight"] for m in moved) / WORKERS
        assert torch.allclose(after["1.weight"], mean, atol=1e-6)


@case
def every_step(rank: int, folder: Path) -> Any:
    pairs = []
    for group_size in (1, 2):
        config = ab(**EXACT, every=1, warmup=0, factor_at=None, group_size=group_size)
        models = []
        for each in (config, thinwire.AllReduce()):
            replica, optimizer, model = start(each, make=plain_sgd)
            for _ in small.walk(replica, optimizer, rank, 6):
                pass
            models.append(model)
        pairs.append(
            max(float((p - q).detach().abs().max()) for p, q in zip(*(m.parameters() for m in models), strict=True))
        )
    return pairs


def test_averaging_every_step_at_full_rank_is_all_reduce() -> None:
    assert max(gap for pairs in found(every_step) for gap in pairs) < 1e-6


# What a code leaves out.


@case
def refined(rank: int, folder: Path) -> Any:
    """For each code, the groups' own weights, and what `finish` and a change of shape make of them."""
    rows = []
    for wire, group_size in (("int2", 1), ("bit", 1), ("int2", 2), ("int4", 1)):
        replica, optimizer, model = start(ab(wire=wire, outer=None, factor_at=None, every=9, group_size=group_size))
        for _ in small.walk(replica, optimizer, rank, 6):
            pass
        first = small.clone(model)
        rows.append((wire, first, small.clone(replica.finish())))
        replica, optimizer, model = start(
            ab(wire=wire, every=9, warmup=0, factor_at=8, outer=None, group_size=group_size)
        )
        method, seen = next(each for each in replica._method._every_exchange if each.trains_apart), []
        honest_send, honest_factor = method._send, method._factor
        method._send = lambda *a, **k: (seen.append(small.clone(model)), honest_send(*a, **k))  # noqa: B023
        method._factor = lambda: (seen.append(small.clone(model)), honest_factor())  # noqa: B023
        for _ in small.walk(replica, optimizer, rank, 9):
            pass
        assert replica.phase == "factored"
        rows.append((f"{wire} shape", *seen))
    return rows


def test_the_last_average_before_the_end_and_before_a_change_of_shape_is_fine() -> None:
    """Two codings in int8 of changes of at most 0.05: less than 1 % of them. Two bits alone would leave a third."""
    for rows in zip(*found(refined), strict=True):
        for name in rows[0][1]:
            mean = sum(own[name] for _, own, _ in rows) / WORKERS
            spread = max(float((own[name] - mean).abs().max()) for _, own, _ in rows)
            assert all(torch.equal(after[name], rows[0][2][name]) for _, _, after in rows)
            assert float((rows[0][2][name] - mean).abs().max()) < 0.05 * spread, (rows[0][0], name)


# Evaluation.

VARIANTS: dict[str, dict[str, Any]] = {
    "radial": {"outer": Radial(), "overlap": 2, "wire": "int8"},
    "weighted overlap": {"merge": "weighted", "wire": "int4", "overlap": 2},
    "overlap": {"overlap": 1, "offload": True},
    "split": {"train": "split", "wire": "topk:0.2", "moments": "average"},
    "both": {"train": "both", "wire": "lowrank:2", "match_rate": True, "group_size": 2},
    "weighted": {**EXACT, "merge": "weighted", "train": "split"},
}
QUICK = ("radial",)
variants = pytest.mark.parametrize("name", slow_but(QUICK, VARIANTS))


def observed_step(replica: Any, optimizer: Any, rank: int, number: int) -> None:
    x, y = small.batch(rank, number)
    loss = F.cross_entropy(replica(x), y)
    replica.observe(loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def variant(name: str) -> AB:
    return ab(**{"group_size": 1, "warmup_wire": "lowrank:2", **VARIANTS[name]})


def evaluated(name: str, rank: int, folder: Path) -> Any:
    rows: dict[bool, Any] = {}
    for looks in (False, True):
        replica, optimizer, model = start(variant(name), small.net(smooth=True))
        merged = []
        for number in range(STEPS):
            observed_step(replica, optimizer, rank, number)
            if looks:
                own, state = small.model_bits(model), small.optimizer_bits(optimizer)
                flags = [p.requires_grad for p in model.parameters()]
                with replica.merged():
                    merged.append(small.model_bits(model))
                assert (own, state) == (small.model_bits(model), small.optimizer_bits(optimizer))
                assert flags == [p.requires_grad for p in model.parameters()]
        summary = replica.agreement.summary()
        rows[looks] = small.model_bits(model) + small.optimizer_bits(optimizer), summary, merged
        replica.finish()
    return rows


@variants
def test_looking_at_the_merged_model_changes_nothing(name: str) -> None:
    """After every step: in the warm-up, apart, at averages, while one is pending."""
    workers = found(f"evaluated {name}")
    for mine in workers:
        assert mine[True][:2] == mine[False][:2]
    assert all(alike(each) for each in zip(*(mine[True][2] for mine in workers), strict=True))


@case
def merged_mean(rank: int, folder: Path) -> Any:
    replica, optimizer, model = start(ab(**EXACT, group_size=2))
    rows = []
    for _ in small.walk(replica, optimizer, rank, STEPS):
        own = small.clone(model)
        with replica.merged():
            rows.append((own, small.clone(model)))
    return rows


def test_the_merged_model_is_the_mean() -> None:
    for rows in zip(*found(merged_mean), strict=True):
        for name in rows[0][0]:
            mean = sum(own[name] for own, _ in rows) / WORKERS
            assert torch.allclose(rows[0][1][name], mean, atol=1e-6), name


# Saves.

SAVES = (1, 5, 9)
"""In the warm-up, just after factoring, and while an average is pending."""


def resumed(name: str, rank: int, folder: Path) -> Any:
    return [_resume(rank, name, folder, at) for at in (0, *SAVES)]


for each in VARIANTS:
    CASES[each not in QUICK] |= {
        f"evaluated {each}": functools.partial(evaluated, each),
        f"resumed {each}": functools.partial(resumed, each),
    }


def _resume(rank: int, name: str, folder: Path, at: int) -> Any:
    replica, optimizer, model = start(variant(name), small.mlp(at, smooth=True))
    if at:
        replica.load(folder / str(at))
    for number in range(at, 12):
        observed_step(replica, optimizer, rank, number)
        if replica.step in SAVES:
            replica.save(folder / (str(replica.step) if not at else f"{at}-{replica.step}"))
    ends = small.model_bits(model)[:12], small.optimizer_bits(optimizer)[:12], replica.agreement.summary()
    return *ends, small.model_bits(replica.finish())[:12]


@variants
def test_resuming_in_any_phase_is_as_if_never_stopped(name: str) -> None:
    for whole, *others in found(f"resumed {name}"):
        assert [at for at, other in zip(SAVES, others, strict=True) if other != whole] == []


@case
def held_elsewhere(rank: int, folder: Path) -> Any:
    bits = []
    for offload in (False, True):
        replica, optimizer, _ = start(ab(group_size=1, overlap=1, offload=offload))
        for _ in small.walk(replica, optimizer, rank, STEPS):
            pass
        bits.append(small.model_bits(replica.finish()))
    return bits


def test_where_agreed_values_are_held_changes_nothing() -> None:
    assert alike(bits for both in found(held_elsewhere) for bits in both)


# Weights of groups.


@case
def weighted(rank: int, folder: Path) -> Any:
    """Losses 1, 2 and 4 by worker; and nobody reports any."""
    replica, optimizer, model = start(
        ab(**EXACT, merge="weighted", group_size=1, warmup=0, factor_at=None), make=plain_sgd
    )
    for number in range(3):
        x, y = small.batch(rank, number)
        optimizer.zero_grad()
        F.cross_entropy(replica(x), y).backward()
        replica.observe(2.0**rank)
        own = [p.detach() - 0.1 * p.grad for p in model.parameters()]
        optimizer.step()
    mean = [p.detach().clone() for p in model.parameters()]
    replica.finish()  # right after an average, when no loss was observed since
    replica, optimizer, model = start(ab(**EXACT, merge="weighted", group_size=1))
    try:
        for _ in small.walk(replica, optimizer, rank, 6):
            pass
    except ConfigError as error:
        return own, mean, str(error)
    return own, mean, ""


def test_groups_with_lower_losses_weigh_more() -> None:
    workers = found(weighted)
    for own, mean in zip(zip(*(worker[0] for worker in workers), strict=True), workers[0][1], strict=True):
        expected = sum(w * p for w, p in zip((4 / 7, 2 / 7, 1 / 7), own, strict=True))
        assert torch.allclose(mean, expected, atol=1e-6)
    assert all("call replica.observe(loss) after each backward pass" in message for _, _, message in workers)


# Overlap.


@case
def overlapped(rank: int, folder: Path) -> Any:
    """The factors A around the arrival, at step 7, of what was sent at step 6: A is paused by then."""
    rows = {}
    for outer in (None, Nesterov(2.0, 0.0)):
        config = ab(group_size=1, wire="fp32", warmup_wire="fp32", outer=outer, overlap=1, warmup=0, factor_at=3)
        replica, optimizer, model = start(config, make=plain_sgd)
        seen = []
        for number in small.walk(replica, optimizer, rank, 8):
            if number in (2, 5, 6, 7):
                seen.append([p.detach().clone() for p in factors(model, "a")])
        rows[outer is None] = seen, [p.requires_grad for p in factors(model, "a")]
    return rows


def test_what_arrives_for_a_paused_factor_is_taken_as_it_is_after_its_outer_step() -> None:
    workers = found(overlapped)
    for plain in (True, False):
        for layer in range(len(workers[0][plain][0][0])):
            first, sent, arrived, later = (
                [worker[plain][0][i][layer] for worker in workers] for i in range(4)
            )  # by place in `seen`
            mean = sum(sent) / WORKERS
            expected = mean if plain else first[0] + 2.0 * (mean - first[0])
            for here in (*arrived, *later):
                assert torch.equal(here, arrived[0]) and torch.allclose(here, expected, atol=1e-6)
        assert not any(workers[0][plain][1])


# Lengths of rounds.


@case
def growing(rank: int, folder: Path) -> Any:
    """Bits after each step while the rate falls to zero."""
    rows = {}
    kinds = {
        "ab": ab(group_size=1, warmup=0, every_max=8, total_steps=40, factor_at=20),
        "localsgd": LocalSGD(every=2, every_max=9, group_size=1),
        "diloco": DiLoCo(every=3, every_max=9, fragments=3, overlap=1, group_size=1),
    }
    for name, config in kinds.items():
        replica, optimizer, model = start(config)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / 30))
        seen = []
        for _ in small.walk(replica, optimizer, rank, 32):
            schedule.step()
            seen.append((small.model_bits(model), replica._method.exchanges[0].round.period, replica.phase))
        rows[name] = seen, small.model_bits(replica.finish())
    return rows


@pytest.mark.parametrize("name", ["ab", "localsgd", "diloco"])
def test_rounds_grow_as_the_rate_falls_and_all_workers_agree_on_them(name: str) -> None:
    workers = [worker[name] for worker in found(growing)]
    periods = [row[1] for row in workers[0][0]]
    assert all([row[1] for row in seen] == periods for seen, _ in workers)
    assert periods[0] < max(periods) <= 9
    assert name == "ab" or periods == sorted(periods), "AB's are shorter just before weights become factors"
    assert alike(bits for _, bits in workers)
    if name != "diloco":
        agreed = [step for step in range(1, 28) if alike(seen[step - 1][0] for seen, _ in workers)]
        assert [b - a for a, b in itertools.pairwise(agreed)] == [periods[step - 1] for step in agreed[:-1]], (
            "averages are as far apart as rounds are long; at a rate of zero all steps are alike"
        )
    if name == "ab":
        assert [row[2] for row in workers[0][0]].index("factored") == 19


# Scalers, and losses of one group.


@case
def scaled(rank: int, folder: Path) -> Any:
    """Batches that overflow on one worker: apart, at an average, and at the average that changes shapes."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    replica, optimizer, model = start(ab(group_size=1, wire="int8"), scaler=scaler)
    seen = []
    for number in range(STEPS):
        x, y = small.batch(rank, number)
        loss = F.cross_entropy(replica(x), y)
        if {3: 1, 4: 2, 7: 0, 10: 1}.get(number) == rank:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append((replica.step, small.model_bits(model)))
    return seen


def test_steps_that_one_group_skips_leave_averages_alike() -> None:
    for number, rows in enumerate(zip(*found(scaled), strict=True)):
        assert all(step == number + 1 for step, _ in rows)
        if (number - 1) % 3 == 0 and number > 1:
            assert alike(bits for _, bits in rows), number


# The user says when.


@case
def asked(rank: int, folder: Path) -> Any:
    replica, optimizer, _ = start(AB(warmup=2, every=3, factor_at=None, cutoff=0.6, group_size=1))
    phases = []
    for number in small.walk(replica, optimizer, rank, 9):
        if number == 5:
            replica.factor_now()
        phases.append((replica.phase, str(replica.ranks())))
    return phases


def test_all_workers_factor_when_all_ask() -> None:
    workers = found(asked)
    assert all(phases == workers[0] for phases in workers)
    assert [phase for phase, _ in workers[0]] == ["warmup"] + ["local"] * 6 + ["factored"] * 2


def asks_alone(rank: int) -> str:
    replica, optimizer, _ = start(AB(warmup=2, every=3, factor_at=None, cutoff=0.6, group_size=1))
    store = dist.distributed_c10d._get_default_store()
    for number in small.walk(replica, optimizer, rank, 4):
        if number == 2 and rank == 0:
            with pytest.raises(thinwire.DisagreementError) as caught:
                replica.factor_now()
            store.set("told", "1")
            return str(caught.value)
        if number == 2:
            store.wait(["told"], timedelta(seconds=60))  # busy elsewhere, not gone
            return ""
    return "went on"


def test_a_worker_that_asks_alone_hears_who_did_not() -> None:
    message, other = gang.run(asks_alone, 2, patience=2)
    assert message.startswith("factor_now() is collective: every rank must call it, and rank 1 did not") and not other
