"""Studies of what is lost for fewer bytes: their settings, the order of runs, tables and pictures."""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import needs
from thinwire.launch.jobs import Job
from thinwire.recipes import digits
from thinwire.train.batcher import Batcher

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("setting", "run", "results", "tables", "labels", "pareto", "pictures", "afterwards")
pytestmark = [
    pytest.mark.slow,
    needs.part("benchmarks", None if BENCHMARKS.is_dir() else "they are not in this copy"),
]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports the scripts by their short names, which other folders of scripts have too, for one test."""
    for folder in ("hundredfold", "study"):
        monkeypatch.syspath_prepend(BENCHMARKS / folder)
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["hundredfold", "words"])
def test_every_setting_is_one_and_its_name_means_one_run(study, name: str) -> None:
    named: dict[str, Any] = {}
    for setting in [setting for group in study("setting").sets_of(name).values() for setting in group]:
        assert named.setdefault(setting.name, setting) == setting
    for setting in named.values():
        flags = setting.options
        options: dict[str, Any] = {
            flag.removeprefix("--").replace("-", "_"): float(value)
            for flag, value in zip(flags[::2], flags[1::2], strict=True)
        }
        job = Job(
            recipe=setting.recipe,
            method=setting.method,
            settings=setting.fields,
            workers=setting.workers,
            epochs=setting.epochs,
            eval_every=setting.eval_every,
            out=Path("unused"),
            **options,
        )
        assert job.config.total_steps == job.trained.steps if hasattr(job.config, "total_steps") else job.config


def given(**more: Any) -> argparse.Namespace:
    usual = {"study": "hundredfold", "seeds": "0,1", "recipe": None, "epochs": None}
    usual |= {"data": Path("data"), "validate": False, "save_every": None}
    return argparse.Namespace(**usual | more)


def test_the_longest_runs_come_first_and_none_twice(study) -> None:
    run = study("run")
    jobs = run.wanted(given(set="groups,defaults,allreduce"))
    assert [job.setting.workers for job in jobs] == sorted((job.setting.workers for job in jobs), reverse=True)
    assert len({job.name for job in jobs}) == len(jobs) == 16
    assert run.next_fitting(jobs, 48) is jobs[0] and jobs[0].setting.workers == 32
    assert run.next_fitting(jobs, 12).setting.workers == 8 and run.next_fitting(jobs, 3) is None


def test_the_command_of_a_run(study) -> None:
    run = study("run")
    full = run.wanted(given(set="defaults/ab-full", seeds="3"))[0]
    words = run.command(given(save_every=100, validate=True), full, Path("out"), resume=True)
    assert {"--resume", "--validate"} <= set(words) and not {"--overwrite", "--no-model"} & set(words)
    assert words[words.index("--set") + 1] == "factor_at=none" and words[words.index("--save-every") + 1] == "100"
    words = run.command(
        given(), full._replace(setting=full.setting._replace(keeps_model=False)), Path("out"), resume=False
    )
    assert {"--overwrite", "--no-model"} <= set(words) and not {"--resume", "--save-every"} & set(words)
    assert words[words.index("--epochs") + 1] == "40"
    rate = run.wanted(given(study="words", set="rates/allreduce-lr2.8e-3-1workers", seeds="0"))[0]
    words = run.command(given(), rate, Path("out"), resume=False)
    assert words[words.index("--lr") + 1] == "2.8e-3" and "--epochs" not in words


def test_an_unknown_study_or_set_is_answered_with_those_there_are(study) -> None:
    run = study("run")
    with pytest.raises(
        SystemExit, match=r"no study worlds, choose from: hundredfold, large_batch, thousandfold, words"
    ):
        run.wanted(given(study="worlds", set="rates"))
    with pytest.raises(SystemExit, match=r"no rate, choose from: rates, allreduce, headline, search"):
        run.wanted(given(study="words", set="rate"))


def written(out: Path, name: str, method: str, seed: int, value: float, **config: Any) -> None:
    """A finished run's folder."""
    folder = out / f"{name}-seed{seed}"
    folder.mkdir(parents=True)
    workers, metric = config.pop("workers", 4), config.pop("metric", "accuracy")
    share = 1.0 if method == "allreduce" and config.get("wire", "fp32") == "fp32" else 0.005
    summary = {
        "method": method,
        "seed": seed,
        "metric": metric,
        metric: value,
        "recipe": "vgg16bn-cifar10" if metric == "accuracy" else "gpt-wikitext2",
        "split": "test",
        "steps": 100,
        f"{metric}_before_truncation": value,
        "compression": 2.0,
        "world_size": workers,
        "groups": [[rank] for rank in range(workers)],
        "config": {"total_steps": 100, **config},
        "wall_s": 1.5,
        "traffic_vs_allreduce_fp32": share,
        "traffic_vs_ideal_fp32": share,
        "parameters_final": 7,
        "traffic": {"slow_bytes": 90, "by_purpose": {"evaluate": {"slow_bytes": 40}}},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    at = 101 if method != "ab" else 75
    records: list[dict[str, Any]] = []
    for step in range(5, 101, 5):
        phase = "factored" if step > at else "local"
        records.append({"kind": "step", "step": step, "phase": phase})
        if method == "ab":
            records.append({"kind": "agreement", "step": step, "ratio": 1.5})
        if step % 25 == 0:
            about = {"phase": phase, "model": "merged", metric: value * step / 100}
            records.append({"kind": "evaluation", "step": step, **about})
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for seed in range(3):
        written(tmp_path, "allreduce", "allreduce", seed, 0.9 + seed / 100, wire="fp32")
    for seed in range(2):
        written(tmp_path, "ab-default", "ab", seed, 0.88 + seed / 100, train="alternate", factor_at="auto")
        written(tmp_path, "ab-both", "ab", seed, 0.87, train="both", factor_at="auto")
        written(tmp_path, "ab-default-16workers", "ab", seed, 0.8, train="alternate", factor_at="auto", workers=16)
    return tmp_path


def test_tables_pair_by_seed_and_pictures_need_the_json_alone(study, out, tmp_path, monkeypatch, capsys) -> None:
    needs.package("matplotlib")
    tables, pictures = study("tables"), study("pictures")
    monkeypatch.setattr(sys, "argv", ["tables", str(out), "--json", str(tmp_path / "kept.json")])
    tables.main()
    lines = {line.split(" | ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["| allreduce"].startswith("| allreduce | 3 | 91.00 ± 1.00 |  | 100 % | 1 : 1 |")
    assert lines["| ab-default"].startswith("| ab-default | 2 | 88.50 ± 0.71 | -2.00 ± 0.00 | 0.5 % | 1 : 200 | 0.5 %")
    assert lines["| ab-default"].endswith("| 2.00 : 1 | 1.50 |")
    kept = json.loads((tmp_path / "kept.json").read_text())
    both = next(row for row in kept["runs"] if row["name"] == "ab-both")
    assert both["config"] == {"train": "both"} and kept["defaults"]["ab"]["train"] == "alternate"
    assert both["phases"] == [[5, "local"], [80, "factored"]] and both["sent"] == 50
    assert [point[0] for point in both["curve"]] == [25, 50, 75, 100] and len(both["agreement"]) == 20
    found = pictures.variants([row for row in kept["runs"] if row["workers"] == 4], "train", kept["defaults"])
    assert {value: len(rows) for value, rows in found.items()} == {"alternate": 2, "both": 2}
    monkeypatch.setattr(sys, "argv", ["pictures", str(tmp_path / "kept.json"), "--out", str(tmp_path / "drawn")])
    pictures.main()
    names = {"agreement.png", "groups.png", "over-steps.png", "pareto.png", "pareto-near.png"}
    assert {path.name for path in (tmp_path / "drawn").iterdir()} == names


def test_perplexity_is_compared_by_its_ratio_and_coded_all_reduce_too(study, tmp_path, monkeypatch, capsys) -> None:
    needs.package("matplotlib")
    for seed in range(2):
        written(tmp_path, "allreduce", "allreduce", seed, 100.0 + 100 * seed, wire="fp32", metric="perplexity")
        written(tmp_path, "allreduce-int2", "allreduce", seed, 101.0 + 105 * seed, wire="int2", metric="perplexity")
        written(tmp_path, "onebit", "onebit", seed, 98.0 + 98 * seed, metric="perplexity")
    tables, pareto, kept = study("tables"), study("pareto"), tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["tables", str(tmp_path)])
    tables.main()
    printed = capsys.readouterr().out
    assert "| setting | seeds | perplexity | to all-reduce % | bytes |" in printed
    assert "| allreduce | 2 | 150.00 ± 70.71 |  | 100 %" in printed
    assert "| allreduce-int2 | 2 | 153.50 ± 74.25 | +2.00 ± 1.41 | 0.5 %" in printed
    assert "| onebit | 2 | 147.00 ± 69.30 | -2.00 ± 0.00 |" in printed
    rows = json.loads(kept.read_text())["runs"]
    assert {row["name"] for row in pareto.baseline(rows)} == {"allreduce"}
    assert {row["name"] for row in pareto.named(rows, "*bit")} == {"allreduce", "onebit"}
    monkeypatch.setattr(sys, "argv", ["pareto", str(kept), "--out", str(tmp_path / "pareto.png")])
    pareto.main()
    assert (tmp_path / "pareto.png").stat().st_size > 10_000


def test_others_are_compared_with_all_reduce_at_its_best_rate(study) -> None:
    results = study("results")

    def row(method: str, lr: float, value: float, **more: Any) -> dict[str, Any]:
        about = {"recipe": "gpt", "split": "test", "steps": 9, "seed": 0, "weight_decay": 0.1, "metric": "perplexity"}
        return about | {"method": method, "config": {}, "lr": lr, "value": value} | more

    decayed = row("allreduce", 1e-3, 90.0, weight_decay=0.2)
    rows = [row("allreduce", 1e-3, 120.0), row("allreduce", 2e-3, 100.0), decayed, row("ab", 3e-3, 105.0)]
    assert results.baseline(rows) == rows[1:2]
    assert results.differences(rows[3:], rows) == pytest.approx([5.0])
    rates = [row("allreduce", lr, value, metric="accuracy") for lr, value in ((1e-3, 0.9), (2e-3, 0.8))]
    assert results.differences([row("ab", 2e-3, 0.85, metric="accuracy")], rates) == pytest.approx([-5.0])


def test_one_worker_that_stands_for_all_counts_as_all_reduce(study, tmp_path) -> None:
    written(tmp_path, "allreduce-1workers", "allreduce", 0, 0.9, wire="fp32", workers=1)
    path = tmp_path / "allreduce-1workers-seed0" / "summary.json"
    nothing = {"traffic_vs_allreduce_fp32": None, "traffic_vs_ideal_fp32": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | nothing))
    (row,) = study("results").read([tmp_path])["runs"]
    assert row["bytes"] == row["ideal"] == 1


def test_labels_of_crowded_points_do_not_overlap(study) -> None:
    needs.package("matplotlib")
    from thinwire.report.plots import blank

    labels, figure = study("labels"), blank(8, 5)
    axes = figure.subplots()
    points = [(1 + 0.01 * (i % 4), 2 + 0.01 * (i // 4)) for i in range(12)]
    axes.scatter(*zip(*points, strict=True))
    axes.set_xlim(0, 2)
    axes.set_ylim(1, 3)
    labels.label(axes, points, [f"setting {i}" for i in range(12)], [])
    boxes = [note.get_window_extent() for note in axes.texts if note.get_text()]
    assert len(boxes) == 12
    assert not any(boxes[i].overlaps(boxes[j]) for i in range(12) for j in range(i))


def test_a_cut_model_is_trained_on(study) -> None:
    afterwards, recipe = study("afterwards"), digits()
    source = recipe.source(None)
    torch.manual_seed(0)
    model: nn.Module = recipe.model(source)
    batcher = Batcher(recipe, source, torch.device("cpu"))
    small = afterwards.cut(model, batcher.example(), target=2)
    before = [p.clone() for p in small.parameters()]
    trained = afterwards.train_on(small, recipe, batcher, range(3, 6), 1e-3)
    assert sum(p.numel() for p in trained.parameters()) <= sum(p.numel() for p in model.parameters()) / 2
    pairs = list(zip(before, small.parameters(), trained.parameters(), strict=True))
    assert all(torch.equal(old, kept) and not torch.equal(old, new) for old, kept, new in pairs)
