"""Models of many shapes, none written with Thinwire in mind, each with a batch and a loss."""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

Model = Callable[..., Any]

ADAMW = functools.partial(torch.optim.AdamW, lr=3e-3)
SGD = functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9)

WIDE = 24
"""Wide enough that factors are smaller, narrow enough that a step takes a millisecond."""


def pull(output: Any) -> Tensor:
    """A loss for any output: every floating tensor in it, pulled towards one."""
    found = [t for t in tensors_of(output) if t.is_floating_point() or t.is_complex()]
    return torch.stack([(t.to(torch.float64 if not t.is_complex() else t.dtype) - 1).abs().mean() for t in found]).sum()


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors in whatever a model returned."""
    if isinstance(output, Tensor):
        return [output]
    if dataclasses.is_dataclass(output) or hasattr(output, "to_tuple"):
        return [t for value in vars(output).values() for t in tensors_of(value)]
    if isinstance(output, dict):
        return [t for value in output.values() for t in tensors_of(value)]
    return [t for value in output for t in tensors_of(value)] if isinstance(output, list | tuple) else []


def images(rng: Generator, channels: int = 3, size: int = 8, batch: int = 4) -> Tensor:
    """A batch of noise."""
    return torch.randn(batch, channels, size, size, generator=rng)


def rows(rng: Generator, width: int = WIDE, batch: int = 6) -> Tensor:
    """A batch of vectors."""
    return torch.randn(batch, width, generator=rng)


def words(rng: Generator, length: int = 7, batch: int = 3, vocabulary: int = 40) -> Tensor:
    """A batch of token ids."""
    return torch.randint(vocabulary, (batch, length), generator=rng)


def plain_loss(model: Model, batch: Any, rank: int, step: int) -> Tensor:
    """One call of the model."""
    return pull(model(**batch) if isinstance(batch, dict) else model(batch))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, what it is fed, and what is known of it."""

    build: Callable[[], nn.Module]
    batch: Callable[[Generator], Any] = rows
    loss: Callable[[Model, Any, int, int], Tensor] = plain_loss
    optimizer: Callable[[list[nn.Parameter]], Optimizer] = ADAMW
    ddp: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Methods that must refuse it, and what they must say."""


SHAPES: dict[str, Shape] = {}


def shape(name: str, **about: Any) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Add a model to the zoo."""

    def add(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        SHAPES[name] = Shape(build=build, **about)
        return build

    return add


def mlp(width: int = WIDE, **kind: Any) -> nn.Sequential:
    """Four Linears, of which the middle ones get factored."""
    sizes = (width, width, 2 * width, width, 5)
    layers = [part for m, n in itertools.pairwise(sizes) for part in (nn.Linear(m, n, **kind), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


class Recurrent(nn.Module):
    """An embedding, a recurrent layer and a head."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDE)
        self.inner = kind(WIDE, WIDE, batch_first=True, **options)
        width = WIDE * (2 if options.get("bidirectional") else 1)
        self.middle = nn.Linear(width, WIDE)
        self.extra = nn.Linear(WIDE, WIDE)
        self.head = nn.Linear(WIDE, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.inner(self.table(tokens))
        return self.head(torch.relu(self.extra(torch.relu(self.middle(hidden)))))


shape("lstm", batch=words)(lambda: Recurrent(nn.LSTM, num_layers=2))
shape("gru both ways", batch=words)(lambda: Recurrent(nn.GRU, bidirectional=True))


class Cells(nn.Module):
    """A recurrent cell in a loop of its own, with a projection that is used at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.cell = nn.Linear(WIDE, WIDE), nn.GRUCell(WIDE, WIDE)
        self.step, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(x.shape[0], WIDE)
        for _ in range(4):
            hidden = self.step(self.cell(self.enter(x), hidden))
        return self.head(hidden)


shape("cells in a loop")(Cells)


@shape("u-net", batch=images)
class UNet(nn.Module):
    """Down, up, a skip; transposed and grouped convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(32, 32, 3, padding=1, groups=4)
        self.norm = nn.GroupNorm(4, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.fuse = nn.Conv2d(32, 16, 1)
        self.head = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        low = F.silu(self.norm(self.grouped(F.silu(self.down(x)))))
        return self.head(F.silu(self.fuse(torch.cat([x, self.up(low)], 1))))


class Tied(nn.Module):
    """A head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDE)
        self.one, self.two = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)
        self.head = nn.Linear(WIDE, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.two(torch.relu(self.one(self.table(tokens)))))


shape("tied head", batch=words)(Tied)


class Shared(nn.Module):
    """One module under two names and used three times, another used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.again, self.own = self.block, nn.Linear(WIDE, WIDE)
        self.head = nn.Linear(WIDE, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(torch.tanh(self.enter(x)))
        return self.head(self.own(torch.tanh(self.own(self.again(torch.tanh(self.block(x)))))))


shape("shared module")(Shared)


def normed(norm: Callable[..., nn.Module], *which: int) -> nn.Module:
    """The second Linear with its weight under some norm; the others as they are."""
    model = mlp()
    for i in which:
        norm(model[i])
    return model


def quietly(norm: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Old-style norms warn that there are newer ones."""

    def apply(module: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return norm(module)

    return apply


shape("weight norm")(lambda: normed(parametrizations.weight_norm, 2))
shape("spectral norm")(lambda: normed(parametrizations.spectral_norm, 2))
shape("orthogonal")(lambda: normed(parametrizations.orthogonal, 2))
NOTHING = dict.fromkeys(("ab", "ab carry", "ab average", "oialr"), "nothing to factor")
shape("everything normed", refused=NOTHING)(lambda: normed(parametrizations.weight_norm, 0, 2, 4, 6))
shape("old weight norm")(lambda: normed(quietly(nn.utils.weight_norm), 2))
shape("old spectral norm")(lambda: normed(quietly(nn.utils.spectral_norm), 2))


class Adapted(nn.Module):
    """A frozen Linear and a trained low-rank detour, as LoRA has it; the names are LoRA's own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


@shape("adapters on a frozen base")
def adapters() -> nn.Module:
    """Adapters, and one Linear that is trained whole."""
    model = mlp()
    model[0], model[2] = Adapted(model[0]), Adapted(model[2])
    return model


shape("bf16 parameters", batch=lambda rng: rows(rng).bfloat16())(lambda: mlp(dtype=torch.bfloat16))
# AdamW's epsilon is zero in fp16.
shape("fp16 parameters", batch=lambda rng: rows(rng).half(), optimizer=SGD)(lambda: mlp(dtype=torch.float16))
shape("fp64 parameters", batch=lambda rng: rows(rng).double())(lambda: mlp(dtype=torch.float64))


class Mixed(nn.Module):
    """Layers of three dtypes one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(WIDE, WIDE, dtype=dtype)
            for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.float32)
        )
        self.norm = nn.BatchNorm1d(WIDE, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return self.norm(x.double())


shape("mixed dtypes")(Mixed)


class Branches(nn.Module):
    """Three branches; which is used depends on worker and step, and one never is."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 5)
        self.branches = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(3))

    def forward(self, x: Tensor, which: int = 0) -> Tensor:
        return self.head(torch.tanh(self.branches[which](torch.tanh(self.enter(x)))))


def branch_loss(model: Model, batch: Any, rank: int, step: int) -> Tensor:
    """Another branch for another worker, at every other step."""
    return pull(model(batch, which=(rank + step // 2) % 2))


shape("unused branches", loss=branch_loss, ddp={"find_unused_parameters": True})(Branches)


class Experts(nn.Module):
    """Rows go to experts by what they hold, so some experts see nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.gate, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 4), nn.Linear(WIDE, 5)
        self.experts = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        share, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if (mask := chosen == i).any():
                out[mask] = share[mask, None] * expert(x[mask])
        return self.head(out)


shape("experts", batch=lambda rng: rows(rng, batch=3), ddp={"find_unused_parameters": True})(Experts)


def siamese_loss(model: Model, batch: Any, rank: int, step: int) -> Tensor:
    """Both of a pair through the same model, then one backward pass."""
    left, right = model(batch), model(batch.flip(0))
    return (left - right.detach()).square().mean() + pull(left) + pull(right)


shape("siamese", loss=siamese_loss)(mlp)
shape(
    "siamese with batch norm", loss=siamese_loss, batch=images
)(lambda: nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(),
    nn.Linear(512, 24), nn.ReLU(), nn.Linear(24, 5),
))  # fmt: skip


class Checkpointed(nn.Module):
    """Activations of the middle are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.head = nn.Linear(WIDE, WIDE), mlp(), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.middle, torch.tanh(self.enter(x)), use_reentrant=False))


shape("checkpointed")(Checkpointed)


class Buffers(nn.Module):
    """Buffers of every kind, some of which training changes, and differently on each worker."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = mlp(), nn.BatchNorm1d(WIDE)
        self.instance = nn.BatchNorm1d(WIDE, momentum=None, affine=False)
        self.register_buffer("table", torch.linspace(0, 1, WIDE))
        self.register_buffer("mask", torch.arange(WIDE) % 2 == 0)
        self.register_buffer("seen", torch.zeros(5, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDE), persistent=False)
        self.register_buffer("phase", torch.exp(1j * torch.linspace(0, 1, 4)))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("rounded", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("scalar", torch.tensor(0.0))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("small", torch.zeros(2, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.instance(self.norm(x * (1 + self.table)).masked_fill(self.mask, 0.5))
        out = self.net(x)
        if self.training:
            with torch.no_grad():
                self.seen.add_(torch.bincount(out.argmax(1), minlength=5))
                self.mean.lerp_(x.mean(0), 0.1)
                self.scalar.add_(out.mean())
                self.rounded.mul_(0.9)
                self.flag.logical_not_()
                self.small.add_(1)
                self.phase.mul_(torch.exp(torch.tensor(1j)))
        return out


shape("buffers of every kind")(Buffers)


class Codebook(nn.Module):
    """A table of codes that is a buffer, moved by the batch and not by a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.one, self.two = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.register_buffer("codes", torch.randn(8, WIDE))
        self.register_buffer("uses", torch.zeros(8, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(torch.tanh(self.enter(x))))
        chosen = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                self.codes = self.codes.index_add(0, chosen, 0.1 * (x - self.codes[chosen]))
                self.uses += torch.bincount(chosen, minlength=8).int()
        return self.two(x + (self.codes[chosen] - x).detach())


shape("a codebook that is rebound")(Codebook)


class Attention(nn.Module):
    """Attention as torch has it, packed and with widths of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDE)
        self.own = nn.MultiheadAttention(WIDE, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(WIDE, 2, kdim=16, vdim=16, batch_first=True)
        self.narrow, self.head = nn.Linear(WIDE, 16), nn.Linear(WIDE, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.own(x, x, x, need_weights=False)[0]
        other = self.narrow(x)
        return self.head(x + self.cross(x, other, other)[0])


shape("attention", batch=words)(Attention)


class Encoder(nn.Module):
    """torch's own encoder with a class token and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, WIDE)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, WIDE)), nn.Parameter(torch.randn(8, WIDE))
        layer = nn.TransformerEncoderLayer(WIDE, 2, 2 * WIDE, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDE, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(tokens), -1, -1), self.table(tokens)], 1) + self.places
        return self.head(self.encoder(x)[:, 0])


shape("transformer encoder", batch=words)(Encoder)


SPARSE = dict.fromkeys(("allreduce int8", "powersgd", "topk", "onebit"), "has a sparse gradient")


@shape("sparse embedding", batch=words, optimizer=functools.partial(torch.optim.SGD, lr=0.01), refused=SPARSE)
def sparse() -> nn.Module:
    """Gradients of a few rows."""
    return nn.Sequential(nn.Embedding(40, WIDE, sparse=True), mlp())


def pruned() -> nn.Module:
    """Half of a weight is masked before each pass."""
    model = mlp()
    prune.l1_unstructured(model[2], "weight", 0.5)
    return model


shape("pruned")(pruned)
shape("traced by fx")(lambda: torch.fx.symbolic_trace(mlp()))


class Bags(nn.Module):
    """Sums of embeddings, as recommenders have them."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(40, WIDE, mode="sum", padding_idx=0)
        self.net, self.pairs = mlp(), nn.Bilinear(WIDE, WIDE, WIDE)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bag(tokens)
        return self.net(self.pairs(x, x.flip(0)))


shape("embedding bags and a bilinear", batch=words)(Bags)


class Depthwise(nn.Module):
    """A ConvNeXt block: depthwise, norm, wide and back, a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDE, 2, 2)
        self.depthwise = nn.Conv2d(WIDE, WIDE, 3, padding=1, groups=WIDE)
        self.norm = nn.LayerNorm(WIDE)
        self.wide, self.back = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)
        self.gamma, self.head = nn.Parameter(torch.full((WIDE,), 0.1)), nn.Linear(WIDE, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        inner = self.back(F.gelu(self.wide(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))))
        return self.head((x + (self.gamma * inner).permute(0, 3, 1, 2)).mean((2, 3)))


shape("depthwise", batch=images)(Depthwise)


@shape("one dimension", batch=lambda rng: torch.randn(3, 4, 16, generator=rng))
def one_dimension() -> nn.Module:
    """Dilated and circular convolutions over time."""
    return nn.Sequential(
        nn.Conv1d(4, 16, 3, padding=2, dilation=2), nn.InstanceNorm1d(16, affine=True, track_running_stats=True),
        nn.PReLU(), nn.Conv1d(16, 32, 3, padding=1, padding_mode="circular"), nn.GLU(1),
        nn.ConvTranspose1d(16, 16, 3), nn.Conv1d(16, 16, 3, padding="same"), nn.Conv1d(16, 2, 1),
    )  # fmt: skip


@shape("three dimensions", batch=lambda rng: torch.randn(2, 2, 4, 6, 6, generator=rng))
def three_dimensions() -> nn.Module:
    """Video."""
    return nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.Conv3d(8, 16, (1, 3, 3)), nn.ReLU(),
        nn.Conv3d(16, 16, 1), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


@shape("channels last", batch=lambda rng: images(rng).to(memory_format=torch.channels_last))
def channels_last() -> nn.Module:
    """Weights whose memory is not in the order of their dimensions."""
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 16, 3),
        nn.ReLU(), nn.Flatten(), nn.Linear(64, 24), nn.Linear(24, 5),
    )  # fmt: skip
    return net.to(memory_format=torch.channels_last)


class Odd(nn.Module):
    """Scalar parameters, empty ones, one that is a view's transpose, and one that the optimizer has but nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor([0.1]))
        self.nothing, self.no_rows = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0, 4))
        self.turned = nn.Parameter(torch.randn(WIDE, 30).t()[:WIDE])

    def forward(self, x: Tensor) -> Tensor:
        extra = self.nothing.sum() + self.no_rows.sum()
        return self.net(x @ self.turned) * self.scale + self.shift + extra


shape("scalar and empty parameters")(Odd)


class Nested(nn.Module):
    """Lists, dicts and lists of parameters inside one another."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {"left.right".replace(".", "_"): nn.ModuleList([mlp(), nn.ModuleDict({"x": nn.Linear(5, WIDE)})])}
        )
        self.loose = nn.ParameterList([nn.Parameter(torch.randn(WIDE, WIDE) / 5) for _ in range(2)])
        self.named = nn.ParameterDict({"gain": torch.ones(WIDE), "weight": torch.randn(WIDE, WIDE) / 5})
        self.head = nn.Linear(WIDE, 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.parts["left_right"]
        x = second["x"](first(x))
        for p in self.loose:
            x = torch.tanh(x @ p)
        return self.head(x @ self.named["weight"] * self.named["gain"])


shape("nested containers")(Nested)


class Complex(nn.Module):
    """A filter in the frequency domain."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.filter = mlp(), nn.Parameter(torch.randn(WIDE // 2 + 1, dtype=torch.complex64))
        self.mix = nn.Parameter(torch.randn(WIDE // 2 + 1, WIDE // 2 + 1, dtype=torch.complex64) / 4)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) * self.filter
        return self.net(torch.fft.irfft(spectrum @ self.mix, n=WIDE))


shape("complex parameters", refused={"daso": "cannot carry the complex parameter"})(Complex)


@dataclass
class Answer:
    """What a model may return."""

    logits: Tensor
    hidden: list[Tensor]
    name: str = "answer"


class Talkative(nn.Module):
    """Takes keywords only and returns whatever it likes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.kind, self.head = kind, nn.Linear(WIDE, 5)

    def forward(self, *, x: Tensor, note: str | None = None) -> Any:
        hidden = torch.tanh(self.two(torch.tanh(self.one(x))))
        logits = self.head(hidden)
        if self.kind == "dict":
            return {"logits": logits, "parts": {"hidden": [hidden]}, "note": note, "loss": None}
        return Answer(logits, [hidden]) if self.kind == "dataclass" else (logits, (hidden, None), 3)


for _kind in ("dict", "dataclass", "tuple"):
    shape(f"returns a {_kind}", batch=lambda rng: {"x": rows(rng), "note": "hello"})(
        functools.partial(Talkative, _kind)
    )


class Thrifty(nn.Module):
    """Its own loss inside, as Hugging Face's models have it; outputs alone are no use."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_noise = mlp(), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.net(x) - 1).square().mean() * torch.exp(-self.log_noise) + self.log_noise


shape("returns a scalar loss")(Thrifty)


ONE_LAYER = {name: why for name, why in NOTHING.items() if name != "ab average"} | {"diloco streaming": "`fragments`=2"}


@shape("one bare layer", refused=ONE_LAYER)
def bare() -> nn.Module:
    """The root is the only layer."""
    return nn.Linear(WIDE, 2 * WIDE)


@shape("nobody's parameters")
def outsiders() -> nn.Module:
    """Part of it is frozen, part is trained by nobody."""
    model = mlp()
    model[0].requires_grad_(False)
    model.append(nn.BatchNorm1d(5).requires_grad_(False))
    return model


def bert() -> nn.Module:
    """A tiny BERT."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=40, hidden_size=WIDE, num_hidden_layers=2, num_attention_heads=2, intermediate_size=2 * WIDE,
            max_position_embeddings=16,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    """A tiny T5."""
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=40, d_model=WIDE, d_kv=12, d_ff=2 * WIDE, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    )  # fmt: skip


def llama() -> nn.Module:
    """A tiny Llama with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, hidden_size=WIDE, intermediate_size=2 * WIDE, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16,
        )
    )  # fmt: skip


def labelled(rng: Generator) -> dict[str, Tensor]:
    """Tokens that are their own labels."""
    tokens = words(rng)
    return {"input_ids": tokens, "labels": tokens}


def own_loss(model: Model, batch: Any, rank: int, step: int) -> Tensor:
    """The loss that the model itself computes."""
    return model(**batch).loss


for _name, _build in (("bert", bert), ("t5", t5), ("llama", llama)):
    shape(_name, batch=labelled, loss=own_loss)(_build)
