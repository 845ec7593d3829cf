"""torch.compile of models that groups shard with FSDP2."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

import gang
import thinwire
from selection import slow_but
from sharded_net import Net, sharded, steps, whole
from thinwire import AB, LocalSGD

WAYS: dict[str, Any] = {
    "localsgd": LocalSGD(every=3, warmup=2),
    "ab factors": AB(
        warmup=2, every=2, redecompose=2, cutoff=0.6, factor_at=4, keep_first=False, keep_last=False, wire="fp32"
    ),
}


def compiled(rank: int, name: str, folder: str | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, graphs = sharded(Net()), list[int]()

    def count(graph: Any, example: Any) -> Any:
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    optimizer = AdamW(model.parameters(), 1e-2)
    options = {"backend": count, "fullgraph": True} if folder else None
    replica = thinwire.attach(model, optimizer, WAYS[name], compile=options)
    ema = thinwire.EMA(replica)
    steps(rank, model, optimizer, replica, 0, 9)
    if folder is not None:
        replica.save(folder)
        steps(rank, model, optimizer, replica, 9, 12)
        replica.load(folder)
    steps(rank, model, optimizer, replica, 9, 12)
    ema.update_parameters()
    found = {"graphs": graphs, "again": replica.recompilations}
    small = replica.finish()
    made = len(graphs)
    with torch.no_grad():
        small(torch.randn(8, 12)), ema(torch.randn(8, 12))
    assert len(graphs) == made, "what is finished, or a copy, is still compiled"
    return found | {"model": whole(small), "ema": whole(ema.finish())}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(("ab factors",), WAYS))
def test_blocks_are_compiled_and_train_as_before(name: str, tmp_path: Path) -> None:
    plain = gang.run(compiled, 4, name, None, fresh=True)
    for one, other in zip(gang.run(compiled, 4, name, str(tmp_path / "save"), fresh=True), plain, strict=True):
        assert len(one["graphs"]) >= 4 and not other["graphs"]
        assert max(one["graphs"]) == (2 if name == "ab factors" else 1)  # nothing of FSDP is in a graph
        for part in ("model", "ema"):
            for key, value in one[part].items():
                torch.testing.assert_close(value, other[part][key])


class Tower(nn.Sequential):
    """More blocks than Dynamo has compilations for one function."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Linear(12 + i, 13 + i) for i in range(12)), nn.Linear(24, 5))


def many(rank: int) -> tuple[int, int]:
    graphs: list[Any] = []

    def count(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Tower()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "in"))["in"]
    for layer in model:
        fully_shard(layer, mesh=mesh)
    optimizer = AdamW(fully_shard(model, mesh=mesh).parameters())
    replica = thinwire.attach(model, optimizer, LocalSGD(), compile={"backend": count})
    steps(rank, model, optimizer, replica, 0, 1)
    return len(graphs), replica.recompilations


@pytest.mark.slow
def test_each_block_has_dynamos_limit_for_itself() -> None:
    assert gang.run(many, 4, fresh=True) == [(13, 0)] * 4
