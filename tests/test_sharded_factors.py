"""AB's factors of models that groups shard with FSDP2."""

import weakref
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
from sharded_net import steps, whole
from thinwire import AB

_AB: dict[str, Any] = {"warmup": 2, "warmup_wire": "lowrank:2", "every": 2, "redecompose": 2, "cutoff": 0.6}
_AB |= {"wire": "fp32", "group_size": 2, "checksum_every": 1}


class Words(nn.Module):
    """Weights that are tied, and attention, which reads its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 48, 0.0, batch_first=True) for _ in range(2))
        self.mix, self.head = nn.Linear(16, 16), nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(F.gelu(self.mix(x)))


def read(rank: int, shards: bool) -> tuple[dict[str, int], dict[str, torch.Tensor], torch.Tensor]:
    torch.set_num_threads(1)
    model: Any = Words()
    if shards:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "in"))["in"]
        for part in (*model.blocks, model.mix, model):
            fully_shard(part, mesh=mesh)
    optimizer = AdamW(model.parameters(), 1e-3)
    replica = thinwire.attach(model, optimizer, AB(factor_at=4, **_AB))
    for step in range(9):
        x = torch.randint(0, 20, (4, 7), generator=torch.Generator().manual_seed(100 * rank + step))
        F.cross_entropy(replica(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    small = replica.finish()
    with torch.no_grad():
        return replica.finished_ranks, whole(small), small.eval()(torch.arange(20)[None])


@pytest.mark.slow
def test_attention_and_tied_weights_in_groups_of_layers() -> None:
    (ranks, state, outputs), *_ = gang.run(read, 4, False, fresh=True)
    assert {"blocks.0.self_attn.in_proj_weight", "blocks.1.linear1.weight", "mix.weight"} <= ranks.keys()
    for found in gang.run(read, 4, True, fresh=True):
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
