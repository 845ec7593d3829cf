import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from thinwire import methods as config
from thinwire.base.errors import ConfigError
from thinwire.cli import main
from thinwire.config.settings import from_strings
from thinwire.launch.jobs import Job
from thinwire.recipes import installed, named
from thinwire.train.recorder import Recorder
from thinwire.train.task import describe_optimizer

SHIPPED = ("digits", "shakespeare")


@pytest.mark.parametrize("name", ["digits", pytest.param("shakespeare", marks=pytest.mark.slow)])
def test_a_recipe_learns(name):
    torch.manual_seed(0)
    recipe = named(name)
    source = recipe.source(None)
    model = recipe.model(source)
    optimizer = recipe.optimizer(model.parameters())
    x, y = source.train(np.arange(16))
    losses = []
    for _ in range(8):
        loss = recipe.task.loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", SHIPPED)
def test_figures_do_not_depend_on_how_work_is_shared(name):
    torch.manual_seed(0)
    recipe = named(name)
    source = recipe.source(None)
    model = recipe.model(source).eval()
    x, y = source.heldout(np.arange(30))
    with torch.no_grad():
        whole = recipe.task.totals(model(x), y)
        parts = sum(recipe.task.totals(model(x[a:b]), y[a:b]) for a, b in ((0, 7), (7, 30)))
        loss = recipe.task.loss(model(x), y).item()
    assert torch.allclose(whole, parts, rtol=1e-5)
    figures = recipe.task.figures(whole)
    assert figures["loss"] == pytest.approx(loss, rel=1e-5)
    assert recipe.task.metric in figures


def test_unknown_recipe_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown recipe 'mnist', choose from: ") as told:
        named("mnist")
    assert all(name in str(told.value) for name in installed())


def test_no_name_is_given_twice():
    recipes = {name: named(name) for name in installed()}
    assert {recipe.name for recipe in recipes.values()} == set(installed())
    assert len({recipe.summary for recipe in recipes.values()}) == len(installed())
    for name, recipe in recipes.items():
        assert recipe.name == name and abs(recipe.steps_per_epoch * recipe.epochs - recipe.steps) < 1e-6


def test_steps_must_be_positive():
    assert named("digits", steps=7).steps == 7
    with pytest.raises(ConfigError, match="`steps` must be at least 1, got 0"):
        named("digits", steps=0)


# What suits single methods.

TUNED = """
from dataclasses import replace
from functools import partial
from torch.optim import SGD
from thinwire.recipes import MethodOverrides, digits
STEPPER = partial(SGD, lr={rate}, momentum=0.9)
def tuned():
    suited = {{"ab-paper": MethodOverrides({{"cutoff": 0.3, "every": 5, "nosuch": 1}}, optimizer=STEPPER, clip=0.5)}}
    return replace(digits(), name="tuned", steps=20, suited=suited)
def unknown():
    return replace(digits(), suited={{"adam": MethodOverrides()}})
"""


@pytest.fixture
def tuned(tmp_path):
    (tmp_path / "mine.py").write_text(TUNED.format(rate=0.05))
    return f"{tmp_path / 'mine.py'}:tuned"


def _job(recipe, method, *settings, **more):
    return Job(recipe=recipe, method=method, out=None, settings=settings, **more)


@pytest.mark.slow
def test_what_suits_a_method_holds_beneath_what_is_typed(tuned):
    own = _job(tuned, "ab-paper").config
    assert (own.cutoff, own.every, own.total_steps) == (0.3, 5, 20)
    typed = _job(tuned, "ab-paper", "ab-paper.cutoff=0.2", steps=30, group_size="1").config
    assert (typed.cutoff, typed.every, typed.total_steps, typed.group_size) == (0.2, 5, 30, 1)
    assert _job(tuned, "allreduce").config == config.AllReduce()
    words = [tuned, "--methods", "ab-paper,ab-paper:every=4", "--compute", "1ms", "--json"]
    result = CliRunner().invoke(main, ["plan", *words])
    rows = [row["config"] for row in json.loads(result.output)["methods"]]
    assert [(row["cutoff"], row["every"], row["total_steps"]) for row in rows] == [(0.3, 5, 20), (0.3, 4, 20)]


def test_the_optimizer_and_the_clipping_that_suit_a_method_are_its_own(tuned):
    plain = named(tuned)
    own = plain.suited_to("ab-paper")
    assert (type(own.optimizer([torch.zeros(1)])), own.clip) == (torch.optim.SGD, 0.5)
    assert own.usual_optimizer is plain.optimizer and own.suited_to("ab-paper") == own
    assert plain.suited_to("allreduce") == plain
    assert _job(tuned, "ab-paper").trained.clip == 0.5 and _job(tuned, "allreduce").trained.clip == 1.0
    # A method with clipping of its own is given the recipe's.
    assert from_strings(config.TopK, {}, **plain.defaults("topk")).clip == plain.clip == 1.0
    assert from_strings(config.TopK, {"clip": "none"}, **plain.defaults("topk")).clip is None


def test_a_run_tells_its_optimizer_and_is_not_resumed_with_another(tuned, tmp_path):
    out = tmp_path / "run"
    words = [
        "run",
        tuned,
        "--method",
        "ab-paper",
        "--workers",
        "1",
        "--out",
        str(out),
        "--save-every",
        "8",
        "--no-model",
    ]
    result = CliRunner().invoke(main, [*words, "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert (summary["optimizer"], summary["lr"]) == ("SGD", 0.05)
    assert (summary["usual_optimizer"], summary["usual_lr"]) == ("AdamW", 3e-3)
    (tmp_path / "mine.py").write_text(TUNED.format(rate=0.25))
    result = CliRunner().invoke(main, [*words, "--resume"])
    assert result.exit_code == 2 and "it was saved with `optimizer.lr`=0.05, this run has 0.25" in result.output
    for saved in out.glob("checkpoint*"):
        saved.rename(tmp_path / saved.name)
    result = CliRunner().invoke(main, [*words, "--resume"])
    assert result.exit_code == 2 and "holds a finished run with `optimizer.lr`=0.05, not 0.25" in result.output


CHANGED = """
from functools import partial
from torch.optim import AdamW
from thinwire.recipes import digits
from thinwire.train.task import Classify
def changed():
    return digits().replace(**{{"name": "changed", "steps": 3, "optimizer": partial(AdamW, lr=1e-3), {change}}})
"""
CHANGES = {
    "clip": '"clip": 0.1',
    "autocast": '"autocast": True',
    "patience": '"patience": 3',
    "task": '"task": Classify(smoothing=0.1)',
    "optimizer.weight_decay": '"optimizer": partial(AdamW, lr=1e-3, weight_decay=0.5)',
    "optimizer.lr": '"optimizer": partial(AdamW, lr=0.1)',
}


def test_a_run_with_another_setting_is_neither_gone_on_with_nor_taken_for_finished(tmp_path):
    def job(change="", **more):
        (tmp_path / "mine.py").write_text(CHANGED.format(change=change))
        recipe = f"{tmp_path / 'mine.py'}:changed"
        return Job(recipe=recipe, method="allreduce", out=tmp_path / "run", resume=True, model=False, **more)

    summary = job(save_every=2).run(print)
    assert job().finished() == job(eval_every=1).finished() == summary
    job().check()
    for name, change in CHANGES.items():
        with pytest.raises(ConfigError, match=f"a finished run with `{name}`=.*, not .*; give another `--out`, or"):
            job(change).finished()
        with pytest.raises(ConfigError, match=f"saved with `{name}`=.*, this run has .*; give the same settings"):
            job(change).check()


@pytest.mark.slow
def test_a_plan_has_the_optimizer_that_suits_a_method(tuned):
    words = [tuned, "--methods", "ab-paper:moments=average,allreduce", "--compute", "1ms", "--json"]
    ours, usual = json.loads(CliRunner().invoke(main, ["plan", *words]).output)["methods"]
    plain = json.loads(CliRunner().invoke(main, ["plan", "digits", "--steps", "20", *words[1:]]).output)["methods"]
    assert usual["memory_bytes"] == plain[1]["memory_bytes"] > ours["memory_bytes"]  # SGD keeps one moment, not two
    moments = [row["traffic"]["by_purpose"]["moments"]["slow_bytes"] for row in (ours, plain[0])]
    assert 0 < moments[0] < moments[1]


def test_a_method_that_nobody_knows_cannot_be_suited(tuned):
    with pytest.raises(ConfigError, match="unknown method in `suited` of the recipe digits 'adam', choose from"):
        named(tuned.replace(":tuned", ":unknown"))


def test_optimizers_are_told_as_plain_values():
    def make(parameters):
        matrix, vector = parameters
        groups = [{"params": [matrix], "weight_decay": 0.1}, {"params": [vector], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=torch.tensor(0.5))

    told = describe_optimizer(make)
    assert told == json.loads(json.dumps(told))
    assert (told["optimizer"], told["optimizer.lr"], told["optimizer.weight_decay"]) == ("AdamW", 0.5, [0.1, 0.0])


def test_records_beyond_the_checkpoint_are_cut(tmp_path):
    path = tmp_path / "records.jsonl"
    recorder = Recorder(path, active=lambda: True)
    for step in range(1, 5):
        recorder.write("step", step=step)
    recorder.close()
    with path.open("a") as file:
        file.write('{"kind": "st')
    recorder = Recorder(path, active=lambda: True, keep_until=3)
    recorder.write("step", step=4, again=True)
    recorder.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 4 and '"again": true' in lines[-1]
