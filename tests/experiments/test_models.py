"""The models: their sizes, their libraries' arithmetic weight for weight, first values, and a step by AB."""

import math
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gang
import needs
import small
import thinwire
from thinwire.experiments.models import VGG16, VGG16BN, ResNet18, ResNet50, ViT
from thinwire.experiments.models import vision as library
from thinwire.experiments.models.vision import DropPath
from thinwire.experiments.text import GPT
from thinwire.train import initial
from thinwire.train.models import CharGPT, DigitNet

MINI_VIT = {"image": 32, "patch": 8, "depth": 6, "heads": 6, "qkv_bias": False, "drop_path": 0.2}
SMALL_VIT = {"classes": 7, "image": 16, "patch": 4, "width": 24, "depth": 2, "heads": 3}
SMALL_GPT = {"vocabulary": 40, "block": 16, "width": 24, "depth": 2, "heads": 3}
NARROW: dict[str, Callable[[], nn.Module]] = {
    "VGG16": lambda: VGG16(width=1 / 16),
    "VGG16BN": lambda: VGG16BN(width=1 / 8),
    "ResNet18": lambda: ResNet18(width=1 / 16),
    "ResNet50": lambda: ResNet50(classes=10, width=1 / 16, dropout=0.1),
    "ViT": lambda: ViT(classes=10, **{**MINI_VIT, "width": 48, "depth": 2}, dropout=0.1),
    "GPT": lambda: GPT(**SMALL_GPT, dropout=0.1),
}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "make, parameters",
    [
        (VGG16, 134_301_514),
        (VGG16BN, 15_249_354),
        (ResNet18, 11_173_962),
        (ResNet50, 25_557_032),
        (ViT, 86_567_656),
        (lambda: ViT(classes=10, **MINI_VIT), 42_684_682),
        (lambda: GPT(vocabulary=50_257), 124_439_808),
        (lambda: CharGPT(vocabulary=65), 818_176),
        (DigitNet, 226_794),
    ],
)
def test_parameters_of_the_full_ones(make: Callable[[], nn.Module], parameters: int) -> None:
    with torch.device("meta"):
        assert count(initial.build(make, orthogonal=True)) == parameters


@pytest.mark.parametrize("side", [32, 64, 256])
def test_shapes_of_what_they_give(side: int) -> None:
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        assert VGG16(classes=7, width=1 / 32)(images).shape == (2, 7)
        assert ResNet18(classes=7, width=1 / 16)(images).shape == (2, 7)
        assert ResNet50(classes=7, width=1 / 16)(images).shape == (2, 7)
        assert ViT(**{**SMALL_VIT, "image": side, "patch": 16})(images).shape == (2, 7)
    assert VGG16BN(classes=7, width=1 / 16)(images[..., :32, :32]).shape == (2, 7)
    assert GPT(**SMALL_GPT)(torch.zeros(2, 9, dtype=torch.long)).shape == (2, 9, 40)


def test_small_features_are_spread_under_the_wide_kernel() -> None:
    model = VGG16(width=1 / 32)
    features = torch.randn(2, 16, 1, 1)
    wide, spread = model.pre_logits(features), model.pre_logits(features.expand(-1, -1, 7, 7))
    torch.testing.assert_close(wide, spread)
    kernel = model.pre_logits.fc1.weight.sum((2, 3))
    by_hand = F.relu(features.flatten(1) @ kernel.t() + model.pre_logits.fc1.bias)
    by_hand = F.relu(by_hand @ model.pre_logits.fc2.weight.flatten(1).t() + model.pre_logits.fc2.bias)
    torch.testing.assert_close(wide.flatten(1), by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_as_transformers_gpt2() -> None:
    transformers = needs.package("transformers")
    sizes = {"n_layer": 2, "n_head": 3, "n_embd": 24, "vocab_size": 40, "n_positions": 16}
    theirs = varied(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    names = {
        r"transformer\.wte": "tokens",
        r"transformer\.wpe": "places",
        r"transformer\.ln_f": "norm",
        r"transformer\.h": "layers",
        "lm_head": "head",
        "ln_1": "norm_attention",
        "ln_2": "norm_mlp",
        r"attn\.c_attn": "attention.qkv",
        r"attn\.c_proj": "attention.out",
        "c_fc": "0",
        r"mlp\.c_proj": "mlp.2",
    }
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    state = {name: t.t() if name.endswith(transposed) else t for name, t in theirs.state_dict().items()}
    agree(GPT(**SMALL_GPT), theirs, renamed(state, names), torch.randint(40, (3, 16)))


def test_as_transformers_vit() -> None:
    transformers = needs.package("transformers")
    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = transformers.ViTConfig(**sizes, intermediate_size=96, layer_norm_eps=1e-6, num_labels=7)
    theirs = varied(transformers.ViTForImageClassification(config))
    names = {
        r"vit\.embeddings\.": "",
        "position_embeddings": "pos_embed",
        "patch_embeddings": "patch_embed",
        "projection": "proj",
        r"vit\.layers": "blocks",
        "layernorm_before": "norm1",
        "layernorm_after": "norm2",
        "attention": "attn",
        "o_proj": "proj",
        r"vit\.layernorm": "norm",
        "classifier": "head",
    }
    state = renamed(theirs.state_dict(), names)
    for name in [name for name in state if "q_proj" in name]:
        parts = [state.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        state[name.replace("q_proj", "qkv")] = torch.cat(parts)
    agree(ViT(**SMALL_VIT), theirs, state, torch.randn(3, 3, 16, 16))


RESNET_NAMES = {
    r"resnet\.embedder\.embedder\.convolution": "conv1",
    r"resnet\.embedder\.embedder\.normalization": "bn1",
    **{rf"resnet\.encoder\.stages\.{i}\.layers": f"layer{i + 1}" for i in range(4)},
    r"shortcut\.convolution": "downsample.0",
    r"shortcut\.normalization": "downsample.1",
    **{rf"layer\.{i}\.convolution": f"conv{i + 1}" for i in range(3)},
    **{rf"layer\.{i}\.normalization": f"bn{i + 1}" for i in range(3)},
    r"classifier\.1": "fc",
}


def test_as_transformers_resnet() -> None:
    transformers = needs.package("transformers")
    widths = {"embedding_size": 4, "hidden_sizes": [16, 32, 64, 128], "depths": [3, 4, 6, 3], "num_labels": 7}
    config = transformers.ResNetConfig(**widths, layer_type="bottleneck", downsample_in_bottleneck=False)
    theirs = varied(transformers.ResNetForImageClassification(config))
    agree(
        ResNet50(classes=7, width=1 / 16), theirs, renamed(theirs.state_dict(), RESNET_NAMES), torch.randn(3, 3, 64, 64)
    )


def test_resnet18_as_transformers_with_the_stem_for_small_images() -> None:
    transformers = needs.package("transformers")
    widths = {"embedding_size": 4, "hidden_sizes": [4, 8, 16, 32], "depths": [2, 2, 2, 2], "num_labels": 7}
    theirs = transformers.ResNetForImageClassification(transformers.ResNetConfig(**widths, layer_type="basic"))
    embedder = theirs.resnet.embedder
    embedder.embedder.convolution, embedder.pooler = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Identity()
    ours = ResNet18(classes=7, width=1 / 16)
    agree(ours, varied(theirs), renamed(theirs.state_dict(), RESNET_NAMES), torch.randn(3, 3, 32, 32))


LIBRARY = {
    "vgg16": (library.vgg16, VGG16, {"classes": 10}),
    "resnet50": (library.resnet50, ResNet50, {"classes": 10}),
    "vit": (library.vit, ViT, {**SMALL_VIT, "image": 32, "patch": 8, "qkv_bias": False, "drop_path": 0.2}),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_as_the_library(name: str) -> None:
    needs.package("torchvision" if name == "resnet50" else "timm")
    make, own, sizes = LIBRARY[name]
    theirs = make(**sizes)
    assert not isinstance(theirs, own), "the library imports, and was not used"
    agree(own(**sizes), theirs.eval(), theirs.state_dict(), torch.randn(2, 3, 32, 32))


def varied(model: nn.Module) -> nn.Module:
    """Values everywhere: a fresh model's biases and norms are zeros and ones, which would hide a wrong place."""
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand_like(tensor))
    return model.eval()


def renamed(state: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    for theirs, ours in names.items():
        state = {re.sub(theirs, ours, name): tensor for name, tensor in state.items()}
    return state


def agree(ours: nn.Module, theirs: nn.Module, state: dict[str, Tensor], x: Tensor) -> None:
    """Both hold as many values, and say the same once they are the same ones."""
    ours.load_state_dict(state)
    assert count(ours) == count(theirs)
    with torch.no_grad():
        said = theirs(x)
        torch.testing.assert_close(ours.eval()(x), getattr(said, "logits", said), rtol=1e-5, atol=1e-5)


LIKE = """
import torch
from torch import nn
__version__ = "7.1"

class Alike(nn.Sequential):
    def __init__(self):
        torch.rand(17)
        super().__init__(nn.Linear(3, 5))

class Renamed(nn.Linear):
    def __init__(self):
        super().__init__(3, 5)

class Wider(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 5))

class Broken(nn.Module):
    def __init__(self):
        raise {}["key"]
"""
LIBRARIES = {
    "likely": LIKE,
    "lacking": "import a_package_that_nobody_has",
    "mismatched": "raise RuntimeError('operator mismatched::nms does not exist')",
}
FOUND = {
    "likely Alike": (True, None),
    "likely Renamed": (False, "Renamed of likely 7.1 has a different 0.weight: our own model is used"),
    "likely Wider": (False, "Wider of likely 7.1 has a different 0.weight: our own model is used"),
    "likely __doc__": (False, None),
    "absent Alike": (False, None),
    "lacking Alike": (
        False,
        "lacking cannot be imported (ModuleNotFoundError: No module named 'a_package_that_nobody_has'): "
        "our own model is used",
    ),
    "mismatched Alike": (
        False,
        "mismatched cannot be imported (RuntimeError: operator mismatched::nms does not exist): our own model is used",
    ),
}


@pytest.fixture
def libraries(tmp_path, monkeypatch) -> None:
    for name, text in LIBRARIES.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)


def of(name: str) -> Callable[[Any], nn.Module | None]:
    return lambda module: made() if (made := getattr(module, name)) else None


@pytest.mark.parametrize("case", FOUND)
def test_a_library_in_place_of_ours(case: str, libraries, caplog) -> None:
    """Our initial values and as many random numbers, whether it is there, cannot be imported, or has other names."""
    (module, name), (taken, said) = case.split(), FOUND[case]
    torch.manual_seed(0)
    ours, after = nn.Sequential(nn.Linear(3, 5)), torch.rand(2)
    torch.manual_seed(0)
    mine = nn.Sequential(nn.Linear(3, 5))
    found = library._library(mine, module, of(name))
    assert (found is not mine) == taken
    assert small.same(found.state_dict(), ours.state_dict()) and torch.equal(torch.rand(2), after)
    assert [record.message for record in caplog.records] == [said][: said is not None]


def test_a_library_that_fails_is_seen(libraries) -> None:
    with pytest.raises(KeyError, match="key"):
        library._library(nn.Linear(3, 5), "likely", of("Broken"))


def test_what_no_library_has_is_ours() -> None:
    assert isinstance(library.vgg16(classes=7, width=1 / 32), VGG16)
    assert isinstance(library.resnet50(classes=7, width=1 / 16), ResNet50)
    assert isinstance(library.resnet50(classes=7, dropout=0.1, width=1 / 16), ResNet50)


@pytest.mark.parametrize("name", NARROW)
def test_orthogonal_first_values(name: str) -> None:
    torch.manual_seed(3)
    model = initial.orthogonal_values(varied(NARROW[name]()))
    for module in model.modules():
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if isinstance(module, nn.Embedding) or (name == "GPT" and module is model.head):
            assert weight.std().item() == pytest.approx(0.02, rel=0.15)
        elif weight is not None and weight.dim() > 1:
            values = torch.linalg.svdvals(weight.detach().flatten(1))
            torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-5)
        elif weight is not None:
            assert bool((weight == 1).all())
        assert bias is None or not bias.any()
    for key, parameter in model.named_parameters(recurse=False):
        assert parameter.std().item() == pytest.approx(0.02, rel=0.4), key
    assert all(not b.any() for key, b in model.named_buffers() if key.endswith("running_mean"))
    assert name != "GPT" or model.head.weight is model.tokens.weight


@pytest.mark.parametrize(
    "shape",
    [(1200, 300), pytest.param((2100, 520), marks=pytest.mark.slow), pytest.param((4000, 999), marks=pytest.mark.slow)],
)
def test_cholesky_finds_what_qr_does(shape: tuple[int, int]) -> None:
    """Sides that are no multiples of a block, too."""
    tall = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found, simple = initial.by_cholesky(tall.clone()), initial.by_qr(tall)
    torch.testing.assert_close(found, simple, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.t() @ found, torch.eye(shape[1]), rtol=0, atol=3e-6)


def test_large_orthogonal_weights(monkeypatch) -> None:
    """The same to rounding by the fast way, nearly orthogonal in a simulation; small ones are the same to the bit."""

    def built() -> dict[str, Tensor]:
        torch.manual_seed(0)
        layers = {"tall": nn.Linear(40, 800), "wide": nn.Conv2d(90, 40, 3), "square": nn.Linear(200, 200)}
        return initial.build(
            lambda: nn.ModuleDict({**layers, "small": nn.Linear(10, 20)}), orthogonal=True
        ).state_dict()

    usual = built()
    monkeypatch.setattr(initial, "_LARGE", 1000)
    large = built()
    with initial.rough_values():
        rough = built()
    assert small.same(built(), large), "rough values stay behind"
    for name, weight in usual.items():
        torch.testing.assert_close(large[name], weight, rtol=0, atol=1e-6)
        exact = name.startswith(("square", "small")) or name.endswith("bias")
        assert torch.equal(large[name], weight) == exact, name
        if name in ("tall.weight", "wide.weight"):
            values = torch.linalg.svdvals(rough[name].flatten(1))
            assert 0.7 < values.min() < 0.95 and 1.05 < values.max() < 1.3
    assert torch.equal(rough["small.weight"], usual["small.weight"])


@pytest.mark.parametrize("orthogonal", [True, False])
def test_built_models_do_not_tell_what_chance_the_construction_took(orthogonal: bool) -> None:
    def wasteful() -> nn.Module:
        model = NARROW["ViT"]()
        torch.rand(1000)
        return model

    def built(make: Callable[[], nn.Module], seed: int) -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(seed)
        return small.clone(initial.build(make, orthogonal=orthogonal)), torch.rand(3)

    (frugal, after), (same, too), (other, _) = built(NARROW["ViT"], 0), built(wasteful, 0), built(NARROW["ViT"], 1)
    assert small.same(frugal, same) and torch.equal(after, too)
    assert all(not torch.equal(frugal[name], other[name]) for name in frugal if name.endswith("proj.weight"))


@pytest.mark.parametrize("name", NARROW)
def test_built_without_values_a_model_is_the_same_but_for_them(name: str) -> None:
    before = torch.get_rng_state()
    bare = initial.without_values(lambda: initial.build(NARROW[name], orthogonal=True))
    assert torch.equal(torch.get_rng_state(), before)
    shapes = {key: (t.shape, t.dtype) for key, t in NARROW[name]().state_dict().items()}
    assert {key: (t.shape, t.dtype) for key, t in bare.state_dict().items()} == shapes
    assert all(p.is_meta for p in bare.parameters())


def test_a_model_that_looks_at_values_while_it_is_built_has_them() -> None:
    def curious() -> nn.Module:
        return nn.Linear(round(torch.ones(3).sum().item()), 2)

    assert initial.without_values(curious).weight.shape == (2, 3)


def test_orthogonal_values_follow_names_and_not_the_order_of_construction() -> None:
    states = []
    for order in (("a", "b"), ("b", "a")):
        torch.manual_seed(0)
        states.append(initial.orthogonal_values(nn.ModuleDict({name: nn.Linear(4, 4) for name in order})).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_drop_path() -> None:
    torch.manual_seed(0)
    drop, x = DropPath(0.25), torch.rand(4000, 3, 2) + 0.5
    assert torch.equal(drop.eval()(x), x)
    share = drop.train()(x) / x
    assert torch.equal(share == 0, (share[:, :1, :1] == 0).expand_as(share))
    torch.testing.assert_close(share[share > 0], torch.full_like(share[share > 0], 1 / 0.75))
    assert share.mean().item() == pytest.approx(1, abs=4 * math.sqrt(0.25 / 0.75 / 4000))
    rates = [block.drop_path.rate for block in ViT(**{**SMALL_VIT, "depth": 5}, drop_path=0.2).blocks]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


def test_evaluation_has_no_chance_and_training_has() -> None:
    model = ViT(**SMALL_VIT, drop_path=0.5, dropout=0.1)
    x = torch.randn(2, 3, 16, 16)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))
    ids = torch.randint(40, (2, 16))
    gpt = GPT(**SMALL_GPT, dropout=0.1)
    assert not torch.equal(gpt(ids), gpt(ids))
    assert torch.equal(gpt.eval()(ids), gpt(ids))


def test_gpt_sees_no_later_token() -> None:
    gpt, ids = GPT(**SMALL_GPT).eval(), torch.randint(40, (2, 16))
    changed = ids.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 40
    torch.testing.assert_close(gpt(ids)[:, :9], gpt(changed)[:, :9])


def test_the_character_gpt_keeps_its_names_and_its_own_head() -> None:
    model = CharGPT(vocabulary=65, depth=1)
    layer = ["norm_attention", "attention.qkv", "attention.out", "norm_mlp", "mlp.0", "mlp.2"]
    inner = [f"layers.0.{part}.{kind}" for part in layer for kind in ("weight", "bias")]
    assert list(model.state_dict()) == [
        "tokens.weight",
        "places.weight",
        *inner,
        "norm.weight",
        "norm.bias",
        "head.weight",
    ]
    assert model.head.weight is not model.tokens.weight


STEPS = 9  # warm-up, then a whole cycle


@pytest.mark.slow
def test_a_cycle_of_ab_on_each() -> None:
    [found] = gang.run(cycles, 1)
    for name, seen in found.items():
        assert all(math.isfinite(loss) for loss in seen["losses"]), name
        assert len(seen["factored"]) >= 4, name
        assert seen["changed"], name
    assert found["GPT"]["tied"] and not {"tokens", "head"} & set(found["GPT"]["factored"])


def cycles(rank: int) -> dict[str, Any]:
    small.strict()
    return {name: cycle(name) for name in NARROW}


def cycle(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = initial.build(NARROW[name], orthogonal=False)
    before = small.model_bits(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    replica = thinwire.attach(model, optimizer, small.ab(total_steps=STEPS))
    seen: dict[str, Any] = {"losses": [], "factored": set()}
    for number in range(STEPS):
        loss = loss_of(name, replica, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen["losses"].append(loss.item())
        seen["factored"] |= set(replica.ranks())
    tied = name == "GPT" and model.head.weight is model.tokens.weight
    return {**seen, "tied": tied, "changed": small.model_bits(model) != before}


def loss_of(name: str, replica: nn.Module, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    if name == "GPT":
        ids = torch.randint(40, (4, 17), generator=generator)
        return F.cross_entropy(replica(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    images = torch.randn(4, 3, 32, 32, generator=generator)
    return F.cross_entropy(replica(images), torch.randint(10, (4,), generator=generator))
