"""Habits that make workers differ are refused at the next step or average, by name, and not when the work is lost."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gang
import small
import thinwire
from thinwire.base.errors import ConfigError, DisagreementError

APART: dict[str, Any] = {
    "localsgd": lambda: thinwire.LocalSGD(warmup=0, every=3),
    "diloco, under way": lambda: thinwire.DiLoCo(warmup=2, every=4, overlap=2),
    "daso": lambda: thinwire.DASO(total_steps=40, warmup=2, cooldown=4, every=3, overlap=1, plateau_patience=None),
    "ab": lambda: thinwire.AB(total_steps=60, warmup=2, every=3, factor_at=4, cutoff=0.6),
    "paper": small.ab,
    "oialr": lambda: thinwire.OIALR(total_steps=30, factor_at=10),
}


def own_plateau(rank: int, names: list[str]) -> list[str]:
    """Each worker's scheduler follows its own loss."""
    return [_follow_own_loss(rank, APART[name]()) for name in names]


def _follow_own_loss(rank: int, config: Any) -> str:
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, config)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    with pytest.raises(DisagreementError) as caught:
        for number in small.walk(replica, optimizer, rank, 20):
            scheduler.step(float(number if rank == 1 else -number))
    replica.detach()
    return str(caught.value)


def test_rates_that_differ_are_found_at_the_next_average() -> None:
    for messages in gang.run(own_plateau, 2, list(APART)):
        for message in messages:
            assert "workers train at different learning rates at step" in message
            assert (
                "rank 1 has " in message
                and ", the others 0.05, in parameter group 0; give schedulers the same" in message
            )


def a_rate_of_one_group(rank: int) -> str:
    model = small.mlp()
    optimizer = torch.optim.SGD([{"params": [p], "lr": 0.1} for p in model.parameters()])
    replica = thinwire.attach(model, optimizer, thinwire.LocalSGD(warmup=0, every=3))
    optimizer.param_groups[2]["lr"] = 0.1 - 0.05 * rank
    with pytest.raises(DisagreementError) as caught:
        for _ in small.walk(replica, optimizer, rank, 4):
            pass
    return str(caught.value)


def test_a_rate_of_one_parameter_group_is_found() -> None:
    for message in gang.run(a_rate_of_one_group, 2):
        assert "rank 1 has 0.05, the others 0.1, in parameter group 2;" in message


class OwnRate(torch.optim.Optimizer):
    """Finds its learning rate itself, and has None for it, as Adafactor with relative steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.05)


def rates_of_their_own(rank: int) -> list[str]:
    found = []
    for make in (*APART.values(), lambda: thinwire.LocalSGD(every=2, every_max=4), thinwire.AllReduce):
        model = small.mlp()
        optimizer = OwnRate(model.parameters())
        replica = thinwire.attach(model, optimizer, make())
        with contextlib.suppress(ConfigError), replica.join():
            for number in range(5 - rank):
                small.step(replica, optimizer, rank, number)
        for _ in small.walk(replica, optimizer, rank, 12):
            pass
        assert optimizer.param_groups[0]["lr"] is None
        found.append(small.model_bits(replica.finish()))
    return found


@pytest.mark.slow
def test_an_optimizer_may_find_its_own_rate() -> None:
    first, second = gang.run(rates_of_their_own, 2)
    assert first == second


class Growing(nn.Module):
    """A model that is given one more layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.late = nn.Linear(64, 32), nn.Identity()
        self.blocks, self.spare = nn.ModuleList(), [nn.Linear(32, 32)]
        self.middle, self.head = nn.Sequential(nn.Linear(32, 32)), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.late(F.relu(self.body(x.flatten(1)))))
        for block in self.blocks:
            x = F.relu(block(x))
        return self.head(self.middle(x))

    def grow(self, place: str) -> nn.Module:
        """Add a layer; where it is inserted, one that there was from the beginning."""
        if place == "late":
            self.late = nn.Linear(32, 32)
            return self.late
        self.get_submodule(place).insert(0, self.spare[0])
        return self.spare[0]


def added(rank: int, tells_optimizer: bool, place: str) -> list[tuple[int, str]]:
    """By method, the step at which a layer that was added after step 5 is refused, and how."""
    found = []
    for make in (thinwire.AllReduce, *APART.values()) if place == "late" else (thinwire.AllReduce, APART["localsgd"]):
        model = Growing()
        optimizer = small.sgd(model)
        replica = thinwire.attach(model, optimizer, make())
        with pytest.raises(ConfigError) as caught:
            for number in small.walk(replica, optimizer, rank, 8):
                if number == 4:
                    late = model.grow(place)
                    if tells_optimizer:
                        optimizer.add_param_group({"params": list(late.parameters())})
        found.append((replica.step, str(caught.value)))
        replica.detach()
    return found


@pytest.mark.parametrize(
    ("tells_optimizer", "place", "name"),
    [(False, "late", "late"), (True, "late", "late"), (True, "middle", "middle.0"), (False, "blocks", "blocks.0")],
)
def test_a_parameter_that_is_added_late_is_refused_at_the_next_step(
    tells_optimizer: bool, place: str, name: str
) -> None:
    for found in gang.run(added, 2, tells_optimizer, place):
        for step, message in found:
            assert step == 5
            assert f"'{name}.weight' and 1 more was added to the model or replaced there by step 5" in message
            assert "add it before attach()" in message
