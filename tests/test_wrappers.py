"""A replica, its model or its optimizer inside what other libraries wrap around them."""

import copy
import inspect
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gang
import small
import thinwire
from thinwire.base.errors import ConfigError, ThinwireError


def attached() -> tuple[nn.Module, Any, Any]:
    model = small.mlp()
    optimizer = small.sgd(model)
    return model, optimizer, thinwire.attach(model, optimizer, thinwire.LocalSGD(every=1000))


def said_by(work: Any, *args: Any) -> str:
    with pytest.raises(ThinwireError) as error:
        work(*args)
    return str(error.value)


def wrap_in_everything(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    x, _ = small.batch(rank, 0)
    model, _, replica = attached()
    wrapped = DistributedDataParallel(replica)
    found["ddp around"] = said_by(wrapped, x)
    wrapped.eval()
    with torch.no_grad():
        wrapped(x)  # nobody averages anything here
    found["ddp of more"] = said_by(DistributedDataParallel(nn.Sequential(replica.train(), nn.Linear(10, 2))), x)
    replica.detach()

    found["ddp inside"] = said_by(
        thinwire.attach, DistributedDataParallel(model), small.sgd(model), thinwire.LocalSGD(every=4)
    )
    # Another model's DDP may call a replica: it averages its own parameters alone.
    model, _, replica = attached()

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(10, 10)
            self.others = [replica]  # no submodule

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(self.others[0](x))

    found["ddp of another"] = DistributedDataParallel(Student())(x).shape
    replica.detach()

    model, _, replica = attached()
    found["sharded around"] = said_by(fully_shard(replica), x)
    model = fully_shard(small.mlp())
    found["sharded inside"] = said_by(thinwire.attach, model, small.sgd(model), thinwire.AllReduce())
    model, _, replica = attached()
    found["flat around"] = said_by(FullyShardedDataParallel(replica, device_id=torch.device("cpu")), x)
    return found


def test_a_replica_inside_what_averages_by_itself_is_refused_at_its_first_pass() -> None:
    for found in gang.run(wrap_in_everything, 2):
        for place in ("ddp around", "ddp of more"):
            assert "the replica is inside DistributedDataParallel" in found[place]
            assert "bypassing Thinwire and its ledger" in found[place] and "prepare()" in found[place]
        assert "the model is inside DistributedDataParallel" in found["ddp inside"]
        assert "give attach() the bare model" in found["ddp inside"]
        assert found["ddp of another"] == (6, 10)
        assert "the replica is inside FSDPModule" in found["sharded around"]
        assert "the model is sharded over all 2 workers" in found["sharded inside"]
        assert "the model has changed since attach()" in found["flat around"]


def accelerate(rank: int) -> dict[str, Any]:
    from accelerate import Accelerator

    # It reads torchrun's variables, though the process group is there.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", LOCAL_WORLD_SIZE="2")
    accelerator = Accelerator(cpu=True)
    found: dict[str, Any] = {}
    x, y = small.batch(rank, 0)
    _, _, replica = attached()
    found["prepared"] = said_by(accelerator.prepare(replica), x)
    replica.detach()

    model = small.mlp()
    optimizer = accelerator.prepare(small.sgd(model))
    replica = thinwire.attach(model, optimizer, thinwire.LocalSGD(every=2))
    for number in range(5):
        x, y = small.batch(rank, number)
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(replica(x), y))
        optimizer.step()
    found["steps"] = replica.step
    found["end"] = small.model_bits(replica.finish())
    return found


def test_accelerates_model_is_refused_and_its_optimizer_followed() -> None:
    here, there = gang.run(accelerate, 2, fresh=True)
    assert "the replica is inside DistributedDataParallel" in here["prepared"]
    assert here["steps"] == 5 and here["end"] == there["end"]


def test_what_replaces_parameters_after_attach_is_noticed() -> None:
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, thinwire.AllReduce())
    model[7] = nn.Linear(32, 10)
    with pytest.raises(ThinwireError, match=r"changed since attach\(\): parameter '7\.weight' is new"):
        small.step(replica, optimizer, 0, 0)


def test_attaching_twice_says_so() -> None:
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, thinwire.AllReduce())
    for again in (model, nn.Sequential(model), model[1]):
        with pytest.raises(ConfigError, match=r"attached already, another replica trains .*finish\(\) or detach\(\)"):
            thinwire.attach(again, torch.optim.SGD(again.parameters(), lr=0.1), thinwire.LocalSGD(every=2))
    with pytest.raises(ConfigError, match="is a replica already"):
        thinwire.attach(replica, optimizer, thinwire.AllReduce())
    replica.detach()
    thinwire.attach(model, optimizer, thinwire.LocalSGD(every=2)).finish()
    thinwire.attach(model, optimizer, thinwire.AllReduce())


def test_a_replica_has_its_models_signature() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
            return self.layer(input_ids)

    model = Named()
    replica = thinwire.attach(model, small.sgd(model), thinwire.AllReduce())
    assert inspect.signature(replica.forward) == inspect.signature(model.forward)
    assert list(inspect.signature(replica.forward).parameters) == ["input_ids", "labels"]


def test_hugging_faces_trainer_keeps_the_columns_that_the_model_takes(tmp_path: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
    replica = thinwire.attach(model, torch.optim.AdamW(model.parameters()), thinwire.AllReduce())
    trainer = Trainer(replica, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    trainer._set_signature_columns_if_needed()
    assert {"input_ids", "attention_mask", "labels"} <= set(trainer._signature_columns)


# A replica is no ordinary module in three ways.


def test_a_module_that_holds_a_replica_saves_and_loads_by_the_models_own_names() -> None:
    model = small.mlp()
    outer = nn.ModuleDict({"net": thinwire.attach(model, small.sgd(model), small.ab())})
    kept = {name: t.clone() for name, t in outer.state_dict().items()}
    assert set(kept) == {f"net.{name}" for name in model.state_dict()}
    nn.init.zeros_(model[1].weight)
    outer.load_state_dict(kept)
    assert small.same(small.clone(model), {name.removeprefix("net."): t for name, t in kept.items()})


def test_copies_and_pickles_say_what_to_keep_instead(tmp_path: Any) -> None:
    model = small.mlp()
    replica = thinwire.attach(model, small.sgd(model), thinwire.AllReduce())
    with pytest.raises(ThinwireError, match=r"keep replica.state_dict\(\) for the model, or replica.save\(folder\)"):
        torch.save(replica, tmp_path / "replica.pt")
    with pytest.raises(ThinwireError, match=r"copy replica\.module"):
        copy.deepcopy(replica)


def test_training_inside_merged_is_refused() -> None:
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, small.ab())
    with replica.merged(), pytest.raises(ThinwireError, match="what is trained there would be thrown away"):
        small.step(replica, optimizer, 0, 0)
    small.step(replica, optimizer, 0, 0)


def test_models_without_values_are_refused() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=r"'0\.weight' has no shape yet; run one batch"):
        thinwire.attach(lazy, small.sgd(lazy), thinwire.AllReduce())
    empty = nn.Linear(4, 2, device="meta")
    with pytest.raises(ConfigError, match="'weight' is on the meta device"):
        thinwire.attach(empty, small.sgd(empty), thinwire.AllReduce())
