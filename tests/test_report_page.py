"""`report.html`: what it says is what the records say, whatever names they have, and a real browser shows it."""

import json
import re
import resource
import shlex
import time
from collections.abc import Iterator
from html import unescape
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

import pytest
from click.testing import CliRunner

import thinwire
from browser import Browser, binary, browser
from test_report import _write_run
from thinwire.cli import main
from thinwire.errors import ConfigError
from thinwire.jobs import method_config
from thinwire.report import read_run, read_runs
from thinwire.report.page import as_json, write_page
from thinwire.report.page.command import command
from thinwire.report.page.summary import percent
from thinwire.report.tables import size
from thinwire.report.thinned import read_thinned
from thinwire.settings import describe

HOSTILE = "</script><script>alert(\"1\")</script> & 'q' 🚀 {{data}} <b>"


def _add_steps(folder: Path, steps: int, slow: int) -> None:
    """Records of steps, as a run writes them, before its evaluations."""
    path = folder / "records.jsonl"
    lines = [
        {"kind": "step", "step": i, "phase": "train", "loss": 2.0 / i, "lr": 0.1}
        | {"slow_bytes": slow * i // steps, "evaluate_bytes": 0, "fast_bytes": 0, "wall_s": i / 10}
        for i in range(1, steps + 1)
    ]
    evaluations = [json.loads(line) for line in path.read_text().splitlines()]
    evaluations = [line | {"wall_s": line["step"] / 10} for line in evaluations]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *evaluations]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    purposes = {"evaluate": {"slow_bytes": 100}, "gradients": {"slow_bytes": 2000}, "merge": {"slow_bytes": 500}}
    for seed in (0, 1):
        for method, slow, accuracy, compression in (
            ("allreduce", 1_000_000, 0.990 + seed / 1000, 1.0),
            ("ab", 5_000 + seed, 0.988 + seed / 1000, 6.0),
            ("localsgd", 40_000, 0.9904, 1.0),
        ):
            place = tmp_path / f"{method}-seed{seed}"
            traffic = {"slow_bytes": slow + 100, "by_purpose": purposes}
            more = {"traffic": traffic, "compression": compression, "world_size": 4, "steps": 100}
            _write_run(place, method, seed, slow=slow, accuracy=accuracy, **more)
            _add_steps(place, 100, slow)
    records = tmp_path / "ab-seed0" / "records.jsonl"
    with records.open("a") as file:
        for step in (20, 60):
            file.write(json.dumps({"kind": "ranks", "step": step, "ranks": {"a": 64 - step, "b": 8}}) + "\n")
    return tmp_path


def _data(page: Path) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])


def _said(page: Path) -> list[str]:
    return [unescape(text) for text in re.findall(r"<li>(.*?)</li>", page.read_text())]


# The words.


def test_every_number_in_the_summary_is_computed_from_the_files(folder):
    said = _data(write_page(read_runs(folder), folder))["sentences"]
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
        change = fmean(own) - fmean(base)
        word = "lost" if change < 0 else "gained"
        assert (
            f"{word} {abs(change):.2f} points of accuracy ({fmean(own):.2f} % against {fmean(base):.2f} %"
            in said[number]
        )
        within = abs(change) <= max(stdev(own), stdev(base))
        assert ("within the spread over seeds" in said[number]) == within
        assert (f"its model is {fmean(smaller):.1f} times smaller" in said[number]) == (fmean(smaller) > 1)
    assert said[2] == (
        "ab sent 0.50 % of all-reduce's bytes (5.0 kB per node), lost 0.20 points of accuracy "
        "(98.85 % against 99.05 %), and its model is 6.0 times smaller."
    )
    assert len(said) == 4 and said == _said(folder / "report.html")


def test_without_a_baseline_and_where_lower_is_better(tmp_path):
    _write_run(tmp_path / "a", "ab", 0, slow=9, accuracy=0.9, traffic_vs_allreduce_fp32=None)
    told = _data(write_page(read_runs(tmp_path), tmp_path))["sentences"]
    assert told[1] == "ab sent 9 B per node, reached accuracy 90.00 %, and its model is 2.0 times smaller."
    for method, perplexity in (("allreduce", 5.0), ("ab", 5.5), ("localsgd", 4.5), ("diloco", 5.0)):
        more = {"metric": "perplexity", "recipe": "words", "compression": 1.0}
        _write_run(tmp_path / "w" / method, method, 0, slow=10, accuracy=perplexity, **more)
    told = _data(write_page(read_runs(tmp_path / "w"), tmp_path))["sentences"]
    assert "ab sent 100 % of all-reduce's bytes (10 B per node) and is worse by 0.50 of perplexity (5.50" in told[2]
    assert "reached the same perplexity" in told[3] and "is better by 0.50" in told[4] and "one seed" in told[4]


def test_of_many_settings_the_best_are_told(tmp_path):
    for every in range(12):
        more = {"slow": 1000 - every, "accuracy": 0.5 + every / 100, "compression": 1.0 + (every == 3)}
        _write_run(tmp_path / f"{every}", "diloco", 0, config={"every": every}, **more)
    told = _data(write_page(read_runs(tmp_path), tmp_path))["sentences"]
    assert [sentence.partition(" sent")[0] for sentence in told[1:]] == [
        "Best accuracy and fewest bytes: diloco:every=11",
        "Smallest model: diloco:every=3",
    ]


@pytest.mark.parametrize(("share", "text"), [(0.00523, "0.52 %"), (0.052, "5.2 %"), (0.52, "52 %"), (1.0, "100 %")])
def test_shares_have_two_digits(share, text):
    assert percent(share) == text


# What is in the page.


def test_curves_purposes_and_ranks_are_those_of_the_records(folder):
    data = _data(write_page(read_runs(folder), folder))
    run = next(run for run in data["runs"] if run["name"] == "ab-seed0")
    loss, metric = run["curves"]["loss"], run["curves"]["metric"]
    assert loss["step"] == list(range(1, 101)) and loss["y"][3] == 0.5 and loss["s"][9] == 1.0
    assert loss["mb"][-1] == 0.005 and metric["step"] == [10 * i for i in range(1, 11)]
    assert metric["mb"][-1] == 0.005  # without what evaluation sent
    assert run["purposes"] == {"gradients": 2000, "merge": 500, "evaluate": 100}
    assert run["ranks"]["layers"] == {"a": [44, 4], "b": [8, 8]} and run["ranks"]["end"] == 100
    assert [other["ranks"] for other in data["runs"] if other is not run] == [None] * 5
    assert data["problems"] == []


def test_long_records_are_thinned_out_evenly_to_their_end(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps({"kind": "step", "step": i, "loss": 1.0}) + "\n" for i in range(5003)))
    thin = read_thinned(path, 500)
    steps = [record["step"] for record in thin.of("step")]
    assert 250 <= len(steps) <= 501 and steps[0] == 0 and steps[-1] == 5002 and thin.counts == {"step": 5003}
    assert len({b - a for a, b in pairwise(steps[:-1])}) == 1


def test_hostile_names_are_text(tmp_path):
    for method in ("allreduce", HOSTILE):
        place = tmp_path / f"m{len(method)}"
        _write_run(place, method, 0, slow=9, accuracy=0.9, recipe=HOSTILE, config={HOSTILE: HOSTILE})
        with (place / "records.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "ranks", "step": 1, "ranks": {HOSTILE: 3}}) + "\n")
    page = write_page(read_runs(tmp_path), tmp_path, problems=[HOSTILE])
    text = page.read_text(encoding="utf-8")
    assert "alert" in text and "<script>alert" not in text and "</script><script>a" not in text
    data = _data(page)
    assert data["runs"][1]["method"] == HOSTILE and HOSTILE in data["sentences"][2]
    assert text.count("<script") == 3 and HOSTILE in _said(page)


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
    problems = _data(folder / "report.html")["problems"]
    named = {name: next(text for text in problems if text.startswith(name)) for name in ("ab-seed0", "ab-seed1")}
    assert "`records.jsonl` is missing" in named["ab-seed0"] and "is damaged in line 112" in named["ab-seed1"]
    lost = [text for text in problems if text.startswith("localsgd")]
    assert "localsgd-seed0: damaged" in lost[0] and lost[1] == "localsgd-seed1: unfinished after step 100"
    assert "left out: localsgd-seed0" in result.output and set(problems) <= set(_said(folder / "report.html"))


def test_nothing_but_our_own_page_is_replaced(folder, tmp_path_factory):
    runs, page = read_runs(folder), folder / "report.html"
    page.write_text("<html>mine</html>")
    with pytest.raises(ConfigError, match="was not written by `thinwire report`"):
        write_page(runs, folder)
    result = CliRunner().invoke(main, ["report", str(folder)])
    assert result.exit_code == 0 and "no report: " in result.output and page.read_text() == "<html>mine</html>"
    page.unlink()
    write_page(runs, folder)
    write_page(runs, folder)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "mine.html"
    page.rename(elsewhere)
    page.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is a link"):
        write_page(runs, folder)


def test_several_folders_make_one_report(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    _write_run(other / "again" / "diloco-seed0", "diloco", 0, slow=30_000, accuracy=0.97)
    words = ["report", str(folder), str(other / "again")]
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2 and "add `--out DIR`" in refused.output
    result = CliRunner().invoke(main, [*words, "--out", str(other / "both")])
    assert result.exit_code == 0 and f"report: {other / 'both' / 'report.html'}" in result.output
    assert len(_data(other / "both" / "report.html")["runs"]) == 7 and not (folder / "report.html").exists()


CONFIGS = [
    ("allreduce", thinwire.AllReduce(wire="bf16")),
    ("ab", thinwire.AB(total_steps=400, keep=("head", "blocks.0.*"), outer=thinwire.Nesterov(0.7, 0.9))),
    ("localsgd", thinwire.LocalSGD(every=4, outer=thinwire.Radial(), group_size=2)),
]


@pytest.mark.parametrize(("method", "config"), CONFIGS)
def test_a_command_has_every_setting_of_its_run(method, config, tmp_path):
    more = {"config": json.loads(json.dumps(describe(config))), "world_size": 4, "length": 40, "batch": 64}
    _write_run(tmp_path / "a", method, 7, slow=9, accuracy=0.9, **more)
    words = shlex.split(command(read_run(tmp_path / "a").summary))
    given = {flag: value for flag, value in pairwise(words) if flag.startswith("--") and flag != "--set"}
    settings = [value for flag, value in pairwise(words) if flag == "--set"]
    assert words[:3] == ["thinwire", "run", "digits"] and given["--seed"] == "7" and given["--workers"] == "4"
    assert (given["--method"], given["--steps"], given["--batch-size"]) == (method, "40", "64")
    assert method_config(method, settings, lambda *_: {}, given.get("--group-size")) == config


def test_run_ends_with_the_page(tmp_path):
    words = ["run", "digits", "--method", "allreduce", "--workers", "1", "--steps", "4", "--no-model"]
    result = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "run")])
    assert result.exit_code == 0 and f"report: {tmp_path / 'run' / 'report.html'}" in result.output
    (run,) = _data(tmp_path / "run" / "report.html")["runs"]
    assert run["curves"]["loss"]["step"] == [1, 2, 3, 4] and run["name"] == "run"


@pytest.mark.slow
def test_many_long_runs_make_a_small_page_quickly(tmp_path):
    """A tenth of 100 runs of 100,000 records: a tenth of the 20 s, with room for a busy machine; memory alike."""
    _write_run(tmp_path / "0", "localsgd", 0, slow=10**9, accuracy=0.9)
    _add_steps(tmp_path / "0", 100_000, 10**9)
    for seed in range(1, 100):
        _write_run(tmp_path / f"{seed}", "localsgd", seed, slow=10**9, accuracy=0.9)
        place = tmp_path / f"{seed}" / "records.jsonl"
        place.unlink()
        if seed < 10:
            place.hardlink_to(tmp_path / "0" / "records.jsonl")
        else:
            place.write_text("".join((tmp_path / "0" / "records.jsonl").read_text().splitlines(keepends=True)[:1200]))
    runs, before, start = read_runs(tmp_path), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    page = write_page(runs, tmp_path)
    assert time.process_time() - start < 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB
    assert page.stat().st_size < 5_000_000


# In a browser.


@pytest.fixture(scope="module")
def chromium(tmp_path_factory) -> Iterator[Browser]:
    if binary() is None:
        pytest.skip("there is no Chromium on this machine: install chromium to see the page in a browser")
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def _column(opened: Browser, name: str) -> list[str]:
    place = opened.evaluate("[...document.querySelectorAll('#runs th')].map(e => e.textContent)").index(name)
    return opened.evaluate(f"[...document.querySelectorAll('#runs tbody tr')].map(e => e.cells[{place}].textContent)")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it_and_asks_nobody_for_anything(width, dark, folder, chromium, tmp_path_factory):
    page = write_page(read_runs(folder), folder)
    chromium.open(page, width, dark=dark)
    assert chromium.evaluate("document.querySelectorAll('canvas').length") == 7
    assert chromium.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out
    paper = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper)[:3])) < 200) == dark
    chromium.click("#details summary")
    chromium.wait("document.querySelector('#details pre') !== null")
    assert chromium.evaluate("document.querySelector('#details pre').textContent").startswith("thinwire run digits")
    chromium.screenshot(tmp_path_factory.mktemp("shots") / f"{width}-{dark}.png")
    assert chromium.errors() == [] and chromium.requests() == [page.as_uri()]


def test_a_click_sorts_and_a_word_filters(folder, chromium):
    chromium.open(write_page(read_runs(folder), folder), 1280)
    assert [text[-5:] for text in _column(chromium, "run")] == ["seed0", "seed1"] * 3
    place = 1 + chromium.evaluate("[...document.querySelectorAll('#runs th')].map(e => e.textContent)").index(
        "slow link"
    )
    wanted = ["5.0 kB", "5.0 kB", "40.0 kB", "40.0 kB", "1.0 MB", "1.0 MB"]
    for expected in (wanted, wanted[::-1]):
        chromium.click(f"#runs th:nth-child({place}) button")
        assert _column(chromium, "slow link") == expected
    chromium.type("#filter", "ab seed1")
    assert _column(chromium, "method") == ["ab"] and chromium.errors() == []


def test_a_browser_shows_hostile_names_as_text(tmp_path, chromium):
    _write_run(tmp_path / "a", HOSTILE, 0, slow=9, accuracy=0.9, recipe=HOSTILE, config={HOSTILE: HOSTILE})
    with (tmp_path / "a" / "records.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "ranks", "step": 1, "ranks": {HOSTILE: 3}}) + "\n")
    chromium.open(write_page(read_runs(tmp_path), tmp_path, problems=[HOSTILE]), 1280)
    chromium.click("#details summary")
    chromium.wait("document.querySelector('#details pre') !== null")
    assert _column(chromium, "method") == [HOSTILE] and chromium.evaluate("document.querySelectorAll('b').length") == 0
    for place in ("h1", "#problems li", "#ranks .legend", "#details pre", "#details td.text", ".bar-row, .legend"):
        assert "alert" in chromium.evaluate(f"document.querySelector({json.dumps(place)}).textContent")
    assert chromium.errors() == []
