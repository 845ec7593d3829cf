"""What Adam divides by while groups train apart, and rows of embeddings that not all groups have seen."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

import gang
import small
import thinwire
from selection import first_of
from thinwire import AB, ConfigError, DiLoCo, LocalSGD
from thinwire.comm.collectives import ProcessGroupWire
from thinwire.comm.ledger import Ledger
from thinwire.comm.topology import arrange
from thinwire.exchange.parts import MethodContext
from thinwire.exchange.second_moment import SecondMoment
from thinwire.factor.optimizers import Optimizers
from thinwire.plan import ranks as predicted
from thinwire.plan.simulate import simulate
from thinwire.plan.workload import Workload

WORDS, LENGTH = 40, 6
KINDS = ("group", "estimate", "shared")


class Words(nn.Module):
    """A word after each word: an embedding of words and one of places, and a head that may share its weight."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Embedding(LENGTH, 16)
        self.middle, self.head = nn.Linear(16, 16), nn.Linear(16, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(torch.tanh(self.middle(self.words(input=x) + self.places(places))))


def text(rank: int, step: int, size: int = 4) -> Tensor:
    """Frequent words and rare ones."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.rand(size, LENGTH + 1, generator=generator).pow(3).mul(WORDS).long()


def read(replica: Any, optimizer: Optimizer, rank: int, steps: range) -> None:
    for number in steps:
        x = text(rank, number)
        loss = F.cross_entropy(replica(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def recognise(replica: Any, optimizer: Optimizer, rank: int, steps: range) -> None:
    """Which quarter of an image is brightest: all workers' gradients have something in common, and no row is rare."""
    for number in steps:
        x = small.batch(rank, number, 32)[0]
        loss = F.cross_entropy(replica(x), x.view(-1, 4, 16).sum(2).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# The estimate.


def corrected(optimizer: Optimizer, share: float) -> SecondMoment:
    """With hooks on an optimizer, as a replica would set them."""
    context = MethodContext(nn.Identity(), Optimizers(optimizer), None)  # type: ignore[arg-type]
    found = SecondMoment(context, "estimate", share, lambda: True)
    found.updates = 10_000  # nothing is shared any more
    optimizer.register_step_pre_hook(lambda o, *_: context.before_update[0](o))
    optimizer.register_step_post_hook(lambda o, *_: context.after_update[0](o))
    return found


def by_hand(p: Tensor, grads: list[Tensor], share: float, *, amsgrad: bool, decay: float) -> Tensor:
    """AdamW that divides by what all-reduce would have."""
    p, m, v, most = p.clone(), torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        most = torch.maximum(most, v)
        first, second = m / (1 - 0.9**t), (most if amsgrad else v) / (1 - 0.95**t)
        left = min(0.95, 0.1 * (1 + 0.9**t) / (1.9 * (1 - 0.9**t)))
        wanted = second - (1 - share) * (second - first**2) / (1 - left)
        wanted = torch.minimum(torch.maximum(wanted, share**2 * second), second)
        p = p * (1 - 0.01 * decay) - 0.01 * first / (wanted.sqrt() + 1e-8)
    return p


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize(
    "how", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}, {"capturable": False, "maximize": True}]
)
def test_updates_are_those_of_adam_with_the_estimate(kind: type, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    grads = list(torch.randn(12, 5, 7) + 0.3)
    p = nn.Parameter(torch.randn(5, 7))
    decay = 0.1 if kind is AdamW else 0.0
    before, optimizer = p.detach().clone(), kind([p], lr=0.01, betas=(0.9, 0.95), weight_decay=decay, **how)
    corrected(optimizer, 0.25)
    for grad in grads:
        p.grad = grad.clone()
        optimizer.step()
    signed = [-grad for grad in grads] if how.get("maximize") else grads
    wanted = by_hand(before, signed, 0.25, amsgrad=bool(how.get("amsgrad")), decay=decay)
    assert torch.allclose(p, wanted, atol=2e-6)


@pytest.mark.parametrize("at_once", [1, 40, 1000])
def test_updates_do_not_depend_on_how_many_are_corrected_at_once(at_once: int, monkeypatch: Any) -> None:
    """Some parameters in half precision, whose steps Adam counts alike."""
    monkeypatch.setattr("thinwire.exchange.second_moment._AT_ONCE", at_once)
    torch.manual_seed(0)
    values, grads = torch.randn(4, 5, 7), torch.randn(12, 4, 5, 7) + 0.3
    kinds = (torch.float32, torch.bfloat16, torch.float32, torch.float64)
    ways = [nn.Parameter(value.to(kind, copy=True)) for value, kind in zip(values, kinds, strict=True)]
    optimizer = AdamW(ways, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    corrected(optimizer, 0.25)
    for grad in grads:
        for p, own in zip(ways, grad, strict=True):
            p.grad = own.to(p.dtype)
        optimizer.step()
    for i, p in enumerate(ways):
        wanted = by_hand(values[i], list(grads[:, i]), 0.25, amsgrad=False, decay=0.1)
        assert torch.allclose(p.float(), wanted, atol=0.12 if p.dtype is torch.bfloat16 else 2e-6)


def test_a_parameter_without_a_gradient_and_an_update_that_a_scaler_skipped_stay() -> None:
    used, idle = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    optimizer = Adam([used, idle], lr=0.1, fused=True)
    corrected(optimizer, 0.25)
    for number in range(4):
        used.grad = torch.randn(3, 3)
        idle.grad = torch.randn(3, 3) if number == 0 else None
        optimizer.step()
    values = used.detach().clone(), idle.detach().clone()
    assert not torch.equal(values[0], values[1])
    used.grad, idle.grad = torch.full((3, 3), torch.inf), None
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)  # as GradScaler does
    optimizer.step()
    assert torch.equal(used, values[0]) and torch.equal(idle, values[1])


@pytest.mark.parametrize("groups", first_of([4, 2, 16]))
def test_the_mean_of_groups_moves_as_far_as_all_reduce(groups: int) -> None:
    """Where gradients are mostly noise, a group's own second moments make steps too short by the root of the groups."""

    def walked(mode: str) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        ways = [nn.Parameter(torch.zeros(4000)) for _ in range(groups if mode != "all-reduce" else 1)]
        optimizers = [Adam([way], lr=1e-3, betas=(0.9, 0.95)) for way in ways]
        if mode == "estimate":
            for optimizer in optimizers:
                corrected(optimizer, 1 / groups)
        for _ in range(150):
            grads = 0.1 + torch.randn(groups, 4000, generator=generator)
            for i, optimizer in enumerate(optimizers):
                ways[i].grad = grads[i] if mode != "all-reduce" else grads.mean(0)
                optimizer.step()
        return torch.stack([way.detach() for way in ways]).mean(0)

    far = {mode: float(walked(mode).mean()) for mode in ("all-reduce", "group", "estimate")}
    assert far["group"] / far["all-reduce"] == pytest.approx(groups**-0.5, rel=0.25)
    assert far["estimate"] / far["all-reduce"] == pytest.approx(1, abs=0.2)


def test_second_moments_of_the_world_become_those_of_a_group() -> None:
    """At the end of a warm-up; or groups would divide by a root that is too small, for as long as Adam remembers."""
    torch.manual_seed(0)
    grads = torch.randn(4, 400, 3000) + 0.1
    found = {}
    for name, seen in {"world": grads.mean(0), "group": grads[0]}.items():
        p = nn.Parameter(torch.zeros(3000))
        optimizer = Adam([p], betas=(0.9, 0.95))
        for grad in seen:
            p.grad = grad
            optimizer.step()
        found[name] = optimizer
    second = corrected(found["world"], 0.25)
    second.separate()
    mean = [float(next(iter(o.state.values()))["exp_avg_sq"].mean()) for o in found.values()]
    assert mean[0] == pytest.approx(mean[1], rel=0.05)


# Against all-reduce, with real workers.


def walked(rank: int, config: Any, words: bool, tied: bool = False) -> Tensor:
    """How far a run comes, as one vector."""
    model: nn.Module = Words(tied=tied) if words else small.mlp()
    optimizer = AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    replica = thinwire.attach(model, optimizer, config)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    (read if words else recognise)(replica, optimizer, rank, range(30))
    return nn.utils.parameters_to_vector(replica.finish().parameters()).detach() - before


def distances(rank: int, tied: bool) -> dict[str, float]:
    """How far runs that average after every step are from all-reduce, over how far all-reduce came."""
    configs = {kind: LocalSGD(every=1, group_size=1, second_moment=kind, moments_wire="fp32") for kind in KINDS}
    for code in ("int8", "int2") if tied else ("int2",):
        configs[code] = LocalSGD(every=1, group_size=1, second_moment="shared", moments_wire=code)
    found = {}
    for words in (True, False) if not tied else (True,):
        usual = walked(rank, thinwire.AllReduce(), words, tied)
        for name in configs if words else ("group", "estimate"):
            off = walked(rank, configs[name], words, tied) - usual
            found[f"{'words' if words else 'images'} {name}"] = float(off.norm() / usual.norm())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_averages_after_every_step_follow_all_reduce(tied: bool) -> None:
    for found in gang.run(distances, 4, tied):
        assert found["words shared"] < min(0.12, 0.4 * found["words group"])
        assert found["words estimate"] < 0.5 * found["words group"]
        assert not tied or found["words int8"] < 0.4 * found["words group"]
        assert found["words int2"] < 0.75 * found["words group"]
        if not tied:
            assert found["images estimate"] < min(0.25, 0.75 * found["images group"])


# Rows.


def one_sided(rank: int, tied: bool, group_size: int) -> dict[str, Any]:
    """Words 0 to 3 are seen by the first group alone, 4 to 7 by the second, 8 by both, 9 by nobody."""
    model = Words(tied=tied)
    optimizer = SGD(model.parameters(), 0.5)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=2, rows="seen", group_size=group_size))
    before = model.words.weight.detach().clone()
    group = rank // group_size
    batches = [torch.tensor([[4 * group, 4 * group + 1, 8, 8, 4 * group + 2, 4 * group + 3, 8]])] * 2
    own = before
    for number, x in enumerate(batches):
        if number == 1:
            alone = Words(tied=tied)  # what this group alone would have come to
            alone.load_state_dict(model.state_dict())
            F.cross_entropy(alone(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
            own = alone.words.weight.detach() - 0.5 * alone.words.weight.grad
        loss = F.cross_entropy(replica(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        replica.eval()(batches[0][:, :-1])  # is not counted
    replica.finish()
    return {"before": before, "own": own, "after": model.words.weight.detach().clone()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("workers", [2, 4])
def test_a_row_that_one_group_saw_is_that_groups(tied: bool, workers: int) -> None:
    group_size = workers // 2
    everyone = gang.run(one_sided, workers, tied, group_size)
    first, second = everyone[0], everyone[-1]
    assert torch.equal(first["after"], second["after"])
    assert torch.allclose(first["after"][:4], first["own"][:4], atol=1e-6)
    assert torch.allclose(first["after"][4:8], second["own"][4:8], atol=1e-6)
    assert torch.allclose(first["after"][8], (first["own"][8] + second["own"][8]) / 2, atol=1e-6)
    nobody = (first["own"][9:] + second["own"][9:]) / 2
    assert torch.allclose(first["after"][9:], nobody, atol=1e-6)
    assert tied or torch.equal(first["after"][9:], first["before"][9:])


def in_turns(rank: int) -> list[list[float]]:
    """Counts of the words' embedding after each step, where it and the rest of the model are sent in turns."""
    model = Words()
    optimizer = SGD(model.parameters(), 0.1)
    config = DiLoCo(every=4, fragments=2, rows="seen", group_size=1)
    replica = thinwire.attach(model, optimizer, config)
    rows, found = replica._method.exchanges[0].scales.rows, []
    for number in range(8):
        read(replica, optimizer, rank, range(number, number + 1))
        found.append([float(rows.counts[name].sum()) for name in ("words", "places")])
    return found


def test_rows_are_counted_until_their_own_weight_is_sent() -> None:
    for found in gang.run(in_turns, 2):
        words = [count / (4 * LENGTH) for count, _ in found]
        assert sorted(words[:4]) == [0, 1, 2, 3] or sorted(words[4:]) == [0, 1, 2, 3], words


@pytest.mark.parametrize("kind", KINDS)
def test_alone_nothing_is_corrected_bit_for_bit(kind: str) -> None:
    ends = []
    for config in (None, LocalSGD(every=2, warmup=1, second_moment=kind, rows="mean" if kind == "shared" else "seen")):
        model = Words()
        optimizer = AdamW(model.parameters(), 3e-3)
        trained = model if config is None else thinwire.attach(model, optimizer, config)
        read(trained, optimizer, 0, range(7))
        ends.append(small.model_bits(model) + small.optimizer_bits(optimizer))
    assert ends[0] == ends[1]


# Saves, plans, codes, bad input.

WAYS: dict[str, Any] = {
    "estimate": DiLoCo(every=3, warmup=2, second_moment="estimate", group_size=1),
    "shared": LocalSGD(every=3, warmup=2, wire="int4", second_moment="shared", group_size=1),
    "rows": DiLoCo(every=4, warmup=2, fragments=2, overlap=1, wire="int2", rows="seen", group_size=1),
    "ab": AB(
        total_steps=22,
        warmup=2,
        every=3,
        factor_at=11,
        cutoff=0.3,
        group_size=1,
        second_moment="shared",
    ),
}


def resumed(rank: int, folder: Path) -> dict[str, tuple[Any, ...]]:
    found = {}
    for name, config in WAYS.items():
        ends = []
        for stop in (None, 13):
            model = Words()
            optimizer = AdamW(model.parameters(), 3e-3)
            replica = thinwire.attach(model, optimizer, config)
            read(replica, optimizer, rank, range(stop or 22))
            if stop is not None:
                replica.save(folder / name)
                replica.detach()
                model = Words()
                optimizer = AdamW(model.parameters(), 3e-3)
                replica = thinwire.attach(model, optimizer, config)
                replica.load(folder / name)
                read(replica, optimizer, rank, range(stop, 22))
            replica.finish()
            ends.append((small.model_bits(model), replica.traffic.slow_bytes))
        found[name] = (*ends, replica.traffic.slow_bytes)
    return found


@pytest.mark.slow
def test_a_run_continues_bit_for_bit_and_workers_agree(tmp_path: Path) -> None:
    everyone = gang.run(resumed, 2, tmp_path)
    for name in WAYS:
        through, stopped, _ = everyone[0][name]
        assert through[0] == stopped[0], name
        assert through[0] == everyone[1][name][0][0], name


def traffic(rank: int) -> dict[str, int]:
    found = {}
    for name, config in WAYS.items():
        model = Words()
        optimizer = AdamW(model.parameters(), 3e-3)
        replica = thinwire.attach(model, optimizer, config)
        read(replica, optimizer, rank, range(9))
        replica.finish()
        found[name] = replica.traffic.slow_bytes
    return found


def test_a_plan_counts_what_is_sent() -> None:
    real = gang.run(traffic, 2)[0]
    for name, config in WAYS.items():
        what = Workload(name="words", model=Words(), optimizer=AdamW, steps=9, inputs=(text(0, 0)[:, :-1],))
        planned = simulate(what, config, arrange(0, [0, 0], 1), predicted.typical)
        assert planned.ledger.slow_bytes == pytest.approx(real[name], rel=0.02), name


def lopsided(rank: int) -> dict[str, Tensor]:
    """Two groups' moments of a matrix, once they are shared: row 0 both have seen, row 1 the first, row 2 nobody."""
    p = nn.Parameter(torch.zeros(3, 4))
    optimizer = Adam([p], betas=(0.9, 0.95))
    p.grad = torch.tensor([[1.0, 2.0, 3.0, 0.0], [5.0, 0.0, 5.0, 5.0], [0.0] * 4]) * (1 + rank)
    if rank == 1:
        p.grad[1] = 0
        p.grad[0, 3] = 7
    optimizer.step()
    wire = ProcessGroupWire.open(1, "", torch.device("cpu"), Ledger())
    context = MethodContext(nn.Identity(), Optimizers(optimizer), wire)  # type: ignore[arg-type]
    second = SecondMoment(context, "shared", 0.5, lambda: True, "fp32")
    before = {name: value.clone() for name, value in optimizer.state[p].items()}
    gains = second.exchange({0: [p]})
    return {"gain": gains[id(p)], "m": optimizer.state[p]["exp_avg"], "v": optimizer.state[p]["exp_avg_sq"], **before}


def test_rows_of_second_moments_get_the_mean_size_and_no_element_too_little() -> None:
    first, second = gang.run(lopsided, 2)
    mean_m = (first["exp_avg"] + second["exp_avg"]) / 2
    mean_v = (first["exp_avg_sq"] + second["exp_avg_sq"]) / 2
    for found in (first, second):
        assert torch.allclose(found["m"], mean_m)
        least = (mean_m / (1 - 0.9)) ** 2 * (1 - 0.95)
        assert bool((found["v"] >= least * 0.999).all())
        assert bool(found["gain"].isfinite().all()) and float(found["gain"].max()) <= 2
    # Where nothing was too little, a row is as it was but for its size; one that a group had not seen has its mean.
    assert torch.allclose(
        first["v"][0, :3] / first["exp_avg_sq"][0, :3], mean_v[0].mean() / first["exp_avg_sq"][0].mean()
    )
    assert torch.allclose(second["v"][1].mean(), mean_v[1].mean())
    assert not first["v"][2].any() and not second["v"][2].any()


def test_a_plan_says_what_shared_moments_and_counted_rows_hold() -> None:
    what = Workload(name="words", model=Words(), optimizer=AdamW, steps=9, inputs=(text(0, 0)[:, :-1],))
    held = {
        name: simulate(what, WAYS[name], arrange(0, [0, 0], 1), predicted.typical).memory["local"].method
        for name in ("shared", "rows")
    }
    assert held["shared"]["residuals of moments"] == held["shared"]["residuals"]
    assert held["rows"]["counts of rows"] == 4 * (WORDS + LENGTH)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"second_moment": "mean"}, "`second_moment`='mean' is not known, choose from: group, estimate, shared"),
        ({"rows": "all"}, "`rows`='all' is not known, choose from: mean, seen"),
        ({"moments_wire": "bit"}, "`moments_wire`='bit' is not known, choose from: fp32, bf16, int8, int4, int2"),
        ({"second_moment": "shared", "overlap": 1}, "use overlap=0, or second_moment='estimate'"),
        ({"second_moment": "shared", "rows": "seen"}, "rows='seen' is for second_moment 'group' or 'estimate'"),
        ({"second_moment": "shared", "fragments": 2}, "leave out `fragments` and `moments`"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DiLoCo(every=8, **fields)
    assert said in str(caught.value)


@pytest.mark.parametrize("kind", [SGD, NAdam])
def test_other_optimizers_are_refused_by_name(kind: type) -> None:
    model = small.mlp()
    with pytest.raises(ConfigError, match=f"not for {kind.__name__}; leave it out"):
        thinwire.attach(model, kind(model.parameters(), lr=0.1), LocalSGD(every=2, second_moment="estimate"))


def test_an_optimizer_without_second_moments_may_stand_beside_adam() -> None:
    model = small.mlp()
    first, *others = model.parameters()
    optimizers = [SGD([first], 0.1), AdamW(others)]
    replica = thinwire.attach(model, optimizers, LocalSGD(every=2, second_moment="estimate"))
    for number in range(3):
        x, y = small.batch(0, number)
        F.cross_entropy(replica(x), y).backward()
        for optimizer in itertools.chain(optimizers):
            optimizer.step()
    replica.finish()
