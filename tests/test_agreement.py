"""How far groups agree: sketches of changes, the ratio made of them, the warning, and radial steps."""

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gang
import small
import thinwire
from thinwire import LocalSGD, Radial
from thinwire.exchange.agreement import Agreement
from thinwire.exchange.averaged import SIZE, sketch

# Sketches.

SHAPES = {
    "a bias": lambda: torch.randn(50),
    "random": lambda: torch.randn(64, 64),
    "rank one": lambda: torch.outer(torch.randn(100), torch.randn(128)),
    "rank one of one sign": lambda: torch.outer(torch.rand(256), torch.rand(512)),
    "large": lambda: torch.outer(torch.randn(600), torch.randn(512)),
    "large of one sign": lambda: torch.outer(torch.rand(600), torch.rand(512)),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_a_sketch_has_the_length_of_its_tensor_on_average(kind: str) -> None:
    """Over 60 seeds the squared length is right to 15 %, and varies by less than 40 %."""
    shares = []
    for seed in range(60):
        torch.manual_seed(seed)
        x = SHAPES[kind]()
        # Other signs for the same elements: signs are fixed, and a single drawing of them proves nothing.
        x = x.flatten().roll(4099 * seed).view_as(x)
        shares.append(float(sketch(x).norm() / x.norm()) ** 2)
    found = torch.tensor(shares)
    assert abs(float(found.mean()) - 1) < 0.15 and float(found.std()) < 0.4, (found.mean(), found.std())


@pytest.mark.parametrize("size", [1, SIZE, SIZE + 1, 1000, 64 * 4096, 64 * 4096 + 7, 3 * 64 * 4096 + 1])
def test_sketches_are_linear_and_of_one_size(size: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(size, dtype=torch.float64), torch.randn(size, dtype=torch.float64)
    assert sketch(x).shape == (SIZE,)
    assert torch.allclose(sketch(2 * x - 3 * y), 2 * sketch(x) - 3 * sketch(y), atol=1e-9)
    one = torch.zeros(size)
    one[-1] = 2.0
    assert float(sketch(one).norm()) == 2.0, "every element counts"


# The ratio.


class Linears(nn.Module):
    """Large enough for changes that are unrelated, if they are random."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x) for layer in self.each)


def pushed(rank: int, how: str, outer: Any, wire: str) -> Any:
    """Groups that move by gradients made up here: one and the same, unrelated ones, or opposed ones."""
    torch.manual_seed(0)
    model = Linears()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = thinwire.attach(model, optimizer, LocalSGD(every=1, outer=outer, wire=wire, group_size=1))
    ratios = []
    for number in range(6):
        replica(torch.ones(1, 48)).sum().backward()
        generator = torch.Generator().manual_seed(100 * number + rank * (how == "unrelated"))
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator) * (-1) ** (rank * (how == "opposed"))
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        ratios.append(replica.agreement.ratio)
        lengths = [float((p - b).norm()) for p, b in zip(model.parameters(), before, strict=True)]
    return ratios, dict(replica.agreement.ratios), replica.agreement.summary(), lengths, small.model_bits(model)


def all_ratios(rank: int) -> dict[str, Any]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire").addHandler(handler)
    found: dict[str, Any] = {f"alike{wire}": pushed(rank, "alike", None, wire or "bf16") for wire in ("", "int4")}
    found["no warnings"] = [record for record in records if "unrelated directions" in record]
    found["opposed"] = pushed(rank, "opposed", None, "bf16")  # noise alone is not always above the limit
    found["warnings"] = [record for record in records if "unrelated directions" in record]
    found["unrelated"] = pushed(rank, "unrelated", None, "bf16")
    found["radial"] = pushed(rank, "unrelated", Radial(), "fp32")
    found["radial 1.2"] = pushed(rank, "unrelated", Radial(most=1.2), "fp32")
    found["radial alike"] = pushed(rank, "alike", Radial(), "fp32")
    return found


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return gang.run(all_ratios, 3)


def test_the_ratio_is_1_for_the_same_change_and_the_root_of_the_groups_for_unrelated_ones(three: Any) -> None:
    for mine in three:
        for name in ("alike", "alikeint4"):
            ratios, by_layer, summary, _, _ = mine[name]
            # A sketch of the sum is off by 9 % of its length in each weight, and weights err independently.
            assert ratios == pytest.approx([1.0] * 6, rel=0.12), name
            assert by_layer.keys() == {f"each.{i}.weight" for i in range(6)}
            assert summary["averages"] == 6 and summary["last"] == ratios[-1]
        ratios = mine["unrelated"][0]
        assert ratios == pytest.approx([math.sqrt(3)] * 6, rel=0.12)
        assert mine["opposed"][0] == pytest.approx([3.0] * 6, rel=0.12)
        assert all(mine[name][0] == three[0][name][0] for name in ("alike", "unrelated", "radial"))


def test_the_warning_comes_once_and_on_rank_0(three: Any) -> None:
    assert [len(mine["warnings"]) for mine in three] == [1, 0, 0]
    assert not any(mine["no warnings"] for mine in three)
    assert "Average more often (a smaller `every`)" in three[0]["warnings"][0]


def test_it_is_not_repeated_when_groups_agree_in_between(caplog: pytest.LogCaptureFixture) -> None:
    model = small.mlp()
    replica = thinwire.attach(model, small.sgd(model), LocalSGD())
    agreement = Agreement(model, replica.wire, lambda: False)
    with caplog.at_level("WARNING", "thinwire"):
        for ratio in (2.0,) * 8 + (0.5,) * 8 + (2.0,) * 8:
            agreement.ratio = ratio
            agreement._warn(1)
    assert len(caplog.records) == 1


def test_a_radial_step_is_as_long_as_the_changes_and_no_longer_than_it_may_be(three: Any) -> None:
    """Each tensor of 48 x 48 by SGD of random gradients at rate 0.1: changes of length 0.1 x 48."""
    for mine in three:
        weights = [length for length in mine["radial"][3] if length > 2]
        assert weights == pytest.approx([4.8] * 6, rel=0.05)
        weights = [length for length in mine["radial 1.2"][3] if length > 2]
        assert weights == pytest.approx([1.2 * 4.8 / math.sqrt(3)] * 6, rel=0.05)
        assert [length for length in mine["radial alike"][3] if length > 2] == pytest.approx([4.8] * 6, rel=0.05)
    for name in ("unrelated", "radial", "radial 1.2", "radial alike"):
        assert len({mine[name][4] for mine in three}) == 1, name
