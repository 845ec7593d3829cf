"""Parameters without elements, as a layer of width 0 has: nothing to train, and nothing that may stop training."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gang
import small
import thinwire
from every_method import ALL_WAYS
from selection import slow_but
from thinwire.comm.topology import arrange
from thinwire.plan import ranks as predicted
from thinwire.plan.simulate import Workload, simulate

OF_GRADIENTS, OF_PARAMETERS = ("int8", "lowrank:2", "topk:0.1"), ("bf16", "int4", "int2", "bit")
CONFIGS = {name: way.config for name, way in ALL_WAYS.items()}
CONFIGS |= {f"allreduce {code}": lambda code=code, **m: thinwire.AllReduce(wire=code, **m) for code in OF_GRADIENTS}
CONFIGS |= {
    f"diloco {code}": lambda code=code, **m: thinwire.DiLoCo(
        warmup=2, warmup_wire=code, every=3, overlap=1, wire=code, **m
    )
    for code in OF_PARAMETERS
}
CONFIGS |= {
    "radial": lambda **m: thinwire.DiLoCo(warmup=2, every=3, outer=thinwire.Radial(), wire="int8", **m),
    "ab ends": lambda **m: thinwire.AB(
        total_steps=20, warmup=2, every=3, factor_at=5, cutoff=0.6, keep_first=False, keep_last=False, **m
    ),
    "left out": lambda **m: thinwire.LocalSGD(warmup=2, every=3, diverged="leave_out", **m),
}


class Hollow(nn.Module):
    """A net with parameters of every shape that has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small.net(smooth=True)
        self.row, self.none = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(2, 0, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # initializing them does nothing
            self.wide, self.tall = nn.Linear(0, 10), nn.Linear(10, 0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        return y + self.wide(self.tall(y)) + self.row.sum() + self.none.sum()


def attached(name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Hollow()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return thinwire.attach(model, optimizer, CONFIGS[name](group_size=1)), optimizer


def train(rank: int, name: str, folder: str) -> tuple[str, ...]:
    """The digests of two runs: one that saves, and another that goes on from its saves."""
    digests = []
    for resumes in (False, True):
        replica, optimizer = attached(name)
        for start, end in itertools.pairwise((0, 4, 9, 13, 18)):
            if resumes and start:
                replica.load(Path(folder) / str(start))
            for number in range(start, end):
                small.step(replica, optimizer, rank, number)
            if not resumes:
                replica.save(Path(folder) / str(end))
            with replica.merged():
                pass
        digests.append(small.model_bits(replica.finish(cutoff=0.3)))
    return tuple(digests)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(("localsgd shared",), CONFIGS))
def test_parameters_without_elements_are_trained_saved_and_finished(name: str, tmp_path: Path) -> None:
    found = gang.run(train, 2, name, str(tmp_path))
    assert len({digest for own in found for digest in own}) == 1


@pytest.mark.parametrize("name", slow_but(("localsgd shared", "ab ends"), CONFIGS))
def test_plans_count_them_as_nothing(name: str) -> None:
    inputs = (small.batch(0, 0)[0],)
    workload = Workload(name="hollow", model=Hollow(), optimizer=torch.optim.AdamW, steps=20, inputs=inputs)
    found = simulate(workload, CONFIGS[name](group_size=1), arrange(0, [0, 0], 1), predicted.typical)
    assert found.ledger.slow_bytes > 0
