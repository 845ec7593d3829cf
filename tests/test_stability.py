"""Stability and similarity of bases: what changes them, what does not, and the callback that watches a run."""

import copy
import itertools
import json
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import small
import thinwire
from thinwire.base.files import write_tensors
from thinwire.cli import main
from thinwire.factor.convert import find_layers, to_factors
from thinwire.factor.export import write
from thinwire.factor.forms import tall
from thinwire.factor.matrix import decompose
from thinwire.factor.plain import to_plain
from thinwire.factor.stability import Basis, Stability, basis_of, compare, measure
from thinwire.train.models import CharGPT

EXACT = {"abs": 1e-6}


def _random(m: int, n: int, seed: int, **like) -> torch.Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed), **like)


def _turn(n: int, seed: int) -> torch.Tensor:
    """A random orthogonal matrix."""
    return torch.linalg.qr(_random(n, n, seed, dtype=torch.float64)).Q


def _basis(matrix: torch.Tensor | tuple[torch.Tensor, ...]) -> Basis:
    return basis_of(tall((matrix,) if isinstance(matrix, torch.Tensor) else matrix))


def stability(before, after, *, printed: bool = False) -> float:
    return measure(_basis(before), _basis(after))["stability_printed" if printed else "stability"]


def similarity(before, after) -> float:
    return measure(_basis(before), _basis(after))["similarity"]


W, OTHER = _random(40, 12, 0).double(), _random(40, 12, 1).double()
LOW = _random(40, 3, 2), _random(3, 12, 3)
MATRICES = {
    "tall": W,
    "wide": W.t(),
    "square": _random(12, 12, 4),
    "half": _random(40, 12, 0).bfloat16(),
    "deficient": LOW[0] @ LOW[1],
    "zero column": W * torch.tensor([0.0] + 11 * [1.0]),
    "factored": LOW,
    "three factors": (LOW[0], _random(3, 3, 5), LOW[1]),
    "zero": torch.zeros(6, 4),
}


@pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
def test_a_matrix_is_like_itself(matrix):
    assert stability(matrix, matrix) == pytest.approx(1, **EXACT)
    assert similarity(matrix, matrix) == 1


def test_by_the_plain_way():
    """Against the definition: compact SVD, and QR with the signs turned."""
    polar = []
    for matrix in (W, OTHER):
        u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
        polar.append(u @ vt)
    trace = torch.trace(polar[0] @ polar[1].t()).item()
    assert stability(W, OTHER) == pytest.approx(trace / 12, **EXACT)
    assert stability(W, OTHER, printed=True) == pytest.approx(trace / 40, **EXACT)
    mixing = [torch.linalg.cholesky(matrix.t() @ matrix).t() for matrix in (W, OTHER)]
    assert similarity(W, OTHER) == pytest.approx(1 - (mixing[0] - mixing[1]).square().mean().sqrt().item(), **EXACT)


def test_independent_matrices_share_nothing_and_opposite_ones_are_at_minus_one():
    big = [_random(400, 300, seed) for seed in (0, 1)]
    assert abs(stability(*big)) < 0.02
    assert stability(W, -W) == pytest.approx(-1, **EXACT)
    assert stability(LOW, (LOW[0], -LOW[1])) == pytest.approx(-1, **EXACT)


def test_printed_gives_n_over_m_and_ranks_give_one():
    assert stability(W, W, printed=True) == pytest.approx(12 / 40, **EXACT)
    # Three of twelve directions are left: the rest of the other matrix must not count against it.
    cut = decompose(W, 0.0, rank=3)
    assert _basis((cut.a, cut.b)).rank == 3
    assert stability(W, (cut.a, cut.b)) == pytest.approx(1, **EXACT)
    assert stability(W, (cut.a, cut.b), printed=True) == pytest.approx(3 / 40, **EXACT)


def test_rank_is_the_factors_and_survives_rounding():
    assert _basis(LOW).rank == _basis(LOW[0] @ LOW[1]).rank == 3
    assert stability(LOW, LOW[0] @ LOW[1]) == pytest.approx(1, **EXACT)
    assert similarity(LOW, LOW[0] @ LOW[1]) == pytest.approx(1, **EXACT)
    assert _basis(LOW[0] @ LOW[1]).polar.square().sum().item() == pytest.approx(3, **EXACT)
    others = _random(40, 5, 10), _random(5, 12, 11)
    assert stability(LOW, others) == pytest.approx(stability(LOW[0] @ LOW[1], others[0] @ others[1]), **EXACT)
    assert stability(torch.zeros(6, 4), _random(6, 4, 0)) == 0


def test_stability_ignores_scale_a_common_turn_and_transposition():
    left, right = _turn(40, 6), _turn(12, 7)
    plain = stability(W, OTHER)
    assert abs(plain) > 1e-3
    for before, after in (
        (5 * W, OTHER),
        (W, 0.01 * OTHER),
        (left @ W, left @ OTHER),
        (W @ right, OTHER @ right),
        (left @ W @ right, left @ OTHER @ right),
        (W.t(), OTHER.t()),
        (OTHER, W),
    ):
        assert stability(before, after) == pytest.approx(plain, **EXACT)
    square = _random(12, 12, 8), _random(12, 12, 9)
    assert stability(square[0].t(), square[1].t()) == pytest.approx(stability(*square), **EXACT)


def test_stability_sees_a_turn_of_one_alone():
    assert stability(W, _turn(40, 6) @ W) < 0.5
    assert stability(W, W @ _turn(12, 7)) < 0.5
    assert stability(W, W.square()) < 0.99


def test_similarity_ignores_turns_from_the_left_and_sees_the_rest():
    left = _turn(40, 6)
    assert similarity(left @ W, W) == pytest.approx(1, **EXACT)
    assert similarity(left @ W, OTHER) == pytest.approx(similarity(W, OTHER), **EXACT)
    assert similarity(W, -W) == pytest.approx(1, **EXACT)
    assert similarity(W, 1.1 * W) < 0.9
    assert similarity(W, W @ _turn(12, 7)) < 0.9
    # The mean is over R's own elements: of ten times the rows with the same R it is the same.
    assert similarity(torch.cat([W, 0 * W]), torch.cat([OTHER, 0 * W])) == pytest.approx(similarity(W, OTHER), **EXACT)


def test_what_is_not_finite_is_told():
    broken = W.clone()
    broken[0, 0] = torch.inf
    assert stability(W, broken) != stability(W, broken)


NAMES = ["stem", "conv", "rising", "square", "falling", "head"]


def _net() -> nn.Module:
    """Flattened, `conv` and `falling` are wide and `rising` is tall."""
    torch.manual_seed(0)
    made = [nn.Conv2d(1, 8, 3), nn.Conv2d(8, 12, 3), nn.Linear(12, 40), nn.Linear(40, 40), nn.Linear(40, 20)]
    return nn.Sequential(OrderedDict(zip(NAMES, [*made, nn.Linear(20, 10)], strict=True)))


def _factored(model: nn.Module, rank: int = 4) -> nn.Module:
    """All but the first and the last layer as two factors."""
    for layer in find_layers(model, trained=model.parameters())[0]:
        found = decompose(layer.matrix(), 0.0, rank=rank)
        to_factors(layer, found.a, found.b)
    return model


def _three(state: dict) -> dict:
    """Two factors in a state dict as three."""
    out = {}
    for key, t in state.items():
        if key.endswith("_a"):
            q, r = torch.linalg.qr(t)
            out |= {key[:-2] + "_u": q, key[:-2] + "_s": r}
        else:
            out[key[:-2] + "_vt" if key.endswith("_b") else key] = t
    return out


def _multiplied_out(model: nn.Module, state: dict) -> dict:
    """The dense model's state dict."""
    dense = {}
    for key, like in model.state_dict().items():
        if key in state:
            dense[key] = state[key]
        else:
            product = state[f"{key}_a"] @ state[f"{key}_b"]
            wide = like.shape[0] < like[0].numel()
            dense[key] = (product.t() if wide else product).reshape(like.shape)
    return dense


@pytest.fixture(scope="module")
def forms(tmp_path_factory) -> dict:
    """One low-rank model in every form it can have."""
    folder = tmp_path_factory.mktemp("forms")
    model = _factored(_net())
    state = small.clone(model)
    plain = to_plain(copy.deepcopy(model))
    write(plain, folder / "run" / "model")
    write_tensors(folder / "three.safetensors", _three(state))
    return {
        "model": model,
        "state": state,
        "full": _multiplied_out(_net(), state),
        "three": _three(state),
        "plain": plain,
        "plain state": small.clone(plain),
        "file": folder / "three.safetensors",
        "run": str(folder / "run"),
        "wrapped": {f"module.{key}": t for key, t in state.items()},
    }


def test_every_form_is_the_same_model(forms):
    for one, other in itertools.combinations(forms.values(), 2):
        found = compare(one, other)
        assert set(found) == set(NAMES)
        for measures in found.values():
            assert measures["stability"] == pytest.approx(1, **EXACT)
            assert measures["similarity"] == pytest.approx(1, **EXACT)
    assert list(compare(forms["run"], forms["three"])) == NAMES
    assert list(compare(forms["run"], forms["file"])) == sorted(NAMES)


def test_a_save_of_a_group_phase_is_the_first_groups(tmp_path):
    states = [small.clone(small.net(seed)) for seed in range(3)]
    folder = tmp_path / "run" / "checkpoint" / "step-000012.old"
    folder.mkdir(parents=True)
    for rank, state in zip((4, 12, 8), states, strict=True):
        write_tensors(folder / f"model-rank{rank}.safetensors", state)
    for path in (folder, tmp_path / "run" / "checkpoint", tmp_path / "run"):
        assert compare(path, states[0])["conv"]["stability"] == pytest.approx(1, **EXACT)
    assert compare(folder, states[1])["conv"]["stability"] < 0.9


def test_a_finished_model_with_parametrized_weights():
    """MultiheadAttention reads its weights itself, so they are no Sequentials."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(8, 16), nn.MultiheadAttention(16, 2), nn.Linear(16, 4))
    model = _factored(copy.deepcopy(dense))
    state, plain = small.clone(model), to_plain(copy.deepcopy(model))
    assert any("parametrizations" in key for key in plain.state_dict())
    for other in (plain, small.clone(plain)):
        found = compare(state, other)
        assert list(found) == ["0", "1.in_proj_weight", "1.out_proj", "2"]
        assert all(measures["similarity"] == pytest.approx(1, **EXACT) for measures in found.values())


def test_a_users_own_sequential_is_two_layers():
    one, other = (nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 5)) for _ in range(2))
    assert list(compare(one, other)) == list(compare(one.state_dict(), other)) == ["0", "1"]


def test_what_cannot_be_compared_is_named(tmp_path):
    model, other = small.net(), small.net()
    other.middle, other.extra = nn.Linear(32, 30), nn.Linear(3, 3)
    with pytest.raises(thinwire.ConfigError) as error:
        compare(model, other)
    assert "`extra` is only in the second" in str(error.value)
    assert "`middle` is (32, 32) in the first and (32, 30) in the second" in str(error.value)
    with pytest.raises(thinwire.ConfigError, match="no weight of two dimensions"):
        compare({"epoch": torch.tensor(3)}, {})
    with pytest.raises(thinwire.ConfigError, match="there is no model at"):
        compare(model, tmp_path)
    (tmp_path / "model.safetensors").write_text("no")
    with pytest.raises(thinwire.ConfigError, match="not a valid safetensors file"):
        compare(model, tmp_path)


def test_the_callback_keeps_few_snapshots_and_compares_with_the_right_one():
    model = small.net()
    replica = thinwire.attach(model, optimizer := small.sgd(model), thinwire.AllReduce())
    watch = Stability(replica, every=2, back=3, keep=("st*",))
    states, records = [small.clone(model)], []
    for number in small.walk(replica, optimizer, 0, 12):
        states.append(small.clone(model))
        records.append(watch.update(number + 1))
        assert len(watch.snapshots) <= 3
    found = [record for record in records if record]
    assert [(record["before"], record["step"]) for record in found] == [(0, 6), (2, 8), (4, 10), (6, 12)]
    for record in found:
        wanted = compare(states[record["before"]], states[record["step"]])
        assert list(record["layers"]) == ["conv", "middle", "head"]
        for label, measures in record["layers"].items():
            assert measures == pytest.approx(wanted[label], **EXACT)
    numbers = [basis.polar.numel() + basis.mixing.numel() for basis in watch.snapshots[0][1].values()]
    assert numbers == [32 * 32 + 32 * 32, 32 * 32 + 32 * 32, 32 * 10 + 10 * 10]
    assert all(basis.polar.dtype == torch.float32 for basis in watch.snapshots[0][1].values())


OIALR = thinwire.OIALR(total_steps=small.STEPS, factor_at=4, redecompose=3, cutoff=0.6, layer_fraction=1)


@pytest.mark.parametrize("config", [small.ab(), OIALR], ids=lambda config: type(config).__name__)
def test_the_callback_watches_through_changes_of_rank_and_changes_nothing(config):
    plain, watched = small.net(), small.net()
    _train(plain, config)
    replica, watch, seen = _train(watched, config, watching=True)
    assert small.model_bits(plain) == small.model_bits(watched)
    assert len({ranks.get("conv") for ranks, _ in seen}) > 1
    for _, record in seen:
        assert list(record["layers"]) == ["stem", "conv", "middle", "head"]
        assert all(0.5 < measures["stability"] <= 1 for measures in record["layers"].values())
    assert "conv.0.weight" in replica.finish().state_dict()
    assert list(watch.update(small.STEPS + 1)["layers"]) == ["stem", "conv", "middle", "head"]


def _train(model: nn.Module, config, *, watching: bool = False):
    replica = thinwire.attach(model, optimizer := small.sgd(model), config)
    watch, seen = Stability(replica, every=1) if watching else None, []
    for number in small.walk(replica, optimizer, 0):
        if watch:
            seen.append((replica.ranks(), watch.update(number + 1)))
    return replica, watch, seen


def test_tables_are_not_watched_and_wrappers_are_seen_through():
    torch.manual_seed(0)
    model = CharGPT(vocabulary=7, width=8, depth=1)
    (_, bases) = Stability(model).snapshots[0]
    assert list(bases) == [
        *(f"layers.0.{name}" for name in ("attention.qkv", "attention.out", "mlp.0", "mlp.2")),
        "head",
    ]
    with pytest.warns(UserWarning, match="keep pattern 'no' matches no layer"):
        Stability(model, keep=("no",))
    with pytest.raises(thinwire.ConfigError, match="`every`=0"):
        Stability(model, every=0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = Stability(DistributedDataParallel(model))
    finally:
        dist.destroy_process_group()
    assert list(wrapped.snapshots[0][1]) == list(bases)


def _thinwire(*words, expect: int = 0) -> str:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == expect, result.output
    return result.output


def _run(out: Path, *more) -> str:
    return _thinwire("run", "digits", "--workers", 1, "--steps", 8, "--out", out, *more)


def _records(run: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.slow
def test_the_command_line_looks_draws_and_compares(tmp_path):
    run, layers = tmp_path / "run", ["features.0", "features.4", "features.7", "hidden", "head"]
    said = _run(run, "--method", "ab-paper", "--set", "every=2", "--stability", 2, "--save-every", 4)
    picture = run / "stability.png"
    assert f"picture: {picture}" in said
    records = _records(run, "stability")
    assert [(record["before"], record["step"]) for record in records] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert all(list(record["layers"]) == layers for record in records)
    picture.unlink()
    assert f"picture: {picture}" in _thinwire("report", run)
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(_thinwire("stability", run / "checkpoint", run, "--json"))
    assert set(found["layers"]) == set(layers)
    # Steps 4 to 8 moved the model a little, and `finish` cut what was smallest.
    assert 0.5 < found["mean"]["stability"] < 1 and 0 < found["mean"]["similarity"] < 1
    assert "features.7" in (table := _thinwire("stability", run / "checkpoint", run)) and "mean" in table
    assert "there is no model at" in _thinwire("stability", tmp_path, run, expect=2)
    assert "leaves nothing to compare in a run of 8" in _thinwire(
        *("run", "digits", "--method", "allreduce", "--steps", 8, "--stability", 3, "--stability-back", 3), expect=2
    )


@pytest.mark.slow
def test_looking_changes_nothing_and_begins_anew_after_a_resume(tmp_path):
    watched, plain = tmp_path / "watched", tmp_path / "plain"
    flags = ["--method", "allreduce", "--quiet", "--no-model", "--save-every", 5]
    _run(watched, *flags, "--stability", 2)
    (watched / "summary.json").unlink()
    _run(watched, *flags, "--stability", 2, "--resume")
    _run(plain, *flags)
    # Resumed at step 5: the look at 6 has none before it.
    assert [line["step"] for line in _records(watched, "stability")] == [2, 4, 8]
    assert (watched / "stability.png").exists() and not (plain / "stability.png").exists()
    ours, theirs = ([line["loss"] for line in _records(run, "step")] for run in (watched, plain))
    assert ours == theirs and len(ours) == 8
