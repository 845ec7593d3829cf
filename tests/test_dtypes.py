"""Parameters that are not fp32: half precision, double, mixed, complex."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import device
import gang
import small
import thinwire
from selection import first_of
from thinwire.base.errors import ThinwireError
from thinwire.factor import moments
from thinwire.factor.matrix import view_of

METHODS: dict[str, Callable[[], Any]] = {
    "ab-paper carry": lambda: small.ab(moments="carry"),
    "ab-paper average": lambda: small.ab(moments="average", merge="trained"),
    "ab bf16": lambda: small.ab(moments="carry", wire="bf16"),
    "oialr": lambda: thinwire.OIALR(total_steps=small.STEPS, factor_at=4, redecompose=5, cutoff=0.3),
    "localsgd": lambda: thinwire.LocalSGD(every=4, moments="average"),
    "diloco int8": lambda: thinwire.DiLoCo(every=4, wire="int8"),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, centered=True, momentum=0.5),
}


def mixed() -> nn.Module:
    """Half, single and double precision, layer by layer."""
    model = small.mlp()
    model[3].to(torch.bfloat16)
    model[5].to(torch.float64)
    return model


def logits(replica: Any, x: Tensor, kind: str) -> Tensor:
    if kind == "bf16":
        return replica(x.to(torch.bfloat16)).float()
    return replica(x)


class Casting(nn.Module):
    """Calls each layer in its own type."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mixed()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weight = next(layer.parameters(), None)
            x = layer(x if weight is None else x.to(weight.dtype))
        return x


def train(rank: int, kind: str) -> dict[Any, Any]:
    found = {}
    for name, config in METHODS.items():
        for optimizer_name, make in OPTIMIZERS.items():
            torch.manual_seed(0)
            model = small.mlp().to(torch.bfloat16) if kind == "bf16" else Casting()
            optimizer = make(model)
            replica = thinwire.attach(model, optimizer, config())
            for number in range(small.STEPS):
                x, y = small.batch(rank, number)
                loss = F.cross_entropy(logits(replica, x, kind), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            types = {str(p.dtype) for p in replica.parameters()}
            states = [v for p in optimizer.state.values() for v in p.values() if isinstance(v, Tensor) and v.dim()]
            bits = small.bits(*(p.double() for p in replica.finish().parameters()))
            found[name, optimizer_name] = bits, sorted(types), {str(v.dtype) for v in states} <= types
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", first_of(["mixed", "bf16"]))
def test_parameters_of_any_type_go_through_every_change_of_shape(kind: str) -> None:
    here, there = gang.run(train, 2, kind)
    expected = ["torch.bfloat16"] if kind == "bf16" else ["torch.bfloat16", "torch.float32", "torch.float64"]
    for case, (bits, types, states) in here.items():
        assert bits == there[case][0], case
        assert types == expected and states, case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moments_of_half_precision_are_those_of_single_rounded(dtype: torch.dtype) -> None:
    """Every map, with state and factors in half precision, within the rounding of inputs and outputs."""
    torch.manual_seed(0)
    view = view_of(torch.Size((24, 16)))
    a, b = torch.randn(24, 5), torch.randn(5, 16)
    u, vt = torch.linalg.qr(torch.randn(24, 5))[0], torch.linalg.qr(torch.randn(16, 5))[0].T
    new_u, new_vt = u[:, :3], vt[:3]

    def state(*shape: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        m = torch.randn(shape, generator=generator)
        return {"exp_avg": m, "exp_avg_sq": m.square() + 0.1, "step": torch.tensor(3.0)}

    def all_maps(cast: Callable[[Any], Any]) -> list[dict[str, Tensor]]:
        full, of_a, of_b, of_s = (cast(state(*s)) for s in ((24, 16), (24, 5), (5, 16), (5, 5)))
        f = [cast(t) for t in (a, b, u, vt, new_u, new_vt)]
        return [
            *moments.factors_from_full(full, view, f[0], f[1]),
            moments.full_from_factor(of_a, view, b=f[1]),
            moments.full_from_factor(of_b, view, a=f[0]),
            moments.middle_from_full(full, view, f[2], f[3]),
            moments.recut_middle(of_s, [f[2], f[3]], [f[4], f[5]]),
        ]

    def halve(value: Any) -> Any:
        return {k: halve(v) if v.dim() else v for k, v in value.items()} if isinstance(value, dict) else value.to(dtype)

    def rounded(value: Any) -> Any:
        halved = halve(value)
        return {k: v.float() for k, v in halved.items()} if isinstance(halved, dict) else halved.float()

    for narrow, wide in zip(all_maps(halve), all_maps(rounded), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert narrow[name].dtype == dtype
            torch.testing.assert_close(narrow[name], wide[name].to(dtype), rtol=0, atol=0)


# Complex parameters.


class Spectral(nn.Module):
    """A filter in the frequency domain, before a classifier."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filter = nn.Parameter(torch.randn(8, 5, dtype=torch.complex64))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.irfft2(torch.fft.rfft2(x) * self.filter, s=(8, 8)).flatten(1))


def complex_parameters(rank: int) -> dict[str, str]:
    found = {}
    refused = [thinwire.PowerSGD(warmup=3), thinwire.TopK(), thinwire.OneBit(), thinwire.AllReduce(wire="int8")]
    refused += [thinwire.LocalSGD(warmup=3, warmup_wire="int4")]
    for config in refused:
        model = device.here(Spectral())
        try:
            thinwire.attach(model, small.sgd(model), config).detach()
            found[repr(config)] = ""
        except ThinwireError as error:
            found[repr(config)] = str(error)
    carried = [thinwire.AllReduce(wire=wire) for wire in ("fp32", "bf16")]
    carried += [thinwire.LocalSGD(every=2, wire=wire) for wire in ("fp32", "bf16", "topk:0.5")]
    carried += [thinwire.DiLoCo(every=2, wire=wire) for wire in ("fp32", "bf16", "int8")]
    carried += [thinwire.DASO(total_steps=90, wire=wire) for wire in ("fp32", "bf16", "int8")]
    for config in carried:
        model = device.here(Spectral())
        optimizer = small.sgd(model)
        replica = thinwire.attach(model, optimizer, config)
        for _ in small.walk(replica, optimizer, rank, 4):
            pass
        trained = replica.finish()
        assert bool((trained.filter.imag != device.here(Spectral()).filter.imag).any()), (
            "its imaginary part was not trained"
        )
        found[repr(config)] = small.model_bits(trained)
    return found


def test_complex_parameters_are_refused_at_attach_where_a_code_would_lose_them() -> None:
    here, there = gang.run(complex_parameters, 2)
    assert here == there
    for text, code in zip(here.values(), ("lowrank:4", "topk:0.001", "bit", "int8", "int4"), strict=False):
        assert text.startswith(f"{code!r} cannot carry the gradient of the complex parameter 'filter'; use 'fp32'")
