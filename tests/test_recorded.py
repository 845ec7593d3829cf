"""What runs record for their report: spectra, saves, resumes and their command; none of it changes them."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from pages import data_of
from thinwire.cli import main
from thinwire.factor.stability import POINTS, spectra
from thinwire.report.records import read_records

RUN = ["run", "digits", "--method", "ab", "--steps", "16", "--eval-every", "8", "--no-model"]
RUN += ["--set", "every=4", "--set", "factor_at=8", "--set", "cutoff=0.6"]


def _trained(out: Path, *more: str) -> Path:
    result = CliRunner().invoke(main, [*RUN, "--workers", "1", "--out", str(out), *more])
    assert result.exit_code == 0, result.output
    return out


def test_singular_values_are_those_of_the_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 80), nn.Linear(3, 4), nn.Embedding(9, 9))
    found = spectra(model)
    assert list(found) == ["0", "1"] and len(found["0"]) == POINTS and len(found["1"]) == 3
    sigma = torch.linalg.svdvals(model[0].weight)
    assert (found["0"][0], found["0"][-1]) == (1.0, pytest.approx((sigma[-1] / sigma[0]).item(), rel=1e-3))
    model[0].weight.data[0, 0] = torch.nan
    assert list(spectra(model)) == ["1"]


@pytest.mark.slow
def test_spectra_are_recorded_at_evaluations_and_change_nothing(tmp_path):
    plain, watched = _trained(tmp_path / "plain"), _trained(tmp_path / "watched", "--spectra")
    records = read_records(watched / "records.jsonl", "spectra")
    assert [record["step"] for record in records] == [8, 16]
    ranks = read_records(watched / "records.jsonl", "ranks")[-1]["ranks"]
    last = records[-1]["layers"]
    assert ranks and all(last[name][-1] == 0 < last[name][0] for name in ranks)  # nothing behind the rank
    both = [read_records(place / "records.jsonl", "step", "evaluation") for place in (plain, watched)]
    losses = [[record["loss"] for record in records] for records in both]
    assert losses[0] == losses[1] and len(losses[0]) == 16 + 3


def test_saves_and_resumes_are_recorded(tmp_path):
    out = _trained(tmp_path / "run", "--save-every", "5", "--until", "12")
    lines = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    extra = [{"kind": "step", "step": 13, "loss": 1.0}, {"kind": "step", "step": 14, "loss": 1.0}]  # then it was killed
    (out / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, *extra]))
    _trained(out, "--save-every", "5", "--resume")
    records = read_records(out / "records.jsonl", "save", "resume")
    assert [(record["kind"], record["step"]) for record in records] == [
        *(("save", 5), ("save", 10), ("save", 12), ("resume", 12), ("save", 15))
    ]
    assert records[3]["lost_steps"] == 2
    averages = [record["step"] for record in read_records(out / "records.jsonl", "agreement")]
    assert len(averages) == len(set(averages))
    (run,) = data_of(out / "report.html")["runs"]
    assert run["timeline"]["events"] == [{"step": 12, "kind": "resume", "text": "resumed from a save, 2 steps again"}]


@pytest.mark.slow
def test_the_command_in_a_report_is_the_one_that_was_given(tmp_path):
    more = ["--optimizer", "sgd", "--lr", "0.05", "--rate", "warmup=0.1", "--batch-size", "32"]
    out = _trained(tmp_path / "run", *more)
    (run,) = data_of(out / "report.html")["runs"]
    words = shlex.split(run["command"])
    assert words[:3] == ["thinwire", "run", "digits"] and words[-2:] == ["--workers", "1"]
    assert all(words[words.index(flag) + 1] == value for flag, value in zip(more[::2], more[1::2], strict=True))
    again = CliRunner().invoke(main, [*words[1:], "--out", str(tmp_path / "again"), "--no-model"])
    assert again.exit_code == 0, again.output
    first, second = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "again"))
    assert first["identity"] == second["identity"] and first["accuracy"] == second["accuracy"]
