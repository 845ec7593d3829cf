"""Nothing that a command wrote is lost unless somebody said so, and nothing that others wrote ever is."""

import errno
import fcntl
import os
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

import thinwire
from thinwire.base.errors import ConfigError
from thinwire.cli import main
from thinwire.netbench.bench import Bench
from thinwire.recipes import named
from thinwire.train import fit
from thinwire.train.run_folder import LOCK, locked, refuse_occupied

RUN = ["run", "digits", "--method", "allreduce", "--workers", "1", "--steps", "4", "--no-model", "--quiet"]
COMPARE = ["compare", "digits", "--methods", "allreduce", "--workers", "1", "--steps", "4", "--no-model", "--quiet"]


def _thinwire(*words: object, expect: int = 0) -> str:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == expect, result.output
    return result.output


def _held(folder: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def _strange(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Files of the user's own whose names are almost ours."""
    paths = [folder / name for name in ("notes.txt", "checkpoint-notes/a", "best-of/b", "model/mine.txt")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    return {path: what for path, what in _held(folder).items() if path in paths}


def test_a_run_without_resume_leaves_a_paused_run_alone(tmp_path, monkeypatch):
    out = tmp_path / "run"
    _thinwire(*RUN, "--until", 2, "--out", out)
    before = _held(out)
    assert any("checkpoint" in path.parts for path in before)
    # Refused before the data is looked for.
    said = _thinwire(*RUN, "--seed", 1, "--data", tmp_path / "nowhere", "--out", out, expect=2)
    assert f"`{out}` is in use, it holds records.jsonl, checkpoint" in said
    assert "add `--resume` to continue it, `--overwrite` to replace it, or give another `--out`" in said
    assert _held(out) == before
    monkeypatch.setattr("thinwire.launch.jobs.launch", lambda *_: pytest.fail("workers were started"))
    _thinwire(*RUN, "--workers", 2, "--seed", 1, "--out", out, expect=2)
    with pytest.raises(ConfigError, match="is in use"):
        fit(named("digits", steps=4), thinwire.AllReduce(), out=out)
    assert _held(out) == before
    assert "give one of them" in _thinwire(*RUN, "--resume", "--overwrite", "--out", out, expect=2)


def test_overwrite_replaces_the_run_and_no_other_files(tmp_path):
    out = tmp_path / "run"
    words = [word for word in RUN if word != "--no-model"]
    _thinwire(*words, "--out", out)
    foreign = _strange(out)
    assert len(foreign) == 4
    _thinwire(*words, "--out", out, expect=2)
    summary = (out / "summary.json").read_text()
    _thinwire(*RUN, "--seed", 1, "--until", 2, "--overwrite", "--out", out)
    assert not (out / "summary.json").exists() and not (out / "model" / "model.safetensors").exists()
    assert {path: what for path, what in _held(out).items() if path in foreign} == foreign
    _thinwire(*RUN, "--seed", 1, "--resume", "--out", out)
    assert (out / "summary.json").read_text() != summary
    assert {path: what for path, what in _held(out).items() if path in foreign} == foreign


def test_a_folder_is_written_to_by_one_command_at_a_time(tmp_path, monkeypatch):
    out = tmp_path / "run"
    _thinwire(*RUN, "--until", 2, "--out", out)
    before = _held(out)
    monkeypatch.setattr("thinwire.launch.jobs.launch", lambda *_: pytest.fail("workers were started"))
    with locked(out):
        for more in (["--resume"], ["--overwrite"], ["--overwrite", "--workers", 2]):
            said = _thinwire(*RUN, *more, "--out", out, expect=2)
            assert f"`{out}` is in use by process {os.getpid()} on {socket.gethostname()} since 20" in said
            assert "wait for its end, stop it, or give another `--out`" in said
        with pytest.raises(ConfigError, match="is in use by process"):
            fit(named("digits", steps=4), thinwire.AllReduce(), out=out, resume=True)
        assert {path: what for path, what in _held(out).items() if path.name != LOCK} == before
    _thinwire(*RUN, "--resume", "--out", out)
    assert not (out / LOCK).exists()


def test_a_run_that_fails_lets_go_of_its_folder(tmp_path):
    _thinwire(*RUN, "--until", 2, "--out", tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot resume"):
            fit(named("digits", steps=4), thinwire.AllReduce(wire="bf16"), out=tmp_path, resume=True)


def test_comparisons_and_benches_keep_others_out_too(tmp_path, monkeypatch):
    compare = [*COMPARE, "--out", tmp_path, "--overwrite"]
    with locked(tmp_path):
        assert f"`{tmp_path}` is in use by process" in _thinwire(*compare, expect=2)
    with locked(tmp_path / "allreduce-seed0"):
        assert f"`{tmp_path / 'allreduce-seed0'}` is in use by process" in _thinwire(*compare, expect=2)
    monkeypatch.setattr(Bench, "check", lambda self: None)
    with locked(tmp_path):
        said = _thinwire("netbench", "digits", "--methods", "allreduce", "--out", tmp_path, expect=2)
        assert f"`{tmp_path}` is in use by process" in said


def test_what_a_killed_command_leaves_behind_blocks_nobody(tmp_path):
    (tmp_path / LOCK).write_text("process 1 on elsewhere")
    _thinwire(*RUN, "--out", tmp_path)
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF])
def test_a_file_system_without_locks_is_used_without_them(number, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path), locked(tmp_path):
        pass


def test_a_lock_is_not_taken_from_a_file_that_its_holder_has_just_removed(tmp_path, monkeypatch):
    real, calls = fcntl.flock, []

    def late(file, how):
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(how)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(tmp_path):
        assert len(calls) == 2 and (tmp_path / LOCK).exists()
        with pytest.raises(ConfigError, match="is in use by process"), locked(tmp_path):
            pass


@pytest.mark.slow
def test_the_first_of_several_workers_finds_the_lock_and_all_end(tmp_path, monkeypatch):
    monkeypatch.setattr("thinwire.launch.jobs.refuse_locked", lambda out: None)  # as if both had begun at once
    with locked(tmp_path):
        said = _thinwire(*RUN, "--workers", 2, "--out", tmp_path, expect=2)
    assert f"`{tmp_path}` is in use by process {os.getpid()}" in said and not list(tmp_path.iterdir())


def test_the_usual_folder_is_no_exception(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _thinwire(*RUN)
    assert "`runs/digits-allreduce-seed0` is in use" in _thinwire(*RUN, expect=2)
    _thinwire(*RUN, "--overwrite")
    _thinwire(*RUN, "--seed", 1)


@pytest.mark.slow
def test_compare_goes_on_or_overwrites_only_if_asked(tmp_path):
    _thinwire(*COMPARE, "--out", tmp_path)
    before = _held(tmp_path)
    for more in ([], ["--seeds", 2]):
        said = _thinwire(*COMPARE, *more, "--out", tmp_path, expect=2)
        assert f"`{tmp_path / 'allreduce-seed0'}` is in use" in said and "--resume" in said
    # The comparison alone: no run of these methods is there.
    other = [word if word != "allreduce" else "localsgd" for word in COMPARE]
    assert "it holds comparison.json, comparison.png" in _thinwire(*other, "--out", tmp_path, expect=2)
    assert _held(tmp_path) == before
    _thinwire(*COMPARE, "--seeds", 2, "--resume", "--out", tmp_path)
    assert _held(tmp_path / "allreduce-seed0").items() <= before.items() and (tmp_path / "allreduce-seed1").is_dir()
    _thinwire(*COMPARE, "--overwrite", "--out", tmp_path)
    assert not _held(tmp_path / "allreduce-seed0").items() <= before.items()


def test_export_replaces_an_export_only_if_asked(tmp_path):
    (tmp_path / "model.py").write_text("from torch import nn\ndef build():\n    return nn.Linear(8, 8)\n")
    words = ["export", f"{tmp_path / 'model.py'}:build", "--out", tmp_path / "small"]
    _thinwire(*words)
    foreign = _strange(tmp_path / "small")
    before = _held(tmp_path / "small")
    assert "add `--overwrite` to replace what an export wrote there" in _thinwire(*words, expect=2)
    assert _held(tmp_path / "small") == before
    _thinwire(*words, "--overwrite")
    after = _held(tmp_path / "small")
    changed = {path.name for path in before if after[path] != before[path]}
    assert "model.safetensors" in changed and not changed & {path.name for path in foreign}


def test_a_plan_in_a_folder_of_ones_own_is_not_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("mine", "runs/plan-digits"):
        Path(folder).mkdir(parents=True)
        Path(folder, "plan.json").write_text("{}")
    words = ["plan", "digits", "--methods", "allreduce", "--steps", 20, "--compute", "1ms"]
    assert "`mine` is in use, it holds plan.json; add `--overwrite` to replace it" in _thinwire(
        *words, "--out", "mine", expect=2
    )
    assert "100 Mbps" in _thinwire(*words, "--out", "mine", "--overwrite", "--bandwidth", "100 Mbps", expect=2)
    assert Path("mine", "plan.json").read_text() == "{}"
    _thinwire(*words)  # in the usual folder the next plan takes its place
    assert Path("runs/plan-digits", "plan.json").read_text() != "{}"


@pytest.mark.parametrize("there", ["netbench.json", "calibration/summary.json", "100Mbit/allreduce/records.jsonl"])
def test_netbench_refuses_what_it_would_overwrite_before_it_asks_for_root(there, tmp_path, monkeypatch):
    (tmp_path / there).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / there).write_text("{}")
    monkeypatch.setattr(Bench, "check", lambda self: pytest.fail("it went on"))
    said = _thinwire("netbench", "digits", "--methods", "allreduce", "--out", tmp_path, expect=2)
    assert "is in use" in said and "--overwrite" in said and (tmp_path / there).read_text() == "{}"


def test_a_run_that_began_a_moment_ago_is_named_and_not_offered_for_resuming(tmp_path: Path) -> None:
    record = tmp_path / "records.jsonl"
    record.touch()
    with locked(tmp_path), pytest.raises(ConfigError, match="is in use by process"):
        refuse_occupied(tmp_path, [record], resume=True)
    with pytest.raises(ConfigError, match="add `--resume` to continue it"):
        refuse_occupied(tmp_path, [record], resume=True)
