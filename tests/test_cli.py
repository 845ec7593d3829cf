"""The command line on real workers, and what it says to bad input."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

import gang
from patience import LIMIT_S, until
from thinwire.checkpoint import saves
from thinwire.cli import main
from thinwire.launch import jobs

STEPS, SAVE_EVERY = 40, 8
COMPARED = ["--steps", "20", "--set", "every=5", "--no-model"]  # a field that one of the two methods has
SUMMARY_FIELDS = """
    recipe method config seed world_size groups steps accuracy accuracy_before_truncation loss wall_s traffic
    traffic_vs_allreduce_fp32 traffic_vs_ideal_fp32 parameters_full parameters_final compression kept_full
    versions
"""
ROW_FIELDS = """
    method seeds accuracy_mean accuracy_std slow_bytes_mean traffic_vs_allreduce_fp32 traffic_vs_ideal_fp32
    compression_mean wall_s_mean
"""


def _command(words: list[str], said: str) -> None:
    with open(said, "w") as file:
        os.dup2(file.fileno(), 2)
    main(words)


def _start(said: Path, *words):
    """The command in a process of its own, which may be killed; what it says goes to a file."""
    return gang.start(_command, [str(word) for word in words], str(said))


def _thinwire(*words, expect=0, only="output") -> str:
    """What it prints and says; without the seconds that a fresh process would spend on loading torch."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == expect, result.output
    return getattr(result, only)


def _ab(out, *more) -> list:
    words = ["run", "digits", "--method", "ab-paper", "--workers", 2, "--group-size", 1, "--steps", STEPS]
    return [*words, "--save-every", SAVE_EVERY, "--out", out, *more]


def _records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


def _tensors(run: Path) -> dict[str, bytes]:
    (path,) = (run / "model").glob("*.safetensors")
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def _processes(mark: str) -> list[int]:
    """Processes whose command line has `mark`, which only those of one run have."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _rank(pid: int) -> int | None:
    """The rank of a process that is a worker."""
    found = re.search(rb"\0RANK=(\d+)\0", b"\0" + Path(f"/proc/{pid}/environ").read_bytes())
    return int(found[1]) if found else None


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> tuple[Path, str]:
    """By workers that need not load torch first; slow tests leave the launching to the launcher, and compare."""

    def launch(words: list[str], workers: int, on_line: Any, *_: Any, **__: Any) -> None:
        for line in _in_a_job(workers, *words)[0].splitlines():
            on_line(line)

    out = tmp_path_factory.mktemp("unbroken") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "launch", launch)
        return out, _thinwire(*_ab(out, "--json"), only="stdout")


def _in_a_job(workers: int, *words: str) -> list[str]:
    """What each of the workers of a job of torchrun prints."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    return gang.run(_as_worker, workers, words, port, fresh=True)


def _as_worker(rank: int, words: tuple[str, ...], port: int) -> str:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return _thinwire(*words)


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> tuple[Path, str]:
    """As inside a job of torchrun, whose workers train one method after the other."""
    out = tmp_path_factory.mktemp("compared")
    words = ("compare", "digits", "--methods", "allreduce,ab-paper", *COMPARED, "--out", str(out))
    printed, nothing = _in_a_job(2, *words)
    assert nothing == ""
    return out, printed


def test_run_writes_records_summary_and_model(unbroken):
    out, printed = unbroken
    summary = json.loads(printed)
    assert summary == json.loads((out / "summary.json").read_text())
    assert not [field for field in SUMMARY_FIELDS.split() if field not in summary]
    assert (summary["method"], summary["steps"], summary["groups"]) == ("ab-paper", STEPS, [[0], [1]])
    assert 0.5 < summary["accuracy"] <= 1
    assert {"slow_bytes", "fast_bytes", "slow_calls", "by_phase", "by_purpose"} <= summary["traffic"].keys()
    records = _records(out)
    assert [r["step"] for r in records if r["kind"] == "step"] == list(range(1, STEPS + 1))
    last = [r for r in records if r["kind"] == "evaluation"][-1]
    assert last["model"] == "finished" and last["accuracy"] == summary["accuracy"]
    assert _tensors(out)


def test_evaluation_says_which_model_and_stays_out_of_the_ratio(unbroken):
    summary, records = json.loads(unbroken[1]), _records(unbroken[0])
    models = {r["phase"]: r["model"] for r in records if r["kind"] == "evaluation"}
    assert models["groups"] == "merged" and models["finished"] == "finished"
    evaluate = summary["traffic"]["by_purpose"]["evaluate"]["slow_bytes"]
    counted = summary["traffic"]["slow_bytes"] - evaluate
    assert evaluate > 0
    assert summary["traffic_vs_allreduce_fp32"] == pytest.approx(counted / summary["baseline"]["allreduce_fp32"])


@pytest.mark.slow
def test_killed_and_resumed_is_as_never_stopped(unbroken, tmp_path):
    out = tmp_path / "run"
    process = _start(tmp_path / "said", *_ab(out, "--quiet"))
    until(lambda: saves.find(out / "checkpoint") and _records_seen(out) > 2 * SAVE_EVERY + 2, "two saves")
    process.kill()  # SIGKILL: nothing of it can run any more, its workers must notice
    until(lambda: not _processes(str(out)), "the workers to leave with their launcher")
    assert not (out / "summary.json").exists()
    assert "not finished; saved at step" in _thinwire("export", out, "--out", tmp_path / "model")
    _thinwire(*_ab(out, "--resume", "--quiet"))
    assert _tensors(out) == _tensors(unbroken[0])
    steps = [r["step"] for r in _records(out) if r["kind"] == "step"]
    assert steps == list(range(1, STEPS + 1))
    ours, theirs = (json.loads((run / "summary.json").read_text()) for run in (out, unbroken[0]))
    assert ours["accuracy"] == theirs["accuracy"]
    assert _bytes(ours["traffic"]) == _bytes(theirs["traffic"])


def _records_seen(out: Path) -> int:
    path = out / "records.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def _bytes(traffic: dict) -> dict:
    """What training sent; a resumed run has to agree on where it stands once more, which is control."""
    sent = {purpose: row["slow_bytes"] for purpose, row in traffic["by_purpose"].items()}
    return {purpose: amount for purpose, amount in sent.items() if purpose != "control"}


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_and_other_settings_are_not_resumed(tmp_path):
    out = tmp_path / "run"
    process = _start(tmp_path / "said", *_ab(out))
    until(lambda: saves.find(out / "checkpoint"), "a save")
    workers = {rank: pid for pid in _processes(str(out)) if (rank := _rank(pid)) is not None}
    os.kill(workers[1], signal.SIGKILL)
    process.join(LIMIT_S)
    err = (tmp_path / "said").read_text()
    assert process.exitcode == 1
    assert "thinwire: worker 1 was killed by SIGKILL; the other workers were stopped\n" in err
    assert "Traceback" not in err
    assert not _processes(str(out))
    said = _thinwire(*_ab(out, "--resume", "--quiet", "--set", "cutoff=0.3"), expect=2)
    assert "it was saved with `cutoff`=0.15, this run has 0.3" in said


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_no_process_behind(tmp_path):
    out = tmp_path / "run"
    words = ["run", "digits", "--method", "allreduce", "--workers", 2, "--steps", 5000, "--out", out]
    process = _start(tmp_path / "said", *words)
    until(lambda: _records_seen(out) > 0, "the first step")
    os.kill(process.pid, signal.SIGINT)
    process.join(LIMIT_S)
    said, (saved,) = (tmp_path / "said").read_text(), (out / "checkpoint").iterdir()
    step = json.loads((saved / "position.json").read_text())["step"]
    assert process.exitcode == 75 and "Traceback" not in said
    assert f"stopped by SIGINT and saved after step {step} of 5000 in {out}; continue with --resume" in said
    assert _records_seen(out) == step and saved.name == f"step-{step:06}"
    assert not _processes(str(out))


@pytest.mark.slow
def test_the_package_is_a_command():
    done = subprocess.run([sys.executable, "-m", "thinwire", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "count every byte" in done.stdout


def test_compare_sets_methods_side_by_side(compared):
    out, printed = compared
    rows = json.loads((out / "comparison.json").read_text())
    assert [row["method"] for row in rows] == ["allreduce", "ab-paper"]
    assert not [field for field in ROW_FIELDS.split() if field not in rows[0]]
    assert rows[0]["traffic_vs_allreduce_fp32"] == 1.0 > rows[1]["traffic_vs_allreduce_fp32"]
    assert {path.name for path in out.iterdir()} >= {"allreduce-seed0", "ab-paper-seed0", "comparison.png"}
    assert "allreduce" in printed and f"picture: {out / 'comparison.png'}" in printed


@pytest.mark.slow
def test_compare_keeps_variants_of_a_method_apart(tmp_path):
    words = ["compare", "digits", "--workers", "1", "--steps", "12", "--set", "every=4", "--no-model"]
    words += ["--seeds", "2", "--out", str(tmp_path)]
    result = CliRunner().invoke(main, [*words, "--methods", "allreduce,ab-paper:cutoff=0.2,ab-paper:cutoff=0.5"])
    assert result.exit_code == 0, result.output
    folders = [
        f"{name}-seed{seed}" for name in ("allreduce", "ab-paper-cutoff-0.2", "ab-paper-cutoff-0.5") for seed in (0, 1)
    ]
    assert {path.name for path in tmp_path.iterdir()} == {*folders, "comparison.json", "comparison.png", "report.html"}
    rows = json.loads((tmp_path / "comparison.json").read_text())
    assert [(row["method"], row["label"], row["seeds"]) for row in rows] == [
        ("allreduce", "allreduce", [0, 1]),
        ("ab-paper", "ab-paper:cutoff=0.2", [0, 1]),
        ("ab-paper", "ab-paper:cutoff=0.5", [0, 1]),
    ]
    assert rows[1]["compression_mean"] < rows[2]["compression_mean"]
    assert all(row["label"] in result.output for row in rows)
    again = CliRunner().invoke(main, ["report", str(tmp_path), "--json"])
    assert json.loads(again.stdout) == rows


@pytest.mark.slow
def test_compare_resumed_runs_nothing_twice(compared):
    out, _ = compared
    before = (out / "ab-paper-seed0" / "summary.json").stat().st_mtime_ns
    words = ["compare", "digits", "--methods", "allreduce,ab-paper", "--workers", "2", *COMPARED, "--out", str(out)]
    result = CliRunner().invoke(main, [*words, "--resume", "--json"])
    assert result.exit_code == 0 and len(json.loads(result.stdout)) == 2
    assert (out / "ab-paper-seed0" / "summary.json").stat().st_mtime_ns == before
    for other in (["--set", "cutoff=0.3"], ["--workers", "3"]):
        result = CliRunner().invoke(main, [*words, *other, "--resume", "--json"])
        assert result.exit_code == 2 and "holds a finished run with" in result.output


def test_report_and_export_read_folders(compared, unbroken, tmp_path):
    (compared[0] / "comparison.png").unlink()
    _thinwire("report", compared[0])
    assert (compared[0] / "comparison.png").exists()
    export = ["export", unbroken[0], "--out", tmp_path / "model"]
    assert "torch.export.load" in _thinwire(*export)
    program = torch.export.load(tmp_path / "model" / "program.pt2").module()
    assert program(torch.zeros(5, 1, 8, 8)).shape == (5, 10)
    assert "not empty" in _thinwire(*export, expect=2)
    assert "without `--no-model`" in _thinwire(
        "export", compared[0] / "ab-paper-seed0", "--out", tmp_path / "x", expect=2
    )


@pytest.mark.slow
def test_one_process_needs_nothing_else(tmp_path):
    out = tmp_path / "run"
    words = [
        "run",
        "shakespeare",
        "--method",
        "allreduce",
        "--workers",
        "1",
        "--steps",
        "2",
        "--out",
        str(out),
    ]
    result = CliRunner().invoke(main, [*words, "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["world_size"] == 1 and 1 < summary["perplexity"] < 100
    assert summary["perplexity_before_truncation"] == summary["perplexity"]


def test_run_takes_a_method_with_its_settings_as_compare_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["run", "digits", "--method", "localsgd:every=3", "--workers", 1, "--steps", 4, "--set", "warmup=1"]
    config = json.loads(_thinwire(*words, "--no-model", "--json"))["config"]
    assert (config["every"], config["warmup"]) == (3, 1)
    assert [path.name for path in Path("runs").iterdir()] == ["digits-localsgd-every-3-seed0"]
    told = json.loads(_thinwire(*words, "--dry-run", "--json"))["run"]
    assert (told["method"], told["config"]["every"]) == ("localsgd", 3)


def _without_matplotlib(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.slow
def test_a_picture_never_costs_a_result(tmp_path, monkeypatch):
    """Without matplotlib everything else is written and printed, and one line says what to install."""
    _without_matplotlib(monkeypatch)
    words = ["--workers", 1, "--steps", 12, "--set", "every=4", "--stability", 4]
    missing = "thinwire: no picture: plotting needs matplotlib: pip install 'thinwire[plot]'"
    told = _thinwire("run", "digits", "--method", "ab-paper", *words, "--out", tmp_path / "run")
    assert told.count(missing) == 1 and "summary.json and model/ are in" in told
    told = _thinwire("export", tmp_path / "run", "--out", tmp_path / "small")
    assert "model.safetensors" in told and not (tmp_path / "small" / "spectrum.png").exists()
    told = _thinwire("compare", "digits", "--methods", "ab-paper", *words, "--no-model", "--out", tmp_path / "c")
    assert told.count(missing) == 1 and "accuracy" in told and "picture: " not in told.replace(missing, "")
    rows = (tmp_path / "c" / "comparison.json").read_text()
    (tmp_path / "c" / "comparison.json").unlink()
    for more in ([], ["--json"]):
        told = _thinwire("report", tmp_path / "c", *more)
        assert told.count(missing) == 1 and (tmp_path / "c" / "comparison.json").read_text() == rows
    result = CliRunner().invoke(main, ["report", str(tmp_path / "c"), "--json"])
    assert json.loads(result.stdout) == json.loads(rows)


def test_help_says_where_data_comes_from_and_that_schedules_can_be_chosen():
    for command in ("run", "compare", "plan", "netbench"):
        told = " ".join(CliRunner().invoke(main, [command, "--help"]).output.split())
        assert "schedule=table|guideline" in told and "that of digits and shakespeare is in the package" in told


def test_data_may_be_a_file_where_the_source_takes_one(tmp_path):
    (tmp_path / "text").write_text("any")
    result = CliRunner().invoke(main, ["run", "digits", "--method", "ab-paper", "--data", str(tmp_path / "text")])
    assert result.exit_code == 2 and f"no `digits8x8.npz` in `{tmp_path / 'text'}`" in result.output


def test_list_knows_recipes_and_methods():
    text = CliRunner().invoke(main, ["list"]).output
    for name in ("digits", "shakespeare", "allreduce", "ab-paper"):
        assert name in text


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("run mnist --method ab-paper", "unknown recipe 'mnist', choose from: "),
        ("run digits --method adam", "unknown method 'adam', choose from: ab"),
        ("run digits --method ab-paper:cutof=0.1", "unknown field of PaperAB 'cutof', choose from"),
        ("run digits --method ab-paper:cutoff", "must be FIELD=VALUE"),
        ("run digits --method ab-paper,allreduce", "must be one method; `thinwire compare --methods` takes several"),
        ("run digits --method ", "names no method, choose from: "),
        ("compare digits --methods ab-paper,adam", "unknown method 'adam'"),
        (
            "run digits --method ab-paper --workers 2 --group-size 3",
            "`group_size`=3 exceeds the world of 2 workers",
        ),
        ("run digits --method ab-paper --group-size many", "must be a whole number of workers"),
        ("run digits --method ab-paper --steps 3", "`total_steps`=3 is too small"),
        ("run digits --method ab-paper --set cutoff=1.5", "`cutoff`=1.5"),
        ("run digits --method ab-paper --set cutof=0.1", "unknown field of PaperAB 'cutof', choose from"),
        ("run digits --method ab-paper --set cutoff", "must be FIELD=VALUE"),
        ("run digits --method ab-paper --set zz.cutoff=0.1", "unknown method 'zz'"),
        ("compare digits --methods allreduce,ab-paper --set ab-paper.cutof=0.1", "unknown field of PaperAB 'cutof'"),
        ("compare digits --methods ab-paper,ab-paper:cutof=0.1", "unknown field of PaperAB 'cutof'"),
        (
            "compare digits --methods ab-paper,ab-paper:cutoff=0.15",
            "`ab-paper` and `ab-paper:cutoff=0.15` have the same settings",
        ),
        ("compare digits --methods ab,ab:every=24", "`ab` and `ab:every=24` have the same settings"),
        ("run digits --method ab --steps 8", "warmup=1, every=2, factor_at=4 fit together"),
        ("run digits --method ab-paper --data no/such/place", "no `digits8x8.npz` in `no/such/place`"),
        ("run digits --method ab-paper --workers 65", "a batch of 64 cannot be shared by 65 workers"),
        ("run digits --method ab-paper --steps 0", "Invalid value for '--steps'"),
        ("export .", None),
        ("report .", "no finished run"),
    ],
)
def test_bad_input_is_one_clear_sentence(words, wanted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, words.split(" "))
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert wanted is None or wanted in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell):
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0 and "_THINWIRE_COMPLETE" in result.stdout


def test_completion_knows_commands_and_options():
    asked = {"_THINWIRE_COMPLETE": "bash_complete", "COMP_WORDS": "thinwire doc", "COMP_CWORD": "1"}
    assert "doctor" in CliRunner().invoke(main, [], env=asked, prog_name="thinwire").stdout
    asked |= {"COMP_WORDS": "thinwire doctor --comp", "COMP_CWORD": "2"}
    assert "--compute" in CliRunner().invoke(main, [], env=asked, prog_name="thinwire").stdout
