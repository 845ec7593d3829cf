"""Loggers: what a function sees, on which worker, and that none of them can end a run."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import gang
import small
import thinwire
from thinwire import ConfigError
from thinwire.cli import main
from thinwire.loggers import NAMES, Log, Loggers, TensorBoard, chosen
from thinwire.loggers.log import _is_installed
from thinwire.loggers.trackers import FILE, settings, shown
from thinwire.recipes import named
from thinwire.train import fit

FACTORS = thinwire.AB(total_steps=40, warmup=4, every=4, factor_at=16, cutoff=0.5, group_size=1)
# As docs/logging.md has them.
STEP = "kind step phase loss lr slow_bytes evaluate_bytes fast_bytes wire_s wall_s"
NUMBERS = "slow_bytes wire_share traffic_vs_allreduce_fp32"
EVALUATION = (
    "kind step phase model loss accuracy slow_bytes evaluate_bytes fast_bytes wire_s wall_s ranks trainable time"
)
BEGIN = "kind name group out step resumed config phases"
END = "kind step status summary"


def trained(out: Path, *loggers: Any, steps: int = 12, **more: Any) -> dict[str, Any]:
    recipe = named("digits", steps=steps, eval_every=6)
    return fit(recipe, thinwire.LocalSGD(every=4), out=out, model=False, loggers=loggers, **more)


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


def untimed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name not in ("wall_s", "time")} for record in records]


def on_two_workers(rank: int, out: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    summary = fit(named("digits", steps=40, eval_every=20), FACTORS, out=out, model=False, loggers=[seen.append])
    return seen, summary


@pytest.mark.slow
def test_a_function_sees_every_record_on_rank_0_alone(tmp_path: Path) -> None:
    (seen, summary), (others, _) = gang.run(on_two_workers, 2, tmp_path / "group" / "run")
    assert not others
    first, *between, last = seen
    assert set(first) == set(BEGIN.split()) and set(last) == set(END.split())
    assert (first["name"], first["group"], first["step"], first["resumed"]) == ("run", "group", 0, False)
    assert (
        first["config"]["recipe"] == "digits" and first["config"]["every"] == 4 and first["config"]["world_size"] == 2
    )
    assert (last["status"], last["step"], last["summary"]) == ("finished", 40, summary)
    written = lines(tmp_path / "group" / "run")
    assert [{name: record[name] for name in line} for record, line in zip(between, written, strict=True)] == written
    for record in between:
        more = {"mean_rank"} & set(record)
        if record["kind"] == "step":
            assert set(record) - more == set(f"{STEP} {NUMBERS}".split())
        if record["kind"] == "evaluation":
            assert set(record) - more == set(f"{EVALUATION} {NUMBERS}".split())
        if record["kind"] in ("step", "evaluation"):
            assert record["phase"] in first["phases"] and 0 <= record["wire_share"] <= 1
    steps = [record for record in between if record["kind"] == "step"]
    assert "mean_rank" not in steps[0] and steps[-1]["mean_rank"] > 0
    # Nodes send the same here, so that the mean over nodes, which the summary has, is this node's.
    final = [record for record in between if record["kind"] == "evaluation"][-1]["traffic_vs_allreduce_fp32"]
    assert final == pytest.approx(summary["traffic_vs_allreduce_fp32"], rel=0.02)


def test_records_are_the_same_with_loggers_and_without(tmp_path: Path) -> None:
    trained(tmp_path / "without", steps=6)
    trained(tmp_path / "with", lambda record: record.clear(), steps=6)
    assert untimed(lines(tmp_path / "with")) == untimed(lines(tmp_path / "without"))


def test_a_logger_that_raises_is_left_out_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[dict[str, Any]] = []

    def full_disk(record: dict[str, Any]) -> None:
        if record.get("step", 0) >= 3:
            raise OSError(28, "No space left on device")

    with caplog.at_level(logging.WARNING, "thinwire"):
        assert trained(tmp_path, full_disk, seen.append)["steps"] == 12
    warned = [record.getMessage() for record in caplog.records if "full_disk" in record.getMessage()]
    assert len(warned) == 1 and "at step 3" in warned[0] and "training goes on: No space left" in warned[0]
    assert seen[-1]["kind"] == "end" and sum(record["kind"] == "step" for record in seen) == 12


def test_one_that_cannot_begin_ends_the_run_before_its_first_step(tmp_path: Path) -> None:
    seen: list[str] = []

    class Unreachable(TensorBoard):
        def begin(self, record: dict[str, Any]) -> None:
            raise ConnectionError("no route to host")

    loggers = Loggers([lambda record: seen.append(record["kind"]), Unreachable()])
    with pytest.raises(ConfigError, match=r"tensorboard could not begin: ConnectionError: no route to host; leave it"):
        loggers.begin(step=0)
    assert seen == ["begin", "end"]


def test_a_stopped_run_is_resumed_where_it_was(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    trained(tmp_path, seen.append, until=4)
    assert seen[-1]["status"] == "stopped" and seen[-1]["summary"]["stopped_at"] == 4
    seen.clear()
    trained(tmp_path, seen.append, resume=True)
    assert seen[0]["resumed"] and seen[0]["step"] == 4 and seen[-1]["status"] == "finished"
    assert [record["step"] for record in seen if record["kind"] == "step"] == list(range(5, 13))


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_one_sentence_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thinwire.loggers.log.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"needs the package {name}: pip install 'thinwire\[{name}\]'$"):
        trained(tmp_path / "run", name)
    words = ["run", "digits", "--method", "localsgd", "--log", name, "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and f"thinwire[{name}]" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_folder_is_not_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_some_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not _is_installed("of_some_tracker") and _is_installed("thinwire")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["tensorbord"], "unknown logger 'tensorbord', choose from: mlflow, tensorboard, trackio, wandb"),
        ("tensorboard", "must be a list"),
        (print, "must be a list"),
        ([3], "must be a function of one record"),
    ],
)
def test_what_is_no_logger_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(given)


def test_trackers_take_a_place_and_every_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.loggers.log._is_installed", lambda package: True)
    found: list[Any] = chosen(["tensorboard:a:b, wandb", print], every=3)
    assert [logger.name for logger in found[:2]] == ["tensorboard", "wandb"] and found[2] is print
    assert [(logger.place, logger.every) for logger in found[:2]] == [("a:b", 3), (None, 3)]
    with pytest.raises(ConfigError, match="`every`=0 must be"):
        TensorBoard(every=0)


def test_trackers_show_one_step_in_ten_and_all_else() -> None:
    written: list[tuple[int, dict[str, float]]] = []

    class Tracker(TensorBoard):
        def begin(self, record: dict[str, Any]) -> None: ...

        def write(self, step: int, values: dict[str, float]) -> None:
            written.append((step, values))

    tracker = Tracker()
    tracker({"kind": "begin"})
    for step in range(1, 31):
        tracker({"kind": "step", "step": step, "phase": "local", "loss": 1.0, "slow_bytes": 8})
    tracker({"kind": "ranks", "step": 30, "ranks": {"head": 3}})
    tracker({"kind": "event", "step": 30, "event": "lost"})
    assert [step for step, _ in written] == [1, 10, 20, 30, 30]
    assert written[0][1] == {"train/loss": 1.0, "wire/slow_bytes": 8} and written[-1][1] == {"ranks/head": 3}
    record = {"kind": "evaluation", "step": 30, "model": "merged", "loss": 0.5, "slow_bytes": 8, "time": {}}
    assert shown(record) == {"evaluation/loss": 0.5}
    assert settings({"config": {"lr": 0.1}, "phases": ["local", "finished"]}) == {
        "lr": 0.1,
        "phases": "local, finished",
    }


def by_hand(rank: int, out: Path) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    model = small.net()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, thinwire.LocalSGD(every=2, group_size=1))
    with Log(replica, [seen.append], out=out, config={"lr": 0.05}) as log:
        for number in range(4):
            loss = small.step(replica, optimizer, rank, number)
            log.step(loss=loss)
        log.evaluation(accuracy=0.5)
        log.close({"accuracy": 0.5})
    replica.finish()
    return [*seen, replica.numbers()]


def test_a_loop_of_ones_own_logs_by_hand(tmp_path: Path) -> None:
    (begin, *between, evaluation, end, numbers), others = gang.run(by_hand, 2, tmp_path / "mine")
    assert len(others) == 1
    assert begin["name"] == "mine" and begin["config"]["method"] == "localsgd" and begin["config"]["lr"] == 0.05
    assert [record["step"] for record in between] == [1, 2, 3, 4]
    assert all(type(record["loss"]) is float and set(NUMBERS.split()) < set(record) for record in between)
    assert evaluation["kind"] == "evaluation" and evaluation["accuracy"] == 0.5
    assert end["status"] == "finished" and end["summary"] == {"accuracy": 0.5}
    assert "finished" in begin["phases"] and not any("phase" in name for name in numbers)
    assert 0 < numbers["wire_share"] < 1


def test_a_loop_that_raises_ends_as_failed(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    model = small.net()
    replica = thinwire.attach(model, small.sgd(model), thinwire.AllReduce())
    with pytest.raises(ZeroDivisionError), Log(replica, [seen.append], out=tmp_path):
        raise ZeroDivisionError
    assert seen[-1]["status"] == "failed"
    replica.detach()


def test_the_share_of_waiting_is_of_the_time_so_far() -> None:
    model = small.net()
    optimizer = small.sgd(model)
    replica = thinwire.attach(model, optimizer, thinwire.AllReduce())
    small.step(replica, optimizer, 0, 0)
    assert replica.numbers()["wire_share"] == 0 and "traffic_vs_allreduce_fp32" not in replica.numbers()
    split = replica.traffic.split
    assert replica.traffic.times.elapsed >= sum(phase["seconds"] for phase in split.values()) > 0
    assert all(isinstance(value, int | float) for value in replica.numbers().values())
    replica.detach()
    assert not torch.distributed.is_initialized()


# Workers whose rank changes.


class Ranked:
    """What a `Log` sees of a replica."""

    phase, phases = "local", ("local", "finished")

    def __init__(self, rank: int) -> None:
        self.topology = SimpleNamespace(rank=rank, world_size=2)
        self.step = 0

    def describe(self) -> dict[str, Any]:
        return {"method": "localsgd", "config": {"every": 4}}

    def numbers(self) -> dict[str, float]:
        return {}


def test_the_worker_that_becomes_rank_0_goes_on_in_the_same_run(tmp_path: Path) -> None:
    replica, seen = Ranked(1), []
    (tmp_path / FILE).write_text('{"wandb": "ab12"}')
    with Log(replica, [seen.append], out=tmp_path) as log:  # type: ignore[arg-type]
        log.step(loss=1.0)
        assert not seen
        replica.topology.rank, replica.step = 0, 7
        log.step(loss=0.5)
        assert [record["kind"] for record in seen] == ["begin", "step"] and seen[0]["resumed"]
        assert seen[0]["step"] == seen[1]["step"] == 7 and seen[1]["loss"] == 0.5
        replica.topology.rank = 1
        log.step(loss=0.4)
        log.evaluation(accuracy=0.5)
        assert len(seen) == 2
        replica.topology.rank = 0
        log.step(loss=0.3)
    assert [record["kind"] for record in seen] == ["begin", "step", "step", "end"]
    assert (tmp_path / FILE).is_file(), "the trackers' ids belong to the same run"


def test_rank_0_that_is_so_no_more_says_nothing_even_at_the_end(tmp_path: Path) -> None:
    replica, seen = Ranked(0), []
    with Log(replica, [seen.append], out=tmp_path) as log:  # type: ignore[arg-type]
        replica.topology.rank = 1
        log.step(loss=1.0)
    replica.topology.rank = 0
    log.step(loss=1.0)
    assert [record["kind"] for record in seen] == ["begin"]


def test_a_logger_that_cannot_go_on_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def unreachable(record: dict[str, Any]) -> None:
        raise ConnectionError("no route to host")

    replica = Ranked(1)
    log = Log(replica, [unreachable], out=tmp_path)  # type: ignore[arg-type]
    replica.topology.rank = 0
    with caplog.at_level(logging.WARNING, "thinwire"):
        log.step(loss=1.0)
        log.step(loss=1.0)
    (warned,) = [record.getMessage() for record in caplog.records]
    assert warned.endswith("training does: ConnectionError: no route to host")
