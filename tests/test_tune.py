"""Searches: spaces, objectives, the median rule, results; and whole ones with Optuna, whose trials are real runs."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import needs
import thinwire
from thinwire.base.errors import ConfigError, DamagedError
from thinwire.cli import main
from thinwire.launch.jobs import Job
from thinwire.plan.forecast import Links
from thinwire.tuning.api import Execution, begin, best_config, finished, front, importance, run_trials
from thinwire.tuning.by_propulate import Evolution, Pending
from thinwire.tuning.evaluate import Ranks, curve_of, evaluate, reason_to_stop
from thinwire.tuning.objective import FAILED, parse_objective
from thinwire.tuning.search import Limits, Search, Trial, read_trials, remove
from thinwire.tuning.space import PRESETS, Code, as_text, chosen_space, read_space, space_of

SPACE = {
    "lr": {"from": 1e-4, "to": 1e-1, "scale": "log"},
    "every": {"from": 2, "to": 40, "scale": "log"},
    "wire": {"choices": ["int2", "int4", "bf16"]},
    "factor_at": {"choices": ["none", 0.5]},
    "cutoff": {"from": 0.1, "to": 0.3, "when": "factor_at!=none"},
}


def search_in(folder: Path, space: dict[str, Any] | None = None, objective: str = "accuracy", **job: Any) -> Search:
    job = {"recipe": "digits", "method": "ab", "workers": 2, "validate": True, "model": False, **job}
    return Search(
        folder=folder,
        job=Job(out=folder, **job),
        space=space_of(space or SPACE),
        objective=parse_objective(objective, "accuracy"),
    )


def trial(loss: float | None = 0.0, status: str = "finished", name: str = "trial-0-0-0000", **more: Any) -> Trial:
    given = {"codes": {}, "values": {}, "figures": {"accuracy": -(loss or 0.0), "bytes": 0.1, "size": 1.0}} | more
    return Trial(folder=Path(name), loss=loss, status=status, **given)


# Spaces.


def test_codes_stand_for_values_inside_the_range() -> None:
    space = space_of(SPACE)
    for name in space:
        low, high = space[name].limits
        ends = {as_text(space[name].value(code)) for code in (low, high)}
        outer = space[name].choices or (space[name].low, space[name].high)
        assert ends == {as_text(outer[0]), as_text(outer[-1])}
        assert {as_text(space[name].value(code)) for code in (low - 5, high + 5)} == ends
        for value in space[name].tested:
            assert as_text(space[name].value(space[name].code(value))) == as_text(value)


def test_whole_numbers_on_a_logarithmic_scale_have_equal_shares() -> None:
    parameter = space_of({"every": {"from": 1, "to": 4, "scale": "log"}})["every"]
    low, high = parameter.limits
    found = [parameter.value(low + (high - low) * (i + 0.5) / 1000) for i in range(1000)]
    assert {value: round(found.count(value) / 1000, 2) for value in (1, 2, 3, 4)} == {1: 0.5, 2: 0.23, 3: 0.15, 4: 0.11}


def test_a_parameter_whose_condition_is_not_met_is_left_out() -> None:
    space = space_of(SPACE)
    codes = {name: space[name].limits[0] for name in space}
    assert "cutoff" not in space.values(codes)
    assert space.values(codes | {"factor_at": 1})["cutoff"] == pytest.approx(0.1)


def test_conditions_may_depend_on_conditions() -> None:
    written = {
        "c": {"from": 0.0, "to": 1.0, "when": "b=yes"},
        "b": {"choices": ["yes", "no"], "when": "a=on"},
        "a": {"choices": ["on", "off"]},
    }
    space = space_of(written)
    assert list(space) == ["a", "b", "c"]
    assert space.values({"a": 1, "b": 0, "c": 0.5}) == {"a": "off"}


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({}, "is empty"),
        ({"lr": 3}, "write {from"),
        ({"lr": {"from": 1, "to": 0}}, "the lower first"),
        ({"lr": {"from": 0.0, "to": 1.0, "scale": "log"}}, "above 0"),
        ({"lr": {"from": 0.1, "to": 1.0, "scale": "cubic"}}, "choose from: linear, log"),
        ({"lr": {"from": 0.1, "too": 1.0}}, "write {from"),
        ({"lr": {"from": math.nan, "to": 1.0}}, "must be numbers"),
        ({"wire": {"choices": ["int2"]}}, "at least two"),
        ({"wire": {"choices": ["int2", ["int4"]]}}, "texts, numbers"),
        ({"lr": {"from": 0.1, "to": 1.0, "when": "wire=int2"}}, "choose from"),
        ({"lr": {"from": 0.1, "to": 1.0, "when": "wire"}}, "NAME=VALUE"),
        ({"a": {"choices": ["x", "y"], "when": "a=x"}}, "circle"),
        ({"a": {"choices": [1, 2]}, "b": {"choices": [1, 2], "when": "a=3"}}, "choose from: 1, 2"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(table: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("{", r"\{")):
        space_of(table)


def test_a_file_that_is_no_space_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"lr = {from = 1,")
    with pytest.raises(ConfigError, match="is not a TOML file"):
        read_space(tmp_path / "a.toml")
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not a TOML file"):
        read_space(tmp_path / "b.toml")
    with pytest.raises(DamagedError, match="is missing"):
        chosen_space(str(tmp_path / "c.toml"), "ab", 300)
    with pytest.raises(ConfigError, match="nor a preset"):
        chosen_space("nothing", "ab", 300)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_fits_a_recipe(name: str, tmp_path: Path) -> None:
    method = {"minivit": "oialr", "autoformer": "oialr"}.get(name, name)
    search_in(tmp_path, PRESETS[name], method=method, steps=2000, group_size="1").check()


# From values to runs.


def test_values_become_options_of_a_run(tmp_path: Path) -> None:
    search = search_in(tmp_path, settings=("moments=average",))
    values = {"lr": 0.01, "every": 7, "rate.k_decay": 0.5, "with.dropout": 0.25, "batch_size": 32, "optimizer": "sgd"}
    job = search.job_of(values, tmp_path / "one")
    assert (job.lr, job.batch_size, job.optimizer) == (0.01, 32, "sgd")
    assert job.settings == ("moments=average", "every=7")
    assert (job.rate, job.arguments) == (("k_decay=0.5",), ("dropout=0.25",))
    assert job.config.every == 7 and job.trained.rate.k_decay == 0.5
    assert search.job_of({"lr_scale": 2.0}, tmp_path).lr == 0.006
    words = " ".join(job.words())
    assert all(text in words for text in ("--rate k_decay=0.5", "--with dropout=0.25", "--validate", "--lr 0.01"))


def test_a_search_begins_with_the_usual_settings(tmp_path: Path) -> None:
    space = SPACE | {"outer": {"choices": ["none", "1.0", "1.0/0.9"]}, "rate.floor": {"from": 0.001, "to": 0.1}}
    search = search_in(tmp_path, space | {"lr_scale": {"from": 0.1, "to": 10.0, "scale": "log"}}, settings=("every=9",))
    values = search.space.values(search.usual())
    assert {name: as_text(value) for name, value in values.items()} == {
        "lr": "0.003",
        "every": "9",
        "wire": "int2",
        "factor_at": "0.5",  # AB's own, 0.75, is no choice of this space
        "cutoff": "0.2",
        "outer": "1.0",
        "rate.floor": "0.01",
        "lr_scale": "1",
    }
    outside = search_in(tmp_path, {"every": {"from": 30, "to": 40}, "keep_first": {"choices": [False, True]}})
    assert outside.space.values(outside.usual()) == {"every": 30, "keep_first": True}


def test_a_search_begins_with_the_recipes_optimizer_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from thinwire.recipes import digits\ndef own(width: int = 8, depth: int = 2):\n    return digits()\n"
    )
    space = {
        "optimizer": {"choices": ["sgd", "adamw"]},
        "with.width": {"from": 4, "to": 16},
        "with.depth": {"choices": [1, 3]},
    }
    search = search_in(tmp_path, space, recipe=f"{tmp_path / 'own.py'}:own", arguments=("depth=3",))
    assert search.space.values(search.usual()) == {"optimizer": "adamw", "with.width": 8, "with.depth": 3}


def test_what_cannot_be_is_said_before_the_first_trial(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the space has wire=int3, which cannot be"):
        search_in(tmp_path, {"wire": {"choices": ["int2", "int3"]}}).check()
    with pytest.raises(ConfigError, match="the space has evry=2, which cannot be: unknown field"):
        search_in(tmp_path, {"evry": {"from": 2, "to": 4}}).check()
    with pytest.raises(ConfigError, match=r"rate\.foo=0.1"):
        search_in(tmp_path, {"rate.foo": {"from": 0.1, "to": 0.4}}).check()
    with pytest.raises(ConfigError, match="give `--bandwidth`"):
        search_in(tmp_path, objective="seconds,accuracy>=0.9").check()
    with pytest.raises(ConfigError, match="one worker sends none"):
        search_in(tmp_path, objective="accuracy,bytes<=0.1", workers=1).check()
    with pytest.raises(ConfigError, match="both lr and lr_scale"):
        search_in(tmp_path, {"lr": {"from": 0.1, "to": 0.2}, "lr_scale": {"from": 0.1, "to": 0.2}}).check()
    with pytest.raises(ConfigError, match="a setting of daso, and searches ab"):
        search_in(tmp_path, {"daso.every": {"from": 2, "to": 4}}).check()
    with pytest.raises(ConfigError, match=r"`batch_size`=34\.336 must be a whole number"):
        search_in(tmp_path, {"batch_size": {"from": 16.0, "to": 64.0}}).check()
    with pytest.raises(ConfigError, match=r"every=.*which cannot be"):
        search_in(tmp_path, {"every": {"from": 4.0, "to": 16.0}}).check()
    search_in(tmp_path, {"lr": {"choices": ["0.001", "0.01"]}, "batch_size": {"choices": ["32", "64"]}}).check()


def test_two_searches_are_never_in_one_folder_at_once(tmp_path: Path) -> None:
    one, other = search_in(tmp_path), search_in(tmp_path)
    one.open({}, resume=False, overwrite=False)
    for how in ({"resume": True, "overwrite": False}, {"resume": False, "overwrite": True}):
        with pytest.raises(ConfigError, match="is in use by process"):
            other.open({}, **how)
    one.close()
    other.open({}, resume=True, overwrite=False)
    other.close()


def test_a_folder_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    """Not one of the operating system: under MPI that would end one rank and leave the others waiting."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="Not a directory"):
        begin(search_in(tmp_path / "file" / "out"), Execution(engine="random"))


@pytest.mark.parametrize("wrong", [{"islands": 0}, {"generations": 0}, {"migration": 1.5}])
def test_an_evolution_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(wrong))}`"):
        Evolution(**wrong)


def test_a_search_that_replaces_another_leaves_nothing_of_it(tmp_path: Path) -> None:
    search = search_in(tmp_path)
    search.open({}, resume=False, overwrite=False)
    search.close()
    begun = search.begin(search.usual())
    (begun.folder / "trial.json").write_text("damaged")
    for name in ("best.json", "pareto.json", "importance.png", "notes.txt"):
        (tmp_path / name).write_text("")
    search.open({}, resume=False, overwrite=True)
    search.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "search.json"]


def test_a_search_is_not_resumed_for_another_link(tmp_path: Path) -> None:
    search = search_in(tmp_path)
    search.open({}, resume=False, overwrite=False)
    search.close()
    search.links = Links(bandwidth=1e8, latency=5e-5)
    with pytest.raises(ConfigError, match="holds another search, with `link`=None"):
        search.open({}, resume=True, overwrite=False)
    search.close()


def test_a_removed_trial_is_made_again_and_no_other_is_overwritten(tmp_path: Path) -> None:
    search = search_in(tmp_path)
    names = [search.begin(search.usual()).name for _ in range(3)]
    remove(tmp_path / names[1])
    assert [search.begin(search.usual()).name for _ in range(2)] == [names[1], "trial-0-0-0003"]
    assert search.begin(search.usual(), 1, 2).name == "trial-1-2-0000"


# Objectives.


@pytest.mark.parametrize(
    ("text", "better", "worse"),
    [
        ("accuracy", {"accuracy": 0.9, "bytes": 1}, {"accuracy": 0.8, "bytes": 0.1}),
        ("bytes", {"accuracy": 0.1, "bytes": 0.1}, {"accuracy": 0.9, "bytes": 0.2}),
        ("accuracy,bytes<=0.1", {"accuracy": 0.7, "bytes": 0.1}, {"accuracy": 0.9, "bytes": 0.2}),
        ("accuracy,bytes<=0.1", {"accuracy": 0.1, "bytes": 0.2}, {"accuracy": 0.9, "bytes": 0.3}),
        ("bytes,accuracy>=0.8", {"accuracy": 0.8, "bytes": 0.5}, {"accuracy": 0.79, "bytes": 0.1}),
        ("max:accuracy-5*bytes", {"accuracy": 0.8, "bytes": 0.01}, {"accuracy": 0.9, "bytes": 0.1}),
        ("min:2*size + bytes", {"size": 0.1, "bytes": 0.1}, {"size": 0.2, "bytes": 0.0}),
        ("accuracy", {"accuracy": 0.1}, {"accuracy": math.nan}),
        ("accuracy", {"accuracy": 0.1}, {"accuracy": math.inf}),
        ("accuracy", {"accuracy": 0.1}, {}),
    ],
)
def test_objectives_order_trials(text: str, better: dict[str, float], worse: dict[str, float]) -> None:
    objective = parse_objective(text, "accuracy")
    assert objective.loss(better) < objective.loss(worse)
    assert math.isfinite(objective.loss(worse)) and objective.loss(worse) <= FAILED


def test_perplexity_is_better_when_lower() -> None:
    objective = parse_objective("perplexity", "perplexity")
    assert objective.loss({"perplexity": 20}) < objective.loss({"perplexity": 30})


def test_a_metric_of_any_name_needs_a_direction() -> None:
    for text in ("top-1", "bytes"):
        with pytest.raises(ConfigError, match="`--objective max:top-1` or `--objective min:top-1`"):
            parse_objective(text, "top-1").is_lower_better("top-1")
    objective = parse_objective("max:top-1-5*bytes,top-1>=0.5", "top-1")
    assert objective.weights == {"top-1": -1.0, "bytes": 5.0} and objective.limits[0].bound == 0.5
    assert not objective.is_lower_better("top-1")
    assert not parse_objective("bytes,top-1>=0.5", "top-1").is_lower_better("top-1")
    with pytest.raises(ConfigError, match="unknown figure of the objective 'accuracy_of_all'"):
        parse_objective("max:accuracy_of_all", "accuracy")
    with pytest.raises(ConfigError, match="give it another name"):
        parse_objective("size", "size")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("accurcy", "choose from: accuracy"),
        ("accuracy,bytes", "must be a limit"),
        ("accuracy,byte<=1", "unknown figure"),
        ("accuracy,bytes<=1e", "is not a number"),
        ("max:", "names no figure"),
        ("max:accuracy 2", "must be a sum"),
        ("best:accuracy", "choose from: max, min"),
    ],
)
def test_an_objective_that_makes_no_sense_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_objective(text, "accuracy")


# Early stopping, results.


def test_the_median_rule_stops_the_worse_half() -> None:
    others = [[[0.25, low], [0.5, high], [1.0, 0.99]] for low, high in ((0.2, 0.5), (0.3, 0.6), (0.4, 0.7), (0.5, 0.8))]
    assert "half of 4 trials had 0.65" in reason_to_stop([[0.25, 0.3], [0.5, 0.64]], others, lower=False)
    assert not reason_to_stop([[0.5, 0.66]], others, lower=False)
    assert not reason_to_stop([[0.25, 0.66], [0.5, 0.1]], others, lower=False)  # its best counts
    assert not reason_to_stop([[0.1, 0.0]], others, lower=False)  # too early
    assert not reason_to_stop([[0.5, 0.0]], others[:3], lower=False)  # too few
    assert reason_to_stop([[0.5, 0.7]], others, lower=True)
    assert not reason_to_stop([], others, lower=False)


def test_a_trial_may_take_five_times_the_longest_that_finished() -> None:
    assert Limits().of_trial([]) == math.inf
    assert Limits().of_trial([30.0, 100.0]) == 500.0
    assert Limits().of_trial([1.0]) == 60.0
    assert Limits(trial=7.0).of_trial([1.0]) == 7.0


def test_no_trial_begins_that_would_not_end_in_time(tmp_path: Path) -> None:
    search = search_in(tmp_path)
    for number, seconds in enumerate((20.0, 40.0, 60.0, 1000.0)):
        status = "finished" if seconds < 1000 else "out of time"
        trial(name=str(tmp_path / f"trial-0-0-{number:04}"), seconds=seconds, status=status).write()
    assert search.has_time
    search.limits = Limits(search=100.0)
    search.began = time.monotonic() - 50
    assert search.has_time
    search.began = time.monotonic() - 70
    assert not search.has_time and not search.is_over


def test_a_search_that_is_resumed_with_little_time_begins_one_trial(tmp_path: Path, monkeypatch: Any) -> None:
    needs.package("optuna", "Optuna")
    search, begun = search_in(tmp_path), []
    codes = search.usual()
    trial(name=str(tmp_path / "trial-0-0-0000"), seconds=50.0, codes=codes).write()
    search.limits = Limits(search=10.0)

    def evaluated(search: Search, trial: Trial, ranks: Any) -> float:
        begun.append(trial.name)
        return 0.0

    monkeypatch.setattr("thinwire.tuning.by_optuna.evaluate", evaluated)
    found = run_trials(search, Execution(engine="random"), 5)
    assert begun == ["trial-0-0-0001"]
    assert found.left == 4  # of five one has ended: the fake leaves the second one running


def test_propulate_is_asked_again_for_what_was_tried(tmp_path: Path) -> None:
    search = search_in(tmp_path, {"every": {"from": 2, "to": 8}, "wire": {"choices": ["int2", "int8"]}})
    search.begin({"every": 4, "wire": 1})
    limits: dict[str, tuple[Code, Code]] = {"every": (2, 8), "wire": (0, 1)}
    bred = iter([{"every": 4, "wire": 1}] * 3 + [{"every": 4, "wire": 0}])
    assert Pending(lambda population: next(bred), limits, search.was_tried)([]) == {"every": 4, "wire": 0}
    same = {"every": 4, "wire": 1}  # a space in which all has been tried is searched nevertheless
    assert Pending(lambda population: same, limits, search.was_tried)([]) == same


def test_the_front_has_what_nothing_beats() -> None:
    figures = [(0.9, 0.5, 1.0), (0.8, 0.1, 1.0), (0.85, 0.5, 1.0), (0.95, 0.9, 1.0), (0.8, 0.2, 1.0), (0.9, 0.5, 1.0)]
    small = (0.7, 0.5, 0.2)  # the worst, and the smallest
    trials = [trial(figures={"accuracy": a, "bytes": b, "size": s}) for a, b, s in [*figures, small]]
    best = [(0.8, 0.1, 1.0), small, (0.9, 0.5, 1.0), (0.95, 0.9, 1.0)]
    assert [tuple(t.figures.values()) for t in front(trials, "accuracy", lower=False)] == best


def test_a_trial_stopped_early_is_worse_than_all_that_keep_the_limits() -> None:
    objective = parse_objective("max:accuracy-100*bytes,size<=0.5", "accuracy")
    finished_last = objective.loss({"accuracy": 0.1, "bytes": 1.0, "size": 0.4})
    poor, poorer = (objective.loss_if_stopped("accuracy", value) for value in (0.9, 0.2))
    outside = objective.loss({"accuracy": 0.99, "bytes": 0.0, "size": 0.51})
    assert finished_last < poor < poorer < outside
    assert objective.loss_if_stopped("accuracy", float("nan")) < outside


def test_a_curve_has_numbers_only(tmp_path: Path) -> None:
    records = [{"kind": "evaluation", "step": s, "model": "world", "accuracy": a} for s, a in ((1, 0.5), (2, math.nan))]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert curve_of(tmp_path, "accuracy", 4) == [[0.25, 0.5]]


def test_importance_finds_the_parameter_that_decides(tmp_path: Path) -> None:
    search = search_in(tmp_path, {"lr": {"from": 0.0, "to": 1.0}, "weight_decay": {"from": 0.0, "to": 1.0}})
    trials = [
        trial(loss=(i % 8) / 8, codes=codes, values=codes)
        for i in range(64)
        for codes in [{"lr": (i % 8) / 8, "weight_decay": (i // 8) / 8}]
    ]
    shares = importance(search, trials)
    assert list(shares) == ["lr", "weight_decay"]
    assert shares["lr"] > 0.8 and shares["weight_decay"] < 0.1
    assert not importance(search, trials[:11])  # too few to tell


def test_the_best_comes_first_and_has_a_config(tmp_path: Path) -> None:
    search = search_in(tmp_path)
    values = {"lr": 0.0123456789, "every": 7, "wire": "int4", "factor_at": "none"}
    trials = [trial(-0.5), trial(-0.9, values=values), trial(-0.99, "stopped early"), trial(1e9, "failed")]
    best, *rest = finished(trials)
    assert best.loss == -0.9 and len(rest) == 1
    config = best_config(search, best)
    assert config == {
        "recipe": "digits",
        "method": "ab",
        "workers": 2,
        "lr": 0.0123457,
        "set": ["every=7", "wire=int4", "factor_at=none"],
    }


def test_a_config_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"recipe": "digits", "method": "ab", "evry": 3}))
    said = CliRunner().invoke(main, ["run", "--config", str(path)])
    assert said.exit_code == 2 and "unknown option in" in said.output and "set" in said.output
    path.write_text(json.dumps({"recipe": "digits", "method": {"a": 1}}))
    assert "must be a text" in CliRunner().invoke(main, ["run", "--config", str(path)]).output
    path.write_text(json.dumps({"recipe": "digits", "method": "ab", "set": ["evry=3"]}))
    assert "unknown field of AB 'evry'" in CliRunner().invoke(main, ["run", "--config", str(path)]).output


def test_the_function_checks_what_it_is_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown engine 'grid', choose from: optuna, propulate, random"):
        thinwire.tune("digits", "ab", out=tmp_path / "a", engine="grid")
    with pytest.raises(ConfigError, match="give one of them"):
        thinwire.tune("digits", "ab", out=tmp_path / "a", engine="random", resume=True, overwrite=True)
    with pytest.raises(ConfigError, match=r"the space has every=9\.5"):
        thinwire.tune("digits", "ab", out=tmp_path / "a", engine="random", space={"every": {"from": 9.5, "to": 12.0}})
    assert not (tmp_path / "a").exists()


# Whole searches.


def tune(out: Path, *words: str, engine: str = "random", timeout: float = 240) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "thinwire", "tune", *words, "--engine", engine, "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=dict(os.environ))


RECIPES = """
import math, os, signal, time
from thinwire.recipes import digits

def odd(how=0):
    if how == 6:
        raise ValueError("no such network")
    recipe = digits()
    def source(folder):
        # Only trials read their data; the search itself looks at the recipe in another process.
        if os.environ.get("RANK") is None:
            return recipe.source(folder)
        if how == 1:
            raise ValueError("no such thing")
        if how == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == 3:
            time.sleep(1000)
        if how == 4:
            raise MemoryError("no memory left")
        return recipe.source(folder)
    class NaN(type(recipe.task)):
        def figures(self, *args):
            return {**super().figures(*args), "accuracy": math.nan}
    return recipe.replace(source=source, task=NaN() if how == 5 else recipe.task)
"""


@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [
        (0, "finished", ""),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (1, "failed", "ValueError: no such thing"),
                (2, "failed", "worker 0 was killed by SIGKILL, as by a system without memory"),
                (3, "out of time", "it had not finished after"),
                (4, "failed", "MemoryError: no memory left"),
                (5, "diverged", "accuracy is nan"),
                (6, "failed", "ValueError: no such network"),
            )
        ),
    ],
)
def test_a_trial_that_fails_in_any_way_has_a_finite_loss_and_a_reason(
    how: int, status: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "odd.py").write_text(RECIPES)
    space = {"with.how": {"choices": [0, 1, 2, 3, 4, 5, 6]}}
    recipe = f"{tmp_path / 'odd.py'}:odd"
    search = search_in(tmp_path / "out", space, recipe=recipe, method="allreduce", workers=1, steps=4)
    search.limits = Limits(trial=15.0 if how == 3 else None)
    loss = evaluate(search, search.begin({"with.how": how}), Ranks(1))
    (found,) = search.trials()
    assert (found.status, found.loss) == (status, loss) and reason in found.reason, found
    assert math.isfinite(loss) and (loss < 0) == (how == 0)


@pytest.mark.slow
def test_seconds_are_planned_also_for_a_method_without_ranks(tmp_path: Path) -> None:
    space, job = {"lr_scale": {"from": 0.3, "to": 3.0}}, {"method": "allreduce", "steps": 4, "workers": 2}
    search = search_in(tmp_path, space, "seconds,accuracy>=0", **job)
    search.links, search.compute = Links(bandwidth=1e7, latency=5e-5), 0.01
    evaluate(search, search.begin(search.usual()), Ranks(2))
    (found,) = search.trials()
    assert found.status == "finished" and found.figures["seconds"] > 0.04, found


@pytest.mark.slow
def test_one_interrupt_ends_a_search_and_it_can_be_resumed(tmp_path: Path) -> None:
    needs.package("optuna", "Optuna")
    (tmp_path / "space.toml").write_text("lr_scale = { from = 0.1, to = 10.0, scale = 'log' }\n")
    words = ["digits", "--method", "allreduce", "--space", str(tmp_path / "space.toml"), "--steps", "100000"]
    words += ["--workers-per-trial", "1", "--engine", "random", "--islands", "1", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "thinwire", "tune", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(read_trials(tmp_path / "out")) == 1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode and "continue with `--resume`" in said, said
    assert [t.status for t in read_trials(tmp_path / "out")] == ["running"]
    assert not subprocess.run(["pgrep", "-f", str(tmp_path / "out")], capture_output=True).stdout


@pytest.mark.rest
@pytest.mark.slow
def test_a_killed_search_goes_on_where_it_was(tmp_path: Path) -> None:
    needs.package("optuna", "Optuna")
    (tmp_path / "space.toml").write_text("lr_scale = { from = 0.1, to = 10.0, scale = 'log' }\n")
    words = ["digits", "--method", "localsgd", "--set", "every=4", "--space", str(tmp_path / "space.toml")]
    words += ["--steps", "20", "--workers-per-trial", "2", "--islands", "1", "--generations", "4", "--group-size", "1"]
    command = [sys.executable, "-m", "thinwire", "tune", *words, "--engine", "optuna", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(read_trials(tmp_path / "out")) == 2)
    process.kill()
    process.wait()
    before = {t.name: (t.has_ended, t.codes) for t in read_trials(tmp_path / "out")}
    assert [ended for ended, _ in before.values()].count(True) == 1
    other = tune(tmp_path / "out", *words, "--lr", "0.01", "--resume", engine="optuna")
    assert other.returncode == 2 and "holds another search, with `lr`" in other.stderr
    occupied = tune(tmp_path / "out", *words, engine="optuna")
    assert occupied.returncode == 2 and "`--resume` to continue it" in occupied.stderr
    done = tune(tmp_path / "out", *words, "--resume", engine="optuna")
    assert not done.returncode, done.stderr
    (tmp_path / "out" / "report.html").unlink()
    told = tune(tmp_path / "out", *words, "--resume", "--json", engine="optuna")
    assert len(json.loads(told.stdout)["trials"]) == 4 and (tmp_path / "out" / "report.html").is_file()
    after = read_trials(tmp_path / "out")
    assert len(after) == 4 and all(t.has_ended for t in after)
    assert all(after[i].codes == codes for i, (_, codes) in enumerate(before.values()))
    ran = CliRunner().invoke(main, ["run", "--config", str(tmp_path / "out" / "best.json"), "--dry-run", "--quiet"])
    assert ran.exit_code == 0, ran.output
    told = CliRunner().invoke(main, ["report", str(tmp_path / "out"), "--json"])
    assert len(json.loads(told.output)) == len({as_text(t.values["lr_scale"]) for t in finished(after)})


def wait_until(true: Callable[[], bool], seconds: float = 120) -> None:
    import time

    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)
