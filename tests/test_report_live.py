"""`thinwire report --live`: a page that follows runs, and is an ordinary one when they have ended."""

import json
import re
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

import needs
from browser import browser
from patience import until
from test_live import evaluated, start, taken, write
from test_report import _write_run
from thinwire.cli import main
from thinwire.commands import report
from thinwire.report import live, read_runs
from thinwire.report.live import FollowedRun, so_far
from thinwire.report.page import live_part, write_page
from thinwire.report.page.content import Content
from thinwire.report.progress import Progress


@pytest.fixture(autouse=True)
def _impatient(monkeypatch) -> None:
    monkeypatch.setattr(report, "_LOOK_S", 0.02)
    monkeypatch.setattr(report, "RELOAD_S", 0)
    monkeypatch.setattr(live, "_LOOK_EVERY_S", -1.0)


def _data(page: Path) -> dict:
    found = re.search(r'id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_run_under_way_has_the_figures_of_its_last_evaluation(tmp_path):
    run = FollowedRun(tmp_path, Progress("run"), from_start=True)
    write(tmp_path, start(), *(taken(i) for i in range(1, 51)))
    run.refresh()
    assert so_far(run) is None
    write(tmp_path, evaluated(50, time={}), taken(51))
    run.refresh()
    known = so_far(run)
    assert known is not None and not known.is_finished
    assert (known.summary["steps"], known.summary["accuracy"], known.counted_bytes) == (50, 0.5, 500)
    write(tmp_path, start(51, config="nothing of the kind"), evaluated(52))
    run.refresh()
    assert so_far(run) is None


def test_the_page_follows_a_run_and_is_plain_when_it_has_ended(tmp_path):
    page, run = tmp_path / "report.html", tmp_path / "ab-seed0"
    _write_run(tmp_path / "allreduce-seed0", "allreduce", 0, slow=600_000, accuracy=0.9, steps=600)
    write(run, start(), *(taken(i) for i in range(1, 51)))
    results = []
    command = threading.Thread(
        target=lambda: results.append(CliRunner().invoke(main, ["report", str(tmp_path), "--live"]))
    )
    command.start()
    try:
        text = until(lambda: page.is_file() and page.read_text(), "the first page")
        assert "location.reload()" in text and re.search(r"Written at \d\d:\d\d:\d\d, \d{4}-", text)
        assert "ab-seed0, groups, step 50/600" in text
        assert [each["name"] for each in _data(page)["runs"]] == ["allreduce-seed0"]
        write(run, evaluated(50))
        until(lambda: len(_data(page)["runs"]) == 2, "the run's first evaluation")
        ours = _data(page)["runs"][1]
        assert (ours["name"], ours["result"], ours["bytes"], ours["steps"]) == ("ab-seed0", 0.5, 500, 50)
        assert len(_data(page)["sentences"]) == 2  # of the finished run alone
    finally:
        _write_run(tmp_path / "other" / "ab", "ab", 0, slow=6000, accuracy=0.8, steps=600)
        (tmp_path / "other" / "ab" / "summary.json").rename(run / "summary.json")
        (tmp_path / "comparison.json").write_text("[]")
        command.join()
    assert results[0].exit_code == 0 and f"report: {page}" in results[0].output
    text = page.read_text()
    assert "location.reload()" not in text and 'id="live"' not in text
    assert {each["name"]: each["result"] for each in _data(page)["runs"]} == {"allreduce-seed0": 0.9, "ab-seed0": 0.8}


def test_an_interrupted_page_is_plain_and_names_what_was_under_way(tmp_path, monkeypatch):
    write(tmp_path, start(), taken(1), evaluated(1))
    monkeypatch.setattr(report.time, "sleep", _interrupted)
    result = CliRunner().invoke(main, ["report", str(tmp_path), "--live"])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "report.html").read_text()
    assert "location.reload()" not in text and "unfinished after step 1" in text
    assert len(_data(tmp_path / "report.html")["runs"]) == 1


def _interrupted(_: float) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_browser_loads_the_page_again_where_the_reader_was(tmp_path):
    needs.chromium()
    for seed in range(30):
        _write_run(tmp_path / f"ab-seed{seed}", "ab", seed, slow=600, accuracy=0.9)
    page = write_page(Content(read_runs(tmp_path)), tmp_path, live=live_part(["<b>bold</b> step 5/600"], 5))
    with browser(tmp_path / "profile") as opened:
        opened.open(page, 1280)
        opened.type("#filter", "seed1")
        opened.evaluate("scrollTo(0, 300)")
        write_page(Content(read_runs(tmp_path)), tmp_path, live=live_part(["step 6/600"], 600))
        opened.wait("document.body?.textContent.includes('step 6/600') && scrollY === 300")
        assert opened.evaluate("document.getElementById('filter').value") == "seed1"
        assert opened.evaluate("document.querySelectorAll('#runs tbody tr').length") == 11
        assert opened.evaluate("document.querySelectorAll('#runs tbody td b').length") == 0
        write_page(Content([]), tmp_path, live=live_part(["no run yet"], 600))
        opened.open(page, 1280)
        assert opened.errors() == []
