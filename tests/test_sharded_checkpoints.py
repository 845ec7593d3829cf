"""torch's own checkpoints of models that groups shard with FSDP2."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import gang
import thinwire
from device import DEVICE, here
from sharded_net import Net, sharded, steps, whole
from thinwire import DiLoCo


def checkpointed(rank: int, folder: str) -> dict[str, Any]:
    """Two groups of two save their model, as averaged, and the first group's optimizer state."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, mesh = here(Net()), init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("between", "in"))
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=mesh["in"])
    optimizer = AdamW(model.parameters(), 1e-2)
    replica = thinwire.attach(model, optimizer, DiLoCo(every=4, warmup=2, group_size=2))
    steps(rank, model, optimizer, replica, 0, 8)
    with replica.merged():
        shown = {"model": whole(model), "moments": whole_moments(model, optimizer)}
        if replica.topology.group_index == 0:
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            checkpoint.save(state, checkpoint_id=folder, process_group=mesh["in"].get_group())
    steps(rank, model, optimizer, replica, 8, 10)
    return shown


def continued(rank: int, members: int, folder: str) -> dict[str, Any]:
    """Two groups of another size load it, then attach."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = sharded(here(Net()), members) if members > 1 else here(Net())
    optimizer = AdamW(model.parameters(), 1e-2)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    replica = thinwire.attach(model, optimizer, DiLoCo(every=2, group_size=members))
    loaded = {"model": whole(model), "moments": whole_moments(model, optimizer)}
    steps(rank, model, optimizer, replica, 8, 12)
    replica.finish()
    return {**loaded, "trained": whole(model)}


def whole_moments(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    moments = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in moments.items()}


@pytest.mark.slow
@pytest.mark.parametrize("members", [1, 3])
def test_a_distributed_checkpoint_continues_in_groups_of_another_size(members: int, tmp_path: Path) -> None:
    saved, *_ = gang.run(checkpointed, 4, str(tmp_path / "saved"), fresh=True)
    found = gang.run(continued, 2 * members, members, str(tmp_path / "saved"), fresh=True)
    for one in found:
        for what in ("model", "moments"):
            assert one[what].keys() == saved[what].keys()
            assert all(torch.equal(one[what][name], t) for name, t in saved[what].items()), what
        assert all(torch.equal(one["trained"][name], t) for name, t in found[0]["trained"].items())
        assert not torch.equal(one["trained"]["first.weight"], saved["model"]["first.weight"])
