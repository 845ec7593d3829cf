"""The panels of `report.html`, each against the files it was made from, and the figures for papers."""

import json
from pathlib import Path
from statistics import fmean, stdev

import pytest
from click.testing import CliRunner

import needs
from pages import (
    HOSTILE,
    add_panels,
    add_records,
    data_of,
    page_of,
    said_in,
    write_bench,
    write_comparison,
    write_run,
)
from thinwire.cli import main
from thinwire.commands.report import page_of_bench
from thinwire.report.page.summary import front

ACROSS = ("steps", "bytes", "time")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_comparison(tmp_path)


def _run(data: dict, name: str) -> dict:
    return next(run for run in data["runs"] if run["name"] == name)


# Metric against bytes.


def test_points_are_means_over_seeds_and_the_front_is_marked(folder):
    (picture,) = data_of(page_of(folder))["pareto"]
    assert (picture["metric"], picture["better"], picture["left_out"]) == ("accuracy", "high", 0)
    for point in picture["points"]:
        own = [json.loads(path.read_text()) for path in folder.glob(f"{point['label']}-seed*/summary.json")]
        sent = [one["traffic"]["slow_bytes"] - 100 for one in own]
        assert point["bytes"] == pytest.approx(fmean(sent)) and point["seeds"] == 2
        assert point["y"] == pytest.approx(fmean(one["accuracy"] for one in own), rel=1e-4)
        assert point["std"] == pytest.approx(stdev(one["accuracy"] for one in own), rel=1e-4, abs=1e-9)
    assert [point["label"] for point in picture["points"]] == ["ab", "localsgd", "allreduce"]
    best = max(point["y"] for point in picture["points"][:2])
    assert [point["front"] for point in picture["points"]] == [True, True, picture["points"][2]["y"] > best]


def test_of_equal_points_none_but_the_first_is_on_the_front():
    points = [{"bytes": b, "y": y} for b, y in ((1, 0.5), (1, 0.6), (2, 0.6), (3, 0.7), (4, 0.65))]
    assert [(p["bytes"], p["y"]) for p in front(points, "accuracy")] == [(1, 0.6), (3, 0.7)]
    assert [(p["bytes"], p["y"]) for p in front(points, "perplexity")] == [(1, 0.5)]
    assert front(points, "something else") == []


def test_a_method_that_sent_nothing_is_left_out_and_counted(folder):
    write_run(folder / "alone", "daso", 0, slow=0, accuracy=0.9)
    (picture,) = data_of(page_of(folder))["pareto"]
    assert picture["left_out"] == 1 and len(picture["points"]) == 3


# Against which run of all-reduce.


def test_several_folders_are_compared_in_the_table_as_in_the_words(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    write_run(other / "diloco-seed0", "diloco", 0, slow=30_000, accuracy=0.97, steps=100)
    write_run(other / "ab-seed5", "ab", 5, slow=30_000, accuracy=0.97, steps=100)
    result = CliRunner().invoke(main, ["report", str(folder), str(other), "--out", str(other / "both")])
    assert result.exit_code == 0, result.output
    data = data_of(other / "both" / "report.html")
    diloco, alone = (
        next(run for run in data["runs"] if run["name"].endswith(name)) for name in ("diloco-seed0", "ab-seed5")
    )
    assert diloco["share"] == 0.03 and diloco["against"] == f"{folder.name}/allreduce-seed0"
    assert any("diloco sent 3.0 % of all-reduce's bytes" in sentence for sentence in data["sentences"])
    assert alone["share"] == 0.9 and alone["against"] is None  # nothing has its seed: estimated


# Links, time, events.


def test_bytes_of_each_link_and_the_kernels_count(tmp_path):
    phases = {"a": {"slow_bytes": 600, "kernel_bytes": 700}, "b": {"slow_bytes": 400, "kernel_bytes": 450}}
    traffic = {"slow_bytes": 1000, "fast_bytes": 3000, "by_purpose": {}, "by_phase": phases}
    time = {"a": {"seconds": 3.0, "compute": 1.5, "wire": 1.0, "decomposition": 0.0, "other": 0.5}}
    write_run(tmp_path / "a", "ab", 0, slow=1, accuracy=0.9, traffic=traffic, time=time | {"b": time["a"]})
    (run,) = data_of(page_of(tmp_path))["runs"]
    assert run["links"] == {"slow link": 1000, "fast link": 3000} and run["kernel"] == 1150
    assert run["seconds"] == {"compute": 3.0, "wire": 2.0, "other": 1.0}


def test_faults_and_restarts_are_on_a_time_line(folder):
    add_records(
        folder / "ab-seed0",
        {"kind": "save", "step": 50, "wall_s": 5.0},
        {"kind": "resume", "step": 50, "lost_steps": 12, "wall_s": 5.0},
        {"kind": "event", "step": 60, "event": "groups", "lost": [1], "came": [], "groups": 3},
        {"kind": "event", "step": 70, "event": "groups", "lost": [], "came": [1], "groups": 4},
        {"kind": "event", "step": 80, "event": "left out", "group": 2, "why": HOSTILE},
    )
    data = data_of(page_of(folder))
    line = _run(data, "ab-seed0")["timeline"]
    assert [(event["step"], event["kind"]) for event in line["events"]] == [
        *((50, "resume"), (60, "lost"), (70, "joined"), (80, "event"))
    ]
    assert line["events"][0]["text"] == "resumed from a save, 12 steps again"
    assert line["events"][1]["text"] == "lost group 1, 3 go on" and HOSTILE in line["events"][3]["text"]
    assert line["saves"] == [50] and line["phases"] == [[0, "train"]] and line["end"] == 100
    assert [run["timeline"] for run in data["runs"] if run["name"] != "ab-seed0"] == [None] * 5


# Layers.


def test_layers_are_those_of_the_records(folder):
    for step in (20, 40, 60):
        layers = {name: {"stability": step / 100, "similarity": 0.5} for name in ("a", "b")}
        spectrum = {"a": [1.0, step / 100, 0.0]}
        add_records(
            folder / "ab-seed0",
            {"kind": "stability", "step": step, "before": step - 20, "layers": layers},
            {"kind": "spectra", "step": step, "layers": spectrum},
            {"kind": "agreement", "step": step, "ratio": 1 + step / 100, "layers": {"a": 1.1}},
        )
    layers = _run(data_of(page_of(folder)), "ab-seed0")["layers"]
    assert layers["stability"]["layers"] == {"a": [0.2, 0.4, 0.6], "b": [0.2, 0.4, 0.6]}
    assert [(one["step"], one["layers"]["a"]) for one in layers["spectra"]] == [
        *((20, [1.0, 0.2, 0.0]), (40, [1.0, 0.4, 0.0]), (60, [1.0, 0.6, 0.0]))
    ]
    assert layers["agrees"]["y"] == [1.2, 1.4, 1.6] and layers["agreement"]["layers"] == {"a": [1.1] * 3}


@pytest.mark.slow
def test_many_layers_stay_small(tmp_path):
    for seed in range(20):
        write_run(tmp_path / f"{seed}", "ab", seed, slow=9, accuracy=0.9, steps=4000)
        names = [f"encoder.layers.{i}.attention" for i in range(300)]
        for step in range(0, 4000, 200):
            layers = {name: {"stability": 0.123456, "similarity": 0.5} for name in names}
            add_records(tmp_path / f"{seed}", {"kind": "stability", "step": step, "before": 0, "layers": layers})
    page = page_of(tmp_path)
    table = data_of(page)["runs"][0]["layers"]["stability"]
    assert table["of"] == 300 and len(table["layers"]) <= 65 and table["steps"][-1] == 3800
    assert page.stat().st_size < 2_000_000


# Netbench.


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    return write_bench(tmp_path)


def test_netbench_ends_with_the_page(bench, capsys):
    page_of_bench(bench, silent=False)
    assert capsys.readouterr().out == f"report: {bench / 'report.html'}\n"
    data = data_of(bench / "report.html")
    (shown,) = data["benches"]
    row = shown["rates"][0]["methods"][1]
    assert (row["label"], row["step_s"], row["planned_s"], row["speedup"], row["wire"]) == ("ab", 0.04, 0.02, 10.0, 0.5)
    assert data["sentences"][0] == "At 100 Mbit/s a step took 40 ms with ab, 10.0 times as fast as all-reduce."
    labels = [run["label"] for run in data["runs"]]
    assert labels == [f"{method} at {rate}" for rate in ("100 Mbit/s", "1 Gbit/s") for method in ("allreduce", "ab")]
    assert [point["label"] for point in data["pareto"][0]["points"]] == ["ab at 100 Mbit/s", "allreduce at 100 Mbit/s"]


def test_report_reads_what_netbench_wrote_wherever_it_was_moved(bench):
    moved = bench.rename(bench.with_name("moved"))
    result = CliRunner().invoke(main, ["report", str(moved)])
    assert result.exit_code == 0 and "ab at 1 Gbit/s" in result.output, result.output
    assert any("times as fast" in text for text in said_in(moved / "report.html"))


def test_a_damaged_netbench_is_named(bench, capsys):
    (bench / "netbench.json").write_text('{"recipe": 3}')
    page_of_bench(bench, silent=False)
    assert "no report: " in (said := capsys.readouterr().err) and "netbench.json` is damaged" in said


# Figures.


def _figures(folder: Path, kind: str) -> set[str]:
    needs.package("matplotlib")
    result = CliRunner().invoke(main, ["report", str(folder), "--figures", kind])
    assert result.exit_code == 0, result.output
    starts = {"png": b"\x89PNG", "svg": b"<?xml"}
    written = list((folder / "figures").iterdir())
    assert all(path.suffix == f".{kind}" and path.read_bytes().startswith(starts[kind]) for path in written)
    return {path.stem for path in written}


def test_charts_are_files_for_a_paper(tmp_path):
    for method, slow in (("allreduce", 100), ("ab", 9)):
        write_run(tmp_path / method, method, 0, slow=slow, accuracy=0.9)
        (tmp_path / method / "records.jsonl").unlink()
    wanted = {
        "pareto",
        "bytes-by-purpose",
        "bytes-by-link",
        *(f"{a}-over-{b}" for a in ("accuracy", "loss") for b in ACROSS),
    }
    assert _figures(tmp_path, "svg") == wanted


@pytest.mark.slow
def test_layers_are_files_for_a_paper(folder):
    add_panels(folder / "ab-seed0", "a")
    layers = {f"{name}-ab-seed0" for name in ("ranks", "stability", "spectra", "agreement")}
    assert {"pareto", "divergence", *layers} <= _figures(folder, "png")
