"""Models with parameters of every kind: normed, frozen, of other dtypes, empty, nested, complex."""

import warnings
from collections.abc import Callable

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from zoo import AB, NOTHING, SGD, WIDE, mlp, rows, shape


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


def pruned() -> nn.Module:
    """Half of a weight is masked before each pass."""
    model = mlp()
    prune.l1_unstructured(model[2], "weight", 0.5)
    return model


shape("pruned")(pruned)
shape("traced by fx")(lambda: torch.fx.symbolic_trace(mlp()))


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


_CODED = (*AB, "allreduce int8", "powersgd", "topk", "onebit")
shape("complex parameters", refused=dict.fromkeys(_CODED, "cannot carry the gradient of the complex"))(Complex)


ONE_LAYER = {name: why for name, why in NOTHING.items() if name != "ab-paper average"} | {
    "diloco streaming": "`fragments`=2"
}


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
