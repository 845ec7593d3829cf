"""AB's factors of models that groups shard with FSDP2."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import gang
import thinwire
from selection import slow_but
from sharded_net import Words, steps, whole
from thinwire import AB, OIALR

_AB: dict[str, Any] = {"warmup": 2, "warmup_wire": "lowrank:2", "every": 2, "redecompose": 2, "cutoff": 0.6}
_AB |= {"wire": "fp32", "group_size": 2, "checksum_every": 1}


WAYS: dict[str, Any] = {
    "ab": AB(factor_at=4, **_AB),
    "ab.paper": AB.paper(total_steps=9, warmup=2, every=3, rebound=1, cutoff=0.6, moments="carry", group_size=2),
    "oialr": OIALR(total_steps=9, factor_at=3, redecompose=2, cutoff=0.6, max_shrink=1.0, layer_fraction=1.0),
}


def read(rank: int, name: str, shards: bool) -> tuple[dict[str, int], dict[str, torch.Tensor], torch.Tensor]:
    torch.set_num_threads(1)
    model: Any = Words()
    if shards:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "in"))["in"]
        for part in (*model.blocks[0].children(), [*model.blocks], model.mix, model):
            fully_shard(part, mesh=mesh)
    optimizer = AdamW(model.parameters(), 1e-3)
    config = WAYS[name] if shards else replace(WAYS[name], group_size=2)
    replica = thinwire.attach(model, optimizer, config)
    ema = thinwire.EMA(replica, 0.5)
    for step in range(9):
        x = torch.randint(0, 20, (4, 7), generator=torch.Generator().manual_seed(100 * rank + step))
        F.cross_entropy(replica(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters()
    small, averaged = replica.finish(), ema.finish()
    state = whole(small) | {f"ema.{key}": value for key, value in whole(averaged).items()}
    x = torch.arange(20)[None]
    with torch.no_grad():
        return replica.finished_ranks, state, torch.stack([each.eval()(x) for each in (small, averaged, ema)])


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(("ab",), WAYS))
def test_attention_and_tied_weights_in_groups_of_layers(name: str) -> None:
    (ranks, state, outputs), *_ = gang.run(read, 4, name, False, fresh=True)
    assert {"blocks.0.self_attn.in_proj_weight", "blocks.1.linear1.weight", "mix.weight"} <= ranks.keys()
    for found in gang.run(read, 4, name, True, fresh=True):
        assert found[0] == ranks
        assert found[1].keys() == state.keys()
        assert torch.allclose(found[2], outputs, atol=1e-4)


class Tower(nn.Sequential):
    """Many layers of one size."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(12, 24), *(nn.Linear(24, 24) for _ in range(12)), nn.Linear(24, 5))


def gathered_at_once(rank: int) -> dict[str, float]:
    """The most values of whole tensors that a worker has at a time while it decomposes."""
    from thinwire.comm.sharded import ShardedWire

    model = Tower()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "in"))["in"]
    for layer in model:
        fully_shard(layer, mesh=mesh)
    optimizer = AdamW(fully_shard(model, mesh=mesh).parameters(), 1e-2)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    gather = ShardedWire.gathered

    def watched(self: Any, t: torch.Tensor, purpose: str) -> torch.Tensor:
        nonlocal most
        found = gather(self, t, purpose)
        alive.append(weakref.ref(found))
        most = max(most, sum(t.numel() for ref in alive if (t := ref()) is not None))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedWire, "gathered", watched)
        replica = thinwire.attach(model, optimizer, AB(factor_at=2, **_AB))
        steps(rank, model, optimizer, replica, 0, 7)
    return {"most": most, "layers": len(replica.ranks())}


@pytest.mark.slow
def test_one_layer_is_whole_at_a_time() -> None:
    for found in gang.run(gathered_at_once, 4, fresh=True):
        assert found["layers"] > 8
        assert 24 * 24 <= found["most"] <= 3 * 24 * 24, found  # a weight and its two moments
