"""`thinwire plot`: what runs reached and sent over their settings."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from test_report import _write_run as write_run
from thinwire.base.errors import ConfigError
from thinwire.cli import main
from thinwire.report import read_runs
from thinwire.report.plots import _curves, _grids, places


@pytest.fixture
def batches(tmp_path: Path) -> Path:
    """Two methods at three batch sizes, two seeds each."""
    for seed in (0, 1):
        for batch in (32, 128, 512):
            for method, slow in (("allreduce", 8_000_000), ("ab", 80_000)):
                more: dict[str, Any] = {"batch": batch, "steps": 100, "nodes": [[0], [1]]}
                place = tmp_path / f"{method}-{batch}-{seed}"
                write_run(place, method, seed, slow=slow, accuracy=0.99 - batch / 10_000 + seed / 100, **more)
    return tmp_path


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    for every in (1, 4):
        for overlap in (0, 1, 4):
            config = {"every": every, "overlap": overlap, "wire": "bf16"}
            if overlap <= every:
                write_run(tmp_path / f"{every}-{overlap}", "daso", 0, slow=10**7 // every, accuracy=0.9, config=config)
    return tmp_path


def test_curves_are_means_over_seeds(batches: Path) -> None:
    found = places(read_runs(batches), ["batch"], ["accuracy", "share", "bytes", "compression", "seconds"])
    assert list(found) == ["allreduce", "ab"]
    assert [place for (place,) in found["ab"]] == [32, 128, 512]
    cell = found["ab"][(128.0,)]
    assert cell["accuracy"].mean == pytest.approx(0.99 - 0.0128 + 0.005)
    assert cell["accuracy"].std == pytest.approx(0.01 / 2**0.5) and cell["accuracy"].seeds == 2
    assert cell["share"].mean == pytest.approx(0.01) and cell["bytes"].mean == pytest.approx(0.08)
    assert cell["compression"].mean == 2.0 and cell["seconds"].mean == 12.0


def test_what_changes_with_a_size_does_not_break_its_curve(tmp_path: Path) -> None:
    for batch in (32, 64):
        config, more = {"total_steps": 6400 // batch}, {"batch": batch, "length": 6400 // batch, "steps": 6400 // batch}
        write_run(tmp_path / str(batch), "ab", 0, slow=10, accuracy=0.9, config=config, **more)
    assert {over: len(places(read_runs(tmp_path), [over], ["accuracy"])) for over in ("batch", "steps")} == {
        "batch": 1,
        "steps": 1,
    }


def test_two_settings_make_a_grid_and_leave_the_label(grid: Path) -> None:
    found = places(read_runs(grid), ["every", "overlap"], ["accuracy", "bytes"])
    assert list(found) == ["daso"]
    assert list(found["daso"]) == [(1, 0), (1, 1), (4, 0), (4, 1), (4, 4)]
    assert found["daso"][(4.0, 1.0)]["bytes"].mean == pytest.approx(2.5)


def test_a_grid_of_figures_that_no_run_has_is_empty(tmp_path: Path) -> None:
    for every in (1, 4):
        more = {"config": {"every": every, "overlap": 0}, "traffic_vs_allreduce_fp32": None}  # one worker
        write_run(tmp_path / str(every), "daso", 0, slow=0, accuracy=float("nan"), **more)
    words = ["plot", str(tmp_path), "--over", "every,overlap", "--out", str(tmp_path / "grid.png")]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "grid.png").is_file()


def test_a_method_that_sent_nothing_is_on_the_axis(batches: Path) -> None:
    runs = read_runs(batches)
    panels = _curves(places(runs, ["batch"], ["bytes"]), "batch", ["bytes"], runs).axes
    assert [axes.get_yscale() for axes in panels] == ["log"]
    write_run(batches / "none", "topk", 0, slow=0, accuracy=0.9, batch=32)
    runs = read_runs(batches)
    panels = _curves(places(runs, ["batch"], ["bytes"]), "batch", ["bytes"], runs).axes
    assert [axes.get_yscale() for axes in panels] == ["linear"]


def test_figures_that_are_all_the_same_can_be_read(grid: Path) -> None:
    runs = read_runs(grid)
    (axes,) = _grids(places(runs, ["every", "overlap"], ["accuracy"]), ["every", "overlap"], ["accuracy"], runs).axes
    assert {text.get_color() for text in axes.texts} == {"white"}  # on dark cells


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_pictures_are_of_the_kind_that_the_name_says(batches: Path, ending: str) -> None:
    out = batches / f"figure.{ending}"
    words = ["plot", str(batches), "--over", "batch", "--show", "accuracy,compression", "--out", str(out)]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    assert out.read_bytes().startswith(starts[ending]) and f"picture: {out}" in result.output
    again = CliRunner().invoke(main, words)
    assert again.exit_code == 2 and "exists; give another" in again.output
    assert CliRunner().invoke(main, [*words, "--overwrite"]).exit_code == 0


def test_a_grid_is_drawn_and_printed(grid: Path) -> None:
    words = ["plot", str(grid), "--over", "every,overlap", "--out", str(grid / "grid.png"), "--json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.output)
    assert len(rows) == 5 and rows[0]["every"] == 1 and rows[0]["accuracy"]["mean"] == 0.9
    assert (grid / "grid.png").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--over", "warmth", "--out", "a.png"], "no run has warmth, choose from: batch"),
        (["--over", "batch", "--show", "speed", "--out", "a.png"], "unknown figure 'speed'"),
        (["--over", "batch,lr,steps", "--out", "a.png"], "must be one or two settings"),
        (["--over", "batch", "--out", "a.txt"], "must end in one of: .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_drawn_is_said(batches: Path, words: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["plot", str(batches), *words])
    assert result.exit_code == 2
    assert said in result.output.replace("\n", " "), result.output


def test_settings_of_no_run_are_refused(grid: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run has outer, choose from: .*every.*overlap"):
        places(read_runs(grid), ["outer"], ["bytes"])
