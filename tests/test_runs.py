"""`thinwire runs`: every run below a folder, whatever became of it."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from test_report import _write_run
from thinwire.cli import main


def _listed(folder: Path) -> list[dict]:
    result = CliRunner().invoke(main, ["runs", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def _date(folder: Path, seconds: int) -> None:
    for path in folder.iterdir():
        os.utime(path, (seconds, seconds))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run, a comparison and a search, made in this order."""
    _write_run(tmp_path / "single", "ab", 3, slow=10_000, accuracy=0.9, traffic_vs_allreduce_fp32=0.25)
    _write_run(tmp_path / "compare" / "allreduce-seed0", "allreduce", 0, slow=1_000_000, accuracy=0.99)
    _write_run(tmp_path / "compare" / "localsgd-seed0", "localsgd", 0, slow=50_000, accuracy=0.98)
    for number, every in enumerate((4, 8)):
        folder = tmp_path / "deep" / "tune" / f"trial-0-0-{number:04}"
        _write_run(folder, "diloco", 0, slow=100, accuracy=0.5, config={"every": every})
        (folder / "trial.json").write_text(json.dumps({"status": "finished", "reason": ""}))
    for number, path in enumerate(sorted(path.parent for path in tmp_path.rglob("summary.json"))):
        _date(path, 1_000_000 + 60 * number)
    return tmp_path


def test_nested_runs_are_rows_with_the_newest_first(runs):
    rows = _listed(runs)
    assert [row["folder"] for row in rows] == [
        "single",
        "deep/tune/trial-0-0-0001",
        "deep/tune/trial-0-0-0000",
        "compare/localsgd-seed0",
        "compare/allreduce-seed0",
    ]
    assert [row["method"] for row in rows] == ["ab", "diloco:every=8", "diloco:every=4", "localsgd", "allreduce"]
    assert {row["status"] for row in rows} == {"finished"}
    assert rows[3]["traffic_vs_allreduce_fp32"] == 0.05 and rows[3]["slow_bytes"] == 50_000
    assert rows[0]["traffic_vs_allreduce_fp32"] == 0.25  # as it estimated itself: no all-reduce lies beside it
    assert (rows[0]["recipe"], rows[0]["metric"], rows[0]["result"], rows[0]["seed"]) == ("digits", "accuracy", 0.9, 3)


def test_the_table_says_the_same(runs):
    printed = CliRunner().invoke(main, ["runs", str(runs)]).output
    for text in ("diloco:every=8, seed 0", "accuracy 98.00 %", "50.0 kB", "0.050", "compare/localsgd-seed0"):
        assert text in printed


def test_unfinished_and_broken_runs_are_rows_too(runs):
    started = runs / "started"
    started.mkdir()
    lines = [json.dumps({"kind": "step", "step": step}) for step in (1, 2, 3)]
    (started / "records.jsonl").write_text("\n".join(lines) + '\n{"kind": "st')
    failed = runs / "tune" / "trial-0-0-0000"
    failed.mkdir(parents=True)
    (failed / "trial.json").write_text(json.dumps({"status": "diverged", "reason": "group 1 is not finite"}))
    (runs / "single" / "summary.json").write_text("{")
    (runs / "compare" / "localsgd-seed0" / "summary.json").write_text('{"recipe": "\\u001b[31m"}')
    rows = {row["folder"]: row for row in _listed(runs)}
    own = rows["started"]
    assert (own["status"], own["last_step"], own["recipe"], own["result"]) == ("unfinished", 3, None, None)
    assert (rows["tune/trial-0-0-0000"]["status"], rows["tune/trial-0-0-0000"]["last_step"]) == ("diverged", None)
    for name in ("single", "compare/localsgd-seed0"):
        assert rows[name]["status"] == "damaged" and "summary.json` is damaged" in rows[name]["note"]
    printed = CliRunner().invoke(main, ["runs", str(runs)])
    assert printed.exit_code == 0 and "\x1b" not in printed.output
    for text in ("unfinished, step 3", "diverged: group 1 is not finite", "single: damaged: "):
        assert text in printed.output


def test_an_unfinished_run_says_what_it_trains(tmp_path):
    (tmp_path / "run").mkdir()
    start = {"kind": "start", "step": 0, "recipe": "digits", "method": "ab", "seed": 3, "config": {}}
    (tmp_path / "run" / "records.jsonl").write_text(json.dumps(start) + "\n")
    (own,) = _listed(tmp_path)
    assert (own["recipe"], own["method"], own["seed"], own["status"]) == ("digits", "ab", 3, "unfinished")
    assert "ab, seed 3" in CliRunner().invoke(main, ["runs", str(tmp_path)]).output


def test_a_folder_without_runs_and_a_missing_one(tmp_path, monkeypatch):
    told = CliRunner().invoke(main, ["runs", str(tmp_path)])
    assert told.exit_code == 0 and "no run in" in told.output and _listed(tmp_path) == []
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(main, ["runs"])
    assert told.exit_code == 2 and "there is no folder `runs`" in told.output


def test_links_are_listed_and_loops_end(runs):
    (runs / "compare" / "linked").symlink_to(runs / "single")
    (runs / "compare" / "loop").symlink_to(runs)
    assert "compare/linked" in [row["folder"] for row in _listed(runs)] and len(_listed(runs)) == 6
