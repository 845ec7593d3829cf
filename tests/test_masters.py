"""Optimizers that train a copy of each parameter: averages reach the copy, in all of its bits."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gang
import small
import thinwire
from thinwire.base.errors import ConfigError
from thinwire.exchange.masters import Masters
from thinwire.factor.optimizers import Optimizers

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import gossip


class MasterSGD(torch.optim.Optimizer):
    """SGD on copies, as mixed-precision optimizers have them."""

    def __init__(self, params: Any, lr: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(params, {"lr": lr})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.move()

    def move(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if p.grad is not None:
                    state.setdefault("wide", p.detach().to(self.dtype, copy=True))
                    state["momentum"] = state.get("momentum", 0) * 0.9 + p.grad.to(self.dtype)
                    state["wide"].sub_(state["momentum"], alpha=group["lr"])
                    p.copy_(state["wide"])


WAYS: dict[str, Any] = {
    "localsgd": lambda: thinwire.LocalSGD(warmup=0, every=4),
    "localsgd, int8": lambda: thinwire.LocalSGD(warmup=0, every=4, wire="int8"),
    "moments": lambda: thinwire.LocalSGD(warmup=0, every=4, moments="average"),
    "diloco": lambda: thinwire.DiLoCo(warmup=0, every=4),
    "a method of one's own": lambda: gossip.Gossip(every=4),
    "daso": lambda: thinwire.DASO(total_steps=17, warmup=4, cooldown=4, every=4, overlap=0, plateau_patience=None),
}


class TwiceSGD(MasterSGD):
    """Keeps two copies, and begins each step half way between them."""

    def move(self) -> None:
        for state in self.state.values():
            state["wide"].lerp_(state["again"], 0.5)
        super().move()
        for state in self.state.values():
            state["again"] = state["wide"].clone()


def distances(rank: int, dtype: torch.dtype) -> dict[str, list[float]]:
    """By method, how far copies of this worker are from those of all workers after each step."""
    found = {name: _distances(rank, make(), MasterSGD, dtype) for name, make in WAYS.items()}
    return found | {"two copies": _distances(rank, WAYS["localsgd"](), TwiceSGD, dtype)}


def _distances(rank: int, config: Any, kind: type[MasterSGD], dtype: torch.dtype) -> list[float]:
    model = small.mlp(smooth=True).to(dtype)
    optimizer = kind(model.parameters(), 0.1)
    replica = thinwire.attach(model, optimizer, config)
    found = []
    for number in range(12):
        x, y = small.batch(rank, number)
        loss = nn.functional.cross_entropy(replica(x.to(dtype)).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        before = small.bits(*(optimizer.state[p]["wide"] for p in model.parameters()))
        with replica.merged():
            pass
        wide = [optimizer.state[p]["wide"] for p in model.parameters()]
        assert small.bits(*wide) == before
        assert all(torch.equal(copy.to(dtype), p) for copy, p in zip(wide, model.parameters(), strict=True))
        flat = torch.cat([copy.flatten() for copy in wide])
        rows = replica.wire.all_gather_object(flat.tolist())
        found.append(float((torch.tensor(rows[0]) - torch.tensor(rows[1])).norm()))
    replica.finish()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_an_average_is_not_undone(dtype: torch.dtype) -> None:
    for found in gang.run(distances, 2, dtype):
        for name, apart in found.items():
            for step, distance in enumerate(apart, 1):
                if step % 4 == 0:
                    assert distance == 0, (name, step)
                elif step % 4 == 1 and step > 4 and name != "daso":
                    assert 0 < distance < apart[step + 1], (name, step)  # from a common start


def small_steps(rank: int) -> float:
    """How far copies come by steps that bf16 would round away."""
    model = nn.Linear(8, 8).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = MasterSGD(model.parameters(), 1e-5)
    replica = thinwire.attach(model, optimizer, thinwire.LocalSGD(warmup=0, every=2))
    for _ in range(8):
        optimizer.zero_grad()
        replica(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum().backward()
        optimizer.step()
    return float((1 - optimizer.state[model.weight]["wide"]).mean())


def test_averages_keep_what_a_parameter_cannot_hold() -> None:
    first, second = gang.run(small_steps, 2)
    assert first == second == pytest.approx(1e-5 * sum(sum(0.9**i for i in range(n)) for n in range(1, 9)), rel=1e-2)


@pytest.mark.parametrize(
    "config", [small.ab(), thinwire.AB(total_steps=200), thinwire.OIALR(total_steps=60)], ids=["paper", "ab", "oialr"]
)
def test_factors_are_refused_by_name(config: Any) -> None:
    model = small.mlp()
    optimizer = MasterSGD(model.parameters(), 0.1)
    replica = thinwire.attach(model, optimizer, config)
    with pytest.raises(ConfigError, match=r"MasterSGD cannot be attached with .*'wide' in its state, and factors have"):
        for number in range(2):
            small.step(replica, optimizer, 0, number)


def handed_over(rank: int) -> tuple[str, set[torch.dtype]]:
    """What a worker holds that has fewer batches, and is given the state of one that has more."""
    model = small.mlp().bfloat16()
    optimizer = MasterSGD(model.parameters(), 0.1)
    replica = thinwire.attach(model, optimizer, thinwire.AllReduce())
    with replica.join():
        for number in range(3 - rank):
            x, y = small.batch(rank, number)
            optimizer.zero_grad()
            nn.functional.cross_entropy(replica(x.bfloat16()).float(), y).backward()
            optimizer.step()
    wide = [optimizer.state[p]["wide"] for p in model.parameters()]
    return small.bits(*wide), {copy.dtype for copy in wide}


def test_copies_are_handed_over_in_all_of_their_bits() -> None:
    first, second = gang.run(handed_over, 2)
    assert first == second and first[1] == {torch.float32}


def test_steps_that_leave_no_state_do_not_count() -> None:
    """A GradScaler skips steps, the first ones most of all."""
    model = small.mlp().bfloat16()
    optimizer = MasterSGD(model.parameters(), 0.1)
    masters = Masters(Optimizers(optimizer))
    for _ in range(4):
        masters.look()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    masters.look()
    assert masters.names == {"wide"}


def test_a_load_reaches_the_copies() -> None:
    model = small.mlp()
    optimizer = MasterSGD(model.parameters(), 0.0)
    replica = thinwire.attach(model, optimizer, thinwire.AllReduce())
    small.step(replica, optimizer, 0, 0)
    other = small.mlp(1)
    model.load_state_dict(other.state_dict())
    small.step(replica, optimizer, 0, 1)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


class Own(torch.optim.AdamW):
    """Of a script: torch's own optimizers have no copies, and are not looked at."""


def test_what_is_no_copy_is_left_alone() -> None:
    """Adam's moments, where a parameter began, and state that equals a parameter of zeros."""
    for still in (0, 2):
        model = small.mlp()
        optimizer = Own(model.parameters(), lr=0.01)
        masters = Masters(Optimizers(optimizer))
        for number in range(still + 3):
            optimizer.param_groups[0]["lr"] = 0.0 if number < still else 0.1
            small.step(model, optimizer, 0, number)
            for p in model.parameters():
                optimizer.state[p].setdefault("start", p.detach().clone())
            masters.look()
            assert not masters.trained
        assert not masters.names


@pytest.mark.filterwarnings("ignore:optimizer state .* is not known to follow:UserWarning")
def test_the_average_of_asgd_is_no_copy() -> None:
    """It is what the parameter is for the first `t0` steps."""
    for config in (thinwire.AB(total_steps=60, warmup=2, every=3, factor_at=4, cutoff=0.6), WAYS["localsgd"]()):
        model = small.mlp()
        optimizer = torch.optim.ASGD(model.parameters(), lr=0.05, t0=3)
        replica = thinwire.attach(model, optimizer, config)
        for number in range(12):
            small.step(replica, optimizer, 0, number)
        replica.finish()


class LateAverage(torch.optim.Optimizer):
    """SGD that averages its parameters from the fourth step on, and begins at a learning rate of 0."""

    def __init__(self, params: Any, dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": 0.0})
        self.dtype, self.steps = dtype, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for p in [p for p in self.param_groups[0]["params"] if p.grad is not None]:
            p.sub_(p.grad, alpha=0.1 if self.steps > 1 else 0.0)
            average = self.state[p].setdefault("average", p.detach().to(self.dtype, copy=True))
            average.lerp_(p.to(self.dtype), 1.0 if self.steps < 4 else 0.1)
        self.left = flat(self.param_groups[0]["params"])


def late(rank: int, dtype: torch.dtype, kept: torch.dtype) -> list[float]:
    """How far parameters are from the mean of what optimizers left, after each average."""
    model = small.mlp(smooth=True).to(dtype)
    optimizer = LateAverage(model.parameters(), kept)
    replica = thinwire.attach(model, optimizer, thinwire.LocalSGD(warmup=0, every=4))
    found = []
    for number in range(8):
        x, y = small.batch(rank, number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(x.to(dtype)).float(), y).backward()
        optimizer.step()
        if number % 4 == 3:
            left = torch.tensor(replica.wire.all_gather_object(optimizer.left.tolist()))
            found.append(float((flat(model.parameters()).cpu() - left.mean(0)).abs().max()))
    return found


def flat(parameters: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten().float() for p in parameters])


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_an_average_that_begins_late_does_not_replace_parameters(kept: torch.dtype) -> None:
    for found in gang.run(late, 2, torch.bfloat16, kept) + gang.run(late, 2, torch.float32, torch.float32):
        assert max(found) < 1e-3


@pytest.mark.filterwarnings("ignore:optimizer state .* is not known to follow:UserWarning")
def test_an_average_that_begins_late_is_no_reason_to_refuse_factors() -> None:
    model = small.mlp().bfloat16()
    optimizer = LateAverage(model.parameters(), torch.float32)
    config = thinwire.AB(total_steps=60, warmup=2, every=3, factor_at=4, cutoff=0.6)
    replica = thinwire.attach(model, optimizer, config)
    for number in range(9):
        x, y = small.batch(0, number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(replica(x.bfloat16()).float(), y).backward()
        optimizer.step()
    assert replica.phase == "factored"


class Elsewhere(torch.optim.Optimizer):
    """SGD on copies that it keeps in a list, or in an optimizer of its own."""

    def __init__(self, params: Any, *, inner: bool) -> None:
        super().__init__(params, {"lr": 0.1})
        self.copies = [p.detach().float() for p in self.param_groups[0]["params"]]
        self.sgd = torch.optim.SGD([nn.Parameter(copy) for copy in self.copies], lr=0.1)
        if inner:
            self.copies = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, copy in zip(self.param_groups[0]["params"], self.sgd.param_groups[0]["params"], strict=True):
            copy.grad = p.grad.float()
        self.sgd.step()
        for p, copy in zip(self.param_groups[0]["params"], self.sgd.param_groups[0]["params"], strict=True):
            p.copy_(copy)


@pytest.mark.parametrize("inner", [True, False])
def test_copies_out_of_reach_are_refused_where_averages_would_be_undone(inner: bool) -> None:
    for config, is_refused in ((WAYS["diloco"](), True), (small.ab(), True), (thinwire.AllReduce(), False)):
        model = small.mlp().bfloat16()
        optimizer = Elsewhere(model.parameters(), inner=inner)
        replica = thinwire.attach(model, optimizer, config)
        x, y = small.batch(0, 0)
        nn.functional.cross_entropy(replica(x.bfloat16()).float(), y).backward()
        if is_refused:
            with pytest.raises(ConfigError, match=r"Elsewhere cannot be attached with .* undo every average"):
                optimizer.step()
        else:
            optimizer.step()
