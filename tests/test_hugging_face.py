"""Models people bring: Hugging Face's, nn.TransformerEncoder, and layers we have no class for."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gang
import needs
import small
import thinwire
from thinwire.factor.plain import to_plain

CYCLES = 2
STEPS = 3 + 6 * CYCLES


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, **quiet))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    shape = {"image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 32, "intermediate_size": 48}
    config = ViTConfig(num_hidden_layers=2, num_attention_heads=2, num_labels=10, hidden_dropout_prob=0.0, **shape)
    return ViTForImageClassification(config)


class Encoder(nn.Module):
    """nn.TransformerEncoder with packed projections, then attention with separate ones."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, batch_first=True)
        self.embed = nn.Linear(8, 32)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.attention = nn.MultiheadAttention(32, 2, kdim=24, vdim=28, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(self.embed(x.squeeze(1)))
        x, _ = self.attention(x, x[..., :24], x[..., :28])
        return self.head(x.mean(1))


class Scaled(nn.Module):
    """A user's own layer: its weight is used in no way we know."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.tanh(self.weight)


class Odd(nn.Module):
    """ConvTranspose2d and a user's own layer between ends that stay full; buffers that have no mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 4, stride=4)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.scaled = Scaled(32)
        self.head = nn.Linear(32, 10)
        self.register_buffer("rotation", torch.full((4,), 1j))
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        self.register_buffer("empty", torch.zeros(0, dtype=torch.long))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.training
        x = torch.relu(self.up(self.stem(x)))
        return self.head(self.scaled(x.flatten(2).mean(1).repeat(1, 2)))


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return Encoder()


def odd() -> nn.Module:
    torch.manual_seed(0)
    return Odd()


MODELS = {"gpt2": gpt2, "vit": vit, "encoder": encoder, "odd": odd}


def loss_of(name: str, model: Any, rank: int, number: int) -> Tensor:
    images, labels = small.batch(rank, number, 4)
    if name == "gpt2":
        tokens = (images.flatten(1)[:, :12].abs() * 20).long() % 64
        return model(input_ids=tokens, labels=tokens).loss
    if name == "vit":
        return model(pixel_values=images, labels=labels).loss
    return nn.functional.cross_entropy(model(images), labels)


def output_of(name: str, model: Any) -> Tensor:
    images, _ = small.batch(9, 9, 4)
    with torch.no_grad():
        if name == "gpt2":
            return model((images.flatten(1)[:, :12].abs() * 20).long() % 64).logits
        return model(images).logits if name == "vit" else model(images)


def all_of(rank: int, names: list[str]) -> dict[str, Any]:
    return {name: two_cycles(rank, name) for name in names}


def two_cycles(rank: int, name: str) -> dict[str, Any]:
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    replica = thinwire.attach(model, optimizer, small.ab(total_steps=STEPS))
    seen: dict[str, Any] = {"ranks": [], "exported": [], "losses": []}
    for number in range(STEPS):
        if replica.phase == "groups":
            seen["ranks"].append(replica.ranks())
            seen["exported"].append(as_exported(name, replica))
        loss = loss_of(name, replica, rank, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen["losses"].append(loss.item())
    return {**seen, **finish(name, replica)}


def as_exported(name: str, replica: Any) -> tuple[Tensor, Tensor]:
    """What the model says as factors, and what a copy of it says as plain layers."""
    plain = to_plain(copy.deepcopy(replica.module).eval())
    replica.eval()
    factored = output_of(name, replica)
    replica.train()
    return factored, output_of(name, plain)


def finish(name: str, replica: Any) -> dict[str, Any]:
    before: list[Tensor] = []

    def watched(module: nn.Module) -> nn.Module:
        before.append(output_of(name, module.eval()))
        return to_plain(module)

    with mock.patch("thinwire.replica.replica.to_plain", watched):
        finished = replica.finish(0.6)
    return {
        "factored": before[0],
        "finished": output_of(name, finished),
        "own classes": [type(m).__module__ for m in finished.modules() if type(m).__module__.startswith("thinwire")],
        "described": replica.describe(),
        "bits": small.model_bits(finished),
        "ranks at the end": replica.ranks(),
    }


SEPARATE = {f"attention.{part}" for part in ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj")}
WANTED = {
    "gpt2": {f"transformer.h.{i}.{part}" for i in (0, 1) for part in ("attn.c_attn", "mlp.c_fc", "mlp.c_proj")},
    "vit": set(),
    "encoder": {"encoder.layers.0.self_attn.in_proj_weight", "encoder.layers.1.linear1", *SEPARATE},
    "odd": {"up", "scaled"},
}

LEAST = {"gpt2": 8, "vit": 12, "encoder": 12, "odd": 2}


def test_two_cycles_and_finish() -> None:
    check_workers(["encoder", "odd"])


@pytest.mark.slow
def test_two_cycles_and_finish_of_hugging_face() -> None:
    needs.package("transformers")
    check_workers(["gpt2", "vit"])


def check_workers(names: list[str]) -> None:
    workers = gang.run(all_of, 2, names)
    for name in names:
        check_model(name, [worker[name] for worker in workers])


def check_model(name: str, found: list[dict[str, Any]]) -> None:
    assert found[0]["bits"] == found[1]["bits"]
    for worker in found:
        assert len(worker["ranks"]) == 4 * CYCLES
        assert all(ranks.keys() >= WANTED[name] and len(ranks) >= LEAST[name] for ranks in worker["ranks"])
        for factored, plain in [*worker["exported"], (worker["factored"], worker["finished"])]:
            torch.testing.assert_close(plain, factored, rtol=1e-5, atol=1e-5)
        assert worker["own classes"] == []
        assert worker["described"]["parameters"] < worker["described"]["parameters_full"]
        assert all(loss == loss for loss in worker["losses"])


def test_tied_head_of_gpt2_and_tokens_of_vit_stay_full() -> None:
    needs.package("transformers")
    kept = {}
    for name, build in (("gpt2", gpt2), ("vit", vit)):
        model = build()
        replica = thinwire.attach(model, small.sgd(model), small.ab())
        loss_of(name, replica, 0, 0).backward()
        kept[name] = reasons(replica)
        replica.detach()
    assert kept["gpt2"] == {
        "transformer.wte.weight": "tied weight",
        "transformer.wpe.weight": "embedding",
        "lm_head.weight": "tied weight",
    }
    assert kept["vit"] == {
        "vit.embeddings.cls_token": "not a layer's weight",
        "vit.embeddings.position_embeddings": "not a layer's weight",
        "vit.embeddings.patch_embeddings.projection.weight": "first layer",
        "classifier.weight": "last layer",
    }


def reasons(replica: Any) -> dict[str, str]:
    return {kept["layer"]: kept["why"] for kept in replica.describe()["kept_full"]}


def test_the_fast_path_of_the_encoder_reads_factors() -> None:
    """In eval() without gradients nn.TransformerEncoderLayer hands its weights to one fused call."""
    model = encoder()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, small.ab(warmup=0, total_steps=4))
    # Until the first step hooks note the order of layers, and a module with hooks has no fast path.
    small.step(replica, optimizer, 0, 0)
    assert replica.ranks() and replica.phase == "groups"
    images, _ = small.batch(0, 0)
    replica.eval()
    slow = replica(images)
    fused = torch._transformer_encoder_layer_fwd
    with mock.patch("torch._transformer_encoder_layer_fwd", wraps=fused) as calls, torch.no_grad():
        fast = replica(images)
    assert calls.call_count == 2
    torch.testing.assert_close(fast, slow.detach(), rtol=1e-4, atol=1e-5)


class Everything(nn.Module):
    """One of each thing that must stay as it is, and one layer that need not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.table = nn.Embedding(20, 16)
        self.tied = nn.Linear(16, 20, bias=False)
        self.tied.weight = self.table.weight
        self.shared = nn.Linear(16, 16)
        self.again = self.shared
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.grouped = nn.Conv1d(16, 16, 1, groups=4)
        self.recurrent = nn.GRU(16, 16, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.thin = nn.Linear(16, 1)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.norm = nn.LayerNorm(16)
        self.mine = nn.Linear(16, 16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.shared(self.first(x))) + self.token
        x = self.norm(self.frozen(x)) + self.table(torch.arange(3)) + self.tied(x)[..., :16]
        x = self.grouped(x.mT).mT + self.recurrent(x)[0]
        return self.last(self.middle(self.mine(self.normed(x) + self.thin(x))))


def test_what_is_left_alone_and_why() -> None:
    torch.manual_seed(0)
    model = Everything()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    replica = thinwire.attach(model, optimizer, small.ab(keep=("mine",)))
    for _ in range(4):
        replica(torch.randn(2, 3, 16)).square().mean().backward()
        optimizer.step()
    assert replica.ranks().keys() == {"middle"}
    assert reasons(replica) == {
        "token": "not a layer's weight",
        "first.weight": "first layer",
        "table.weight": "tied weight",
        "tied.weight": "tied weight",
        "shared.weight": "shared module",
        "frozen.weight": "frozen",
        "grouped.weight": "grouped convolution",
        "recurrent.weight_ih_l0": "recurrent layer",
        "recurrent.weight_hh_l0": "recurrent layer",
        "normed.parametrizations.weight.original0": "already parametrized",
        "normed.parametrizations.weight.original1": "already parametrized",
        "thin.weight": "too thin to factor",
        "mine.weight": "kept by pattern 'mine'",
        "last.weight": "last layer",
    }
    assert not model.frozen.weight.requires_grad and model.tied.weight is model.table.weight


def test_hooks_names_and_references_survive() -> None:
    model = small.net()
    optimizer = small.sgd(model)
    held, fired = model.middle, []
    held.register_forward_hook(lambda *_: fired.append(type(held).__name__))
    names = [name for name, _ in model.named_modules()]
    replica = thinwire.attach(model, optimizer, small.ab())
    for number in small.walk(replica, optimizer, 0):
        assert len(fired) == number + 1
        assert replica.module.middle is held and [name for name, _ in model.named_modules()] == names
        assert isinstance(held, nn.Linear) and (held.in_features, held.out_features) == (32, 32)
        assert held.weight.shape == (32, 32)
        if replica.phase == "groups":
            check_read_only(held)
            assert "middle.weight" not in replica.state_dict() and "middle.weight_a" in replica.state_dict()
    assert {"Linear", "FactoredLinear"} == set(fired)
    assert replica.state_dict().keys() == small.net().state_dict().keys()


def check_read_only(layer: Any) -> None:
    torch.testing.assert_close(layer.weight, layer.weight_a @ layer.weight_b)
    for value in (torch.zeros(32, 32), nn.Parameter(torch.zeros(32, 32))):
        with pytest.raises((AttributeError, KeyError)):
            layer.weight = value
    with pytest.raises(AttributeError):
        del layer.weight
    assert "weight" not in dict(layer.named_parameters())


def test_a_weight_that_its_parent_reads_is_still_there_when_finished() -> None:
    needs.package("transformers")
    model = vit()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    replica = thinwire.attach(model, optimizer, small.ab(keep_first=False, warmup=0, total_steps=4, group_size=None))
    loss_of("vit", replica, 0, 0).backward()
    optimizer.step()
    replica.finish(0.6)  # the embeddings read `projection.weight.dtype`
    assert output_of("vit", replica.eval()).isfinite().all()
    assert not any("_weight_was_read" in vars(m) for m in replica.module.modules())


@pytest.mark.parametrize("name", MODELS)
def test_frozen_bases_in_every_kind_of_layer(name: str) -> None:
    """OIALR: entering low rank and finishing without a cut change no output; ranks fall, layers are plain at last."""
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = thinwire.OIALR(total_steps=8, factor_at=2, redecompose=2, cutoff=0.6, layer_fraction=1.0)
    replica = thinwire.attach(model, optimizer, config)
    for number in range(8):
        loss_of(name, replica, 0, number).backward()
        before = None
        if number == 1:  # the step that ends the delay: seen around its update of nothing
            for group in optimizer.param_groups:
                group["lr"], group["weight_decay"], kept = 0.0, 0.0, group["lr"]
            before = output_of(name, replica.eval())
            replica.train()
        optimizer.step()
        optimizer.zero_grad()
        if before is not None:
            torch.testing.assert_close(output_of(name, replica.eval()), before, rtol=1e-4, atol=1e-5)
            replica.train()
            for group in optimizer.param_groups:
                group["lr"] = kept
    ranks = replica.ranks()
    assert ranks and any(layer.rank < min(layer.view.tall) for layer in replica._method.shape.factored)
    before = output_of(name, replica.eval())
    finished = replica.finish(cutoff=0.0)
    torch.testing.assert_close(output_of(name, finished.eval()), before, rtol=1e-4, atol=1e-5)
    assert not any(type(module).__module__.startswith("thinwire") for module in finished.modules())


def test_a_models_full_state_is_its_own_classes_in_training_and_when_finished() -> None:
    """Conv1D's weight is (in, out), and it is a Linear once it is finished."""
    needs.package("transformers")
    from thinwire.integrations.dense import dense_state_of, transposed_layers

    model, fresh = gpt2(), gpt2()
    transposed = transposed_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    replica = thinwire.attach(model, optimizer, small.ab(warmup=0, total_steps=4, group_size=None))
    for number in range(2):
        loss_of("gpt2", replica, 0, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert replica.ranks() and transposed == transposed_layers(model)
    fresh.load_state_dict(dense_state_of(model, transposed))
    torch.testing.assert_close(output_of("gpt2", fresh.eval()), output_of("gpt2", replica.eval()), rtol=1e-4, atol=1e-5)
    finished = replica.finish(0.6)
    fresh.load_state_dict(dense_state_of(finished, transposed))
    torch.testing.assert_close(output_of("gpt2", fresh), output_of("gpt2", finished.eval()), rtol=1e-4, atol=1e-5)
