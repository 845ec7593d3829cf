"""`thinwire run --dry-run`: one real step, what the run would be, and nothing left behind."""

import json
import math
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from standins import folder_for
from thinwire.cli import main

SETTINGS = ["--steps", "20", "--set", "every=8"]
OWN = """
from torch import nn
from thinwire.experiments import vgg16_bn
from thinwire.recipes import digits

def narrow():
    return vgg16_bn(width=0.125).replace(batch=8, steps=6, epochs=2)

def many():
    return small().replace(batch=160)

def small():
    return digits().replace(batch=64, steps=6)

def lost():
    class Lost(nn.Linear):
        def forward(self, x):
            return super().forward(x.flatten(1)) / 0

    return narrow().replace(model=lambda source: Lost(3072, 10), clip=None)
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    """A folder for everything, temporary ones too: all that is left would be seen there."""
    (tmp_path / "place").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "place"))
    return tmp_path / "place"


def thinwire(*words, expect=0) -> str:
    """What it prints, without what it says beside it."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == expect, result.output
    return result.stdout if expect == 0 else result.output


@pytest.mark.slow
def test_real_workers_take_a_step_and_the_rest_is_planned(place):
    words = ["run", "digits", "--method", "ab-paper", *SETTINGS, "--workers", 2, "--out", place / "mine"]
    told = json.loads(thinwire(*words, "--dry-run", "--json"))
    assert not [*place.glob("thinwire*"), *place.glob("mine")]
    plan = json.loads(thinwire("plan", "digits", "--methods", "ab-paper", *SETTINGS, "--json", "--compute", "1s"))
    (row,) = plan["methods"]
    traffic, step, run = told["traffic"], told["step"], told["run"]
    for name in ("slow_bytes", "slow_bytes_range", "slow_bytes_per_step", "traffic_vs_allreduce_fp32"):
        assert traffic[name] == row[name], name
    steps = {phase["phase"]: phase["steps"] for phase in traffic["phases"] if phase["steps"]}
    assert steps == row["steps_by_phase"] and sum(steps.values()) == run["steps"] == 20
    assert sum(phase["slow_bytes"] for phase in traffic["phases"]) == traffic["slow_bytes"]
    assert step["finite"] and len(step["losses"]) == 2 and step["loss"] == pytest.approx(math.log(10), rel=0.2)
    assert len(set(step["losses"])) == 2, "each worker has examples of its own"
    assert all(seconds > 0 for seconds in step["seconds"].values())
    assert run["settings"] == {"total_steps": 20, "every": 8.0}
    assert run["batch_per_worker"] == [32] and run["groups"] == run["nodes"] == [[0], [1]]
    memory = told["memory"]
    assert memory["state_bytes"] == row["memory_bytes"] and memory["activation_bytes"] > 0
    becomes = {weight["layer"]: weight["becomes"] for weight in told["layers"]["weights"]}
    assert becomes["features.0"] == "full: first layer" and becomes["head"] == "full: last layer"
    assert set(becomes.values()) == {"factored", "full: first layer", "full: last layer"}


def held(place: Path) -> dict[Path, bytes | None]:
    """Without what torch keeps for itself."""
    found = [*place.glob("mine/**/*"), *place.glob("thinwire*")]
    return {path: path.read_bytes() if path.is_file() else None for path in found}


def test_it_reads_well_and_leaves_a_run_alone(place):
    """The step is the run's own first one, and the folder of a run that is there stays as it is."""
    out = place / "mine"
    words = ["run", "digits", "--method", "allreduce", "--workers", 1, "--steps", 1, "--out", out, "--quiet"]
    thinwire(*words, "--no-model")
    before = held(place)
    records = map(json.loads, (out / "records.jsonl").read_text().splitlines())
    first = next(record for record in records if record["kind"] == "step")
    told = thinwire(*words, "--dry-run")
    assert held(place) == before
    assert max(map(len, told.splitlines())) <= 100
    for text in (
        "digits: a small CNN",
        "allreduce",
        "1, so nothing is sent",
        "1,257 to train on, 540 held out",
        "1 step in 30 epochs, 0.0509 passes over this data",
        "AdamW, lr 0.003",
        "256 × 10",
        "226,794",
        "holds a run and would be refused; --overwrite replaces it",
        f"{first['loss']:.4f}",
    ):
        assert text in " ".join(told.split()), text
    assert "nothing would be trained" in " ".join(thinwire(*words, "--dry-run", "--resume").split())
    assert held(place) == before


def test_errors_are_those_of_a_run(tmp_path):
    run = ["run", "vgg16bn-cifar10", "--method", "ab-paper"]
    for words in (
        [*run],
        [*run, "--data", tmp_path / "nowhere"],
        ["run", "digits", "--method", "ab-paper", "--set", "warmpu=3"],
        ["run", "digits", "--method", "ab-paper", "--workers", 65],
    ):
        assert thinwire(*words, "--dry-run", expect=2) == thinwire(*words, expect=2)


def test_a_loss_that_is_no_number_is_said_loudly(tmp_path, caplog):
    own = tmp_path / "own.py"
    own.write_text(OWN)
    words = ["--method", "allreduce", "--workers", 1, "--data", folder_for("cifar10", tmp_path), "--dry-run"]
    assert "THE LOSS IS NOT FINITE" in thinwire("run", f"{own}:lost", *words, expect=1)
    caplog.clear()
    told = json.loads(thinwire("run", f"{own}:narrow", *words, "--json"))
    assert (told["run"]["epochs"], told["run"]["passes"]) == (2, 0.48)
    assert [record.message for record in caplog.records] == [
        "6 steps of 8 examples are 0.48 passes over this data of 100, not 2 epochs; "
        "for those give `--steps 25`, or replace(steps=25) in a recipe of your own"
    ]
    assert told["run"]["data"] == {"train": 100, "validation": None, "heldout": 20}
    assert told["run"]["precision"] == "fp32" and told["run"]["autocast_on_gpu"]
    assert [weight["becomes"] for weight in told["layers"]["weights"]] == [None] * 16


def test_a_large_batch_is_cut_on_a_cpu(tmp_path):
    """Examples show nothing new beyond some; what is kept for the backward pass is told of all of them."""
    own = tmp_path / "own.py"
    own.write_text(OWN)
    words = ["--method", "allreduce", "--workers", 1, "--dry-run"]
    few, many = (json.loads(thinwire("run", f"{own}:{name}", *words, "--json")) for name in ("small", "many"))
    assert few["step"]["examples"] == many["step"]["examples"] == [64]
    assert many["run"]["batch_per_worker"] == [160] and many["step"]["finite"]
    assert many["memory"]["activation_bytes"] == few["memory"]["activation_bytes"] * 160 // 64
    told = " ".join(thinwire("run", f"{own}:many", *words).split())
    assert "taken 64 of 160 examples per worker" in told
    assert "examples per worker" not in thinwire("run", f"{own}:small", *words)


def test_a_cpu_computes_in_fp32_and_says_so_once(tmp_path, caplog):
    caplog.set_level("INFO", "thinwire")
    own, out = tmp_path / "own.py", tmp_path / "out"
    own.write_text(OWN)
    words = ["--method", "allreduce", "--workers", 1, "--data", folder_for("cifar10", tmp_path), "--out", out]
    thinwire("run", f"{own}:narrow", *words, "--no-model")
    said = [record.message for record in caplog.records if "fp32" in record.message]
    assert said == ["computing in fp32: bf16 autocast is for GPUs, many CPUs emulate it"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["precision"] == "fp32" and summary["identity"]["autocast"]
    caplog.clear()
    thinwire("run", f"{own}:small", "--method", "allreduce", "--workers", 1, "--out", tmp_path / "small", "--no-model")
    assert not [record.message for record in caplog.records if "fp32" in record.message]
