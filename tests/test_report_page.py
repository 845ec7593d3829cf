"""`report.html`: what it says is what the records say, whatever names they have."""

import json
import math
import shlex
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import thinwire
from pages import HOSTILE, add_records, data_of, page_of, said_in, write_comparison, write_run
from thinwire.base.errors import ConfigError
from thinwire.cli import main
from thinwire.commands.report import _evaluations
from thinwire.config.settings import describe
from thinwire.launch.jobs import method_config
from thinwire.report import compare, read_run, read_runs, table
from thinwire.report.page import as_json
from thinwire.report.page.content import command
from thinwire.report.page.summary import percent
from thinwire.report.tables import size


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_comparison(tmp_path)


# The words.


def test_every_number_in_the_summary_is_computed_from_the_files(folder):
    said = data_of(page_of(folder))["sentences"]
    files = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/summary.json")}

    def of(method: str) -> tuple[list[float], list[float], list[float]]:
        own = [files[f"{method}-seed{seed}"] for seed in (0, 1)]
        sent = [one["traffic"]["slow_bytes"] - one["traffic"]["by_purpose"]["evaluate"]["slow_bytes"] for one in own]
        return [100 * one["accuracy"] for one in own], sent, [one["compression"] for one in own]

    base, sent, _ = of("allreduce")
    assert said[0] == "6 finished runs of digits: 3 methods or settings, 2 seeds each, on 4 workers, test data."
    figures = f"{fmean(base):.2f} ± {stdev(base):.2f} %"
    assert said[1] == f"All-reduce reached accuracy {figures} and sent {size(fmean(sent))} per node."
    for number, method in ((2, "ab"), (3, "localsgd")):
        own, bytes_, smaller = of(method)
        share = fmean(mine / whole for mine, whole in zip(bytes_, sent))
        assert f"{method} sent {100 * share:.{2 if share < 0.01 else 1}f} % of" in said[number]
        assert f"({size(fmean(bytes_))} per node)" in said[number]
        against = f"{fmean(own):.2f} % against {fmean(base):.2f} %"
        chance = 4.30 * math.sqrt((stdev(own) ** 2 + stdev(base) ** 2) / 2) + 1e-9  # Student's t of two seeds each
        assert abs(fmean(own) - fmean(base)) < chance
        assert (
            f"showed no measurable difference in accuracy ({against}, up to {chance:.2f} points may be chance)"
            in said[number]
        )
        assert (f"its model is {fmean(smaller):.1f} times smaller" in said[number]) == (fmean(smaller) > 1)
    assert said[2] == (
        "ab sent 0.50 % of all-reduce's bytes (5.0 kB per node), showed no measurable difference in accuracy "
        "(98.85 % against 99.05 %, up to 0.30 points may be chance), and its model is 6.0 times smaller."
    )
    assert len(said) == 4 and said == said_in(folder / "report.html")


@pytest.mark.parametrize(("right", "measurable"), [(530, False), (523, False), (516, True)])
def test_a_difference_below_what_the_test_set_can_show_is_called_none(right, measurable, tmp_path):
    """Of 540 examples at 98 %, two standard errors are 9 examples."""
    for method, hits in (("allreduce", 529), ("ab", right)):
        write_run(tmp_path / method, method, 0, slow=900, accuracy=hits / 540, split_size=540)
    told = data_of(page_of(tmp_path))["sentences"]
    assert told[0].endswith("540 test examples.")
    assert ("showed no measurable difference in accuracy" in told[2]) != measurable
    assert ("lost 2.41 points of accuracy" in told[2]) == measurable and "one seed)" in told[2]
    rows = compare(read_runs(tmp_path))
    assert [row["differs_from_allreduce"] for row in rows] == [None, measurable]
    with (console := Console(width=100)).capture() as shown:
        console.print(table(rows))
    assert "digits, accuracy on 540 test examples, 1 seed" in shown.get()
    assert ("≈" in shown.get()) != measurable


def test_seeds_show_a_difference_in_any_metric(tmp_path):
    for method, perplexity in (("allreduce", 5.0), ("ab", 5.5), ("localsgd", 5.01)):
        for seed in range(3):
            more = {"metric": "perplexity", "slow": 10, "accuracy": perplexity + seed / 100}
            write_run(tmp_path / f"{method}-{seed}", method, seed, **more)
    told = data_of(page_of(tmp_path))["sentences"]
    assert "is worse by 0.50 of perplexity" in told[2]
    assert "showed no measurable difference in perplexity (5.02 against 5.01, up to 0.02 may be chance)" in told[3]


def test_without_a_baseline_and_where_lower_is_better(tmp_path):
    write_run(tmp_path / "a", "ab", 0, slow=9, accuracy=0.9, traffic_vs_allreduce_fp32=None)
    told = data_of(page_of(tmp_path))["sentences"]
    assert told[1] == "ab sent 9 B per node, reached accuracy 90.00 %, and its model is 2.0 times smaller."
    for method, perplexity in (("allreduce", 5.0), ("ab", 5.5), ("localsgd", 4.5), ("diloco", 5.0)):
        more = {"metric": "perplexity", "recipe": "words", "compression": 1.0}
        write_run(tmp_path / "w" / method, method, 0, slow=10, accuracy=perplexity, **more)
    told = data_of(page_of(tmp_path, runs=read_runs(tmp_path / "w")))["sentences"]
    assert "ab sent 100 % of all-reduce's bytes (10 B per node) and is worse by 0.50 of perplexity (5.50" in told[2]
    assert "reached the same perplexity" in told[3] and "is better by 0.50" in told[4] and "one seed" in told[4]


def test_seconds_are_told_where_the_links_are_known(tmp_path):
    for method, seconds in (("allreduce", 78.0), ("ab", 20.4)):
        write_run(tmp_path / method, method, 0, slow=900, accuracy=0.9, wall_s=seconds, link="100 Mbit/s")
    told = data_of(page_of(tmp_path))["sentences"]
    assert told[0] == "2 finished runs of digits: 2 methods or settings, links of 100 Mbit/s, test data."
    assert "(900 B per node), took 20 s where all-reduce took 78 s, reached the same accuracy" in told[2]
    for method in ("allreduce", "ab"):
        write_run(tmp_path / "memory" / method, method, 0, slow=900, accuracy=0.9, wall_s=20.0, link=None)
    assert " took " not in str(data_of(page_of(tmp_path, runs=read_runs(tmp_path / "memory")))["sentences"])


def test_of_many_settings_the_best_are_told(tmp_path):
    for every in range(12):
        more = {"slow": 1000 - every, "accuracy": 0.5 + every / 100, "compression": 1.0 + (every == 3)}
        write_run(tmp_path / f"{every}", "diloco", 0, config={"every": every}, **more)
    told = data_of(page_of(tmp_path))["sentences"]
    assert [sentence.partition(" sent")[0] for sentence in told[1:]] == [
        "Best accuracy and fewest bytes: diloco:every=11",
        "Smallest model: diloco:every=3",
    ]


@pytest.mark.parametrize(("share", "text"), [(0.00523, "0.52 %"), (0.052, "5.2 %"), (0.52, "52 %"), (1.0, "100 %")])
def test_shares_have_two_digits(share, text):
    assert percent(share) == text


# What is in the page.


def test_curves_purposes_and_ranks_are_those_of_the_records(folder):
    data = data_of(page_of(folder))
    run = next(run for run in data["runs"] if run["name"] == "ab-seed0")
    loss, metric = run["curves"]["loss"], run["curves"]["metric"]
    assert loss["step"] == list(range(1, 101)) and loss["y"][3] == 0.5 and loss["s"][9] == 1.0
    assert loss["mb"][-1] == 0.005 and metric["step"] == [10 * i for i in range(1, 11)]
    assert metric["mb"][-1] == 0.005  # without what evaluation sent
    assert run["purposes"] == {"gradients": 2000, "merge": 500, "evaluate": 100}
    ranks = run["layers"]["ranks"]
    assert ranks["layers"] == {"a": [44, 4], "b": [8, 8]} and ranks["end"] == 100
    assert [other["layers"]["ranks"] for other in data["runs"] if other is not run] == [None] * 5
    assert data["problems"] == []


@pytest.mark.slow
def test_the_picture_beside_the_page_is_drawn_from_its_curves(folder):
    said = CliRunner().invoke(main, ["report", str(folder)])
    assert (
        said.exit_code == 0
        and "no picture" not in said.output
        and f"picture: {folder / 'comparison.png'}" in said.output
    )
    runs = read_runs(folder)
    known = _evaluations(runs, data_of(folder / "report.html"))
    for run in runs:
        read = [(r["step"], r["counted_bytes"], r["wall_s"], r["accuracy"]) for r in run.evaluations()]
        assert known[run.folder] == pytest.approx(np.array(read, dtype=float), rel=1e-5)  # the page rounds


def test_recipes_have_tables_of_their_own(folder):
    write_run(folder / "other", "allreduce", 0, slow=77, accuracy=0.5, recipe="letters")
    write_run(folder / "words", "ab", 0, slow=77, accuracy=9.0, metric="perplexity", recipe="words")
    said = CliRunner().invoke(main, ["report", str(folder)])
    assert said.exit_code == 0
    for title in ("digits, accuracy", "letters, accuracy", "words, perplexity"):
        assert f"{title} on test data" in said.output
    rows = {(row["recipe"], row["label"]): row for row in json.loads((folder / "comparison.json").read_text())}
    assert rows["letters", "allreduce"]["accuracy_mean"] == 0.5 and len(rows["digits", "allreduce"]["seeds"]) == 2
    assert "no comparison.png" in said.output and not (folder / "comparison.png").exists()


def test_hostile_names_are_text(tmp_path):
    for method in ("allreduce", HOSTILE):
        place = tmp_path / f"m{len(method)}"
        write_run(place, method, 0, slow=9, accuracy=0.9, recipe=HOSTILE, config={HOSTILE: HOSTILE})
        add_records(place, {"kind": "ranks", "step": 1, "ranks": {HOSTILE: 3}})
    page = page_of(tmp_path, (HOSTILE,))
    text = page.read_text(encoding="utf-8")
    assert "alert" in text and "<script>alert" not in text and "</script><script>a" not in text
    data = data_of(page)
    assert data["runs"][1]["method"] == HOSTILE and HOSTILE in data["sentences"][2]
    assert text.count("<script") == 3 and HOSTILE in said_in(page)


def test_json_in_a_page_ends_nothing():
    value = {"a": "</script><!--&\u2028\u2029\ud800"}
    assert not set("<>&\u2028\u2029") & set(as_json(value)) and json.loads(as_json(value)) == value


def test_what_cannot_be_read_is_named_in_the_page(folder):
    (folder / "ab-seed0" / "records.jsonl").unlink()
    records = folder / "ab-seed1" / "records.jsonl"
    records.write_text(records.read_text() + "not a record\n")
    (folder / "localsgd-seed0" / "summary.json").write_text("{")
    (folder / "localsgd-seed1" / "summary.json").unlink()
    result = CliRunner().invoke(main, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    problems = data_of(folder / "report.html")["problems"]
    named = {name: next(text for text in problems if text.startswith(name)) for name in ("ab-seed0", "ab-seed1")}
    assert "`records.jsonl` is missing" in named["ab-seed0"] and "is damaged in line 112" in named["ab-seed1"]
    lost = [text for text in problems if text.startswith("localsgd")]
    assert "localsgd-seed0: damaged" in lost[0] and lost[1] == "localsgd-seed1: unfinished after step 100"
    assert "left out: localsgd-seed0" in result.output and set(problems) <= set(said_in(folder / "report.html"))


def test_nothing_but_our_own_page_is_replaced(folder, tmp_path_factory):
    page = folder / "report.html"
    page.write_text("<html>mine</html>")
    with pytest.raises(ConfigError, match="was not written by `thinwire report`"):
        page_of(folder)
    result = CliRunner().invoke(main, ["report", str(folder)])
    assert result.exit_code == 0 and "no report: " in result.output and page.read_text() == "<html>mine</html>"
    page.unlink()
    page_of(folder)
    page_of(folder)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "mine.html"
    page.rename(elsewhere)
    page.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is a link"):
        page_of(folder)


def test_several_folders_make_one_report(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    write_run(other / "again" / "diloco-seed0", "diloco", 0, slow=30_000, accuracy=0.97)
    words = ["report", str(folder), str(other / "again")]
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2 and "add `--out DIR`" in refused.output
    result = CliRunner().invoke(main, [*words, "--out", str(other / "both")])
    assert result.exit_code == 0 and f"report: {other / 'both' / 'report.html'}" in result.output
    assert len(data_of(other / "both" / "report.html")["runs"]) == 7 and not (folder / "report.html").exists()


CONFIGS = [
    ("allreduce", thinwire.AllReduce(wire="bf16")),
    ("ab", thinwire.AB(total_steps=400, keep=("head", "blocks.0.*"), outer=thinwire.Nesterov(0.7, 0.9))),
    ("localsgd", thinwire.LocalSGD(every=4, outer=thinwire.Radial(), group_size=2)),
]


@pytest.mark.parametrize(("method", "config"), CONFIGS)
def test_a_command_has_every_setting_of_its_run(method, config, tmp_path):
    more = {"config": json.loads(json.dumps(describe(config))), "world_size": 4, "length": 40, "batch": 64}
    write_run(tmp_path / "a", method, 7, slow=9, accuracy=0.9, **more)
    words = shlex.split(command(read_run(tmp_path / "a").summary))
    given = {flag: value for flag, value in pairwise(words) if flag.startswith("--") and flag != "--set"}
    settings = [value for flag, value in pairwise(words) if flag == "--set"]
    assert words[:3] == ["thinwire", "run", "digits"] and given["--seed"] == "7" and given["--workers"] == "4"
    assert (given["--method"], given["--steps"], given["--batch-size"]) == (method, "40", "64")
    again = method_config(method, settings, lambda *_: {}, given.get("--group-size"))
    assert describe(again) == describe(config), "with numbers in place of what followed the length"


def test_run_ends_with_the_page(tmp_path):
    words = ["run", "digits", "--method", "allreduce", "--workers", "1", "--steps", "4", "--no-model"]
    result = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "run")])
    assert result.exit_code == 0 and f"report: {tmp_path / 'run' / 'report.html'}" in result.output
    (run,) = data_of(tmp_path / "run" / "report.html")["runs"]
    assert run["curves"]["loss"]["step"] == [1, 2, 3, 4] and run["name"] == "run"
