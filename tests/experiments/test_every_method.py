"""Every recipe through every method, on stand-ins for its data and with narrow models."""

import json
import math
import re
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import gang
import small
import thinwire
from every_method import BUILT_IN
from selection import slow_but
from standins import folder_for
from thinwire.base.errors import ConfigError
from thinwire.checkpoint import saves
from thinwire.cli import main
from thinwire.launch.jobs import Job, method_config
from thinwire.recipes import Recipe, installed, load, named
from thinwire.train import checkpoint, fit
from thinwire.train.data import Images, Source
from thinwire.train.task import CLASSIFY, Task

pytestmark = pytest.mark.slow

VIT = {"image": 32, "patch": 16, "width": 32, "depth": 2, "heads": 2}
AUTOFORMER = {"width": 16, "heads": 2, "hidden": 32, "encoder_layers": 1}
GPT = {"block": 8, "width": 32, "depth": 1, "heads": 2}
NARROW: dict[str, dict[str, Any]] = {
    "digits": {},
    "shakespeare": GPT,
    "vgg16-cifar10": {"width": 1 / 16},
    "vgg16bn-cifar10": {"width": 1 / 16},
    "resnet18-cifar10": {"width": 1 / 16},
    "minivit-cifar10": VIT,
    "minivit-cifar10-tuned": VIT,
    "minivit-cifar100": VIT,
    "resnet50-imagenet-local": {"classes": 3, "width": 1 / 16},
    "resnet50-imagenet-global": {"classes": 3, "width": 1 / 16},
    "vitb16-imagenet-local": {"classes": 3, **VIT},
    "vitb16-imagenet-global": {"classes": 3, **VIT},
    "vitb16-imagenet-oialr": {"classes": 3, **VIT},
    "autoformer-ettm2-96": AUTOFORMER,
    "autoformer-ettm2-192": AUTOFORMER,
    "autoformer-ettm2-336": AUTOFORMER,
    "autoformer-ettm2-720": AUTOFORMER,
    "autoformer-ettm2-tuned": AUTOFORMER,
    "gpt-wikitext2": GPT,
    "gpt124m-wikitext2": GPT,
}
"""Sizes at which a step takes milliseconds, by the recipe's name."""

SHIPPED = ("digits", "shakespeare")
STEPS = 3
BATCH = 4
SETTINGS = {
    "ab": ("warmup=1", "every=1", "factor_at=1", "cutoff=0.95"),
    "ab-paper": ("warmup=1", "every=1", "rebound=1", "lr_rebound=1", "cutoff=0.95"),
    "oialr": ("factor_at=1", "redecompose=1"),
    "daso": ("warmup=0", "cooldown=0", "every=1", "overlap=1"),
    "localsgd": ("every=1", "warmup=1"),
    "diloco": ("every=1", "warmup=1"),
    "powersgd": ("rank=1", "warmup=1"),
    "topk": ("density=0.1", "warmup=1"),
    "onebit": ("warmup=1",),
}
"""Whole steps, so that three of them see all that a method does; first values that are orthogonal are cut late."""
EXPORTED = {(name, "ab-paper") for name in ("vgg16-cifar10", "vgg16bn-cifar10", "minivit-cifar10", "gpt-wikitext2")} | {
    ("resnet50-imagenet-local", "oialr"),
    ("autoformer-ettm2-96", "oialr"),
}
"""Once a kind of model, the finished one is written too."""


def tiny(name: str, place: Path, sizes: dict[str, Any] | None = None, **other: Any) -> Recipe:
    """The recipe over a few steps of a few examples, its data loaded once."""
    assert name in NARROW, f"the recipe {name} is new: give its model narrow sizes in NARROW of {__file__}"
    recipe = load(name)(**NARROW[name], **(sizes or {}))
    read = partial(recipe.source, size=32) if "imagenet" in name else recipe.source
    source = few(read(None if name in SHIPPED else folder_for(name, place)))
    return recipe.replace(
        **{"steps": STEPS, "batch": BATCH, "eval_every": STEPS, "source": lambda folder: source, **other}
    )


def few(source: Source) -> Source:
    """The same with little to evaluate on."""
    known = {field.name: getattr(source, field.name) for field in fields(source)}  # type: ignore[arg-type]
    rows = {name: known[name][:4] for name in ("heldout_rows", "validation_rows") if name in known}
    ids = {name: known[name][:40] for name in ("heldout_ids", "validation_ids") if name in known}
    return replace(source, **rows, **ids)  # type: ignore[type-var]


def config(recipe: Recipe, method: str, group_size: str | None = None) -> Any:
    return method_config(method, SETTINGS.get(method, ()), recipe.defaults, group_size)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


QUICK = ("digits", "vgg16bn-cifar10", "gpt-wikitext2")
"""One recipe of each kind that is quick."""


@pytest.mark.parametrize("name", slow_but(QUICK, installed()))
def test_a_recipe_goes_through_every_method(name: str, place: Path, tmp_path: Path) -> None:
    recipe = tiny(name, place)
    for method in BUILT_IN:
        run = watched(recipe.suited_to(method), method, tmp_path / method, model=(name, method) in EXPORTED)
        check(run, recipe, method)


class Told:
    """A task that keeps its losses, which a run notes of rank 0 alone."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.losses: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.task.loss(outputs, targets)
        self.losses.append(loss.item())
        return loss


def watched(recipe: Recipe, method: str, out: Path, group_size: str | None = None, **how: Any) -> dict[str, Any]:
    """What a run came to, with its losses here and the model that it trained."""
    kept: list[nn.Module] = []
    task = Told(recipe.task)

    def model(source: Source) -> nn.Module:
        kept.append(recipe.model(source))
        return kept[0]

    watching = recipe.replace(model=model, task=task)
    summary = fit(watching, config(recipe, method, group_size), out=out, **{"model": False, **how})
    return {"summary": summary, "model": kept[0], "losses": task.losses, "out": out}


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (out / "records.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def check(run: dict[str, Any], recipe: Recipe, method: str) -> None:
    """What holds for every recipe and every method."""
    summary, metric = run["summary"], recipe.task.metric
    assert len(run["losses"]) == STEPS and all(map(math.isfinite, run["losses"])), method
    assert (summary["recipe"], summary["method"], summary["metric"]) == (recipe.name, method, metric), method
    assert math.isfinite(summary[metric]) and math.isfinite(summary["loss"]), method
    assert all(torch.isfinite(p).all() for p in run["model"].parameters()), method
    if method in ("ab-paper", "oialr"):
        phases = [record["phase"] for record in records(run["out"], "step")]
        assert phases == ["warmup", *{"ab-paper": ["groups", "rebound"], "oialr": ["lowrank"] * 2}[method]], method
        assert any(record["ranks"] for record in records(run["out"], "ranks")), method


# Two workers.

ALIKE: dict[str, dict[str, Any]] = {"vgg16-cifar10": {}, "vitb16-imagenet-oialr": {"dropout": 0.0}}
"""Models without BatchNorm, here without dropout too: a batch's loss is the mean of its parts' losses."""
SHARED = {
    "vgg16-cifar10": BUILT_IN,
    "vitb16-imagenet-oialr": ["allreduce"],
    "autoformer-ettm2-96": ["ab-paper", "daso"],
}
"""Methods that two workers train by."""


@pytest.mark.parametrize(
    "names", [pytest.param(["vgg16-cifar10"], marks=pytest.mark.slow), ["vitb16-imagenet-oialr", "autoformer-ettm2-96"]]
)
def test_two_workers_take_the_steps_of_one_and_end_alike(names: list[str], place: Path, tmp_path: Path) -> None:
    for name in names:
        folder_for(name, place)
    first, second = gang.run(both, 2, names, place, tmp_path)
    for run, bits in first.items():
        assert second[run]["model"] == bits["model"], run
        assert bits["slow_bytes"] > 0, run
    for name in ALIKE.keys() & names:
        alone = watched(tiny(name, place, ALIKE[name]), "allreduce", tmp_path / name)
        parts = [ours[name, "allreduce"]["losses"][0] for ours in (first, second)]
        assert parts[0] != parts[1]
        assert sum(parts) / 2 == pytest.approx(alone["losses"][0], rel=1e-5), name


def both(rank: int, names: list[str], place: Path, out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(name, method): shared(name, method, place, out) for name in names for method in SHARED[name]}


def shared(name: str, method: str, place: Path, out: Path) -> dict[str, Any]:
    run = watched(tiny(name, place, ALIKE.get(name)), method, out / f"{name}-{method}", group_size="1")
    traffic = run["summary"]["traffic"]
    sent = traffic["slow_bytes"] - traffic["by_purpose"]["evaluate"]["slow_bytes"]
    return {"model": small.model_bits(run["model"]), "losses": run["losses"], "slow_bytes": sent}


# Full sizes.

PARAMETERS = {
    "digits": 226_794,
    "shakespeare": 818_176,
    "vgg16-cifar10": 134_301_514,
    "vgg16bn-cifar10": 15_249_354,
    "resnet18-cifar10": 2_797_610,
    "minivit-cifar10": 42_684_682,
    "minivit-cifar10-tuned": 42_684_682,
    "minivit-cifar100": 2_725_924,
    "resnet50-imagenet-local": 25_557_032,
    "resnet50-imagenet-global": 25_557_032,
    "vitb16-imagenet-local": 86_567_656,
    "vitb16-imagenet-global": 86_567_656,
    "vitb16-imagenet-oialr": 86_493_928,
    **{f"autoformer-ettm2-{ahead}": 10_536_967 for ahead in (96, 192, 336, 720, "tuned")},
    "gpt-wikitext2": 13_291_008,
    "gpt124m-wikitext2": 110_810_112,
}
WORDS = {"shakespeare": 65, "gpt-wikitext2": 33_278, "gpt124m-wikitext2": 33_278}


def test_full_models_have_the_parameters_that_are_told() -> None:
    assert set(PARAMETERS) == set(installed())
    for name, wanted in PARAMETERS.items():
        source = cast(Source, SimpleNamespace(vocabulary=WORDS.get(name)))
        with torch.device("meta"):
            model = named(name).model(source)
        assert sum(p.numel() for p in model.parameters()) == wanted, name
        told = re.search(r"(\d+\.?\d*) M parameters", f"{named(name).summary} {load(name).__doc__}")
        if told and name != "gpt124m-wikitext2":  # which tells of two vocabularies
            assert wanted / 1e6 == pytest.approx(float(told[1]), abs=0.5), name


@pytest.mark.parametrize("name", [name for name in installed() if "vgg" in name or "vit" in name or "resnet" in name])
def test_abs_models_begin_orthogonal_and_others_do_not(name: str) -> None:
    torch.manual_seed(0)
    model = load(name)(**NARROW[name]).model(cast(Source, SimpleNamespace()))
    linear = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    found = torch.cat([torch.linalg.svdvals(module.weight.detach().flatten(1)) for module in linear])
    assert len(linear) > 8
    orthogonal = bool((found - 1).abs().max() < 1e-4)
    assert orthogonal == (not name.startswith("minivit") and not name.endswith("oialr"))


# Data that is not there.


@pytest.mark.parametrize("name", [name for name in installed() if name not in SHIPPED])
def test_missing_data_is_said_with_how_to_get_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for given in ([], ["--data", "empty"], ["--data", "no/such"]):
        result = CliRunner().invoke(main, ["run", name, "--method", "allreduce", *given])
        assert result.exit_code == 2, result.output
        assert "https://" in result.output and "--data" in result.output and "Traceback" not in result.output
    assert [found.name for found in tmp_path.iterdir()] == ["empty"]


# A run that ends early.


@dataclass(frozen=True, kw_only=True)
class Misleading(Images):
    """The better it is learned, the worse it does on the validation part."""

    @property
    def validation_size(self) -> int:
        return len(self.heldout_rows)

    def validation(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        x, y = self.heldout(indices)
        return x, (y + 1) % 10


def misled(**other: Any) -> Recipe:
    """Epochs of four steps; the loss on the validation part soon rises."""
    chance = torch.Generator().manual_seed(0)
    y = torch.arange(200) % 10
    x = torch.eye(64)[y].view(-1, 1, 8, 8) + 0.1 * torch.randn(200, 1, 8, 8, generator=chance)
    source = Misleading(x=x, y=y, train_rows=np.arange(160), heldout_rows=np.arange(160, 200))
    usual = {"model": lambda source: small.mlp()}
    return Recipe(
        name="misled",
        summary="",
        task=CLASSIFY,
        source=lambda folder: source,
        optimizer=partial(torch.optim.AdamW, lr=1e-2),
        **{**usual, "steps": 40, "epochs": 10, "batch": 16, "patience": 2, "eval_every": 100, **other},
    )


ENDING = {"allreduce": thinwire.AllReduce(), "ab-paper": small.ab(total_steps=40)}


def ends_early(rank: int, out: Path) -> dict[str, Any]:
    """Two workers' summaries of a run, and of its end taken once more from the checkpoint, with the models' bits."""
    return {
        name: [misled_run(method, out / name, resume) for resume in (False, True)] for name, method in ENDING.items()
    }


def misled_run(method: Any, out: Path, resume: bool) -> tuple[dict[str, Any], str]:
    kept: list[nn.Module] = []

    def model(source: Source) -> nn.Module:
        kept.append(small.mlp())
        return kept[0]

    told = fit(misled(model=model), method, out=out, model=False, save_every=6, resume=resume)
    return told, small.model_bits(kept[0])


def test_a_run_ends_as_after_its_best_epoch_when_validation_does_not_improve(tmp_path: Path) -> None:
    first, second = gang.run(ends_early, 2, tmp_path)
    for name in ENDING:
        (summary, bits), (again, others) = first[name]
        *looks, finished = records(tmp_path / name, "evaluation")
        losses = [look["validation_loss"] for look in looks]
        epoch, best = losses.index(min(losses)) + 1, summary["best_epoch"]
        chosen, last = looks[epoch - 1], looks[-1]
        assert len(losses) == epoch + 2 < 10
        assert (summary["steps"], best["step"], best["ended_at"]["step"]) == (4 * epoch, 4 * epoch, 4 * (epoch + 2))
        assert best["validation_loss"] == min(losses) and best["loss"] == chosen["loss"] != last["loss"]
        assert finished["step"] == 4 * epoch
        if name == "allreduce":
            assert finished["loss"] == best["loss"]  # nothing is cut
        assert abs(finished["loss"] - best["loss"]) < abs(finished["loss"] - last["loss"])
        # Bytes and seconds are the best epoch's, and those of the whole run stand beside them.
        assert chosen["slow_bytes"] <= summary["traffic"]["slow_bytes"] < last["slow_bytes"]
        whole = again["best_epoch"]["ended_at"]  # the records' last lines are of the run that went on
        assert whole["slow_bytes"] == last["slow_bytes"] and whole["wall_s"] >= last["wall_s"] > chosen["wall_s"]
        # The checkpoints that are kept speak of them.
        kept = {f"best-{step}" for step in checkpoint.best_steps(tmp_path / name / "checkpoint")}
        assert {p.name for p in (tmp_path / name).glob("best-*")} == kept | {f"best-{4 * epoch}"} and len(kept) <= 2
        assert [again[key] for key in ("steps", "loss")] == [summary[key] for key in ("steps", "loss")]
        steps = [record["step"] for record in records(tmp_path / name, "step")]
        assert steps == list(range(1, best["ended_at"]["step"] + 1))
        assert {bits, others} == {told for _, told in second[name]} and len({bits, others}) == 1


def test_a_best_epoch_that_is_damaged_costs_the_epoch_and_not_the_run(tmp_path: Path, caplog: Any) -> None:
    fit(misled(), thinwire.AllReduce(), out=tmp_path, model=False, until=21)
    for best in tmp_path.glob("best-*"):
        (best / "model.safetensors").unlink()
    summary = fit(misled(), thinwire.AllReduce(), out=tmp_path, model=False, resume=True)
    assert "best_epoch" not in summary and summary["steps"] == 24
    assert "the result is of the last step, not of the best epoch, whose save is lost: `" in caplog.text


def test_a_run_without_patience_goes_on_and_patience_needs_a_validation_part(tmp_path: Path) -> None:
    summary = fit(misled(patience=None, steps=16), thinwire.AllReduce(), out=tmp_path / "whole", model=False)
    assert summary["steps"] == 16 and "best_epoch" not in summary
    summary = fit(misled(steps=8, epochs=2), thinwire.AllReduce(), out=tmp_path / "ended", model=False)
    assert summary["steps"] == summary["best_epoch"]["ended_at"]["step"] == 8 and not list(
        (tmp_path / "ended").glob("best-*")
    )
    with pytest.raises(ConfigError, match="`patience`=1 needs validation data; give the source of"):
        fit(named("digits").replace(patience=1), thinwire.AllReduce(), out=tmp_path / "none")


# A run in pieces.


def dropping(source: Source) -> nn.Module:
    """`small.mlp` whose chance goes on where it was."""
    layers = list(small.mlp())
    return nn.Sequential(*layers[:3], nn.Dropout(0.3), *layers[3:])


def in_pieces(method: Any, out: Path, **how: Any) -> tuple[dict[str, Any], str, list[float]]:
    """What a run of 18 steps said, the model's bits and the losses noted so far."""
    kept: list[nn.Module] = []

    def model(source: Source) -> nn.Module:
        kept.append(dropping(source))
        return kept[0]

    told = fit(misled(patience=None, steps=18, model=model), method, out=out, **how)
    return told, small.model_bits(kept[0]), [record["loss"] for record in records(out, "step")]


@pytest.mark.parametrize("method", [thinwire.AllReduce(), small.ab(total_steps=18)])
def test_a_run_in_pieces_is_the_run_in_one(method: Any, tmp_path: Path) -> None:
    whole, bits, losses = in_pieces(method, tmp_path / "whole", save_every=5)
    assert (tmp_path / "whole" / "summary.json").is_file() and len(losses) == 18
    out = tmp_path / "pieces"
    for until, stands in ((5, 5), (10, 10), (3, 10)):
        told, _, _ = in_pieces(method, out, until=until, resume=until != 5)
        assert told == {"stopped_at": stands, "steps": 18}
        saved = saves.find(out / "checkpoint")
        assert saved and json.loads((saved / "position.json").read_text())["step"] == stands
        assert not (out / "summary.json").exists() and not (out / "model").exists()
        assert [record["step"] for record in records(out, "step")] == list(range(1, stands + 1))
    # Beyond the end it is an ordinary run.
    told, found, noted = in_pieces(method, out, until=100, resume=True)
    assert (found, noted) == (bits, losses)
    assert told["steps"] == 18 and told["loss"] == whole["loss"]
    assert (out / "summary.json").is_file() and (out / "model").is_dir()


def test_pieces_on_the_command_line(tmp_path: Path) -> None:
    words = ["run", "digits", "--method", "allreduce", "--workers", "1", "--steps", "4", "--no-model", "--json"]
    said = []
    for given in (["--until", "2"], ["--until", "1", "--resume"], ["--resume"]):
        result = CliRunner().invoke(main, [*words, *given, "--out", str(tmp_path / "run")])
        assert result.exit_code == 0, result.output
        said.append(json.loads(result.stdout))
    assert said[:2] == [{"stopped_at": 2, "steps": 4}] * 2 and said[2]["steps"] == 4
    arguments = Job(recipe="digits", method="ab-paper", out=tmp_path, until=7).words()
    assert arguments[arguments.index("--until") + 1] == "7"
