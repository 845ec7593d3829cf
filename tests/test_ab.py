"""AB training in one process: phases, sides, shapes, moments, targets, and loops as users write them.

`test_ab_groups.py` has what takes several workers.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import small
import thinwire
from device import here
from thinwire import AB, ConfigError, Nesterov, Radial, ThinwireError
from thinwire.exchange.parameters import Round
from thinwire.factor.matrix import decompose, view_of
from thinwire.factor.moments import recut_factors

STEPS = 17


def ab(**fields: Any) -> AB:
    """Warm-up 2, averages at 5, 8, 11, …; factors from 5 on, cut again at 11 and 17; random weights are flat."""
    cycle = {"total_steps": 20, "warmup": 2, "every": 3, "factor_at": 5, "redecompose": 2, "cutoff": 0.6}
    return AB(**{**cycle, **fields})


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def factors(model: nn.Module, side: str) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if name.endswith(f"weight_{side}")]


def run(config: AB, steps: int = STEPS, model: nn.Module | None = None, optimizer: Any = None) -> Any:
    """A replica after so many steps, alone."""
    model = small.net() if model is None else here(model)
    optimizer = (optimizer or adamw)(model)
    replica = thinwire.attach(model, optimizer, config)
    for _ in small.walk(replica, optimizer, 0, steps):
        pass
    return replica


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# Which factor is trained, and what a lone worker does.


def state_bits(optimizer: Any, parameters: list[nn.Parameter]) -> str:
    return small.bits(*(optimizer.state[p][name] for p in parameters for name in ("exp_avg", "exp_avg_sq", "step")))


@pytest.mark.parametrize("train", ["alternate", "split", "both"])
def test_sides_take_turns_and_a_paused_factor_keeps_its_values_and_its_state(train: str) -> None:
    model = small.net()
    optimizer = adamw(model)
    replica = thinwire.attach(model, optimizer, ab(train=train))
    moved, kept = [], True
    for number in range(STEPS):
        before = {side: small.bits(*factors(model, side)) for side in "ab"}
        states = {side: state_bits(optimizer, factors(model, side)) for side in "ab"}
        decompositions = replica.decompositions
        small.step(replica, optimizer, 0, number)
        if replica.decompositions == decompositions and replica.phase == "factored":
            changed = "".join(side for side in "ab" if small.bits(*factors(model, side)) != before[side])
            moved.append(changed)
            kept = kept and all(state_bits(optimizer, factors(model, s)) == states[s] for s in "ab" if s not in changed)
    # The step that cuts again, the 11th, is left out; so is the 17th.
    assert moved == (["ab"] * 10 if train == "both" else ["a"] * 3 + ["b"] * 2 + ["a"] * 3 + ["b"] * 2) and kept


def test_alone_wire_and_outer_do_nothing_and_nothing_is_sent() -> None:
    found = set()
    for wire, outer, offload in (
        ("int2", Nesterov(1.0, 0.5), False),
        ("fp32", None, True),
        ("topk:0.1", Radial(), False),
    ):
        replica = run(ab(wire=wire, warmup_wire=wire, outer=outer, offload=offload))
        assert replica.traffic.slow_bytes == replica.traffic.fast_bytes == 0
        found.add(small.model_bits(replica.module))
    assert len(found) == 1


def test_ranks_only_fall_and_a_size_never_grows() -> None:
    model = small.net()
    optimizer = adamw(model)
    replica = thinwire.attach(model, optimizer, ab(redecompose=1))
    seen = []
    for _ in small.walk(replica, optimizer, 0, STEPS):
        seen.append((replica.ranks(), size(model)))
    whole = [s for _, s in seen]
    assert whole == sorted(whole, reverse=True) and replica.decompositions == 5
    for (before, _), (after, _) in itertools.pairwise(seen[4:]):
        assert before.keys() <= after.keys() and all(after[key] <= before[key] for key in before)


def test_nothing_stays_frozen_in_a_model_that_was_released_or_finished() -> None:
    replica = run(ab(), 7)
    replica.detach()
    models = [replica.module, *(run(ab(), 7).finish(cutoff) for cutoff in (None, 0.0, 0.3))]
    assert all(p.requires_grad for model in models for p in model.parameters())


# When weights become factors.


def test_factors_come_at_the_end_of_the_warm_up_at_a_step_or_not_at_all() -> None:
    assert run(ab(warmup=0, factor_at=0), 0).phase == "factored"
    assert [run(ab(factor_at=2), n).phase for n in (1, 2)] == ["warmup", "factored"]
    assert [run(ab(factor_at=6), n).phase for n in (7, 8)] == ["local", "factored"]
    replica = run(ab(factor_at=None))
    full = size(replica.module)
    assert replica.phase == "local" and size(replica.finish()) == full


def test_a_loop_that_ends_before_factors_finishes_at_full_rank() -> None:
    replica = run(ab(), 4)
    assert size(replica.finish()) == size(small.net()) and not replica.finished_ranks


def test_the_user_says_when() -> None:
    model = small.net()
    optimizer = adamw(model)
    replica = thinwire.attach(model, optimizer, AB(warmup=2, every=3, factor_at=None, cutoff=0.6))
    phases = []
    for number in small.walk(replica, optimizer, 0, 12):
        if number in (5, 6, 9):  # twice, and again when there are factors
            replica.factor_now()
        phases.append(replica.phase)
    assert phases == ["warmup"] + ["local"] * 6 + ["factored"] * 5
    model = small.mlp()
    with pytest.raises(ThinwireError, match=r"factor_now\(\) is for thinwire.AB, not for LocalSGD"):
        thinwire.attach(model, small.sgd(model), thinwire.LocalSGD()).factor_now()


def test_gradients_of_weights_that_become_factors_hold_no_memory() -> None:
    model = small.net()
    optimizer = adamw(model)
    replica = thinwire.attach(model, optimizer, ab(warmup=2, factor_at=4, cutoff=0.6))
    before = dict(model.named_parameters())
    while not replica.ranks():
        small.step(replica, optimizer, 0, replica.step)
    gone = {name: p for name, p in before.items() if name not in dict(model.named_parameters())}
    assert gone and all(p.grad is None for p in gone.values())


def test_nothing_to_factor_is_said_at_once_or_when_the_user_asks() -> None:
    def one_matrix() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))

    for config in (ab(), small.ab(), thinwire.OIALR(total_steps=20)):
        with pytest.raises(ConfigError, match="nothing to factor in this model"):
            run(config, 0, one_matrix())
    replica = run(ab(factor_at=None), 6, one_matrix())
    with pytest.raises(ConfigError, match="nothing to factor in this model"):
        replica.factor_now()


def test_without_total_steps_lengths_are_whole() -> None:
    assert run(AB(warmup=2, every=3, factor_at=5, cutoff=0.6), 6).phase == "factored"
    with pytest.raises(
        ConfigError, match=r"^`warmup`=0.05 is a fraction of `total_steps`, which is not given; give it"
    ):
        AB()
    with pytest.raises(ConfigError, match=r"^`factor_at`=0.75 is a fraction of `total_steps`, which is not given"):
        AB(warmup=2)


# Models.


class Tied(nn.Module):
    """The input's weight is the output's too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(64, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.last = nn.Linear(32, 64, bias=False)
        self.again = nn.Linear(32, 32, bias=False)
        self.again.weight = self.middle.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(torch.tanh(self.middle(torch.tanh(self.first(x.flatten(1))))))
        return self.last(x)[:, :10]


def bare() -> nn.Module:
    """Matrices and nothing else."""
    torch.manual_seed(0)
    sizes = (64, 32, 32, 10)
    layers = [nn.Linear(m, n, bias=False) for m, n in itertools.pairwise(sizes)]
    return nn.Sequential(nn.Flatten(), layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def test_models_without_anything_but_factors_train() -> None:
    config = ab(keep_first=False, keep_last=False, cutoff=0.9)
    replica = run(config, STEPS, bare())
    assert all(p.dim() > 1 for p in replica.parameters()) and len(replica.ranks()) == 3
    assert replica.finish()(small.batch(0, 0)[0]).isfinite().all()


def test_tied_weights_stay_tied_or_full() -> None:
    torch.manual_seed(0)
    model = Tied()
    replica = run(ab(keep_first=False, keep_last=False, cutoff=0.7), STEPS, model)
    assert torch.equal(model.middle.weight, model.again.weight) and replica.ranks()
    assert replica.finish()(small.batch(0, 0)[0]).isfinite().all()


def test_a_layer_of_zeros_does_not_spoil_the_run() -> None:
    """Its singular values are zero, and nothing may be divided by them."""
    for config in (ab(redecompose=1, match_rate=True), ab(redecompose=1, train="both", factor_at=2)):
        replica = run(
            config, STEPS, model=_zeroed(), optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.0, momentum=0.9)
        )
        assert all(p.isfinite().all() for p in replica.parameters())
        adam = run(config, STEPS, model=_zeroed())
        assert all(p.isfinite().all() for p in adam.parameters())


def test_a_layer_that_begins_with_zeros_stays_full_until_it_has_learned_something() -> None:
    """Both of its factors would be zero, and so would be their gradients."""
    model = _zeroed()
    replica = run(ab(warmup=0, factor_at=0, redecompose=1), 0, model)
    assert list(replica.ranks()) == ["3"]
    model = _zeroed()
    replica = run(ab(warmup=0, factor_at=0, redecompose=1), 4, model)
    assert list(replica.ranks()) == ["3", "5"] and model[5].weight.detach().any()


def _zeroed() -> nn.Module:
    model = small.mlp(smooth=True)
    with torch.no_grad():
        model[5].weight.zero_()
    return model


# Targets.


@pytest.mark.parametrize("target", [1.2, 1.5])
def test_a_target_is_reached_and_no_rank_falls_below_1(target: float) -> None:
    model = small.mlp()
    full = size(model)
    optimizer = adamw(model)
    replica = thinwire.attach(model, optimizer, ab(target=target, redecompose=1))
    sizes = []
    for _ in small.walk(replica, optimizer, 0, STEPS):
        sizes.append(size(model))
    assert sizes == sorted(sizes, reverse=True) and full / sizes[4] >= target
    finished = replica.finish()
    assert full / size(finished) >= target
    assert all(rank >= 1 for rank in replica.finished_ranks.values())
    # Not far below it: one rank less in every layer would be.
    assert full / size(finished) < 1.15 * target


def test_weights_whose_ranks_are_too_high_stay_local_and_are_tried_again() -> None:
    model = small.mlp()
    optimizer = small.sgd(model)
    config = thinwire.AB(total_steps=40, warmup=2, every=3, factor_at=5, redecompose=2, cutoff=0.02)
    replica = thinwire.attach(model, optimizer, config)
    phases = [replica.phase for _ in small.walk(replica, optimizer, 0, 20)]
    assert set(phases) == {"warmup", "local"} and replica.decompositions > 1 and not replica.ranks()


def test_a_target_out_of_reach_says_the_largest() -> None:
    with pytest.raises(ConfigError) as caught:
        run(ab(target=50), 0, small.mlp())
    message = str(caught.value)
    assert message.startswith("`target`=50 cannot be reached") and "use at most that" in message
    most = float(message.split("the model is ")[1].split(" times")[0])
    assert full_at_rank_1(most) and not reaches(most + 0.02)


def full_at_rank_1(target: float) -> bool:
    replica = run(ab(target=target), 6, small.mlp())
    return set(replica.ranks().values()) == {1}


def reaches(target: float) -> bool:
    try:
        run(ab(target=target), 0, small.mlp())
    except ConfigError:
        return False
    return True


class HeadFirst(nn.Module):
    """Registered in another order than used: what is first and last is known after a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.a, self.stem = nn.Linear(48, 10), nn.Linear(48, 48), nn.Linear(64, 48)
        self.b = nn.Linear(48, 8)
        self.c = nn.Linear(8, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(torch.tanh(self.stem(x.flatten(1)))))
        return self.head(torch.tanh(self.c(self.b(x))))


def test_a_target_that_the_order_of_use_puts_out_of_reach_is_refused_at_the_first_step() -> None:
    """Not when most of the run is over."""
    model = here(HeadFirst())
    optimizer = adamw(model)
    replica = thinwire.attach(model, optimizer, ab(target=3.0))
    with pytest.raises(ConfigError, match=r"`target`=3\.0 cannot be reached"):
        small.step(replica, optimizer, 0, 0)


def test_a_target_is_checked_when_the_user_asks_for_factors() -> None:
    replica = run(ab(factor_at=None, target=50), 6, small.mlp())
    with pytest.raises(ConfigError, match="`target`=50 cannot be reached"):
        replica.factor_now()


# Moments.


@pytest.mark.parametrize("shape", [(12, 7), (7, 12)], ids=["tall", "wide"])
@pytest.mark.parametrize("rank", [5, 3], ids=["not cut", "cut"])
@pytest.mark.parametrize("side", [0, 1], ids=["A", "B"])
def test_recut_moments_are_those_of_the_gradients_there_would_have_been(
    shape: tuple[int, int], rank: int, side: int
) -> None:
    """With one factor frozen and A' B' the same product or its best part: momentum of SGD over ten gradients of W."""
    torch.manual_seed(0)
    view = view_of(torch.Size(shape))
    weight = view.to_matrix(torch.randn(shape)).double()
    a, b, _ = decompose(weight, 0.0, rank=5)
    mix = torch.randn(5, 5, dtype=torch.float64)
    a, b = a @ mix, torch.linalg.solve(mix, b)  # training has turned them: any factors of the same product
    new = decompose(a @ b, 0.0, rank=rank)[:2]
    gradients = [torch.randn_like(weight) for _ in range(10)]

    def momentum(a: Tensor, b: Tensor) -> Tensor:
        p = nn.Parameter(torch.zeros_like((a, b)[side]))
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        for g in gradients:
            p.grad = g @ b.t() if side == 0 else a.t() @ g
            optimizer.step()
        return optimizer.state[p]["momentum_buffer"]

    states: list[dict[str, Any]] = [{}, {}]
    states[side] = {"momentum_buffer": momentum(a, b)}
    found = recut_factors(states, (a, b), new)
    assert found[1 - side] == {}
    assert torch.allclose(found[side]["momentum_buffer"], momentum(*new), rtol=1e-5, atol=1e-5)


def test_moments_of_zero_weights_stay_finite() -> None:
    a, b = torch.zeros(8, 2), torch.zeros(2, 6)
    states = [{"exp_avg": torch.ones_like(t), "exp_avg_sq": torch.ones_like(t)} for t in (a, b)]
    for state in recut_factors(states, (a, b), (a[:, :1], b[:1])):
        assert all(t.isfinite().all() for t in state.values())


def test_one_factors_moments_survive_a_cut_that_the_other_had_none_for() -> None:
    """From the first step on factors: A has been trained when it is cut again, B not yet."""
    model = small.mlp()
    optimizer = adamw(model)
    replica = thinwire.attach(model, optimizer, ab(warmup=0, factor_at=0, redecompose=1, cutoff=0.6))
    for _ in small.walk(replica, optimizer, 0, 3):
        pass
    assert replica.decompositions == 2
    assert all(
        float(optimizer.state[p]["step"]) == 3 and optimizer.state[p]["exp_avg"].any() for p in factors(model, "a")
    )


# How long rounds are.


class Rates:
    """A stand-in for optimizers with one learning rate, and for a world of one."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    @property
    def rates(self) -> list[float]:
        return [self.rate]

    def all_gather_scalars(self, values: list[float], purpose: str) -> list[list[float]]:
        return [values]


def periods(rates: list[float], until: int | None = None, **fields: Any) -> list[int]:
    """The lengths of rounds that begin at these rates, one after the other."""
    stand_in = Rates(0.0)
    each, found, at = Round(thinwire.LocalSGD(**fields), stand_in, stand_in), [], 0
    for rate in rates:
        stand_in.rate = rate
        each.begin(at, until)
        found.append(each.period)
        at += each.period
    return found


def test_rounds_grow_with_the_square_of_the_rate_and_never_divide_by_zero() -> None:
    assert periods([1.0, 0.9, 0.5, 0.1, 0.0], every=4, every_max=20) == [4, 4, 16, 20, 20]
    assert periods([1.0, 1e-300], every=4, every_max=20) == [4, 20]
    assert periods([1.0, 0.1, 0.1], until=11, every=4, every_max=20) == [4, 7, 20], "never past `until`"
    assert periods([1.0, 0.1], until=6, every=4, every_max=20) == [4, 4], "nor shorter than `every`"
    assert periods([0.1, 0.0], every=4, every_max=None) == [4, 4]


def test_a_rate_that_warms_up_from_zero_does_not_begin_with_the_longest_round() -> None:
    assert periods([0.0, 0.5, 1.0], every=4, every_max=20) == [4, 4, 4]


def test_growing_rounds_do_not_pass_over_the_step_at_which_weights_become_factors() -> None:
    model = small.net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.0, 1 - s / 12))
    replica = thinwire.attach(model, optimizer, ab(total_steps=40, factor_at=13, every_max=30))
    phases = []
    for _ in small.walk(replica, optimizer, 0, 20):
        schedule.step()
        phases.append(replica.phase)
    assert phases.index("factored") == 12


# Loops as users write them.


def loop(replica: Any, optimizers: list[Any], number: int, how: str) -> None:
    x, y = small.batch(0, number, 8)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=how != "zeros")
    if how in ("accumulate", "no_sync"):
        half = F.cross_entropy(replica(x[:4]), y[:4]) / 2
        if how == "no_sync":
            with replica.no_sync():
                (F.cross_entropy(replica(x[:4]), y[:4]) / 2).backward()
        else:
            half.backward()
        (F.cross_entropy(replica(x[4:]), y[4:]) / 2).backward()
    else:
        F.cross_entropy(replica(x), y).backward()
    for optimizer in optimizers:
        optimizer.step()


def looped(how: str, make: Callable[[nn.Module], list[Any]] | None = None, **more: Any) -> list[Tensor]:
    model = small.mlp(smooth=True)
    optimizers = make(model) if make else [torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)]
    replica = thinwire.attach(model, optimizers, ab(**more))
    for number in range(STEPS):
        loop(replica, optimizers, number, how)
    assert replica.ranks()
    return [p.detach().clone() for p in replica.finish().parameters()]


def close(left: list[Tensor], right: list[Tensor], margin: float = 1e-5) -> bool:
    return all(a.shape == b.shape and torch.allclose(a, b, atol=margin) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("how", ["zeros", "accumulate", "no_sync"])
def test_ways_of_zeroing_and_accumulating_train_alike(how: str) -> None:
    assert close(looped("plain"), looped(how))


def kinds_of_adamw(model: nn.Module, **fields: Any) -> list[Any]:
    return [torch.optim.AdamW(model.parameters(), lr=3e-3, **fields)]


def two_groups(model: nn.Module) -> list[Any]:
    parts = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    return [torch.optim.AdamW([{"params": part, "lr": 3e-3} for part in parts])]


def two_optimizers(model: nn.Module) -> list[Any]:
    parts = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    return [torch.optim.AdamW(part, lr=3e-3) for part in parts]


@pytest.mark.parametrize("make", [two_groups, two_optimizers])
def test_groups_of_parameters_and_several_optimizers_train_as_one(make: Any) -> None:
    assert close(looped("plain", kinds_of_adamw), looped("plain", make))


def test_implementations_of_adamw_train_alike() -> None:
    found = [
        looped("plain", lambda m, way=way: kinds_of_adamw(m, **way))
        for way in ({"foreach": False}, {"foreach": True}, {"fused": True})
    ]
    assert close(found[0], found[1]) and close(found[0], found[2], 1e-3)


def test_matched_rates_move_the_product_as_far_as_the_weight_moved() -> None:
    """Adam's first updates after factoring: with and without scaling, against one of the full weight."""
    far = {}
    for match in (False, True):
        model = small.mlp()
        optimizer = adamw(model)
        replica = thinwire.attach(model, optimizer, ab(match_rate=match))
        moved = []
        for number in range(6):
            before = model[3].weight.detach().clone()
            small.step(replica, optimizer, 0, number)
            moved.append(float((model[3].weight.detach() - before).norm()))
        far[match] = moved[5] / moved[3]
    assert abs(math.log(far[True])) < math.log(2), far
    assert abs(math.log(far[True])) <= abs(math.log(far[False])), far


def test_an_ema_follows_shapes() -> None:
    model = small.mlp()
    optimizer = adamw(model)
    replica = thinwire.attach(model, optimizer, ab())
    ema = thinwire.EMA(replica, 0.8)
    for _ in small.walk(replica, optimizer, 0, STEPS):
        ema.update_parameters(replica)
    finished = replica.finish()
    averaged = ema.finish()
    assert size(averaged) == size(finished) and averaged(small.batch(0, 0)[0]).isfinite().all()


@pytest.mark.parametrize(("groups", "momentum"), [(1, 0.0), (2, 0.293), (4, 0.5), (16, 0.75)])
def test_an_outer_momentum_that_is_not_given_follows_the_number_of_groups(groups: int, momentum: float) -> None:
    assert Nesterov(1.0).among(groups).momentum == pytest.approx(momentum, abs=1e-3)
    assert Nesterov(1.0, 0.9).among(groups).momentum == 0.9
