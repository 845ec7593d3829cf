"""Where recipes come from, and what the command line may set of one: batch, optimizer, split; the help on methods."""

import dataclasses
import json
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch.optim import SGD, AdamW, Rprop

from every_method import BUILT_IN
from thinwire.base.errors import ConfigError
from thinwire.cli import main
from thinwire.commands.options import field_docstrings
from thinwire.experiments.data import Folder, Series
from thinwire.experiments.data.image_folder import Files
from thinwire.methods.registry import METHODS
from thinwire.recipes import MethodOverrides, digits, installed, load, named, names
from thinwire.train.data import Text, for_validation
from thinwire.train.task import describe_optimizer


def thinwire(*words, expect=0):
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == expect, result.output
    return result.stdout if expect == 0 else " ".join(result.output.split())


# Entry points.


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Another package as pip leaves it: a module, and a dist-info folder beside it."""

    def install(entries, name="elsewhere"):
        about = tmp_path / f"{name}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[thinwire.recipes]\n{entries}\n")
        (tmp_path / f"{name}.py").write_text(
            "from thinwire.recipes import digits\n"
            "def small(workers=1):\n"
            "    return digits().replace(name='small', summary=f'of another package, {workers}', steps=3)\n"
        )

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    sys.modules.pop("elsewhere", None)


@pytest.mark.slow
def test_recipes_of_other_packages_are_found_beside_our_own(package, tmp_path):
    package("small = elsewhere:small\nbroken = elsewhere:nothing")
    assert list(installed())[:2] == ["digits", "shakespeare"] and {"small", "broken"} < set(installed())
    assert named("small", workers=7).summary == "of another package, 7"
    assert json.loads(thinwire("run", "small", "--method", "topk", "--workers", 1, "--json", "--out", tmp_path / "run"))
    told = " ".join(thinwire("list").split())
    assert "of another package, 1" in told and "`broken` (`elsewhere:nothing`) cannot be imported: Attrib" in told
    assert "cannot be imported" in thinwire("run", "broken", "--method", "ab-paper", expect=2)


def test_two_recipes_of_one_name_are_refused(package):
    package("digits = elsewhere:small")
    with pytest.raises(ConfigError, match=r"two packages have a recipe `digits`: `thinwire\..*` and `elsewhere:small`"):
        named("digits")


def test_an_installation_without_a_checkout_goes_by_its_metadata(package, tmp_path, monkeypatch):
    package("small = elsewhere:small", name="thinwire")
    assert "small" not in installed()  # metadata of an older installation, beside a checkout
    monkeypatch.setattr(names, "_CHECKOUT", tmp_path / "nothing.toml")
    assert installed()["small"].value == "elsewhere:small"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "somebody-else"\n')
    monkeypatch.setattr(names, "_CHECKOUT", tmp_path / "pyproject.toml")
    assert "small" in installed()


def test_every_entry_point_is_a_recipe_of_its_name():
    for name in installed():
        assert load(name)().name == name


# The optimizer and the batch.


def test_batch_and_optimizer_are_set_and_recorded(tmp_path):
    words = ["run", "digits", "--method", "allreduce", "--workers", 1, "--steps", 3, "--no-model", "--out", tmp_path]
    given = ["--lr", 0.01, "--weight-decay", 0.5, "--batch-size", 16]
    summary = json.loads(thinwire(*words, *given, "--json"))
    assert [summary[name] for name in ("lr", "usual_lr", "weight_decay", "batch")] == [0.01, 0.01, 0.5, 16]
    assert json.loads(thinwire(*words, *given, "--resume", "--json")) == summary
    for other, name in ((["--lr", 0.02], "optimizer.lr"), (["--batch-size", 8], "batch"), (["--validate"], "split")):
        assert f"a finished run with `{name}`=" in thinwire(*words, *given, *other, "--resume", expect=2)


@pytest.mark.slow
def test_workers_are_given_the_same(tmp_path):
    words = ["compare", "digits", "--methods", "allreduce", "--steps", 2, "--no-model", "--json", "--out", tmp_path]
    [row] = json.loads(thinwire(*words, "--validate", "--lr", 0.01, "--batch-size", 16, "--workers", 2))
    summary = json.loads((tmp_path / "allreduce-seed0" / "summary.json").read_text())
    assert row["split"] == summary["split"] == "validation"
    assert (summary["world_size"], summary["lr"], summary["batch"]) == (2, 0.01, 16)


def test_values_reach_the_optimizer_of_every_method():
    own = MethodOverrides(optimizer=partial(SGD, lr=0.1, momentum=0.9))
    recipe = digits().replace(suited={"ab-paper": own}).with_optimizer(lr=0.5, weight_decay=0.0)
    for method, name in (("ab-paper", "SGD"), ("topk", "AdamW")):
        known = describe_optimizer(recipe.suited_to(method).optimizer)
        assert [known[f"optimizer{key}"] for key in ("", ".lr", ".weight_decay")] == [name, 0.5, 0.0]
    typed, made = (make([torch.zeros(1)]) for make in (recipe.optimizer, partial(AdamW, lr=0.5, weight_decay=0.0)))
    assert typed.state_dict() == made.state_dict()


def _groups(parameters):
    return AdamW([{"params": [p], "weight_decay": 0.1 * k} for k, p in enumerate(parameters)], lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "values", "said"),
    [
        (AdamW, {"lr": 0.0}, "`lr`=0.0 must be a number above 0"),
        (AdamW, {"weight_decay": -1.0}, "`weight_decay`=-1.0 must be a number above 0 or 0"),
        (AdamW, {"lr": float("nan")}, "`lr`=nan must be"),
        (Rprop, {"weight_decay": 0.1}, "`weight_decay`=0.1 has no meaning for Rprop, which has no `weight_decay`"),
        (_groups, {"weight_decay": 0.2}, r"`weight_decay`=0.2 cannot replace \[0.0, 0.1\]: the optimizer's parameter"),
    ],
)
def test_values_without_meaning_are_refused(optimizer, values, said):
    with pytest.raises(ConfigError, match=said):
        digits().replace(optimizer=optimizer).with_optimizer(**values)


def test_a_larger_batch_leaves_epochs_passes_over_the_data():
    recipe = named("vgg16bn-cifar10", batch_size=512)
    assert (recipe.steps, recipe.epochs, recipe.eval_every) == (2 * 7324, 150, 2 * 98)
    assert named("vgg16bn-cifar10", batch_size=512, epochs=15).steps == 1465
    assert named("vgg16bn-cifar10", batch_size=512, steps=7).steps == 7
    assert named("digits", batch_size=16).steps == named("digits").steps  # its epochs are no passes


# Validation.


def test_images_are_validated_on_the_last_tenth_of_the_training_part():
    whole, part = digits().source(None), named("digits", validate=True).source(None)
    assert (part.train_size, part.heldout_size) == (1132, 125)
    assert np.array_equal(np.concatenate([part.train_rows, part.heldout_rows]), whole.train_rows)


def test_text_is_validated_on_its_own_part_or_on_the_last_tenth():
    ids = torch.arange(100)
    text = Text(train_ids=ids, heldout_ids=ids + 200, block=4, tokens=())
    part = text.for_validation()
    assert torch.equal(part.train_ids, ids[:90]) and torch.equal(part.heldout_ids, ids[90:])
    part = Text(train_ids=ids, heldout_ids=ids + 200, validation_ids=ids + 100, block=4, tokens=()).for_validation()
    assert torch.equal(part.train_ids, ids) and torch.equal(part.heldout_ids, ids + 100)


def test_series_and_folders_leave_their_test_part_alone(tmp_path):
    rows = {name: np.arange(3) + k for k, name in enumerate(("train_rows", "validation_rows", "heldout_rows"))}
    none = torch.zeros(1, 1)
    about = {"values": none, "marks": none, "mean": none, "deviation": none, "inputs": 1, "label": 0, "horizon": 1}
    assert np.array_equal(Series(**about, **rows).for_validation().heldout_rows, rows["validation_rows"])
    files = [Files(folder=tmp_path, names=np.arange(25), numbers=np.arange(25) // 5) for _ in range(2)]
    about = {"classes": (), "size": 8, "crop_pct": 1.0, "scale": (0.1, 1.0), "threads": 1}
    part = Folder(train_files=files[0], heldout_files=files[1], **about).for_validation()
    assert part.heldout_files.names.tolist() == [0, 10, 20] and part.train_size == 22
    with pytest.raises(ConfigError, match="give SimpleNamespace a method `for_validation"):
        for_validation(SimpleNamespace())


@pytest.mark.slow
def test_a_validated_run_says_so_and_is_not_compared_with_others(tmp_path):
    words = ["run", "digits", "--method", "allreduce", "--workers", 1, "--steps", 2]
    assert "on 125 validation examples" in thinwire(*words, "--validate", "--out", tmp_path / "runs" / "a")
    assert "on 540 test examples" in thinwire(*words, "--out", tmp_path / "runs" / "b")
    shown = thinwire("report", tmp_path / "runs")
    assert "digits, accuracy on 125 validation examples, 1 seed" in shown and "on 540 test examples, 1 seed" in shown
    summary = json.loads((tmp_path / "runs" / "a" / "summary.json").read_text())
    figure = f"{100 * summary['accuracy']:.2f} %"
    assert figure in thinwire("export", tmp_path / "runs" / "a", "--out", tmp_path / "cut", "--rank", 0.99)


# Help.


@pytest.mark.parametrize("method", BUILT_IN)
def test_help_describes_every_field_of_a_method(method):
    config = METHODS[method].config
    told = " ".join(thinwire("run", "--help", "digits", "--method", method).split())
    described = field_docstrings(config)
    for name in (field.name for field in dataclasses.fields(config)):
        assert " ".join(described[name].split()) in told, name
    assert f"Fields of {method} (--set FIELD=VALUE)" in told


def test_help_has_the_recipes_defaults_and_what_a_field_takes():
    told = " ".join(thinwire("run", "vgg16-cifar10", "--method", "localsgd", "--help").split())
    assert "[a whole number or 'auto'; default: 24]" in told and "default: 7324" in told
    plain = thinwire("run", "--help")
    assert "With `--method METHOD` this help also lists the method's fields." in plain
