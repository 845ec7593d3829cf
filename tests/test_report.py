import io
import json

import pytest
from rich.console import Console

from thinwire.errors import ConfigError
from thinwire.report import compare, draw, read_run, read_runs, table
from thinwire.report.live import Progress, Tail
from thinwire.report.tables import figure, size


def _write_run(folder, method, seed, *, slow, accuracy, metric="accuracy", evaluate=100, wire="fp32"):
    folder.mkdir(parents=True)
    summary = {
        "recipe": "digits",
        "method": method,
        "config": {"wire": wire},
        "seed": seed,
        "metric": metric,
        metric: accuracy,
        f"{metric}_before_truncation": accuracy,
        "traffic": {"slow_bytes": slow + evaluate, "by_purpose": {"evaluate": {"slow_bytes": evaluate}}},
        "traffic_vs_allreduce_fp32": 0.9,
        "traffic_vs_ideal_fp32": 1.2,
        "compression": 2.0,
        "wall_s": 12.0,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    with (folder / "records.jsonl").open("w") as file:
        for i in range(1, 11):
            record = {"kind": "evaluation", "step": 10 * i, "phase": "train", "model": "world"}
            record |= {metric: accuracy * (1 - 0.5**i), "loss": 0.5**i}
            record |= {"slow_bytes": slow * i // 10 + evaluate, "evaluate_bytes": evaluate, "ranks": {}}
            file.write(json.dumps(record) + "\n")
        file.write(json.dumps(record | {"model": "finished"}) + "\n")


@pytest.fixture
def folder(tmp_path):
    for seed, whole in ((0, 1000_000), (1, 2000_000)):
        _write_run(tmp_path / f"allreduce-seed{seed}", "allreduce", seed, slow=whole, accuracy=0.99)
        _write_run(tmp_path / f"ab-seed{seed}", "ab", seed, slow=300_000, accuracy=0.97 + seed / 100)
    return tmp_path


def test_ratios_are_against_the_measured_run_of_the_same_seed(folder):
    baseline, other = compare(read_runs(folder))
    assert (baseline["method"], other["method"]) == ("allreduce", "ab")
    assert baseline["traffic_vs_allreduce_fp32"] == 1.0
    assert other["traffic_vs_allreduce_fp32"] == pytest.approx((0.3 + 0.15) / 2)
    assert other["seeds"] == [0, 1] and other["slow_bytes_mean"] == 300_000
    assert other["accuracy_mean"] == pytest.approx(0.975)
    assert other["accuracy_std"] == pytest.approx(0.01 / 2**0.5)
    assert other["evaluate_bytes_mean"] == 100


def test_without_a_measured_fp32_run_the_reckoned_ratio_stands(tmp_path):
    _write_run(tmp_path / "a", "allreduce", 0, slow=500, accuracy=0.9, wire="bf16")
    _write_run(tmp_path / "b", "ab", 0, slow=100, accuracy=0.9)
    assert [row["traffic_vs_allreduce_fp32"] for row in compare(read_runs(tmp_path))] == [0.9, 0.9]


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
    _write_run(tmp_path / "a", "ab", 0, slow=1, accuracy=0.9)
    _write_run(tmp_path / "b", "ab", 1, slow=1, accuracy=5.0, metric="perplexity")
    with pytest.raises(ConfigError, match="different metrics"):
        compare(read_runs(tmp_path))


def test_figures_for_people():
    assert figure("accuracy", 0.98765) == "98.77 %"
    assert figure("perplexity", 5.4321, 0.1) == "5.43 ± 0.10"
    assert [size(n) for n in (999, 1500, 2.5e6, 3e9, 4e12)] == [
        "999 B",
        "1.5 kB",
        "2.5 MB",
        "3.0 GB",
        "4.0 TB",
    ]


def test_tail_reads_whole_new_lines_and_notices_a_new_file(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"step": 98}\n{"step": 99}\n')
    tail = Tail(path)
    assert tail.read() == []
    path.write_text('{"step": 1}\n{"st')
    assert tail.read() == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert tail.read() == [{"step": 2}]


def test_the_line_says_what_is_known():
    progress = Progress("ab seed 0", 600, "accuracy")
    assert progress.line() == "ab seed 0  starting"
    progress.update({"kind": "step", "step": 5, "phase": "groups", "loss": 0.25, "slow_bytes": 2000})
    assert progress.line() == "ab seed 0  groups  step 5/600  loss 0.2500  slow link 2.0 kB"
    progress.update(
        {"kind": "evaluation", "step": 5, "phase": "groups", "loss": 9.0, "slow_bytes": 2000, "accuracy": 0.5}
        | {"ranks": {"a": 3, "b": 7}}
    )
    assert progress.line().endswith("loss 0.2500  accuracy 50.00 %  slow link 2.0 kB  ranks 3–7")
