"""Trackers, by their own packages where those are installed: what was logged is read back from their files."""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import needs
import thinwire
from thinwire.cli import main
from thinwire.recipes import named
from thinwire.train import fit

# Not ours: what these packages warn of depends on their versions.
pytestmark = pytest.mark.filterwarnings("ignore")


def trained(out: Path, *loggers: Any, **more: Any) -> dict[str, Any]:
    recipe = named("digits", steps=24, eval_every=12)
    return fit(recipe, thinwire.LocalSGD(every=4), out=out, model=False, loggers=loggers, **more)


def stopped_and_resumed(out: Path, *loggers: Any) -> dict[str, Any]:
    """Stopped after 14 steps, and resumed from a save of step 8: six steps are trained and shown twice."""
    trained(out, *loggers, save_every=8, until=14, keep=3)
    (later,) = (out / "checkpoint").glob("step-000014")
    later.rename(out / "later")
    return trained(out, *loggers, resume=True)


def losses(out: Path) -> dict[int, float]:
    records = map(json.loads, (out / "records.jsonl").read_text().splitlines())
    return {record["step"]: record["loss"] for record in records if record["kind"] == "step"}


# TensorBoard.


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard(tmp_path: Path) -> None:
    needs.package("tensorboard", "TensorBoard")
    summary = trained(tmp_path / "run", "tensorboard")
    found = events(tmp_path / "run")
    shown = {event.step: event.value for event in found.Scalars("train/loss")}
    assert shown == pytest.approx({step: losses(tmp_path / "run")[step] for step in (1, 10, 20)})
    assert [event.step for event in found.Scalars("evaluation/accuracy")] == [12, 24, 24]
    assert {"wire/slow_bytes", "wire/wire_share"} < set(found.Tags()["scalars"])
    parts = {tag.split("/")[0] for tag in found.Tags()["scalars"]}
    assert parts <= {"train", "wire", "evaluation", "ranks", "agreement", "summary"}  # not how the run was started
    assert "train/wire_s" not in found.Tags()["scalars"]
    (final,) = found.Scalars("summary/accuracy")
    assert final.value == pytest.approx(summary["accuracy"])
    assert found.PluginTagToContent("hparams")  # settings and results
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    started = HParamsPluginData.FromString(found.PluginTagToContent("hparams")["_hparams_/session_start_info"])
    assert started.session_start_info.hparams["every"].number_value == 4


@pytest.mark.slow
def test_a_resumed_run_hides_what_tensorboard_had_after_the_save(tmp_path: Path) -> None:
    needs.package("tensorboard", "TensorBoard")
    from thinwire.loggers import TensorBoard

    stopped_and_resumed(tmp_path / "run", TensorBoard(every=1))
    shown = {event.step: event.value for event in events(tmp_path / "run").Scalars("train/loss")}
    assert shown == pytest.approx(losses(tmp_path / "run"))
    assert len(events(tmp_path / "run").Scalars("train/loss")) == 24
    trained(tmp_path / "run", "tensorboard", overwrite=True)
    assert len(list((tmp_path / "run").glob("events*"))) == 1


@pytest.mark.slow
def test_each_run_of_a_comparison_has_its_own_name(tmp_path: Path) -> None:
    needs.package("tensorboard", "TensorBoard")
    words = ["compare", "digits", "--methods", "allreduce,localsgd", "--workers", "1", "--steps", "6", "--no-model"]
    words += ["--log", f"tensorboard:{tmp_path / 'events'}", "--log-every", "2", "--out", str(tmp_path / "both")]
    result = CliRunner().invoke(main, [*words, "--quiet"])
    assert result.exit_code == 0, result.output
    for name in ("allreduce-seed0", "localsgd-seed0"):
        shown = events(tmp_path / "events" / "both" / name).Scalars("train/loss")
        assert [event.step for event in shown] == [1, 2, 4, 6]
        assert not list((tmp_path / "both" / name).glob("events*"))


# MLflow.


@pytest.mark.slow
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = needs.package("mlflow", "MLflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    summary = stopped_and_resumed(tmp_path / "group" / "run", "mlflow:mine")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (
        run.info.status == "FINISHED" and run.data.tags["mlflow.runName"] == "run" and run.data.tags["group"] == "group"
    )
    assert run.data.params["every"] == "4" and run.data.params["recipe"] == "digits"
    shown = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "train/loss")}
    wanted = losses(tmp_path / "group" / "run")
    assert shown == pytest.approx({step: wanted[step] for step in (1, 9, 10, 20)})
    assert run.data.metrics["summary/accuracy"] == pytest.approx(summary["accuracy"])


# Weights & Biases.


def records_of(file: Path) -> Iterator[Any]:
    """What wandb wrote offline: protocol buffers in the log format of LevelDB, blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


@pytest.mark.slow
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = needs.package("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    summary = stopped_and_resumed(tmp_path / "group" / "run", "wandb:mine")
    wandb.teardown()
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)
    records = [list(records_of(file)) for file in files]
    runs = [record.run for part in records for record in part if record.HasField("run")]
    assert len(files) == 2 and len({run.run_id for run in runs}) == 1  # `wandb sync` makes one run of them
    assert (runs[0].project, runs[0].display_name, runs[0].run_group) == ("mine", "run", "group")
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["every"] == 4 and config["recipe"] == "digits"
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for part in records
        for record in part
        if record.HasField("history")
    ]
    shown = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    wanted = losses(tmp_path / "group" / "run")
    assert shown == pytest.approx({step: wanted[step] for step in (1, 9, 10, 20)})
    finals = {
        "/".join(item.nested_key) or item.key: json.loads(item.value_json)
        for record in records[-1]
        if record.HasField("summary")
        for item in record.summary.update
    }
    assert finals["summary/accuracy"] == pytest.approx(summary["accuracy"])


# Trackio.


@pytest.mark.slow
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for module in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)  # it reads the variable when it is loaded
    needs.package("trackio", "Trackio")
    import sqlite3

    summary = stopped_and_resumed(tmp_path / "group" / "run", "trackio:mine")
    assert not capsys.readouterr().out  # what it prints is not in the way of `--json`
    with sqlite3.connect(tmp_path / "trackio" / "mine.db") as database:
        rows = database.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
        configs = [json.loads(text) for (text,) in database.execute("select config from configs")]
    assert {name for _, name, _, _ in rows} == {"group/run"} and len({run for run, *_ in rows}) == 1
    found = [(step, json.loads(text)) for _, _, step, text in rows]
    shown = {step: values["train/loss"] for step, values in found if "train/loss" in values}
    wanted = losses(tmp_path / "group" / "run")
    assert shown == pytest.approx({step: wanted[step] for step in (1, 9, 10, 20)})
    assert configs[0]["every"] == 4 and configs[0]["_Group"] == "group"
    assert found[-1][1]["summary/accuracy"] == pytest.approx(summary["accuracy"])
