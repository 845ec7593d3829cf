"""Folders of runs for tests of the report, and what a page made of them holds."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

from test_report import _write_run as write_run
from thinwire.report import Run, read_runs
from thinwire.report.page import write_page
from thinwire.report.page.content import Content

HOSTILE = "</script><script>alert(\"1\")</script> & 'q' 🚀 {{data}} <b>"


def add_steps(folder: Path, steps: int, slow: int) -> None:
    """Records of steps, as a run writes them, before its evaluations."""
    path = folder / "records.jsonl"
    lines = [
        {"kind": "step", "step": i, "phase": "train", "loss": 2.0 / i, "lr": 0.1}
        | {"slow_bytes": slow * i // steps, "evaluate_bytes": 0, "fast_bytes": 0, "wall_s": i / 10}
        for i in range(1, steps + 1)
    ]
    evaluations = [json.loads(line) for line in path.read_text().splitlines()]
    evaluations = [line | {"wall_s": line["step"] / 10} for line in evaluations]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *evaluations]))


def add_records(folder: Path, *records: dict[str, Any]) -> None:
    """Append to those that a run has."""
    with (folder / "records.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def write_comparison(tmp_path: Path) -> Path:
    """Three methods with two seeds each; one run factored layers."""
    purposes = {"evaluate": {"slow_bytes": 100}, "gradients": {"slow_bytes": 2000}, "merge": {"slow_bytes": 500}}
    for seed in (0, 1):
        for method, slow, accuracy, compression in (
            ("allreduce", 1_000_000, 0.990 + seed / 1000, 1.0),
            ("ab", 5_000 + seed, 0.988 + seed / 1000, 6.0),
            ("localsgd", 40_000, 0.9904, 1.0),
        ):
            place = tmp_path / f"{method}-seed{seed}"
            traffic = {"slow_bytes": slow + 100, "by_purpose": purposes}
            more = {"traffic": traffic, "compression": compression, "world_size": 4, "steps": 100}
            write_run(place, method, seed, slow=slow, accuracy=accuracy, **more)
            add_steps(place, 100, slow)
    found = [{"kind": "ranks", "step": step, "ranks": {"a": 64 - step, "b": 8}} for step in (20, 60)]
    add_records(tmp_path / "ab-seed0", *found)
    return tmp_path


def add_panels(folder: Path, name: str) -> None:
    """All that a run can record: stability, singular values, agreement, faults; a layer has this name."""
    add_records(folder, {"kind": "resume", "step": 50, "lost_steps": 12, "wall_s": 5.0})
    for step in (20, 40, 60, 80):
        layers = {layer: {"stability": 1 - step / 200, "similarity": 0.5} for layer in (name, "b")}
        add_records(
            folder,
            {"kind": "save", "step": step, "wall_s": step / 10},
            {"kind": "event", "step": step, "event": "left out", "group": 2, "why": name},
            {"kind": "stability", "step": step, "before": step - 20, "layers": layers},
            {
                "kind": "spectra",
                "step": step,
                "layers": {name: [1.0, 0.5, step / 1000, 0.0], "b": [1.0, 0.9, 0.8, 0.7]},
            },
            {"kind": "agreement", "step": step, "ratio": 1 + step / 100, "layers": {name: 1.1, "b": step / 50}},
        )


def write_bench(folder: Path) -> Path:
    """What netbench writes: two rates, two methods, twice as slow as planned."""
    rates = []
    for rate, seconds in (("100 Mbit/s", 0.4), ("1 Gbit/s", 0.05)):
        rows = []
        for method, factor in (("allreduce", 1.0), ("ab", 0.1)):
            place = folder / rate.replace(" ", "").replace("/s", "") / method
            write_run(place, method, 0, slow=int(1e6 * factor), accuracy=0.9, world_size=2, steps=60)
            step = seconds * factor
            time = {"train": {"steps": 60, "seconds": 60 * step, "wire": 30 * step, "compute": 30 * step}}
            row = {"method": method, "out": str(place), "step_s": step, "speedup": 1 / factor, "time": time}
            rows.append(row | {"planned": {"seconds_per_step": step / 2, "speedup": 1.0}})
        rates.append({"rate": rate, "rate_bits": 1e8, "probe_bits": 0.9e8, "probe_latency_s": 1e-4, "methods": rows})
    found = {"recipe": "digits", "workers": 2, "hosts": 2, "steps": 60, "rates": rates}
    (folder / "netbench.json").write_text(json.dumps(found))
    return folder


def data_of(page: Path) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])


def said_in(page: Path) -> list[str]:
    return [unescape(text) for text in re.findall(r"<li>(.*?)</li>", page.read_text())]


def page_of(folder: Path, problems: tuple[str, ...] = (), runs: list[Run] | None = None) -> Path:
    """The page of all runs in a folder."""
    return write_page(Content(runs or read_runs(folder), problems), folder)
