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
from thinwire.extend import Config, Exchange, Feature, Phase, Topology, register

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
