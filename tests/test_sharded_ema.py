"""Moving averages of models that groups shard with FSDP2."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import gang
import thinwire
from selection import slow_but
from sharded_net import Net, batch, columns, sharded, steps, whole
from thinwire import AB, ConfigError, LocalSGD

WAYS: dict[str, Any] = {
    "localsgd": LocalSGD(every=3, warmup=2, group_size=2),
    "ab factors of columns": AB(
        warmup=2,
        every=2,
        redecompose=2,
        cutoff=0.6,
        factor_at=4,
        keep_first=False,
        keep_last=False,
        warmup_wire="fp32",
        wire="fp32",
        group_size=2,
    ),
}


def averaged(rank: int, name: str, shards: bool, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)

    how = {"shard_placement_fn": columns} if "columns" in name else {}

    def begin() -> tuple[Any, Any, Any]:
        model = sharded(Net(), **how) if shards else Net()
        optimizer = AdamW(model.parameters(), 1e-2)
        replica = thinwire.attach(model, optimizer, WAYS[name])
        return optimizer, replica, thinwire.EMA(replica, 0.8, use_buffers=name == "localsgd").eval()

    def walk(optimizer: Any, replica: Any, ema: Any, first: int, last: int) -> None:
        for step in range(first, last):
            x, y = batch(rank, step)
            F.cross_entropy(replica(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters()
            with torch.no_grad():
                ema(x)  # leaves nothing gathered

    def end(optimizer: Any, replica: Any, ema: Any) -> dict[str, Any]:
        walk(optimizer, replica, ema, 9, 14)
        with torch.no_grad():
            shown = ema(batch(rank, 99)[0])
        held = sum(t.to_local().numel() if isinstance(t, DTensor) else t.numel() for t in ema.parameters())
        found = {"own": whole(ema.module), "shown": shown, "held": held}
        return found | {"model": whole(replica.finish()), "ema": whole(ema.finish())}

    optimizer, replica, ema = begin()
    before = whole(replica.module)
    assert all(torch.equal(value, before[key]) for key, value in whole(ema.module).items())
    walk(optimizer, replica, ema, 0, 9)
    replica.save(folder)
    late = thinwire.EMA(replica)  # perhaps of factors
    assert late.module.state_dict().keys() == before.keys()
    found = end(optimizer, replica, ema)
    optimizer, replica, ema = begin()
    replica.load(folder)
    again = end(optimizer, replica, ema)
    for part in ("own", "ema", "model"):
        assert all(torch.equal(value, found[part][key]) for key, value in again[part].items()), part
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(("ab factors of columns",), WAYS))
def test_an_average_of_shards_is_that_of_whole_weights(name: str, tmp_path: Path) -> None:
    plain = gang.run(averaged, 4, name, False, str(tmp_path / "plain"), fresh=True)
    found = gang.run(averaged, 4, name, True, str(tmp_path / "save"), fresh=True)
    for one, other in zip(found, plain, strict=True):
        assert one["held"] < 0.6 * other["held"]
        assert torch.allclose(one["shown"], other["shown"], atol=1e-4)
        for part in ("own", "ema", "model"):
            assert one[part].keys() == other[part].keys()
            for key, value in one[part].items():
                assert torch.allclose(value.float(), other[part][key].float(), atol=1e-4), (part, key)
                assert part == "own" or torch.equal(value, found[0][part][key]), (part, key)
        assert ("second.0.weight" in one["ema"]) == (name != "localsgd")


class Tree(nn.Module):
    """Parts that are sharded in a whole that is not, one of which knows the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.other = nn.Linear(12, 8), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 5))
        self.leaf.knows = [self]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.leaf(x))


def copied(rank: int) -> bool:
    model: Any = Tree()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "in"))["in"]
    fully_shard(model.leaf, mesh=mesh)
    fully_shard(model.other, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = AdamW(model.parameters())
    replica = thinwire.attach(model, optimizer, LocalSGD(every=1))
    ema = thinwire.EMA(replica, 0.0).eval()
    steps(rank, model, optimizer, replica, 0, 2)
    ema.update_parameters()
    x, _ = batch(rank, 5)
    with torch.no_grad():
        same = torch.equal(ema(x), replica.eval()(x))
    return same and ema(x).dtype == torch.bfloat16 and ema.module.leaf.knows == [ema.module]


@pytest.mark.slow
def test_a_copy_is_sharded_as_the_model_is() -> None:
    assert gang.run(copied, 4, fresh=True) == [True] * 4


def mistaken(rank: int) -> str:
    model = sharded(Net())
    replica = thinwire.attach(model, AdamW(model.parameters()), LocalSGD())
    with pytest.raises(ConfigError) as error:
        thinwire.EMA(replica, device=torch.device("cpu"))
    return str(error.value)


def test_an_average_is_where_the_shards_are() -> None:
    for said in gang.run(mistaken, 4, fresh=True):
        assert said == "`device`=cpu is not for sharded models, whose average is sharded: leave it out"
