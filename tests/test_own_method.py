"""A method that nobody here wrote has every feature, unless it refuses it: those of examples/, and one that refuses."""

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import gang
import small
import thinwire
from thinwire import ConfigError, Faults
from thinwire.extend import (
    Config,
    Exchange,
    Feature,
    Gradients,
    Parameters,
    PartState,
    Phase,
    Topology,
    UpdateRule,
    register,
)

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import desloc
import gossip
import slowmo

BATCHES, SLOPES = (8, 2), (1.0, 4.0)


@pytest.mark.parametrize("example", [gossip, desloc, slowmo])
def test_an_example_is_short_and_needs_public_parts_alone(example: ModuleType) -> None:
    text = Path(str(example.__file__)).read_text(encoding="utf-8")
    assert re.findall(r"^\s*(?:from|import) (thinwire\S*)", text, re.MULTILINE) == ["thinwire.extend"]
    assert len([line for line in text.splitlines() if line]) < 80, "beside empty lines"


def uneven(rank: int) -> tuple[int, float]:
    """Steps, and the only weight, of a worker whose loss has a slope of its own."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = SGD(model.parameters(), lr=1.0)
    replica = thinwire.attach(model, optimizer, gossip.Gossip(every=4, group_size=1))
    with replica.join():
        for _ in range(BATCHES[rank]):
            optimizer.zero_grad()
            (SLOPES[rank] * replica(model.weight.new_ones(1, 1))).sum().backward()
            optimizer.step()
    weight = float(model.weight)
    replica.detach()
    return replica.step, weight


def test_a_group_that_has_trained_nothing_has_no_weight() -> None:
    """After 4 steps the mean of −4 and of −8; after 8 the second has nothing new, and takes what the first has."""
    assert gang.run(uneven, 2) == [(8, -10.0), (8, -10.0)]


def diverged(rank: int) -> str:
    """What is said when the second of three groups has values that are not finite, two steps before an average."""
    model = small.net()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, gossip.Gossip(every=4, group_size=1))
    with pytest.raises(thinwire.DivergedError) as caught:
        for step in range(8):
            if (rank, step) == (1, 2):
                with torch.no_grad():
                    next(model.parameters()).fill_(math.nan)
            small.step(replica, optimizer, rank, step)
    replica.detach()
    return f"{replica.step} {caught.value}"


def test_a_group_that_diverged_is_refused_by_name_at_the_next_average() -> None:
    for said in gang.run(diverged, 3):
        assert said.startswith("4 ") and "group 1" in said, said


class Distance(Exchange):
    """It is here to refuse."""

    def refuses(self, feature: Feature, config: Any) -> str | None:
        return f"{type(config).__name__} has no {feature.value}"


@dataclass(frozen=True, kw_only=True)
class Aloof(Config):
    """Groups that never meet."""

    group_size: int | None = None

    def timetable(self, topology: Topology) -> list[Phase]:
        return [Phase(name="train", exchanges=[Distance()])]


def refused(rank: int) -> list[str]:
    """What each feature is refused with, before anybody is waited for."""
    register("aloof")(Aloof)
    said = []
    with pytest.raises(ConfigError) as caught:
        model = small.net()
        thinwire.attach(model, small.sgd(model), Aloof(), faults=Faults())
    said.append(str(caught.value))
    replica = thinwire.attach(model, small.sgd(model), Aloof())
    with pytest.raises(ConfigError) as caught, replica.join():
        pass
    replica.detach()
    return [*said, str(caught.value)]


def test_what_a_method_refuses_is_refused_in_its_own_words() -> None:
    for said in gang.run(refused, 2, fresh=True):
        assert said == ["Aloof has no faults=…", "Aloof has no join()"]


@dataclass(frozen=True, kw_only=True)
class ThereAndBack(Config):
    """The world, then groups alone, then the world again until all have seen a small loss, then gossip."""

    group_size: int | None = None

    def timetable(self, topology: Topology) -> list[Phase]:
        self_made = Until(9)
        return [
            Phase(name="first", until=3, exchanges=[Gradients("int8")]),
            Phase(name="apart", until=7, exchanges=[Parameters(thinwire.LocalSGD(every=3, wire="int8"))]),
            Phase(name="together", until=self_made.is_over, exchanges=[Gradients("fp32")], rules=[self_made]),
            Phase(name="gossip", exchanges=[gossip.Pairs(2)]),
        ]


class Until(UpdateRule):
    """Ends a phase by what it has counted itself."""

    def __init__(self, step: int) -> None:
        self.step, self.seen = step, 0

    def after_step(self) -> None:
        self.seen = self.run.step

    def is_over(self) -> bool:
        return self.seen >= self.step

    def state_dict(self) -> PartState:
        return PartState({"seen": self.seen})

    def load_state_dict(self, state: PartState, *, stays: bool) -> None:
        self.seen = state.shared["seen"]


def there_and_back(rank: int, folder: str) -> list[Any]:
    """The phase, the bits of model and optimizer after each step, of a run and of one that is resumed at each."""
    register("thereandback", example={})(ThereAndBack)
    runs = []
    for stop in (0, 2, 5, 8, 10):
        seen: list[Any] = []
        replica, optimizer = _begun()
        for step in range(13):
            if stop and step == stop:
                replica.save(f"{folder}/{stop}")
                replica.detach()
                replica, optimizer = _begun()
                replica.load(f"{folder}/{stop}")
            small.step(replica, optimizer, rank, step)
            seen.append((replica.phase, small.model_bits(replica.module), small.optimizer_bits(optimizer)))
        seen.append(small.model_bits(replica.finish()))
        runs.append(seen)
    return runs


def _begun() -> tuple[Any, Any]:
    model = small.net(smooth=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return thinwire.attach(model, optimizer, ThereAndBack(group_size=1)), optimizer


@pytest.mark.slow
def test_phases_may_follow_in_any_order_and_resume(tmp_path: Path) -> None:
    """After groups have trained apart the world goes on with one optimizer too."""
    first, second = gang.run(there_and_back, 2, str(tmp_path), fresh=True)
    assert [phase for phase, *_ in first[0][:-1]] == ["first"] * 2 + ["apart"] * 4 + ["together"] * 2 + ["gossip"] * 5
    for own, other in zip(first, second, strict=True):
        assert own[1] == other[1] and own[6:9] == other[6:9] and own[-1] == other[-1]
        assert own[3] != other[3]
    assert all(run == first[0] for run in first) and all(run == second[0] for run in second)
