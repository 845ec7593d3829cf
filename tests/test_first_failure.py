"""The first cause is reported: a full disk, a file that cannot be written, uneven batches."""

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gang
import needs
import small
import thinwire
from patience import until
from selection import first_of
from thinwire.base.errors import ConfigError, MissingRankError, ThinwireError
from thinwire.cli import main
from thinwire.comm import missing, process_groups
from thinwire.launch.failures import TorchrunLog, WorkerError, _report_and_exit, first_cause
from thinwire.launch.jobs import Job
from thinwire.launch.launcher import HostSpec

RUN = {"recipe": "digits", "method": "allreduce", "steps": 8, "save_every": 4, "workers": 2}


@pytest.fixture
def full_disk(tmp_path):
    """A real file system that is too small for a checkpoint, and for the finished model."""
    needs.mounted(tmp_path, "600k")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.slow
def test_a_full_disk_is_reported_in_two_sentences(full_disk, tmp_path_factory, monkeypatch):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    words = ["run", "digits", "--method", "allreduce", "--workers", 2, "--steps", 8, "--save-every", 4, "--quiet"]
    result = CliRunner().invoke(main, [str(word) for word in [*words, "--out", full_disk / "run"]])
    assert result.exit_code == 1
    *lines, last = result.output.strip().splitlines()
    (warned,) = [line for line in lines if "was not written: rank 0: No space left on device" in line]
    assert warned.endswith("training goes on")
    assert last.startswith("thinwire: the result of the run, accuracy 0.")
    assert f"could not be written: No space left on device: {full_disk}" in last and "it is in `" in last
    assert "Traceback" not in result.output and "collective" not in result.output
    assert len(list(elsewhere.glob("thinwire-result-*/model/model.safetensors"))) == 1


@pytest.mark.slow
def test_a_file_size_limit_is_reported_in_two_sentences(tmp_path):
    limited, said = HostSpec(prefix=("bash", "-c", 'ulimit -f 300; exec "$@"', "bash")), []
    with pytest.raises(WorkerError) as found:
        Job(out=tmp_path / "run", hosts=(limited,), **RUN).run(said.append)
    assert f"could not be written: File too large: {tmp_path}" in str(found.value)
    assert "nor to a temporary folder: File too large" in str(found.value) and "accuracy" in str(found.value)
    assert str(found.value).count("\n") == 0 and not list(tmp_path.glob("run/checkpoint/*"))
    assert any("step-000004` was not written: rank 0: File too large" in line for line in said)


def test_one_process_reports_one_sentence_too(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    words = ["run", "digits", "--method", "allreduce", "--workers", "1", "--steps", "2"]
    result = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "file" / "run")])
    assert result.exit_code == 1 and result.output.splitlines()[-1].startswith("thinwire: Not a directory: ")


# Without our launcher.


def _refused(rank: int, folder: str) -> dict[str, Any]:
    """Errors of saves that one rank cannot write, as seen by this rank; the last save works."""
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, thinwire.LocalSGD(every=4))
    list(small.walk(replica, optimizer, rank, 2))
    found: dict[str, Any] = {}
    for odd in (0, 1):
        if rank == odd:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        found[f"rank {odd}"] = _error(replica.save, Path(folder, "full"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found["a file in the way"] = _error(replica.save, Path(folder, "file", "save"))
    found["others' files"] = _error(replica.save, Path(folder, "others"))
    replica.save(Path(folder, "good"))
    return found


def _error(call: Any, *args: Any) -> tuple[str, str]:
    try:
        call(*args)
    except ThinwireError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_a_rank_that_cannot_write_raises_on_all(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "model.safetensors").write_text("mine")
    by_rank = gang.run(_refused, 2, str(tmp_path), patience=20)
    for odd, file in ((0, "model-rank0.safetensors"), (1, "model-rank1.safetensors")):
        for found in by_rank:
            kind, text = found[f"rank {odd}"]
            assert kind == "SaveError" and f"full` was not written: rank {odd}: File too large: " in text
            assert file in text
    for found in by_rank:
        kind, text = found["a file in the way"]
        assert kind == "SaveError" and "rank 0: Not a directory: " in text
        kind, text = found["others' files"]
        assert kind == "OccupiedError" and "is not a Thinwire save" in text
    assert (tmp_path / "others" / "model.safetensors").read_text() == "mine"
    assert (tmp_path / "good" / "state.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"file", "others", "good"}


def test_other_files_in_a_save_are_kept(tmp_path):
    model = small.mlp()
    replica = thinwire.attach(model, small.sgd(model), thinwire.AllReduce())
    replica.save(tmp_path / "save")
    (tmp_path / "save" / "notes").mkdir()
    (tmp_path / "save" / "notes" / "a.txt").write_text("mine")
    (tmp_path / "save" / "method-rank9.safetensors").write_text("of other groups")
    replica.save(tmp_path / "save")
    assert (tmp_path / "save" / "notes" / "a.txt").read_text() == "mine"
    assert not (tmp_path / "save" / "method-rank9.safetensors").exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is a file and cannot become a saved folder"):
        replica.save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


# Uneven batches.


def _uneven(rank: int, config: Any) -> dict[str, str]:
    process_groups._NOTE_S = 0.05
    model = small.mlp()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, config)
    try:
        list(small.walk(replica, optimizer, rank, 3 if rank == 0 else 5))
        until(lambda: rank == 1 or ((other := process_groups.progress(1)) and other.step > 3), "the other's next step")
        replica.finish()
    except MissingRankError as error:
        return {"error": str(error)}
    except RuntimeError as error:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            sys.excepthook(type(error), error, None)
        return {"torch": said.getvalue(), "told": missing.uneven_batches() or ""}
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("config", first_of([thinwire.AllReduce(), thinwire.LocalSGD(every=4)]))
def test_different_numbers_of_batches_are_reported(config):
    early, late = gang.run(_uneven, 2, config, patience=4, fresh=True)
    assert "finish() is collective: every rank must call it, and rank 1 did not" in early["error"]
    told = "ranks took different numbers of batches: rank 0 is here after 3 steps, rank 1 is in step 4 or later; put"
    assert told in early["error"]
    assert "with replica.join():" in early["error"] and "drop_last=True" in early["error"]
    told = "ranks took different numbers of batches: rank 0 came to finish() after 3 steps, rank 1 was in step 4; put"
    assert told in late["told"] and f"thinwire: {told}" in late["torch"]


# The launcher.


def _write_report(error_dir: Path, rank: int, when: int, kind: str) -> None:
    (error_dir / f"{rank}.json").write_text(json.dumps({"time": when, "kind": kind, "message": f"{kind} of {rank}"}))


@pytest.mark.parametrize(
    ("reports", "wanted"),
    [
        ([(0, 1, "consequence"), (1, 2, "cause")], "cause of 1"),
        ([(0, 1, "lost"), (1, 2, "config")], "config of 1"),
        ([(0, 2, "config"), (1, 1, "cause")], "cause of 1"),
        ([(0, 2, "cause"), (1, 1, "cause")], "cause of 1"),
        ([(0, 1, "lost"), (1, 2, "consequence")], "consequence of 1"),
    ],
)
def test_the_first_cause_by_time_wins(reports, wanted, tmp_path):
    for report in reports:
        _write_report(tmp_path, *report)
    assert str(first_cause(tmp_path, TorchrunLog(2), 1)) == wanted


def test_a_worker_on_a_full_disk_prints_its_report(tmp_path, monkeypatch, capsys):
    (tmp_path / "0.json").write_text("")  # as a full disk leaves it
    _write_report(tmp_path, 1, 5, "lost")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setattr(os, "_exit", lambda code: None)
    _report_and_exit(tmp_path / "0.json", {"time": 7, "kind": "cause", "message": "No space left on device"})
    log = TorchrunLog(3)
    printed = capsys.readouterr().out.splitlines(keepends=True)
    assert not any(log.read_line(0, line) and line.strip() for line in printed)
    assert str(first_cause(tmp_path, log, 1)) == "No space left on device"
