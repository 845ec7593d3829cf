"""Models that leave the house: `thinwire.compress`, what it writes, and the `export` command."""

import inspect
import json
import subprocess
import sys
import warnings
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from shutil import copytree, rmtree
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import prune

import gang
import small
import thinwire
from selection import REST
from test_hugging_face import Encoder, encoder, gpt2
from thinwire.cli import main
from thinwire.commands import sources
from thinwire.factor import load_exported
from thinwire.factor.export import describe_inputs
from thinwire.recipes import Recipe, digits, named
from thinwire.train import fit


def decaying(model: nn.Module) -> nn.Module:
    """Singular values that fall off, as those of trained weights do, and running statistics that are not the first."""
    for p in model.parameters():
        if p.dim() > 1:
            u, sigma, vt = torch.linalg.svd(p.detach().flatten(1), full_matrices=False)
            fall = sigma[0] / (1 + 20 * torch.arange(len(sigma)) / len(sigma))
            p.data = (u * fall @ vt).reshape(p.shape)
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer += 0.3
    return model.eval()


def tokens() -> Tensor:
    return torch.arange(36).reshape(3, 12) * 7 % 64


MODELS = {
    "cnn": lambda: (decaying(small.net()), small.batch(0, 0, 3)[0]),
    "attention": lambda: (decaying(encoder()), small.batch(0, 0, 3)[0]),
    "gpt2": lambda: (decaying(gpt2()), tokens()),
}


def said(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        found = model(x)
    return found[0] if isinstance(found, tuple) else getattr(found, "logits", found)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=REST if name != "cnn" else pytest.mark.slow) for name in MODELS]
)
def written(request, tmp_path_factory) -> SimpleNamespace:
    """A model, what became of it, and the folder where it lies."""
    model, x = MODELS[request.param]()
    made = thinwire.compress(model, cutoff=0.2, example=x)
    folder = made.save(tmp_path_factory.mktemp(request.param), onnx=True)
    return SimpleNamespace(name=request.param, model=model, x=x, made=made, folder=folder)


def test_programs_say_what_the_model_says_for_any_batch(written):
    import onnxruntime

    program = torch.export.load(written.folder / "program.pt2").module()
    session = onnxruntime.InferenceSession(written.folder / "model.onnx")
    for x in (written.x, written.x[:1], torch.cat([written.x, written.x])):
        wanted = said(written.made.model, x)
        close(said(program, x), wanted)
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        close(torch.from_numpy(found[0]), wanted)


def test_the_files_are_as_small_as_is_said(written):
    made, full = written.made, written.folder / "full.safetensors"
    assert made.ranks and made.ratio > 1.3
    assert count(made.model) == made.parameters_after == count(written.model) / made.ratio
    assert json.loads((written.folder / "layers.json").read_text())["parameters"] == made.parameters_after
    state = {name: t.clone() for name, t in written.model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, full)
    sizes = [path.stat().st_size for path in (full, written.folder / "model.safetensors")]
    assert sizes[0] / sizes[1] == pytest.approx(made.ratio, rel=0.25)  # of tiny models the names weigh much
    # Factors are not multiplied out in it; around them stands the graph, larger than tiny weights.
    assert (written.folder / "model.onnx").stat().st_size < 4 * made.parameters_after + 80_000


def test_written_and_loaded_it_can_be_made_smaller_still(written):
    spec = spec_from_file_location("load", written.folder / "load.py")
    load = module_from_spec(spec)
    spec.loader.exec_module(load)
    dense, _ = MODELS[written.name]()
    loaded = load.load(dense, written.folder).eval()
    close(said(loaded, written.x), said(written.made.model, written.x))
    same = thinwire.compress(loaded, cutoff=0.0, example=written.x)
    assert (same.ranks, same.kept, same.ratio) == (written.made.ranks, written.made.kept, 1.0)
    assert torch.equal(said(same.model, written.x), said(loaded, written.x))
    twice, once = (thinwire.compress(model, rank=2, example=written.x) for model in (loaded, written.model))
    assert twice.parameters_after == once.parameters_after < written.made.parameters_after
    close(said(twice.model, written.x), said(once.model, written.x))


STRANGER = """
import sys
sys.modules["thinwire"] = None  # importing it is an error
import torch, torch.nn.functional as F
from torch import Tensor, nn
{classes}
folder, about = sys.argv[1], torch.load(sys.argv[2])
sys.path.insert(0, folder)
from load import load
model = load({name}(), folder).eval()
torch.testing.assert_close(model(about["x"]), about["y"], rtol=1e-5, atol=1e-5)
assert sum(p.numel() for p in model.parameters()) == about["count"]
"""


@pytest.mark.slow  # test_invariants.py has a stranger for `make test`
def test_strangers_load_it_without_thinwire(tmp_path):
    model, x = MODELS["attention"]()
    made = thinwire.compress(model, cutoff=0.2)
    folder = made.save(tmp_path / "small")
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "layers.json", "load.py"}
    script, about = tmp_path / "stranger.py", tmp_path / "about.pt"
    script.write_text(STRANGER.format(classes=inspect.getsource(Encoder), name="Encoder"))
    torch.save({"x": x, "y": said(made.model, x), "count": made.parameters_after}, about)
    done = subprocess.run([sys.executable, script, folder, about], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Wilful(nn.Sequential):
    """What it does depends on values, which no program can follow."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def test_a_model_that_cannot_be_traced_is_written_without_its_program(tmp_path, caplog):
    made = thinwire.compress(Wilful(nn.Linear(8, 8)), rank=2, example=torch.ones(2, 8))
    assert not (made.save(tmp_path / "small") / "program.pt2").exists()
    assert "no program.pt2: torch.export cannot trace this model" in caplog.text
    with pytest.raises(thinwire.ConfigError, match=r"cannot be written as ONNX: .*; leave it out"):
        made.save(tmp_path / "onnx", onnx=True)


# How far layers are cut.


def test_nothing_is_lost_at_cutoff_zero_and_the_original_stays_as_it_is():
    model, x = MODELS["cnn"]()
    model.train().stem.eval()
    model.middle.requires_grad_(False)
    before = small.model_bits(model), [(m.training, type(m)) for m in model.modules()]
    wanted = said(model.eval(), x)
    model.train().stem.eval()
    made = thinwire.compress(model, cutoff=0.0, keep_first=False, keep_last=False, example=x)
    assert (small.model_bits(model), [(m.training, type(m)) for m in model.modules()]) == before
    close(said(made.model.eval(), x), wanted)
    cut = thinwire.compress(model, rank=2).model
    assert not any(p.requires_grad for p in cut.middle.parameters())
    assert all(p.requires_grad for p in cut.conv.parameters()) and cut.conv.training and not cut.stem.training


def test_cutoff_rank_and_share_cut_where_they_say():
    model, _ = MODELS["cnn"]()
    sigma = torch.linalg.svdvals(model.middle.weight)
    made = thinwire.compress(model, cutoff=0.2)
    assert made.ranks["middle"] == int((sigma > 0.2 * sigma[0]).sum())
    torch.testing.assert_close(made.spectra["middle"].float(), sigma, rtol=1e-4, atol=1e-6)
    assert {kept.name: kept.why for kept in made.kept} == {"stem.weight": "first layer", "head.weight": "last layer"}
    assert thinwire.compress(model, rank=3).ranks == {"conv": 3, "middle": 3}
    assert thinwire.compress(model, rank=0.25).ranks == {"conv": 8, "middle": 8}
    uneven = thinwire.compress(model, rank=18)
    assert uneven.ranks == {} and uneven.ratio == 1.0
    assert uneven.kept[-1].why == "not smaller at rank 18 of 32"
    assert set(thinwire.compress(model, rank=3, keep=("mid*",)).ranks) == {"conv"}


def test_a_target_is_met_with_the_least_cutoff():
    model, _ = MODELS["cnn"]()
    made = thinwire.compress(model, target=1.6)
    assert made.parameters_after <= made.parameters_before / 1.6
    less = thinwire.compress(model, cutoff=made.cutoff - 1e-6)
    assert less.parameters_after > made.parameters_before / 1.6
    with pytest.raises(thinwire.ConfigError, match=r"rank 1 in every layer .* 4\.1 times smaller"):
        thinwire.compress(model, target=50)


def test_figures_come_from_data_or_from_a_function(tmp_path):
    model, _ = MODELS["cnn"]()
    batches = [small.batch(0, step, 50) for step in range(3)]
    made = thinwire.compress(model, rank=1, data=iter(batches))
    for which, figure in ((model, made.before), (made.model, made.after)):
        hits = sum(int((said(which.eval(), x).argmax(-1) == y).sum()) for x, y in batches)
        assert figure == pytest.approx(hits / 150)
    loss = thinwire.compress(model, rank=1, evaluate=lambda m: F.cross_entropy(m(batches[0][0]), batches[0][1]).item())
    assert loss.before != loss.after and loss.example is None
    made.plot(tmp_path / "spectrum.png")
    assert (tmp_path / "spectrum.png").read_bytes().startswith(b"\x89PNG")


class Reading(nn.Module):
    """Code that reads a layer's weight, and a layer that is parametrized by its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(16, 16)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.normed(self.read(x.to(self.read.weight.dtype))))


class Own(nn.Conv2d):
    """A class that nobody else knows keeps its forward; its weight is computed from factors."""


def of_own_classes() -> nn.Module:
    return decaying(nn.Sequential(Own(8, 24, 3), nn.ReLU(), Own(24, 32, 3), nn.Flatten(), nn.Linear(128, 5)))


def test_weights_of_unknown_classes_come_back(tmp_path):
    model, x = of_own_classes(), torch.randn(3, 8, 6, 6)
    made = thinwire.compress(model, cutoff=0.2, example=x)
    assert nn.utils.parametrize.is_parametrized(made.model[2])
    made.save(tmp_path)
    close(said(load_exported.load(of_own_classes(), tmp_path), x), said(made.model, x))


def test_weights_that_others_read_or_made_stay_usable():
    model, x = Reading().eval(), torch.randn(2, 16)
    made = thinwire.compress(model, rank=4, keep_first=False, keep_last=False, example=x)
    assert set(made.ranks) == {"read", "head"} and made.model.read.weight.shape == (16, 16)
    assert made.model(x).shape == (2, 16)
    assert {kept.why for kept in made.kept} == {"already parametrized"}


HOOKS = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
}


def hooked(how: str) -> nn.Module:
    """A model one of whose weights is computed by a hook."""
    model = decaying(small.mlp())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's own, about these functions
        HOOKS[how](model[3])
    return model


@pytest.mark.parametrize("how", HOOKS)
def test_weights_that_a_hook_computes_stay_full_and_are_copied(how, tmp_path):
    model, x = hooked(how), torch.randn(4, 64)
    model(x).sum().backward()  # what the hook has computed belongs to a graph now
    found = thinwire.compress(model, rank=4, example=x)
    assert "3" not in found.ranks and "5" in found.ranks
    assert any(told.name.startswith("3.weight_") and how in told.why for told in found.kept)
    close(said(thinwire.compress(model, cutoff=0.0, example=x).model, x), said(model, x))
    found.save(tmp_path)
    close(said(torch.export.load(tmp_path / "program.pt2").module(), x), said(found.model, x))
    close(said(load_exported.load(hooked(how), tmp_path), x), said(found.model, x))


@pytest.mark.parametrize("how", HOOKS)
def test_weights_that_a_hook_computes_are_trained_and_finished(how):
    model = hooked(how).train()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, small.ab())
    list(small.walk(replica, optimizer, 0, 5))
    assert "5" in replica.ranks() and "3" not in replica.ranks()
    list(small.walk(replica, optimizer, 0, small.STEPS - 5))
    wanted = said(model.eval(), x := torch.randn(4, 64))
    close(said(replica.finish(cutoff=0.0).eval(), x), wanted)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({}, "give one of `cutoff`, `rank` and `target`: none is given"),
        ({"cutoff": 0.1, "rank": 4}, "cutoff and rank are given"),
        ({"cutoff": 1.0}, r"`cutoff`=1.0 must be in \[0, 1\)"),
        ({"rank": 0}, "`rank`=0 must be a whole number from 1 on"),
        ({"rank": 2.5}, "`rank`=2.5 must be a whole number from 1 on"),
        ({"target": 1}, "`target`=1 must be above 1"),
        ({"rank": 2, "keep": "conv"}, "must be a tuple of patterns"),
        ({"rank": 2, "data": []}, "`data` has no batches"),
        ({"rank": 2, "data": [], "evaluate": float}, "`data` or `evaluate`, not both"),
        ({"rank": 2, "data": [(torch.zeros(2, 1, 8, 8), torch.zeros(2, 3))]}, r"targets of shape \(2, 3\)"),
    ],
)
def test_bad_arguments_are_refused(arguments, wanted):
    with pytest.raises(thinwire.ConfigError, match=wanted):
        thinwire.compress(small.net(), **arguments)


def test_models_that_cannot_be_cut_are_refused():
    model = small.net()
    with pytest.raises(thinwire.ConfigError, match=r"takes an nn.Module, not int"):
        thinwire.compress(3, rank=2)
    with pytest.raises(thinwire.ConfigError, match=r"give it replica.finish\(\)"):
        thinwire.compress(thinwire.attach(model, small.sgd(model), thinwire.AllReduce()), rank=2)
    model.middle.weight.data[0, 0] = torch.nan
    with pytest.raises(thinwire.ConfigError, match=r"`middle.weight` has non-finite values"):
        thinwire.compress(model, rank=2)


# The command.


def export(*words: Any, expect: int = 0) -> str:
    result = CliRunner().invoke(main, ["export", *(str(word) for word in words)])
    assert result.exit_code == expect, result.output
    assert "Traceback" not in result.output
    return result.output


def train(rank: int, out: str) -> tuple[Tensor, int]:
    """A run that was last saved amid a group phase; what its finished model says, if it is finished from there."""
    recipe, config = named("digits", steps=small.STEPS), small.ab(cutoff=0.5, group_size=1)
    fit(recipe, config, out=out, save_every=17)
    model = recipe.model(recipe.source(None))
    replica = thinwire.attach(model, torch.optim.AdamW(model.parameters()), config)
    replica.load(Path(out) / "checkpoint" / "step-000017")
    assert replica.phase == "groups"
    done = replica.finish().eval()
    return said(done, heldout()), count(done)


def heldout() -> Tensor:
    return digits().source(None).x[:9]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("run")
    output, parameters = gang.run(train, 2, str(folder / "finished"))[0]
    copytree(folder / "finished", folder / "unfinished")
    rmtree(folder / "unfinished" / "model")
    (folder / "unfinished" / "summary.json").unlink()
    return SimpleNamespace(folder=folder, output=output, parameters=parameters)


@pytest.mark.slow
def test_an_unfinished_run_is_merged_and_cut_as_it_would_have_been(run, tmp_path):
    text = export(run.folder / "unfinished", "--out", tmp_path / "small")
    assert "saved at step 17 of 21 by ab-paper, in a group phase: this is the mean of 2 groups' copies" in text
    assert f"parameters {run.parameters:,} of 226,794" in text and "cut at 0.5 of" in text
    program = torch.export.load(tmp_path / "small" / "program.pt2").module()
    close(said(program, heldout()), run.output)


def pause(rank: int, folder: str) -> dict[str, tuple[Tensor, int]]:
    """Runs that are paused amid a group phase, by how they merge; what the model says that each is finished to."""
    found = {}
    for merge, group_size in (("mean", 2), ("trained", 1), ("weighted", 1)):
        recipe, config = named("digits", steps=small.STEPS), small.ab(cutoff=0.5, group_size=group_size, merge=merge)
        fit(recipe, config, out=Path(folder) / merge, until=17)
        model = recipe.model(recipe.source(None))
        replica = thinwire.attach(model, torch.optim.AdamW(model.parameters()), config)
        replica.load(Path(folder) / merge / "checkpoint" / "step-000017")
        assert replica.phase == "groups"
        done = replica.finish().eval()
        found[merge] = said(done, heldout()), count(done)
    return found


@pytest.mark.slow
def test_a_paused_run_is_merged_as_its_config_says(tmp_path):
    """Three groups, two of which train A; and two, one of two workers."""
    finished = gang.run(pause, 3, str(tmp_path))[0]
    notes = {"mean": "", "trained": ", and of each factor among those", "weighted": ", weighted by their losses"}
    for merge, (output, parameters) in finished.items():
        text = export(tmp_path / merge, "--out", tmp_path / f"small-{merge}")
        assert f"the mean of {2 if merge == 'mean' else 3} groups' copies{notes[merge]}" in text
        assert f"parameters {parameters:,} of 226,794" in text
        close(said(torch.export.load(tmp_path / f"small-{merge}" / "program.pt2").module(), heldout()), output)


@pytest.mark.slow
def test_three_factors_to_a_weight_are_multiplied_out(tmp_path):
    recipe = named("digits", steps=6)
    config = thinwire.OIALR(total_steps=6, factor_at=2, redecompose=2, cutoff=0.7, layer_fraction=1.0)
    fit(recipe, config, out=tmp_path / "run", save_every=5, model=False)
    (tmp_path / "run" / "summary.json").unlink()
    model = recipe.model(recipe.source(None))
    replica = thinwire.attach(model, torch.optim.AdamW(model.parameters()), config)
    replica.load(tmp_path / "run" / "checkpoint" / "step-000005")
    assert "hidden.weight_s" in replica.state_dict()
    # As finish() has it: nothing is cut that training has not cut.
    export(tmp_path / "run", "--out", tmp_path / "small")
    low = load_file(tmp_path / "small" / "model.safetensors")["hidden.1.weight"]
    assert low.shape[1] == replica.ranks()["hidden"]
    close(
        said(torch.export.load(tmp_path / "small" / "program.pt2").module(), heldout()), said(model.eval(), heldout())
    )


def test_a_finished_run_is_written_as_it_is_or_smaller(run, tmp_path):
    summary = json.loads((run.folder / "finished" / "summary.json").read_text())
    text = export(run.folder / "finished", "--out", tmp_path / "same")
    assert f"parameters {summary['parameters_final']:,} of 226,794" in text and "before truncation" in text
    names = ("layers.json", "load.py", "model.safetensors", "program.pt2")
    for name in names:
        assert (tmp_path / "same" / name).read_bytes() == (run.folder / "finished" / "model" / name).read_bytes()
    text = export(run.folder / "finished", "--out", tmp_path / "less", "--rank", "0.125")
    assert f"{100 * summary['accuracy']:.2f} % before" in text and "3 layers low-rank; full: features.0.weight" in text
    assert {path.name for path in (tmp_path / "less").iterdir()} == {*names, "spectrum.png"}
    assert "not empty" in export(run.folder / "finished", "--out", tmp_path / "less", expect=2)


ELSEWHERE = """
import torch
from torch import nn
from thinwire.base.errors import ConfigError
from thinwire.recipes import Recipe
from thinwire.train.data import Images
from thinwire.train.task import CLASSIFY
from thinwire.experiments.augmentation import CIFAR10, Pictures

def source(folder):
    if folder is None:
        raise ConfigError("pictures do not come with Thinwire; look for some, then give --data DIR")
    x, rows = torch.arange(8 * 192).reshape(8, 3, 8, 8) * 7 % 256, torch.arange(8).numpy()
    return Images(x=x.byte(), y=torch.arange(8) % 4, train_rows=rows, heldout_rows=rows)

def recipe():
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 32), nn.Linear(32, 4)]
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.01)
    return Recipe(
        name="pictures", summary="", task=CLASSIFY, source=source, model=lambda source: nn.Sequential(*layers),
        optimizer=sgd, steps=2, batch=4, transform=Pictures(statistics=CIFAR10, flip=False), autocast=True,
    )
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory) -> SimpleNamespace:
    """A run whose data is not here any more."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "own.py").write_text(ELSEWHERE)
    own = f"{folder / 'own.py'}:recipe"
    fit(named(own), thinwire.AllReduce(), out=folder / "run", data=folder, save_every=1)
    return SimpleNamespace(run=folder / "run", recipe=("--recipe", own), folder=folder)


@pytest.mark.slow
def test_a_run_whose_data_is_elsewhere_is_written_and_cut(elsewhere, tmp_path):
    text = export(elsewhere.run, "--out", tmp_path / "same", *elsewhere.recipe)
    assert "% on held-out data" in text and (tmp_path / "same" / "spectrum.png").is_file()
    text = export(elsewhere.run, "--out", tmp_path / "less", "--rank", 2, *elsewhere.recipe)
    assert "no accuracy on held-out data: pictures do not come with Thinwire; give --data DIR\n" in text
    assert "1 layer low-rank; full: 0.weight (first layer), 4.weight (last layer)" in text
    program = torch.export.load(tmp_path / "less" / "program.pt2").module()
    assert said(program, torch.zeros(5, 3, 8, 8)).shape == (5, 4)
    text = export(elsewhere.run, "--out", tmp_path / "judged", *elsewhere.recipe, "--data", elsewhere.folder)
    assert "% on held-out data\n" in text


def test_an_unfinished_run_whose_data_is_elsewhere_is_written_without_its_program(elsewhere, tmp_path):
    copytree(elsewhere.run, tmp_path / "run", ignore=lambda *_: ["summary.json", "model"])
    text = export(tmp_path / "run", "--out", tmp_path / "small", *elsewhere.recipe)
    assert "no accuracy on held-out data, and no program.pt2: pictures do not come with Thinwire" in text


def test_a_model_that_depends_on_its_data_is_copied_but_not_cut_without(elsewhere, tmp_path):
    copytree(elsewhere.run, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text()) | {"recipe": "gpt-wikitext2"}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    why = "'gpt-wikitext2' depends on its data: WikiText does not come with Thinwire; give --data DIR"
    assert f"no spectrum.png: the model of the recipe {why}\n" in export(tmp_path / "run", "--out", tmp_path / "same")
    assert (tmp_path / "same" / "program.pt2").is_file()
    assert why in export(tmp_path / "run", "--out", tmp_path / "less", "--rank", 2, expect=2)


@pytest.mark.slow
def test_models_say_what_they_take(elsewhere, tmp_path):
    about = json.loads((elsewhere.run / "model" / "layers.json").read_text())
    wanted = {name: about[name] for name in ("inputs", "views")}
    assert wanted["inputs"] == [{"shape": ["batch", 3, 8, 8], "dtype": "float32"}]
    assert wanted["views"].startswith("Pictures(statistics=((0.49139968, ")
    assert "views" not in describe_inputs(torch.zeros(2, 1), digits().transform_name)
    assert describe_inputs({"ids": tokens()}) == {"inputs": {"ids": {"shape": ["batch", 12], "dtype": "int64"}}}
    # Of earlier versions. `program.pt2` has an example too, but reading it can run code.
    copytree(elsewhere.run, tmp_path / "run")
    older = {"parameters": about["parameters"], "layers": about["layers"]}
    (tmp_path / "run" / "model" / "layers.json").write_text(json.dumps(older))
    export(tmp_path / "run", "--out", tmp_path / "same", *elsewhere.recipe)
    assert json.loads((tmp_path / "same" / "layers.json").read_text()) == older
    export(elsewhere.run, "--out", tmp_path / "cut", "--rank", 2, *elsewhere.recipe)
    assert wanted.items() <= json.loads((tmp_path / "cut" / "layers.json").read_text()).items()


class Half(Recipe):
    """Computes in half precision here, as a recipe with autocast does on a GPU."""

    def precision(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, torch.bfloat16)


def test_models_are_judged_in_the_precision_of_their_run():
    recipe = digits()
    assert not recipe.replace(autocast=True).precision(torch.device("cpu"))._enabled
    source, seen = recipe.source(None), set()
    model = recipe.model(source)
    model.register_forward_hook(lambda module, given, found: seen.add(found.dtype))
    for kind in (Recipe, Half):
        judge = sources._judged(kind(**vars(recipe)), source)["evaluate"]
        with torch.no_grad():
            judge(model)
    assert seen == {torch.float32, torch.bfloat16}


OWN = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))

def with_inputs():
    return model(), torch.zeros(2, 8)

def with_wrong_inputs():
    return model(), torch.zeros(2, 9)

def nothing():
    return None
"""


@pytest.fixture
def own(tmp_path, monkeypatch) -> nn.Module:
    """A user's folder: model.py, and weights of a trained model."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(OWN)
    space: dict[str, Any] = {}
    exec(OWN, space)
    model = decaying(space["model"]())
    save_file(model.state_dict(), "w.safetensors")
    save_file({**model.state_dict(), "2.weight": torch.zeros(3, 3)}, "shapes.safetensors")
    save_file({"other": torch.zeros(2)}, "keys.safetensors")
    Path("full").mkdir()
    Path("full", "here").write_text("")
    Path("run").mkdir()
    Path("run", "summary.json").write_text(
        json.dumps({"recipe": "tiny", "method": "ab-paper", "config": {}, "steps": 3})
    )
    Path("run", "model").mkdir()
    return model


@pytest.mark.slow
def test_a_models_function_and_its_weights(own):
    text = export("model.py:with_inputs", "--weights", "w.safetensors", "--cutoff", 0.3, "--out", "small")
    x = torch.randn(5, 8)
    made = thinwire.compress(own, cutoff=0.3)
    close(said(torch.export.load("small/program.pt2").module(), x), said(made.model, x))
    assert f"parameters {made.parameters_after:,} of {made.parameters_before:,}" in text
    export("model.py:model", "--target", "1.2", "--out", "blind")
    assert not Path("blind", "program.pt2").exists() and Path("blind", "spectrum.png").exists()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("model.py:model --out full", "`full` is not empty; give a new folder"),
        ("model.py:model --out new --cutoff 0.1 --rank 4", "cutoff and rank are given"),
        ("model.py:model --out new --cutoff 1.5", "`cutoff`=1.5 must be in [0, 1)"),
        ("model.py:model --out new --rank many", "`--rank`='many' must be a whole number"),
        ("model.py:model --out new --target 90", "`target`=90.0 cannot be reached"),
        ("model.py:model --out new --weights none.safetensors", "there is no file `none.safetensors`"),
        ("model.py:model --out new --weights model.py", "`model.py` is not a safetensors file; write one with"),
        ("model.py:model --out new --weights keys.safetensors", "model.py:model: the weights are of a different model"),
        ("model.py:model --out new --weights shapes.safetensors", "size mismatch for 2.weight"),
        ("model.py:with_wrong_inputs --out new", "fails on its own inputs: RuntimeError"),
        ("model.py:nothing --out new", "model.py:nothing returns NoneType; it must return an nn.Module"),
        ("model.py:absent --out new", "unknown function of `model.py` 'absent', choose from"),
        ("model.py:model --out new --onnx", "writing ONNX needs an example"),
        ("model.py:model --out new --data .", "--data and --recipe are for runs"),
        ("full --out new --weights w.safetensors", "--weights is for FILE.py:FUNCTION"),
        ("nowhere --out new", "`nowhere` is neither the folder of a run nor FILE.py:FUNCTION"),
        ("full --out new", "no `summary.json` in `full`: there is no finished run"),
        ("run --out new --rank 2", "the run's recipe 'tiny' is not installed"),
        ("run --out new --rank 2 --recipe digits", "the run is of the recipe 'tiny', and --recipe digits is 'digits'"),
    ],
)
def test_bad_input_is_one_clear_sentence(own, words, wanted):
    before = set(Path().rglob("*"))
    assert wanted in export(*words.split(), expect=2)
    assert {path for path in Path().rglob("*") if "__pycache__" not in path.parts} == before


def test_a_missing_package_is_named_with_its_remedy(own, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    said = export("model.py:with_inputs", "--out", "new", "--onnx", expect=2)
    assert "writing ONNX needs the package onnxscript: pip install 'thinwire[onnx]'" in said
    assert not Path("new").exists()
