import io
import json
import re

import pytest
from click.testing import CliRunner
from rich.console import Console

from thinwire.base.errors import ConfigError
from thinwire.cli import main
from thinwire.report import compare, draw, plots, read_run, read_runs, table
from thinwire.report.layer_plots import draw_ranks
from thinwire.report.tables import best_epoch, figure, size, wide_console


def _write_run(
    folder, method, seed, *, slow, accuracy, metric="accuracy", evaluate=100, config=None, optimizer=None, **more
):
    folder.mkdir(parents=True)
    name, rate = optimizer or ("AdamW", 0.003)
    summary = {
        "recipe": "digits",
        "method": method,
        "config": config or {"wire": "fp32"},
        "optimizer": name,
        "lr": rate,
        "usual_optimizer": "AdamW",
        "usual_lr": 0.003,
        "seed": seed,
        "metric": metric,
        metric: accuracy,
        f"{metric}_before_truncation": accuracy,
        "traffic": {"slow_bytes": slow + evaluate, "by_purpose": {"evaluate": {"slow_bytes": evaluate}}},
        "traffic_vs_allreduce_fp32": 0.9,
        "traffic_vs_ideal_fp32": 1.2,
        "compression": 2.0,
        "wall_s": 12.0,
        **more,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    with (folder / "records.jsonl").open("w") as file:
        for i in range(1, 11):
            record = {"kind": "evaluation", "step": 10 * i, "phase": "train", "model": "world"}
            record |= {metric: accuracy * (1 - 0.5**i), "loss": 0.5**i}
            record |= {"slow_bytes": slow * i // 10 + evaluate, "evaluate_bytes": evaluate, "ranks": {}}
            record |= {"wall_s": 1.2 * i}
            file.write(json.dumps(record) + "\n")
        file.write(json.dumps(record | {"model": "finished"}) + "\n")


@pytest.fixture
def folder(tmp_path):
    for seed, whole in ((0, 1000_000), (1, 2000_000)):
        _write_run(tmp_path / f"allreduce-seed{seed}", "allreduce", seed, slow=whole, accuracy=0.99)
        _write_run(tmp_path / f"ab-paper-seed{seed}", "ab-paper", seed, slow=300_000, accuracy=0.97 + seed / 100)
    return tmp_path


def test_ratios_are_against_the_measured_run_of_the_same_seed(folder):
    baseline, other = compare(read_runs(folder))
    assert (baseline["method"], other["method"]) == ("allreduce", "ab-paper")
    assert baseline["traffic_vs_allreduce_fp32"] == 1.0
    assert other["traffic_vs_allreduce_fp32"] == pytest.approx((0.3 + 0.15) / 2)
    assert other["seeds"] == [0, 1] and other["slow_bytes_mean"] == 300_000
    assert other["accuracy_mean"] == pytest.approx(0.975)
    assert other["accuracy_std"] == pytest.approx(0.01 / 2**0.5)
    assert other["evaluate_bytes_mean"] == 100


def test_without_a_measured_fp32_run_the_reckoned_ratio_stands(tmp_path):
    _write_run(tmp_path / "a", "allreduce", 0, slow=500, accuracy=0.9, config={"wire": "bf16"})
    _write_run(tmp_path / "b", "ab-paper", 0, slow=100, accuracy=0.9)
    assert [row["traffic_vs_allreduce_fp32"] for row in compare(read_runs(tmp_path))] == [0.9, 0.9]


def _labels(folder):
    return [row["label"] for row in compare(read_runs(folder))]


def test_variants_of_a_method_are_rows_of_their_own(tmp_path):
    """In order: the baseline first, then by the size of what differs, whatever folders are called."""
    for wire, slow in (("bf16", 500), ("fp32", 1000)):
        _write_run(tmp_path / wire, "allreduce", 0, slow=slow, accuracy=0.9, config={"wire": wire, "group_size": None})
    for every in (24, 4):
        for seed in (0, 1):
            fields = {"every": every, "warmup": 0.05, "moments": "keep"}
            _write_run(tmp_path / f"l{every}{seed}", "localsgd", seed, slow=1000 // every, accuracy=0.9, config=fields)
    _write_run(tmp_path / "a", "ab-paper", 0, slow=400, accuracy=0.9, config={"wire": "bf16"})
    rows = compare(read_runs(tmp_path))
    assert [(row["method"], row["label"], row["seeds"]) for row in rows] == [
        ("allreduce", "allreduce:wire=fp32", [0]),
        ("allreduce", "allreduce:wire=bf16", [0]),
        ("ab-paper", "ab-paper", [0]),
        ("localsgd", "localsgd:every=4", [0, 1]),
        ("localsgd", "localsgd:every=24", [0, 1]),
    ]
    ratios = [row["traffic_vs_allreduce_fp32"] for row in rows]
    assert ratios[:3] == [1.0, 0.5, 0.4]
    assert ratios[3] == (0.25 + 0.9) / 2  # seed 1 has no measured baseline


def test_a_label_names_every_field_that_differs_as_it_is_typed(tmp_path):
    configs = [
        {"cutoff": 0.2, "keep": ["head*"], "wire": "fp32", "keep_last": True, "group_size": None},
        {"cutoff": 0.2, "keep": [], "wire": "fp32", "keep_last": False, "group_size": 2},
    ]
    for number, config in enumerate(configs):
        _write_run(tmp_path / f"{number}", "ab-paper", 0, slow=9, accuracy=0.9, config=config)
    assert _labels(tmp_path) == [
        "ab-paper:keep=head*,keep_last=true,group_size=none",
        "ab-paper:keep=,keep_last=false,group_size=2",
    ]


def test_the_baseline_has_the_same_steps_and_if_it_can_the_same_layout(tmp_path):
    four, two = [[0], [1], [2], [3]], [[0, 1], [2, 3]]
    for each, nodes, slow in ((1, four, 1000), (2, two, 800)):
        fields = {"config": {"wire": "fp32", "group_size": each}, "nodes": nodes, "steps": 10}
        _write_run(tmp_path / f"all{each}", "allreduce", 0, slow=slow, accuracy=0.9, **fields)
        fields = {"config": {"group_size": each}, "nodes": nodes, "steps": 10}
        _write_run(tmp_path / f"ab{each}", "ab-paper", 0, slow=400, accuracy=0.9, **fields)
    _write_run(tmp_path / "long", "localsgd", 0, slow=400, accuracy=0.9, nodes=four, steps=20)
    ratios = {row["label"]: row["traffic_vs_allreduce_fp32"] for row in compare(read_runs(tmp_path))}
    assert ratios["ab-paper:group_size=1"] == 0.4 and ratios["ab-paper:group_size=2"] == 0.5
    assert ratios["localsgd"] == 0.9  # as it reckoned itself


def test_runs_of_other_sizes_are_not_seeds_of_the_same_thing(tmp_path):
    sizes = {"world_size": 2, "batch": 64, "length": 100}
    for name, other in {"a": {}, "b": {"length": 1000}, "c": {"batch": 128}, "d": {"world_size": 4}}.items():
        _write_run(tmp_path / name, "allreduce", 0, slow=1000, accuracy=0.9, **(sizes | other))
    _write_run(tmp_path / "again", "allreduce", 1, slow=1000, accuracy=0.8, **sizes)
    assert {row["label"]: row["seeds"] for row in compare(read_runs(tmp_path))} == {
        "allreduce, 2 workers, batch 64, 100 steps": [0, 1],
        "allreduce, 2 workers, batch 64, 1,000 steps": [0],
        "allreduce, 2 workers, batch 128, 100 steps": [0],
        "allreduce, 4 workers, batch 64, 100 steps": [0],
    }


def test_a_run_that_diverged_costs_the_others_no_picture(folder):
    _write_run(folder / "nan", "localsgd", 0, slow=1000, accuracy=float("nan"))
    runs = read_runs(folder)
    draw(runs, compare(runs), folder / "comparison.png")
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_another_optimizer_than_the_usual_one_is_in_the_label(tmp_path):
    for seed in (0, 1):
        _write_run(tmp_path / f"usual{seed}", "ab-paper", seed, slow=9, accuracy=0.9)
        _write_run(tmp_path / f"other{seed}", "topk", seed, slow=9, accuracy=0.9, optimizer=("SGD", 0.1))
        _write_run(tmp_path / f"rate{seed}", "onebit", seed, slow=9, accuracy=0.9, optimizer=("AdamW", 0.001))
    assert _labels(tmp_path) == ["ab-paper", "onebit (AdamW, lr 0.001)", "topk (SGD)"]
    _write_run(tmp_path / "again", "topk", 0, slow=9, accuracy=0.9)
    _write_run(tmp_path / "faster", "topk", 0, slow=9, accuracy=0.9, optimizer=("SGD", 0.2))
    assert set(_labels(tmp_path)[2:]) == {"topk (AdamW, lr 0.003)", "topk (SGD, lr 0.1)", "topk (SGD, lr 0.2)"}


def test_runs_that_do_not_tell_their_optimizer_are_shown_without_one(tmp_path):
    for seed in (0, 1):
        _write_run(tmp_path / f"{seed}", "ab-paper", seed, slow=9, accuracy=0.9)
        path = tmp_path / f"{seed}" / "summary.json"
        summary = json.loads(path.read_text())
        for field in ("optimizer", "lr", "usual_optimizer", "usual_lr"):
            del summary[field]
        path.write_text(json.dumps(summary))
    assert _labels(tmp_path) == ["ab-paper"]


@pytest.fixture
def twelve(tmp_path):
    """As many rows as a comparison of everything has, with labels as long as they come."""
    for wire, slow in (("fp32", 100_000_000), ("bf16", 50_000_000), ("int8", 26_000_000)):
        for seed in (0, 1):
            _write_run(tmp_path / f"{wire}{seed}", "allreduce", seed, slow=slow, accuracy=0.99, config={"wire": wire})
    for number in range(9):
        fields = {"every": 24 + number, "outer_lr": 0.7 + number / 1000, "outer_momentum": 0.9 - number / 1000}
        more = {"wall_s": 12345.0, "optimizer": ("SGD", 0.1)}
        _write_run(tmp_path / f"d{number}", "diloco", 0, slow=9_000_000, accuracy=0.9, config=fields, **more)
    return tmp_path


def test_twelve_rows_fit_a_hundred_columns(twelve):
    console = Console(file=io.StringIO(), width=100)
    console.print(table(rows := compare(read_runs(twelve))))
    text = console.file.getvalue()
    assert len(rows) == 12 and "…" not in text
    assert "diloco:every=24,outer_lr=0.7," in text and "outer_momentum=0.9 (SGD)" in text
    assert text.count("3.43 h") == 9 and text.count("2.00 : 1") == 12


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_cuts_neither_words_nor_figures(width, folder):
    for seed in (0, 1):
        _write_run(folder / f"w{seed}", "allreduce", seed, slow=5, accuracy=0.9, config={"wire": "bf16"})
    console = Console(file=io.StringIO(), width=width)
    console.print(table(rows := compare(read_runs(folder)), width))
    text = console.file.getvalue()
    assert "…" not in text and all(len(line) <= width for line in text.splitlines())
    words = {word for row in rows for word in re.split(r"(?<=[:, ])", row["label"])}
    assert "wire=bf16" in words and all(word.strip() in text for word in words)
    assert "90.00 ± 0.00 %" in text and ("ideal  " in text or width < 80)


def test_tables_keep_to_the_columns_that_a_user_has(monkeypatch):
    monkeypatch.setenv("COLUMNS", "77")
    assert wide_console().width == 77
    monkeypatch.delenv("COLUMNS")
    assert wide_console(140).width == 140


@pytest.mark.slow
def test_twelve_lines_are_told_apart_and_bytes_are_logarithmic_where_they_spread(twelve, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "blank", lambda *size, made=plots.blank: figures.append(made(*size)) or figures[-1])
    runs = read_runs(twelve)
    draw(runs, compare(runs), twelve / "comparison.png")
    picture = figures[0]
    _, over_bytes, over_time = picture.axes
    assert over_time.get_xlabel() == "seconds"
    looks = {(line.get_color(), line.get_linestyle()) for line in over_bytes.get_lines()}
    assert len(looks) == 12
    (legend,) = picture.legends
    assert len(legend.get_texts()) == 12 and over_bytes.get_legend() is None
    assert over_bytes.get_xscale() == "linear"  # 100 MB are not 20 times 9 MB
    _write_run(twelve / "t", "topk", 0, slow=1_000_000, accuracy=0.9)
    runs = read_runs(twelve)
    draw(runs, compare(runs), twelve / "comparison.png")
    assert [axes.get_xscale() for axes in figures[1].axes] == ["linear", "log", "linear"]
    frame = picture.get_window_extent()
    assert legend.get_window_extent().width <= frame.width


def test_the_table_shows_both_ratios(folder):
    console = Console(file=io.StringIO(), width=140)
    console.print(table(compare(read_runs(folder))))
    text = console.file.getvalue()
    for wanted in ("97.50 ± 0.71 %", "300.0 kB", "0.225", "1.200", "2.00 : 1", "12 s"):
        assert wanted in text


def test_the_picture_is_a_png(folder):
    runs = read_runs(folder)
    draw(runs, compare(runs), folder / "comparison.png")
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert [r["counted_bytes"] for r in runs[0].evaluations()][-1] == 1000_000
    assert len(runs[0].evaluations()) == 10


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(ConfigError, match="no finished run"):
        read_runs(tmp_path)
    with pytest.raises(ConfigError, match=r"no `summary.json`"):
        read_run(tmp_path)
    _write_run(tmp_path / "a", "ab-paper", 0, slow=1, accuracy=0.9)
    _write_run(tmp_path / "b", "ab-paper", 1, slow=1, accuracy=5.0, metric="perplexity")
    with pytest.raises(ConfigError, match="different metrics"):
        compare(read_runs(tmp_path))


def test_figures_for_people():
    assert figure("accuracy", 0.98765) == "98.77 %"
    assert figure("perplexity", 5.4321, 0.1) == "5.43 ± 0.10"
    assert figure("mse", 0.21899, 0.00123) == "0.2190 ± 0.0012"
    assert [size(n) for n in (999, 1500, 2.5e6, 3e9, 4e12)] == [
        "999 B",
        "1.5 kB",
        "2.5 MB",
        "3.0 GB",
        "4.0 TB",
    ]


def test_ranks_and_trained_parameters_are_drawn_over_the_steps(tmp_path):
    _write_run(tmp_path / "oialr-seed0", "oialr", 0, slow=1, accuracy=0.9, steps=100, trainable_full=1000)
    records = tmp_path / "oialr-seed0" / "records.jsonl"
    lines = [line | {"trainable": 1000 - line["step"]} for line in map(json.loads, records.read_text().splitlines())]
    lines += [{"kind": "ranks", "step": 40 + 20 * i, "ranks": {"a": 64 >> i, "b": 8}} for i in range(3)]
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    place = draw_ranks(read_run(tmp_path / "oialr-seed0"))
    assert place == tmp_path / "oialr-seed0" / "ranks.png" and place.read_bytes()[:4] == b"\x89PNG"
    _write_run(tmp_path / "allreduce-seed0", "allreduce", 0, slow=1, accuracy=0.9, steps=100)
    assert draw_ranks(read_run(tmp_path / "allreduce-seed0")) is None


def test_a_column_for_what_was_trained_where_it_is_not_all(tmp_path):
    _write_run(tmp_path / "oialr-seed0", "oialr", 0, slow=1, accuracy=0.9, trainable_share=0.031)
    _write_run(tmp_path / "old-seed0", "allreduce", 0, slow=1, accuracy=0.9)
    text = io.StringIO()
    Console(file=text, width=100).print(table(compare(read_runs(tmp_path))))
    assert "trained" in text.getvalue() and "3.1 %" in text.getvalue()


def test_a_line_for_the_best_epoch_of_a_run_that_looked_for_it() -> None:
    best = {"mse": 0.219, "validation_loss": 0.2, "step": 1075, "epochs_since": 3, "ended_at": {"step": 4297}}
    told = "model of step 1,075, with the lowest validation loss; trained until step 4,297"
    assert best_epoch({"best_epoch": best}) == [told] and best_epoch({"metric": "mse"}) == []


@pytest.mark.parametrize("method", ["topk", pytest.param("allreduce", marks=pytest.mark.slow)])
def test_a_run_that_diverged_is_called_that(method, tmp_path):
    """Never a difference that may be chance, of its own row or, where all-reduce diverged, of the others."""
    for name in ("allreduce", "topk"):
        for seed in (0, 1):
            value = float("nan") if name == method else 0.9
            _write_run(tmp_path / f"{name}{seed}", name, seed, slow=10, accuracy=value, split_size=540)
    result = CliRunner().invoke(main, ["report", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    assert "NaN" not in (tmp_path / "comparison.json").read_text()
    rows = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["differs_from_allreduce"] for row in rows] == [None, None]
    assert [row["accuracy_mean"] for row in rows if row["method"] == method] == [None]
    said = CliRunner().invoke(main, ["report", str(tmp_path)]).output
    assert "diverged" in said and "≈" not in said
    assert " diverged" in (tmp_path / "report.html").read_text()
