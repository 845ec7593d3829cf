"""OIALR: what entering low rank and updating the bases must not change, and what every worker must hold."""

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gang
import thinwire
from device import DEVICE, here
from thinwire.factor import matrix
from thinwire.factor.layers import cheapest_of_three
from thinwire.factor.matrix import MatrixView, find_basis
from thinwire.factor.moments import middle_from_full
from worlds import adamw, batch, optimizer_values, small_model, train_step, values

STEPS = 20


def oialr(**changes: Any) -> thinwire.OIALR:
    """Full rank for 4 steps, then an update every 3; the first reaches half of the three layers."""
    settings = {"total_steps": STEPS, "factor_at": 4, "redecompose": 3, "cutoff": 0.1, "layer_fraction": 0.5}
    return thinwire.OIALR(**{**settings, **changes})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)


def attached(config: thinwire.OIALR, make: Any = adamw, model: nn.Module | None = None) -> tuple[Any, Any]:
    model = model or small_model()
    optimizer = make(model)
    return thinwire.attach(model, optimizer, config), optimizer


def outputs(replica: Any) -> torch.Tensor:
    replica.eval()
    with torch.no_grad():
        found = replica(batch(99, 0)[0])
    replica.train()
    return found


def bases(replica: Any) -> list[tuple[torch.Tensor, ...]]:
    return [layer.factors for layer in replica._method.shape.factored]


def off_orthonormal(replica: Any) -> float:
    gaps = [
        t.double() @ t.double().t() - torch.eye(len(t), device=t.device)
        for u, _, vt in bases(replica)
        for t in (u.t(), vt)
    ]
    return max(float(gap.abs().max()) for gap in gaps)


# Invariants.


@pytest.mark.parametrize("shape", [(20, 7), (7, 7), (30, 1)])
@pytest.mark.parametrize("kind", ["random", "rank 2", "zero", "tiny last value"])
def test_a_basis_is_orthonormal_and_gives_the_matrix_back(shape: tuple[int, int], kind: str) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    if kind == "rank 2":
        matrix = torch.randn(shape[0], 2) @ torch.randn(2, shape[1])
    elif kind == "zero":
        matrix = torch.zeros(shape)
    elif kind == "tiny last value":
        u, sigma, vt = torch.linalg.svd(matrix, full_matrices=False)
        sigma[-1] *= 1e-12
        matrix = u * sigma @ vt
    found = find_basis(matrix, 0.0, least=shape[1])
    assert found.u.shape == shape and found.vt.shape == (shape[1], shape[1])
    for t in (found.u.t(), found.vt):
        torch.testing.assert_close(t @ t.t(), torch.eye(len(t), dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.u @ found.s @ found.vt, matrix.double(), rtol=0, atol=1e-12)


def test_a_cut_basis_is_the_best_of_its_rank() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(20, 9)
    u, sigma, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    found = find_basis(matrix, float(sigma[4] / sigma[0]) - 1e-9)
    assert len(found.s) == 5
    best = u[:, :5] * sigma[:5] @ vt[:5]
    torch.testing.assert_close(found.u @ found.s @ found.vt, best, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_neither_entering_nor_an_update_without_truncation_changes_an_output(make: Any) -> None:
    # Steps 4 and 7 enter and update; with a rate of 0 nothing else could change an output.
    replica, optimizer = attached(oialr(cutoff=0.0), make)
    for step in range(3):
        train_step(replica, optimizer, step, 0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    norms = [m for m in replica.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 0.0
    before, updates = outputs(replica), set()
    for step in range(3, 14):
        train_step(replica, optimizer, step, 0)
        torch.testing.assert_close(outputs(replica), before, rtol=1e-5, atol=1e-5)
        updates.add(replica._method.shape.updates)
    assert replica.phase == "lowrank" and updates == {0, 1, 2, 3}
    assert replica.ranks() == {"0": 6, "3": 16, "7": 24}


def test_only_the_middle_is_trained() -> None:
    replica, optimizer = attached(oialr(cutoff=0.3))
    for step in range(5):
        train_step(replica, optimizer, step, 0)
    first = [[t.clone() for t in layer] for layer in bases(replica)]
    train_step(replica, optimizer, 5, 0)
    for (u, s, vt), (old_u, old_s, old_vt) in zip(bases(replica), first, strict=True):
        assert torch.equal(u, old_u) and torch.equal(vt, old_vt) and not torch.equal(s, old_s)
        assert u.grad is None and vt.grad is None and not u.requires_grad and not vt.requires_grad
        assert u not in optimizer.state and vt not in optimizer.state
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in replica.parameters() if p.requires_grad}


def test_at_full_rank_a_square_weight_trains_under_sgd_as_if_nothing_had_happened() -> None:
    """Orthogonal bases turn gradients, momentum and weight decay alike."""
    torch.manual_seed(0)
    plain = here(
        nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))
    )
    turned = copy.deepcopy(plain)
    replica, optimizer = attached(oialr(cutoff=0.0), sgd, turned)
    other = sgd(plain)
    for step in range(STEPS):
        train_step(plain, other, step, 0)
        train_step(replica, optimizer, step, 0)
    assert replica.phase == "lowrank" and replica._method.shape.updates == 5
    torch.testing.assert_close(outputs(replica), plain(batch(99, 0)[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(12, 5), (5, 12)])
def test_momentum_follows_exactly_what_is_kept(shape: tuple[int, int]) -> None:
    """m_S = Uᵀ m_W V: the mean of the gradients that S would have had, also through a truncated update."""
    torch.manual_seed(0)
    layers = nn.Linear(16, shape[1]), nn.Linear(*reversed(shape)), nn.Linear(shape[0], 5)
    model = here(nn.Sequential(nn.Flatten(), *layers))
    config = oialr(factor_at=3, redecompose=3, cutoff=0.5, layer_fraction=1.0, keep=("1", "3"), keep_last=False)
    replica, optimizer = attached(config, lambda m: torch.optim.SGD(m.parameters(), 0.0, momentum=0.9), model)
    for step in range(3):
        train_step(replica, optimizer, step, 0)
    for step in range(3, 6):
        train_step(replica, optimizer, step, 0)
    (u, s, vt), rank = bases(replica)[0], replica.ranks()["2"]
    assert rank < 5
    found = optimizer.state[s]["momentum_buffer"]
    # The same gradients at the same weights: the rate is 0, but for what the cut at step 6 dropped after them.
    torch.manual_seed(0)
    layers = nn.Linear(16, shape[1]), nn.Linear(*reversed(shape)), nn.Linear(shape[0], 5)
    plain = here(nn.Sequential(nn.Flatten(), *layers))
    other = torch.optim.SGD(plain.parameters(), 0.0, momentum=0.9)
    for step in range(6):
        train_step(plain, other, step, 0)
    whole = MatrixView(shape).to_matrix(other.state[plain[2].weight]["momentum_buffer"])
    torch.testing.assert_close(found, u.t() @ whole @ vt.t(), rtol=1e-4, atol=1e-6)


def test_moments_may_start_again() -> None:
    replica, optimizer = attached(oialr(moments="reset"))
    for step in range(4):
        train_step(replica, optimizer, step, 0)
    assert all(s not in optimizer.state for _, s, _ in bases(replica))
    carrying, other = attached(oialr())
    for step in range(4):
        train_step(carrying, other, step, 0)
    assert all(set(other.state[s]) == {"step", "exp_avg", "exp_avg_sq"} for _, s, _ in bases(carrying))
    assert all(other.state[s]["exp_avg_sq"].min() >= 0 for _, s, _ in bases(carrying))


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_matched_rate_scales_what_is_not_weight_decay(decay: float) -> None:
    """For Adam's first update, which is of the size of the rate in every element."""
    for matched in (True, None, False):
        replica, optimizer = attached(
            oialr(factor_at=0, updates_from=4, keep=("0", "3"), match_rate=matched),
            lambda m: torch.optim.AdamW(m.parameters(), 1e-3, weight_decay=decay),
        )
        before = bases(replica)[0][1].detach().clone()
        train_step(replica, optimizer, 0, 0)
        moved = bases(replica)[0][1].detach() - before * (1 - 1e-3 * decay)
        gain = 1.0 if matched is False else math.sqrt(256 * 24) / 24
        torch.testing.assert_close(moved.abs().median().cpu(), torch.tensor(gain * 1e-3), rtol=1e-2, atol=0)
        # Off the diagonal S is zero and does not decay.
        torch.testing.assert_close(moved[0, 0].abs().cpu(), torch.tensor(gain * 1e-3), rtol=1e-2, atol=0)


def test_sgd_is_left_as_it_is_unless_asked() -> None:
    ways = {}
    for matched in (None, False, True):
        replica, optimizer = attached(oialr(match_rate=matched), sgd)
        for step in range(6):
            train_step(replica, optimizer, step, 0)
        ways[matched] = values(replica)
    assert ways[None] == ways[False] != ways[True]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, torch.tensor(1e-3), foreach=False),
        lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
        lambda p: torch.optim.NAdam(p, 1e-3),
        lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9, centered=True),
        lambda p: torch.optim.Adagrad(p, 1e-2),
        lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True),
    ],
    ids=["amsgrad", "tensor rate", "fused", "NAdam", "RMSprop", "Adagrad", "Nesterov"],
)
@pytest.mark.parametrize("moments", ["carry", "reset"])
def test_optimizers_follow(make: Any, moments: str, tmp_path: Path) -> None:
    """Through entry and updates, and through a save in between, bit for bit."""

    def begin(seed: int) -> tuple[Any, Any]:
        config = oialr(cutoff=0.3, layer_fraction=1.0, moments=moments)
        return attached(config, lambda m: make(m.parameters()), small_model(seed))

    replica, optimizer = begin(0)
    for step in range(14):
        train_step(replica, optimizer, step, 0)
        if step == 7:
            replica.save(tmp_path / "save")
    assert all(bool(p.isfinite().all()) for p in replica.parameters()) and replica.ranks()["7"] < 24
    other, again = begin(1)
    other.load(tmp_path / "save")
    for step in range(8, 14):
        train_step(other, again, step, 0)
    assert values(other) == values(replica) and optimizer_values(again) == optimizer_values(optimizer)


@pytest.mark.slow
def test_accumulated_gradients_and_compiled_models_train_alike() -> None:
    """Two halves of a batch are the batch; `compile=` changes nothing but rounding."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 5))
    found = []
    for way in ("whole", "halves", "compiled"):
        model = copy.deepcopy(first)
        optimizer = sgd(model)
        compiled = {"backend": "eager"} if way == "compiled" else None
        # Few recompilations, and none counted of other tests: beyond Dynamo's limit it compiles layers one by one.
        torch._dynamo.reset()
        config = oialr(cutoff=0.3, layer_fraction=1.0, redecompose=7)
        replica = thinwire.attach(model, optimizer, config, compile=compiled)
        for step in range(STEPS):
            x, y = batch(step, 0)
            optimizer.zero_grad()
            for part in (slice(0, 4), slice(4, 8)) if way == "halves" else (slice(0, 8),):
                share = len(x[part]) / len(x)
                (share * F.cross_entropy(replica(x[part]), y[part])).backward()
            optimizer.step()
        assert replica.ranks()["1"] < 12
        found.append(outputs(replica))
        assert way != "compiled" or replica.recompilations > 0
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=1e-5)


# The timetable.


def test_updates_reach_backwards_and_ranks_fall() -> None:
    replica, optimizer = attached(oialr(cutoff=0.4, layer_fraction=0.3, max_shrink=1.0))
    seen: dict[int, dict[str, int]] = {}
    for step in range(STEPS):
        train_step(replica, optimizer, step, 0)
        if replica.ranks() and replica.ranks() not in seen.values():
            seen[replica.step] = replica.ranks()
    assert seen[4] == {"0": 6, "3": 16, "7": 24}
    assert seen[7]["0"] == 6 and seen[7]["3"] == 16 and seen[7]["7"] < 24, "the first update is of the last layer alone"
    assert seen[10]["0"] == 6 and seen[10]["3"] < 16, "the second one reaches one further"
    assert set(seen) <= {4, 7, 10, 13, 16, 19}
    ranks = list(seen.values())
    assert all(new[label] <= old[label] for old, new in itertools.pairwise(ranks) for label in old)


def test_an_update_drops_no_more_than_it_may() -> None:
    config = oialr(cutoff=0.9, layer_fraction=1.0, max_shrink=0.25)
    replica, optimizer = attached(config)
    before = {"0": 6, "3": 16, "7": 24}
    for step in range(STEPS):
        train_step(replica, optimizer, step, 0)
        now = replica.ranks()
        if now and now != before:
            assert now == {label: max(1, math.ceil(0.75 * rank)) for label, rank in before.items()}
            before = now
    assert before["7"] == math.ceil(0.75 * math.ceil(0.75 * math.ceil(0.75 * math.ceil(0.75 * math.ceil(0.75 * 24)))))


def test_no_update_at_the_very_end() -> None:
    replica, optimizer = attached(oialr(total_steps=7, cutoff=0.9, layer_fraction=1.0))
    for step in range(7):
        train_step(replica, optimizer, step, 0)
    assert replica.ranks() == {"0": 6, "3": 16, "7": 24}
    train_step(replica, optimizer, 7, 0)
    assert replica.ranks() == {"0": 6, "3": 16, "7": 24}


def test_low_rank_from_the_first_step() -> None:
    replica, optimizer = attached(oialr(factor_at=0, updates_from=4))
    assert replica.phase == "lowrank" and replica.ranks() == {"0": 6, "3": 16, "7": 24}
    for step in range(6):
        train_step(replica, optimizer, step, 0)
        assert replica._method.shape.updates == 0, "the delay is what passes before the first update"
    train_step(replica, optimizer, 6, 0)
    assert replica._method.shape.updates == 1


def test_the_paper_keeps_the_last_layer_and_may_keep_the_first() -> None:
    replica, _ = attached(oialr(factor_at=0, updates_from=4, keep_first=True, keep=("7",)))
    assert replica.ranks() == {"3": 16}
    assert {k["layer"]: k["why"] for k in replica.describe()["kept_full"]} == {
        "0.weight": "first layer",
        "7.weight": "kept by pattern '7'",
        "9.weight": "last layer",
    }


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"factor_at": 30}, "`factor_at`=30 leaves nothing"),
        ({"factor_at": 20}, "`factor_at`=20 leaves nothing of `total_steps`=20"),
        ({"redecompose": 0}, "`redecompose`=0 must be"),
        ({"layer_fraction": 0}, "`layer_fraction`=0 must be above 0 and at most 1"),
        ({"max_shrink": 1.5}, "`max_shrink`=1.5 must be above 0 and at most 1"),
        ({"cutoff": 1.0}, "`cutoff`=1.0"),
        ({"moments": "rotate"}, "choose from"),
        ({"warmup_wire": "int3"}, "`warmup_wire`='int3' is not a code"),
        ({"total_steps": 0}, "`total_steps`=0"),
        ({"factor_at": 2.5}, "`factor_at`=2.5"),
    ],
)
def test_bad_settings(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(thinwire.ConfigError, match=told):
        oialr(**fields)


# What the layers compute.


@pytest.mark.parametrize("rank", [1, 4, 12])
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(30, 12), (30,)),
        (nn.Linear(12, 30, bias=False), (12,)),
        (nn.Conv2d(3, 12, 3, padding=1, stride=2), (3, 8, 8)),
        (nn.Conv2d(5, 12, 3, padding=1, padding_mode="circular"), (5, 8, 8)),
        (nn.Conv1d(12, 20, 1, bias=False), (12, 6)),
    ],
)
def test_every_way_through_three_factors_is_the_same(
    module: nn.Module, shape: tuple[int, ...], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    dense, layer = copy.deepcopy(module), copy.deepcopy(module)
    root = nn.Sequential(layer)
    replica, _ = attached(oialr(factor_at=0, updates_from=4, keep_last=False), sgd, root)
    found = replica._method.shape.layers[0]
    rank = min(rank, found.rank)
    u, s, vt = (t.detach() for t in found.factors)
    thinwire.factor.convert.to_factors(found, u[:, :rank], s[:rank, :rank], vt[:rank])
    dense.weight.data = layer.weight.detach().clone()
    x = torch.randn(2, *shape, requires_grad=True)
    wanted = dense(x)
    gradient = torch.autograd.grad(wanted.square().sum(), [x, dense.weight])
    for count in (1, 2, 3):
        monkeypatch.setattr("thinwire.factor.layers.cheapest_of_three", lambda *a, **k: count)  # noqa: B023
        given = layer(x)
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)
        own = torch.autograd.grad(given.square().sum(), [x, found.factors[1]])
        torch.testing.assert_close(own[0], gradient[0], rtol=1e-4, atol=1e-4)
        projected = found.factors[0].t() @ found.view.to_matrix(gradient[1]) @ found.factors[2].t()
        torch.testing.assert_close(own[1], projected, rtol=1e-4, atol=1e-4)


def test_the_cheapest_way_is_taken() -> None:
    tall = MatrixView((3072, 768))
    assert cheapest_of_three(tall, 64, 10_000, trains=True) == 3
    assert cheapest_of_three(tall, 400, 10_000, trains=True) == 2
    assert cheapest_of_three(MatrixView((768, 768)), 768, 10_000, trains=True) == 1
    assert cheapest_of_three(tall, 64, 10_000, trains=False) == 2, "S is folded once for many uses"
    assert cheapest_of_three(tall, 64, 4, trains=False) == 3, "and not for a few"


# Many workers.


def agreement(rank: int, settings: dict[str, Any], kind: str) -> dict[str, Any]:
    model = small_model(rank)
    optimizer = adamw(model) if kind == "adamw" else sgd(model)
    replica = thinwire.attach(model, optimizer, oialr(cutoff=0.2, **settings))
    trace = []
    for step in range(STEPS):
        train_step(replica, optimizer, step, rank)
        trace.append((replica.phase, values(replica), optimizer_values(optimizer), str(replica.ranks())))
    gap = off_orthonormal(replica)
    before, small = outputs(replica), replica.finish(cutoff=0.0)
    kinds = [type(m).__name__ for m in small.modules()]
    return {
        "trace": trace,
        "gap": gap,
        "finish": float((outputs(replica) - before).abs().max() / before.abs().max()),
        "low_rank": kinds.count("Sequential") - 1,
        "final": values(small),
    }


@pytest.mark.parametrize(
    ("workers", "settings", "kind"),
    [
        (2, {"group_size": 1}, "adamw"),
        (3, {"group_size": 2, "wire": "bf16"}, "sgd"),
        pytest.param(4, {"group_size": 2, "max_shrink": 1.0}, "adamw", marks=pytest.mark.slow),
    ],
)
def test_all_workers_hold_the_same_at_every_step(workers: int, settings: dict[str, Any], kind: str) -> None:
    found = gang.run(agreement, workers, settings, kind)
    for worker in found:
        assert worker["trace"] == found[0]["trace"] and worker["final"] == found[0]["final"]
        assert worker["gap"] < 1e-5
        assert worker["finish"] < 1e-5 and worker["low_rank"] >= 1
    assert {phase for phase, *_ in found[0]["trace"]} == {"warmup", "lowrank"}
    assert len({ranks for *_, ranks in found[0]["trace"]}) > 2


def what_crosses(rank: int) -> tuple[int, int, list[int]]:
    replica, optimizer = attached(oialr(cutoff=0.2))
    sent, shares = [], []
    for step in range(6):
        before = replica.traffic.by_purpose.get("gradients", {}).get("slow_bytes", 0)
        train_step(replica, optimizer, step, rank)
        sent.append(replica.traffic.by_purpose["gradients"]["slow_bytes"] - before)
        shares.append(sum(p.numel() for p in replica.parameters() if p.requires_grad))
    return int(sent[0]), int(sent[-1]), shares


def test_only_what_is_trained_crosses_the_wire() -> None:
    for full, low, trained in gang.run(what_crosses, 2):
        assert full == 4 * trained[0]  # two workers: 2 (n-1)/n of it
        assert low == 4 * trained[-1] < 0.5 * full


def shared_out(rank: int) -> tuple[int, int]:
    replica, _ = attached(oialr(factor_at=0, updates_from=4, group_size=2))
    looked = replica.traffic.by_purpose["decomposition"]
    return int(looked["slow_bytes"]), int(looked["fast_bytes"])


def test_decompositions_are_shared_out_inside_a_node() -> None:
    for slow, fast in gang.run(shared_out, 2):
        assert slow == 0 and fast > 0


def turned_bases(rank: int) -> tuple[int, int]:
    """The second worker finds other signs, as other hardware might."""
    if rank == 1:
        honest = matrix.find_basis
        turn = lambda found: found._replace(u=-found.u, vt=-found.vt)  # noqa: E731
        matrix.find_basis = lambda *args, **settings: turn(honest(*args, **settings))
    replica, optimizer = attached(oialr(cutoff=0.2, layer_fraction=1.0))
    for step in range(8):
        train_step(replica, optimizer, step, rank)
    return values(replica), int(replica.traffic.by_purpose["decomposition"]["slow_bytes"])


def test_workers_whose_bases_differ_take_rank_zeros() -> None:
    (first, sent), (second, _) = gang.run(turned_bases, 2, fresh=True)
    assert first == second and sent > 0


def diverging(rank: int) -> str:
    replica, optimizer = attached(oialr())
    for step in range(3):
        train_step(replica, optimizer, step, rank)
    with torch.no_grad():
        replica.module[7].weight.fill_(float("nan"))
    with pytest.raises(thinwire.DivergedError) as caught:
        train_step(replica, optimizer, 3, rank)
    return str(caught.value)


def test_a_run_that_diverged_stops_all_workers_by_name() -> None:
    for said in gang.run(diverging, 2):
        assert "has values that are not finite: training diverged before it was decomposed" in said


# Leaving.


@pytest.mark.parametrize("steps", [0, 2, 5, STEPS])
def test_finishing_without_a_cut_changes_no_output(steps: int) -> None:
    replica, optimizer = attached(oialr(cutoff=0.2))
    for step in range(steps):
        train_step(replica, optimizer, step, 0)
    before = outputs(replica)
    small = replica.finish(cutoff=0.0)
    torch.testing.assert_close(outputs(replica), before, rtol=1e-4, atol=1e-5)
    assert not any(type(m).__module__.startswith("thinwire") for m in small.modules())
    told = replica.describe()
    assert told["parameters"] == sum(p.numel() for p in small.parameters())
    assert all(p.requires_grad for p in small.parameters()), "bases are trained again by whoever fine-tunes it"


def test_a_finished_model_is_smaller_and_says_what_is_not() -> None:
    replica, optimizer = attached(oialr(cutoff=0.3))
    for step in range(STEPS):
        train_step(replica, optimizer, step, 0)
    small = replica.finish()
    assert replica.describe()["parameters"] < replica.describe()["parameters_full"]
    balanced = small[7]
    torch.testing.assert_close(balanced[0].weight.norm(), balanced[1].weight.norm(), rtol=0.05, atol=0)
    assert {k["why"] for k in replica.describe()["kept_full"]} >= {"last layer"}


def test_finishing_cuts_no_layer_that_training_has_not_cut() -> None:
    def trained(steps: int, **changes: Any) -> Any:
        replica, optimizer = attached(oialr(cutoff=0.4, layer_fraction=0.3, max_shrink=1.0, **changes))
        for step in range(steps):
            train_step(replica, optimizer, step, 0)
        return replica

    before = trained(3)
    before.finish()
    assert before.found_ranks == {} and before.describe()["parameters"] == before.describe()["parameters_full"]
    entered = trained(5)
    entered.finish()
    assert entered.found_ranks == {"0": 6, "3": 16, "7": 24}
    updated = trained(8)
    updated.finish()
    assert updated.found_ranks["0"] == 6 and updated.found_ranks["3"] == 16 and updated.found_ranks["7"] < 24
    asked = trained(5)
    asked.finish(cutoff=0.4)
    assert asked.found_ranks["3"] < 16 and asked.found_ranks["7"] < 24


def test_state_is_kept_under_plain_names(tmp_path: Path) -> None:
    replica, optimizer = attached(
        oialr(factor_at=0, updates_from=4), lambda m: torch.optim.AdamW(m.named_parameters(), 1e-3)
    )
    train_step(replica, optimizer, 0, 0)
    assert {"7.weight_u", "7.weight_s", "7.weight_vt", "9.weight"} <= set(replica.state_dict())
    assert "7.weight_s" in optimizer.param_groups[0]["param_names"]
    replica.save(tmp_path / "save")
    other, again = attached(
        oialr(factor_at=0, updates_from=4), lambda m: torch.optim.AdamW(m.named_parameters(), 1e-3), small_model(3)
    )
    other.load(tmp_path / "save")
    assert values(other) == values(replica) and optimizer_values(again) == optimizer_values(optimizer)


class Attends(nn.Module):
    """Weights that other code reads: MultiheadAttention's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x[:, 0])
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def test_attention_and_a_scaler() -> None:
    torch.manual_seed(0)
    model = here(Attends())
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=256.0)
    replica = thinwire.attach(model, optimizer, oialr(cutoff=0.3, layer_fraction=1.0), scaler=scaler)
    for step in range(STEPS):
        x, y = batch(step, 0)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = F.cross_entropy(replica(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert replica.ranks()["attention.in_proj_weight"] <= 16
    before = outputs(replica)
    replica.finish(cutoff=0.0)
    torch.testing.assert_close(outputs(replica), before, rtol=1e-4, atol=1e-5)


def test_the_method_is_what_the_registry_says() -> None:
    replica, _ = attached(oialr())
    assert replica.describe()["method"] == "oialr"


# What once went wrong.


class OutOfOrder(nn.Module):
    """Registered in another order than used: the head first, and the middle ones crossed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head, self.first = nn.Linear(20, 5), nn.Linear(16, 20)
        self.third, self.second = nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.third):
            x = torch.tanh(layer(x.flatten(1)))
        return self.head(x)


@pytest.mark.parametrize(
    "config",
    [
        oialr(factor_at=0, updates_from=4, cutoff=0.3, layer_fraction=0.3),
        oialr(cutoff=0.3, layer_fraction=0.3),
        thinwire.AB.paper(total_steps=STEPS, warmup=0, every=8, rebound=4, cutoff=0.5),
    ],
    ids=["at once", "after a delay", "PaperAB"],
)
def test_layers_are_found_again_as_they_were_found(config: Any, tmp_path: Path) -> None:
    """Without a warm-up layers are factored before anyone knows in which order they are used."""
    replica, optimizer = attached(config, adamw, here(OutOfOrder(0)))
    for step in range(5):
        train_step(replica, optimizer, step, 0)
    replica.save(tmp_path / "save")
    other, again = attached(config, adamw, here(OutOfOrder(1)))
    other.load(tmp_path / "save")
    assert other.ranks() == replica.ranks() and torch.equal(outputs(other), outputs(replica))
    for step in range(5, STEPS):
        train_step(replica, optimizer, step, 0)
        train_step(other, again, step, 0)
    assert other.ranks() == replica.ranks() and values(other) == values(replica)


def test_a_save_of_another_model_is_refused(tmp_path: Path) -> None:
    replica, optimizer = attached(oialr())
    train_step(replica, optimizer, 0, 0)
    replica.save(tmp_path / "save")
    other, _ = attached(oialr(), adamw, here(OutOfOrder(0)))
    with pytest.raises(thinwire.ConfigError, match="the save is of another model: '0\\.bias' is in only"):
        other.load(tmp_path / "save")


def test_centered_rmsprop_finds_no_negative_variance() -> None:
    torch.manual_seed(0)
    mean = torch.ones(12, 5)
    state = {"square_avg": mean.square() + 1e-6, "grad_avg": mean.clone(), "step": torch.tensor(3.0)}
    found = find_basis(torch.randn(12, 5), 0.0)
    carried = middle_from_full(state, MatrixView((12, 5)), found.u.float(), found.vt.float())
    variance = carried["square_avg"] - carried["grad_avg"].square()
    assert bool((variance > -1e-5 * carried["square_avg"]).all())
    # With a variance of a tenth there is one of a tenth in the new bases too, as their squared columns add up to 1.
    wider = middle_from_full(
        state | {"square_avg": mean.square() + 0.1}, MatrixView((12, 5)), found.u.float(), found.vt.float()
    )
    torch.testing.assert_close(
        wider["square_avg"] - wider["grad_avg"].square(), torch.full((5, 5), 0.1), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("why", ["no gradient", "a fused optimizer skips"])
def test_a_matched_rate_leaves_alone_what_the_optimizer_left_alone(why: str) -> None:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.5, fused=True)
    scales = why != "no gradient"  # a scaler would have nothing to look at
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scales)
    replica = thinwire.attach(model, optimizer, oialr(factor_at=0, updates_from=4), scaler=scaler if scales else None)
    for step in range(3):
        loss = F.cross_entropy(replica(batch(step, 0)[0]), batch(step, 0)[1])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step:
            before = [s.detach().clone() for _, s, _ in bases(replica)]
            for p in replica.parameters():
                if p.grad is not None and why == "no gradient":
                    p.grad = None
                elif p.grad is not None:
                    p.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.equal(s, old) for (_, s, _), old in zip(bases(replica), before, strict=True))


def test_a_weight_of_zeros_keeps_its_rank() -> None:
    model = small_model()
    nn.init.zeros_(model[7].weight)
    replica, optimizer = attached(oialr(factor_at=0, updates_from=4, cutoff=0.0), adamw, model)
    assert replica.ranks()["7"] == 24
    for step in range(8):
        train_step(replica, optimizer, step, 0)
    assert replica.ranks()["7"] == 24 and replica._method.shape.updates == 1


def test_a_model_amid_low_rank_can_be_compressed() -> None:
    replica, optimizer = attached(oialr(cutoff=0.05))
    for step in range(8):
        train_step(replica, optimizer, step, 0)
    full = replica.describe()["parameters_full"]
    found = thinwire.compress(replica.module, cutoff=0.01, keep_first=False)
    assert found.parameters_after <= full
    assert not {f"{label}.weight" for label in found.ranks} & {kept.name for kept in found.kept}
    half = thinwire.compress(replica.module, cutoff=0.5, keep_first=False)
    assert dict(half.sizes)[0.5] == half.parameters_after


def test_closures_train_alike() -> None:
    """The optimizer asks for gradients only in the closure, when S has been noted already."""
    ends = []
    for way in ("plain", "zeroed inside", "zeroed after"):
        replica, optimizer = attached(oialr(cutoff=0.0))
        for step in range(12):
            x, y = batch(step, 0)

            def closure(x: torch.Tensor = x, y: torch.Tensor = y, replica: Any = replica) -> torch.Tensor:
                if way == "zeroed inside":  # noqa: B023 - called at once
                    optimizer.zero_grad()  # noqa: B023
                loss = F.cross_entropy(replica(x), y)
                loss.backward()
                return loss

            if way == "plain":
                closure()
                optimizer.step()
            else:
                optimizer.step(closure)
            if way != "zeroed inside":
                optimizer.zero_grad()
        ends.append(values(replica))
    assert len(set(ends)) == 1


@pytest.mark.parametrize("config", [oialr(), thinwire.AB.paper(total_steps=STEPS, warmup=2, every=8, cutoff=0.5)])
def test_an_order_that_nobody_knew_yet_is_learnt_after_a_load(config: Any, tmp_path: Path) -> None:
    replica, optimizer = attached(config, adamw, here(OutOfOrder(0)))
    replica.save(tmp_path / "save")
    for step in range(6):
        train_step(replica, optimizer, step, 0)
    first = replica.ranks()
    replica.load(tmp_path / "save")
    for step in range(6):
        train_step(replica, optimizer, step, 0)
    assert replica.ranks() == first and "head" not in first


def test_layers_kept_full_amid_low_rank_are_counted_and_told() -> None:
    replica, optimizer = attached(oialr(cutoff=0.05))
    for step in range(8):
        train_step(replica, optimizer, step, 0)
    for settings in ({}, {"keep": ("3",)}, {"keep_first": False}):
        found = thinwire.compress(replica.module, cutoff=0.5, **settings)
        assert dict(found.sizes)[0.5] == found.parameters_after
        told = {kept.name for kept in found.kept}
        for label in ("0", "3", "7"):
            assert (label in found.ranks) != (f"{label}.weight" in told)
    most = found.parameters_before / thinwire.compress(replica.module, rank=1).parameters_after
    assert thinwire.compress(replica.module, target=0.99 * most).ratio >= 0.99 * most
