import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from thinwire.errors import ConfigError
from thinwire.recipes import RECIPES, named
from thinwire.train.checkpoint import _random_state, _restore_random
from thinwire.train.recorder import Recorder
from thinwire.train.schedule import cosine


@pytest.mark.parametrize("name", RECIPES)
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


@pytest.mark.parametrize("name", RECIPES)
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
    with pytest.raises(ConfigError, match="unknown recipe 'mnist', choose from: digits, shakespeare"):
        named("mnist")


def test_steps_must_be_positive():
    assert named("digits", steps=7).steps == 7
    with pytest.raises(ConfigError, match="`steps` must be at least 1, got 0"):
        named("digits", steps=0)


def test_cosine_rises_and_falls():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = cosine(optimizer, steps=100, warmup=10)
    rates = []
    for _ in range(120):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates[0] < 0.1 and rates[10] == max(rates) == 1.0
    assert all(a > b for a, b in pairwise(rates[10:100]))
    assert rates[100:] == pytest.approx([0.01] * 20)


def test_random_states_come_back():
    random.gauss(0, 1), np.random.normal()  # leaves half a pair in both
    tensors, plain = _random_state()
    first = random.random(), np.random.normal(), torch.rand(1).item()
    _restore_random(tensors, plain)
    assert (random.random(), np.random.normal(), torch.rand(1).item()) == first


def test_records_beyond_the_checkpoint_are_cut(tmp_path):
    path = tmp_path / "records.jsonl"
    recorder = Recorder(path, active=True)
    for step in range(1, 5):
        recorder.write("step", step=step)
    recorder.close()
    with path.open("a") as file:
        file.write('{"kind": "st')
    recorder = Recorder(path, active=True, keep_until=3)
    recorder.write("step", step=4, again=True)
    recorder.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 4 and '"again": true' in lines[-1]
