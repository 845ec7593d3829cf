"""Thinned-out records: no spike is lost, means are those of all steps, and long runs are read quickly."""

import json
import math
import random
import resource
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest

from pages import add_steps, page_of, write_run
from thinwire.report.records import Block, read_thinned

STEPS = 5003


def _write(path: Path, losses: list[float], **more) -> Path:
    lines = ({"kind": "step", "step": i, "phase": "train", "loss": loss, **more} for i, loss in enumerate(losses))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_long_records_are_thinned_out_evenly_to_their_end(tmp_path):
    thin = read_thinned(_write(tmp_path / "records.jsonl", [1.0] * STEPS), 500)
    steps = [record["step"] for record in thin.of("step")]
    assert 250 <= len(steps) <= 501 and steps[-1] == STEPS - 1 and thin.counts == {"step": STEPS}
    assert len({b - a for a, b in pairwise(steps[:-1])}) == 1 and thin.problems == []


def test_means_are_those_of_all_steps_and_a_spike_is_kept(tmp_path):
    random.seed(0)
    losses = [2.0 / (1 + i / 500) * random.uniform(0.9, 1.1) for i in range(STEPS)]
    losses[3210] = 40.0
    thin = read_thinned(_write(tmp_path / "records.jsonl", losses, lr=1e-5), 300)
    ends = [point.record["step"] + 1 for point in thin.points]
    for start, end, point in zip([0, *ends], ends, thin.points, strict=False):
        assert point.mean == pytest.approx(fmean(losses[start:end]), abs=2e-6)
    assert [(record["step"], record["loss"]) for record in thin.spikes] == [(3210, 40.0)]


def test_losses_are_read_without_parsing_as_they_would_be_by_it(tmp_path):
    random.seed(1)
    plain = [0.0, 1.5, 3, -2.25, 12.125, 999.99999, 0.1, 1e22, 1e-05, 1.23456789e-07, math.inf, -math.inf, math.nan]
    losses = [*plain, *(random.random() * 10 ** random.randint(-8, 6) for _ in range(2000)), *plain[::-1]]
    for more in ({}, {"lr": 0.001, "slow_bytes": 12}, {"lr": 3e-05}):
        _, found = Block(_write(tmp_path / "records.jsonl", losses, **more).read_bytes()).losses()
        assert found.tolist() == pytest.approx(losses, rel=1e-5, abs=2e-6, nan_ok=True)


def test_lines_without_a_loss_and_other_kinds_between_them(tmp_path):
    lines = [{"kind": "step", "step": i} | ({"loss": i / 10} if i % 7 else {}) for i in range(100)]
    lines.insert(50, {"kind": "evaluation", "step": 49, "model": "world", "accuracy": 0.5, "loss": 99.0})
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')
    thin = read_thinned(path, 500)
    assert [point.mean for point in thin.points] == [i / 10 if i % 7 else None for i in range(100)]
    assert thin.counts == {"evaluation": 1, "step": 100}
    assert thin.problems == ["the loss of 15 of 100 steps is missing or not finite; the others are shown"]


def test_extremes_of_the_metric_are_kept(tmp_path):
    values = [0.9] * 2000
    values[777], values[1234] = 0.1, 0.99
    lines = [{"kind": "evaluation", "step": i, "model": "world", "accuracy": value} for i, value in enumerate(values)]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = read_thinned(tmp_path / "records.jsonl", 100, {"evaluation": "accuracy"}).of("evaluation")
    assert {0, 777, 1234, 1999} <= {record["step"] for record in kept} and len(kept) <= 110


def test_broken_lines_are_named(tmp_path):
    path = _write(tmp_path / "records.jsonl", [1.0] * 10)
    lines = path.read_text().splitlines(keepends=True)
    lines[3] = '{"kind": "step", "step": \n'
    lines[5] = '{"kind": "step", "step": "x", "loss"}\n'
    path.write_text("".join(lines))
    thin = read_thinned(path)
    assert "is damaged in line 4, 6; the other lines are shown" in thin.problems[0] and len(thin.points) == 8


@pytest.mark.slow
def test_many_long_runs_make_a_small_page_in_little_memory(tmp_path):
    """100 runs, a tenth of them of 100,000 records; `benchmarks/report_size.py` has the seconds."""
    write_run(tmp_path / "0", "localsgd", 0, slow=10**9, accuracy=0.9)
    add_steps(tmp_path / "0", 100_000, 10**9)
    lines = (tmp_path / "0" / "records.jsonl").read_text().splitlines(keepends=True)
    for seed in range(1, 100):
        write_run(tmp_path / f"{seed}", "localsgd", seed, slow=10**9, accuracy=0.9)
        place = tmp_path / f"{seed}" / "records.jsonl"
        place.unlink()
        if seed < 10:
            place.hardlink_to(tmp_path / "0" / "records.jsonl")
        else:
            place.write_text("".join(lines[:1200]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    page = page_of(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB
    assert page.stat().st_size < 5_000_000
