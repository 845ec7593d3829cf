"""Factors: identities of matrices, layers and moments, without any other worker."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import thinwire.factor.matrix as module
from thinwire.factor import moments
from thinwire.factor.convert import find_layers, to_factors, to_full
from thinwire.factor.layers import thin_is_cheaper
from thinwire.factor.matrix import decompose, decompose_if_smaller, rank_of, svd, view_of
from thinwire.factor.optimizers import Optimizers

SHAPES = [(7, 3), (3, 7), (5, 5), (8, 3, 3), (4, 6, 3, 3), (40, 2, 3, 3), (3, 2, 2, 2, 2)]


def decaying(m: int, n: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    u, _ = torch.linalg.qr(torch.randn(m, n, generator=g, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64))
    return (u * torch.logspace(0, -4, n, dtype=torch.float64) @ v.t()).float()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_is_a_tall_matrix_and_back(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    view = view_of(weight)
    matrix = view.to_matrix(weight)
    assert matrix.shape == view.tall and matrix.shape[0] >= matrix.shape[1]
    assert torch.equal(view.to_weight(matrix), weight)


@pytest.mark.parametrize("shape", SHAPES)
def test_full_rank_factors_rebuild_the_weight(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    view = view_of(weight)
    factors = decompose(view.to_matrix(weight), 0.0, rank=view.tall[1])
    torch.testing.assert_close(view.rebuild(factors.a, factors.b), weight, rtol=1e-5, atol=1e-5)
    left, right = view.sides(factors.a, factors.b)
    torch.testing.assert_close((left @ right).reshape(shape), weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(64, 64), (300, 40), (128, 127)])
@pytest.mark.parametrize("cutoff", [0.01, 0.15, 0.6])
def test_the_fast_decomposition_agrees_with_the_plain_one(size: tuple[int, int], cutoff: float) -> None:
    matrix = decaying(*size)
    fast, plain = decompose(matrix, cutoff), svd(matrix, cutoff)
    assert fast.a.shape == plain.a.shape
    torch.testing.assert_close(fast.sigma, plain.sigma, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(fast.a, plain.a, rtol=1e-4, atol=1e-5)  # equal signs, not only equal products
    torch.testing.assert_close(fast.b, plain.b, rtol=1e-4, atol=1e-5)


def test_rank_counts_values_above_the_cutoff_and_is_at_least_one() -> None:
    sigma = torch.tensor([1.0, 0.5, 0.15, 0.149, 0.0])
    assert rank_of(sigma, 0.15) == 2
    assert rank_of(sigma, 0.99) == 1
    assert rank_of(torch.zeros(3), 0.15) == 1
    zero = decompose(torch.zeros(6, 4), 0.15)
    assert zero.a.shape == (6, 1) and not (zero.a @ zero.b).any()


def test_factors_that_would_not_be_smaller_are_not_made() -> None:
    matrix = decaying(60, 30)
    assert decompose_if_smaller(matrix, 1e-5) is None
    few, all_of_them = decompose_if_smaller(matrix, 0.15), decompose(matrix, 0.15)
    assert few is not None and torch.equal(few.a, all_of_them.a) and torch.equal(few.b, all_of_them.b)


def test_a_wrong_left_basis_is_noticed() -> None:
    matrix = decaying(60, 30)
    sigma, v = module._eigen(matrix)
    assert module._factors(matrix, sigma, v[:, :9]) is not None
    v[:, 3] = v[:, 2]
    assert module._factors(matrix, sigma, v[:, :9]) is None


def test_signs_do_not_depend_on_the_signs_of_the_input() -> None:
    matrix = decaying(30, 12)
    flipped = decompose(-matrix, 0.01)
    straight = decompose(matrix, 0.01)
    torch.testing.assert_close(straight.b, flipped.b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(straight.a, -flipped.a, rtol=1e-4, atol=1e-5)


def test_a_gram_matrix_too_ill_for_its_vectors_falls_back_to_svd() -> None:
    tiny = decaying(20, 10)
    tiny[:, 5:] *= 1e-18
    factors = decompose(tiny, 0.0, rank=10)
    torch.testing.assert_close(factors.a @ factors.b, tiny, rtol=1e-5, atol=1e-6)


class Elementwise(nn.Module):
    """A module of the user's own, with its own way of using its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight[:, :6].sum(dim=0)).tanh()


LAYERS = {
    "linear tall": (lambda: nn.Linear(6, 20), (5, 6)),
    "linear wide": (lambda: nn.Linear(20, 6, bias=False), (2, 3, 20)),
    "linear of one sample": (lambda: nn.Linear(20, 6), (20,)),
    "conv1d": (lambda: nn.Conv1d(6, 12, 3, padding="same"), (2, 6, 9)),
    "conv2d": (lambda: nn.Conv2d(6, 12, 3, stride=2, padding=1, dilation=2), (2, 6, 9, 9)),
    "conv2d tall": (lambda: nn.Conv2d(2, 40, 3, padding=1, padding_mode="reflect"), (2, 2, 8, 8)),
    "conv2d unbatched": (lambda: nn.Conv2d(6, 12, 3), (6, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(3, 8, 2, bias=False), (2, 3, 5, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(6, 12, 3), (2, 6, 5, 5)),
    "user's own": (Elementwise, (4, 6)),
}


@pytest.mark.parametrize("rank", [2, None])
@pytest.mark.parametrize("name", LAYERS)
def test_a_factored_layer_computes_what_its_product_would(name: str, rank: int | None) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    module, x = make(), torch.randn(shape)
    (layer,), _ = find_layers(module, trained=module.parameters(), keep_first=False, keep_last=False)
    factors = decompose(layer.matrix(), 0.0, rank=rank or layer.view.tall[1])
    dense = copy.deepcopy(module)
    dense.weight.data = layer.view.rebuild(factors.a, factors.b)
    to_factors(layer, factors.a, factors.b)
    torch.testing.assert_close(module(x), dense(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module.weight, dense.weight)
    assert isinstance(module, type(dense)) and layer.rank == (rank or layer.view.tall[1])
    to_full(layer)
    assert type(module) is type(dense)
    torch.testing.assert_close(module.weight, dense.weight)


def test_factors_survive_deepcopy_and_pickle() -> None:
    module = nn.Linear(20, 6)
    (layer,), _ = find_layers(module, trained=module.parameters(), keep_first=False, keep_last=False)
    to_factors(layer, *decompose(layer.matrix(), 0.0, rank=2)[:2])
    x = torch.randn(3, 20)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), module(x)) and other.weight_a is not module.weight_a
    assert "rank 2" in repr(module)


def test_the_weight_of_a_factored_layer_is_read_only() -> None:
    module = nn.Linear(20, 6)
    (layer,), _ = find_layers(module, trained=module.parameters(), keep_first=False, keep_last=False)
    to_factors(layer, *decompose(layer.matrix(), 0.0, rank=2)[:2])
    with pytest.raises((AttributeError, KeyError)):
        module.weight = nn.Parameter(torch.zeros(6, 20))
    assert set(module.state_dict()) == {"weight_a", "weight_b", "bias"}


def test_thin_factors_are_used_only_where_they_cost_less() -> None:
    view = view_of(torch.Size((64, 64)))
    assert thin_is_cheaper(view, 8, 100)
    assert not thin_is_cheaper(view, 64, 1000)
    assert thin_is_cheaper(view, 64, 10)  # multiplying out costs more than ten rows do


class Detour(nn.Linear):
    """A Linear with parameters of its own by the names that factors have."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.weight_a, self.weight_b = nn.Parameter(torch.zeros(16, 2)), nn.Parameter(torch.zeros(2, 16))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("change", "parameters", "why"),
    [
        (nn.utils.weight_norm, ["weight_g", "weight_v"], "normed by torch.nn.utils.weight_norm"),
        (nn.utils.spectral_norm, ["weight_orig"], "normed by torch.nn.utils.spectral_norm"),
        (lambda layer: prune.identity(layer, "weight"), ["weight_orig"], "pruned by torch.nn.utils.prune"),
        (lambda layer: Detour(), ["weight"], "its module already uses the factors' names"),
    ],
    ids=["weight norm", "spectral norm", "pruned", "names taken"],
)
def test_weights_that_others_rely_on_stay_full(change: Any, parameters: list[str], why: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), change(nn.Linear(16, 16)), nn.Linear(16, 16))
    found, kept = find_layers(model, trained=model.parameters(), keep_first=False, keep_last=False)
    reasons = {entry.name: entry.why for entry in kept}
    assert {f"1.{name}" for name in parameters if reasons[f"1.{name}"] == why} == {f"1.{name}" for name in parameters}
    assert {"0", "2"} <= {layer.name for layer in found}


def test_first_and_last_are_those_of_the_order_of_use() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    layers, kept = find_layers(model, trained=model.parameters(), order=["2", "1", "0"])
    assert [layer.name for layer in layers] == ["1"]
    assert {(k.name, k.why) for k in kept} == {("2.weight", "first layer"), ("0.weight", "last layer")}


# Law 7: momentum through a change of shape.


def momentum(gradients: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(gradients[0])
    for g in gradients:
        total = 0.9 * total + 0.1 * g
    return total


@pytest.mark.parametrize("shape", [(20, 12), (12, 20), (6, 3, 3, 3)])
def test_momentum_from_full_is_the_average_of_the_factors_own_gradients(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape)
    view = view_of(weight)
    a, b, _ = decompose(view.to_matrix(weight), 0.3)
    gradients = [torch.randn(shape) for _ in range(5)]
    state = {"step": torch.tensor(5.0), "exp_avg": momentum(gradients), "exp_avg_sq": torch.rand(shape)}
    state_a, state_b = moments.factors_from_full(state, view, a, b)
    factors = [torch.autograd.functional.vjp(view.rebuild, (a, b), g)[1] for g in gradients]
    torch.testing.assert_close(state_a["exp_avg"], momentum([f[0] for f in factors]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state_b["exp_avg"], momentum([f[1] for f in factors]), rtol=1e-5, atol=1e-5)
    assert (state_a["exp_avg_sq"] >= 0).all() and state_a["step"] == 5


def test_momentum_back_to_full_is_its_projection_on_the_frozen_factor() -> None:
    view = view_of(torch.Size((20, 12)))
    a, b = torch.randn(20, 4), torch.randn(4, 12)
    g = torch.randn(20, 12)
    state = moments.full_from_factor({"momentum_buffer": g @ b.t()}, view, b=b)
    torch.testing.assert_close(state["momentum_buffer"] @ b.t(), g @ b.t(), rtol=1e-4, atol=1e-4)
    state = moments.full_from_factor({"momentum_buffer": a.t() @ g}, view, a=a)
    torch.testing.assert_close(a.t() @ state["momentum_buffer"], a.t() @ g, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_momentum_comes_back_to_full_in_half_precision(dtype: torch.dtype) -> None:
    g, b = torch.randn(12, 8, dtype=dtype), torch.randn(3, 8, dtype=dtype)
    exact = moments.full_from_factor({"momentum_buffer": (g @ b.t()).float()}, view_of(g), b=b.float())
    state = moments.full_from_factor({"momentum_buffer": g @ b.t()}, view_of(g), b=b)
    assert state["momentum_buffer"].dtype == dtype
    torch.testing.assert_close(state["momentum_buffer"].float(), exact["momentum_buffer"], rtol=0.1, atol=0.1)


def test_unknown_state_starts_again_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="'prev'"):
        assert moments.transport({"prev": torch.ones(3), "step": 1}, lambda m, power: m) == {}


def test_parameters_are_exchanged_in_their_own_group() -> None:
    first, second, third = (nn.Parameter(torch.zeros(2, 2)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [first, second], "lr": 0.1}, {"params": [third], "lr": 0.2}], momentum=0.9)
    F.mse_loss(first + second + third, torch.ones(2, 2)).backward()
    optimizer.step()
    new = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))]
    Optimizers(optimizer).exchange([first], new)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(new[0]), id(new[1]), id(second)]
    assert first not in optimizer.state and optimizer.param_groups[0]["lr"] == 0.1
    full = nn.Parameter(torch.ones(2))
    Optimizers(optimizer).exchange(new, [full])
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(full), id(second)]


def test_adam_takes_a_usual_step_after_moments_came_back_to_full() -> None:
    torch.manual_seed(0)
    view = view_of(torch.Size((40, 24)))
    a, b, _ = decompose(torch.randn(40, 24), 0.0, rank=8)
    factor = nn.Parameter(a.clone())
    optimizer = torch.optim.Adam([factor], lr=1e-3)
    for _ in range(50):
        factor.grad = (torch.randn(40, 24) + 0.3) @ b.t()
        optimizer.step()
    state = moments.full_from_factor(optimizer.state[factor], view, b=b)
    full = nn.Parameter(torch.zeros(40, 24))
    resumed = torch.optim.Adam([full], lr=1e-3)
    resumed.state[full] = state
    full.grad = torch.randn(40, 24) + 0.3
    resumed.step()
    size = float(full.detach().abs().mean())
    assert 1e-4 < size < 3e-3  # about the learning rate, as any Adam step
