"""Runs that are shorter than the usual settings of a method, and runs that go on past their length."""

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import small
import thinwire
from every_method import BUILT_IN, STEPS, WAYS
from thinwire import AB, ConfigError, DiLoCo, LocalSGD, OneBit, PowerSGD, TopK
from thinwire.cli import main
from thinwire.config.common import Config, Scheduled, Warmed
from thinwire.config.settings import describe, from_strings
from thinwire.launch.jobs import Job, method_config
from thinwire.methods import DASO, OIALR, PaperAB
from thinwire.methods.registry import METHODS
from thinwire.recipes import named
from thinwire.tuning.api import search_for

LENGTHS = (8, 20, 40, 60, 93, 100, 300)
REFUSED = {("ab", 8), ("ab-paper", 8)}


def timed(method: str, total_steps: int) -> Any:
    config = METHODS[method].config
    return config(total_steps=total_steps) if issubclass(config, Scheduled | Warmed) else config()


@pytest.mark.parametrize("total_steps", LENGTHS)
@pytest.mark.parametrize("method", BUILT_IN)
def test_every_method_does_its_own_thing_in_a_run_of_any_length_or_says_that_it_does_not(
    method: str, total_steps: int
) -> None:
    if (method, total_steps) in REFUSED:
        with pytest.raises(ConfigError, match="fit together"):
            timed(method, total_steps)
        return
    config = timed(method, total_steps)
    if method == "ab-paper":  # to the letter: a quarter of a short group phase is nothing
        assert bool(config.idle) == (not config.rebound_length)
    elif isinstance(config, Config):
        assert not config.idle


@pytest.mark.parametrize("total_steps", [94, 95, 100, 399, 100_000])
def test_runs_that_are_long_enough_have_the_usual_settings(total_steps: int) -> None:
    config = AB(total_steps=total_steps)
    assert config.round_length == 24 and config.in_force == {"every": 24, "factor_at": 0.75} and not config.chosen


@pytest.mark.parametrize("total_steps", [14, 15, 20, 37, 60, 92, 93])
def test_ab_has_shorter_rounds_in_a_short_run(total_steps: int) -> None:
    config = AB(total_steps=total_steps)
    assert 4 <= config.round_length < 24 and config.factor_step == round(0.75 * total_steps)
    assert config.chosen == f"total_steps={total_steps} is short for every=24: every={config.round_length} instead"


def test_fields_that_are_set_stay_and_others_follow() -> None:
    config = AB(total_steps=60, every=24)
    assert (config.every, config.factor_step) == (24, 27), "the last average that leaves a round"
    assert config.chosen == "total_steps=60 is short for factor_at=0.75: factor_at=27 instead"
    assert AB(total_steps=60, factor_at=0.5).round_length == 24
    assert AB(total_steps=40, factor_at=0.5).round_length == 20
    config = AB(total_steps=60, warmup=50)
    assert (config.round_length, config.factor_step) == (10, 50)
    assert AB(total_steps=60, overlap=18).round_length == 19
    assert AB(total_steps=20, factor_at=None).round_length == 9, "as local SGD"
    assert AB(total_steps=8, every=2).factor_step == 6


@pytest.mark.parametrize("total_steps", [1, 2, 7, 12, 13])
@pytest.mark.parametrize("make", [AB, PaperAB])
def test_one_error_names_values_of_all_fields_that_fit(make: Any, total_steps: int) -> None:
    with pytest.raises(ConfigError) as caught:
        make(total_steps=total_steps)
    found = re.search(r"(warmup=.*) fit together$", str(caught.value))
    assert found
    fields = dict(each.split("=") for each in found[1].split(", "))
    assert {"warmup", "every"} < set(fields)
    assert from_strings(make, fields, total_steps=total_steps)


@pytest.mark.parametrize(("kind", "usual"), [(LocalSGD, 24), (DiLoCo, 48)])
def test_groups_average_before_the_end_of_a_short_run(kind: Any, usual: int) -> None:
    assert kind().round_length == kind(total_steps=usual).round_length == usual
    config = kind(total_steps=20, warmup=0.1)
    assert config.round_length == 9 and config.chosen == f"total_steps=20 is short for every={usual}: every=9 instead"
    assert kind(total_steps=20, fragments=12).round_length == 12
    assert kind(total_steps=20, overlap=12).round_length == 13


IDLE = {
    "all warm-up": (PowerSGD(total_steps=60, warmup=60), "the warm-up (`warmup`=60) is all of total_steps=60"),
    "averages at the end": (LocalSGD(total_steps=60, warmup=40, every=30), "`every`=30 is more than the 20 steps"),
    "a ramp": (TopK(total_steps=60, warmup=20, ramp=40), "the density of 0.001 is never reached"),
    "no cycling": (DASO(total_steps=60, warmup=0.5, cooldown=0.45), "leaves 3 steps between warm-up and cool-down"),
    "no update": (OIALR(total_steps=60, redecompose=40), "the first update of the bases would be at step 60"),
    "no rebound": (PaperAB(total_steps=20), "make rebound=0.25, lr_rebound=0.5 no step at all"),
}


@pytest.mark.parametrize("what", IDLE)
def test_what_never_happens_is_logged(what: str, caplog: pytest.LogCaptureFixture) -> None:
    config, said = IDLE[what]
    assert said in config.idle
    model = small.mlp()
    thinwire.attach(model, small.sgd(model), config)
    assert config.idle in caplog.messages


def test_second_moments_are_not_frozen_by_a_warm_up_of_no_steps() -> None:
    assert OneBit(total_steps=60, warmup=0.02, freeze_second_moment=True).warmup_length == 1
    with pytest.raises(ConfigError, match=r"not `warmup`=0.02, which is no step of total_steps=20; use 0.1"):
        OneBit(total_steps=20, warmup=0.02, freeze_second_moment=True)


def test_fields_that_follow_survive_copies_texts_and_saves(tmp_path: Path) -> None:
    long = AB(total_steps=1000)
    short = dataclasses.replace(long, total_steps=60)
    assert short == AB(total_steps=60) == eval(repr(short), vars(thinwire)) and short.round_length == 15
    assert from_strings(AB, {"every": "auto", "factor_at": "auto"}, total_steps=60) == short
    assert from_strings(AB, {"factor_at": "none"}, total_steps=60).factor_at is None
    assert describe(short) | {"every": 24} == describe(long) | {"total_steps": 60}, "figures, as they are in the run"
    for folder, config in (("auto", short), ("figures", AB(total_steps=60, every=15, factor_at=0.75))):
        model = small.mlp()
        replica = thinwire.attach(model, small.sgd(model), config)
        replica.save(tmp_path / folder)
        model = small.mlp()
        thinwire.attach(model, small.sgd(model), AB(total_steps=60)).load(tmp_path / folder)


@pytest.mark.parametrize("steps", [20, 40, 60, 100])
@pytest.mark.parametrize("method", BUILT_IN)
def test_recipes_settings_follow_too(method: str, steps: int) -> None:
    recipe = dataclasses.replace(named("digits"), steps=steps)
    config = method_config(method, (), recipe.defaults, None)
    assert method == "ab-paper" or not getattr(config, "idle", "")
    if method == "localsgd":
        assert config.round_length == {20: 10, 40: 24, 60: 48, 100: 48}[steps]


def test_a_short_run_says_what_was_chosen_and_factors(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="thinwire")
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, AB(total_steps=20, cutoff=0.6))
    assert "total_steps=20 is short for every=24: every=5 instead" in caplog.messages
    for _ in small.walk(replica, optimizer, 0, 20):
        pass
    replica.finish()
    assert replica.finished_ranks and not [r for r in caplog.records if r.levelno > logging.INFO]


@pytest.mark.parametrize("method", [name for name in BUILT_IN if name != "allreduce"])
def test_steps_beyond_the_last_warn_once(method: str, caplog: pytest.LogCaptureFixture) -> None:
    config = dataclasses.replace(WAYS[method].config(), total_steps=STEPS)
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, config)
    for _ in small.walk(replica, optimizer, 0, STEPS):
        pass
    assert not [text for text in caplog.messages if "beyond" in text]
    for _ in small.walk(replica, optimizer, 0, 4):
        pass
    (said,) = [text for text in caplog.messages if "beyond" in text]
    assert said == f"step {STEPS + 1} is beyond total_steps={STEPS}: training stays in phase {replica.phase!r}"


def test_a_run_of_unknown_length_that_ended_too_early_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, PowerSGD(warmup=10))
    for _ in small.walk(replica, optimizer, 0, 4):
        pass
    replica.finish()
    assert caplog.messages == ["PowerSGD never left its 'warmup' phase: the run was too short for its settings"]


@pytest.mark.slow
def test_a_plan_of_all_methods_leaves_out_those_that_a_run_is_too_short_for(tmp_path: Path) -> None:
    words = ["plan", "digits", "--steps", "8", "--workers", "2", "--compute", "1ms", "--out", str(tmp_path)]
    result = CliRunner().invoke(main, [*words, "--methods", "all"])
    assert result.exit_code == 0, result.output
    assert "ab is left out: `total_steps`=8 is too small" in result.output and "powersgd" in result.output
    result = CliRunner().invoke(main, [*words, "--methods", "allreduce,ab", "--overwrite"])
    assert result.exit_code and "fit together" in result.output


@pytest.mark.parametrize("method", ["ab", "localsgd", "diloco", "daso"])
@pytest.mark.parametrize("steps", [40, 60, 300])
def test_a_preset_fits_a_short_search(method: str, steps: int, tmp_path: Path) -> None:
    search = search_for(Job(recipe="digits", method=method, out=tmp_path, steps=steps), space=None, objective=None)
    search.check()
    assert max(search.space["every"].tested) == min(64, steps // 4)
