"""How long the papers' runs are for the data there is, and the sizes that their models are given."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from standins import folder_for
from thinwire.cli import main
from thinwire.experiments import autoformer, vgg16_bn, vit_b16_global, vit_b16_oialr
from thinwire.recipes import installed, named
from thinwire.train.data import Text
from thinwire.train.run import note_length, passes

# Length.

SEEN = {"cifar": 50_000, "imagenet": 1_281_167, "wikitext2": 2_088_628}


def _published(name):
    """As much data as a recipe was published with."""
    if "wikitext2" in name:
        ids = torch.empty(SEEN["wikitext2"], dtype=torch.int32, device="meta")
        return Text(train_ids=ids, heldout_ids=ids, block=named(name).source.keywords["block"], tokens=())
    if "ettm2" in name:
        sizes = named(name).source.keywords
        return SimpleNamespace(train_size=34_560 - sizes["inputs"] - sizes["horizon"] + 1)
    return SimpleNamespace(train_size=next(size for kind, size in SEEN.items() if kind in name))


@pytest.mark.parametrize("name", [name for name in installed() if name not in ("digits", "shakespeare")])
def test_the_published_epochs_are_passes_over_the_published_data(name, caplog):
    recipe, source = named(name), _published(name)
    note_length(recipe, source)
    note_length(recipe.over(3), source)
    note_length(named(name, steps=7), source)  # chosen, so nothing is to be said
    assert not caplog.records and passes(recipe, source) == pytest.approx(recipe.epochs, rel=0.01)
    source = SimpleNamespace(train_size=getattr(source, "pass_size", source.train_size) // 2)
    note_length(recipe, source)
    assert f"passes over this data of {source.train_size:,}, not {recipe.epochs} epochs" in caplog.text


def test_a_run_says_how_many_passes_its_steps_are_and_how_many_steps_would_be_its_epochs(caplog):
    note_length(vgg16_bn().replace(batch=256), SimpleNamespace(train_size=50_000))
    [told] = caplog.records
    assert told.message.startswith("7,324 steps of 256 examples are 37.5 passes over this data of 50,000, not 150")
    assert "`--steps 29297`, or replace(steps=29297)" in told.message
    note_length(vgg16_bn().replace(batch=256, steps=29_297), SimpleNamespace(train_size=50_000))
    assert len(caplog.records) == 1


# Sizes.

WRONG = {
    "name": ("vgg16_bn(widht=0.5)", "unknown size of VGG16BN 'widht', choose from: classes, width"),
    "no number": ("digits(dropout='some')", "`dropout`='some' must be a number, as it is a size of DigitNet"),
    "heads": ("gpt(heads=3)", "`heads`=3 does not divide `width`=256 of GPT; give a number of heads that does"),
    "of data": ("autoformer(96, variables=3)", "unknown size of Autoformer 'variables', choose from: decoder_layers"),
    "classes": ("vgg16(classes=9)", "`classes`=9 of VGG16 are too few for data with 10; give as many, or leave"),
    "image": ("mini_vit(image=64)", "`image`=64 of ViT is not the size of the data's images, 32; give that, or"),
    "label": ("autoformer(96, inputs=24)", "`label=48` must be from 0 to `inputs=24`"),
    "model": (
        "digits().replace(name='mine', model=lambda source: [][0])",
        "the model of the recipe mine cannot be built (IndexError: list index out of range); fix the sizes",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_sizes_that_do_not_fit_are_found_before_anything_runs(what, tmp_path):
    made, said = WRONG[what]
    (tmp_path / "mine.py").write_text(
        f"from thinwire.experiments import *\nfrom thinwire.recipes import *\ndef wrong():\n    return {made}\n"
    )
    kind = "cifar10" if what in ("classes", "image") else "ettm2"
    folder = ["--data", str(folder_for(kind, tmp_path))] if what in ("classes", "image", "label") else []
    command = ["run", f"{tmp_path / 'mine.py'}:wrong", "--method", "allreduce", *folder, "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2 and said in result.output and "Traceback" not in result.output, result.output
    assert not (tmp_path / "out").exists()


def test_sizes_that_the_data_must_know_are_handed_on_to_it(tmp_path):
    recipe = autoformer(24, inputs=48, label=12, width=16, heads=2, hidden=32, encoder_layers=1)
    source = recipe.source(folder_for("ettm2", tmp_path))
    x, y = source.train(np.arange(2))
    assert x.shape == (2, 48 + 24, 12) and recipe.model(source)(x).shape == y.shape == (2, 24, 7)
    assert autoformer(96).steps == 21_481 and autoformer(96, inputs=48).steps == 21_511
    assert vit_b16_oialr(image=64).source.keywords["size"] == vit_b16_global(image=64).source.keywords["size"] == 64
