"""One row per finished run, compact enough to be kept: tables and pictures need nothing else."""

import dataclasses
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from thinwire.methods.registry import METHODS
from thinwire.report.records import read_records
from thinwire.report.runs import read_run

Row = dict[str, Any]

_OF_THE_RUN = ("total_steps", "group_size", "clip")
"""Fields of a config that follow from the recipe and the workers."""


def read(folders: Iterable[Path]) -> dict[str, Any]:
    """The finished runs in these folders, and the defaults that their settings differ from."""
    rows: dict[tuple[str, ...], Row] = {}
    for path in [path for folder in folders for path in sorted(folder.glob("*/summary.json"))]:
        row = _row(path.parent)
        key = (row["name"], row["recipe"], row["split"], str(row["steps"]), str(row["seed"]))
        if key in rows:
            sys.exit(f"{path.parent} and another folder hold the same run, {' '.join(key)}; give one of them")
        rows[key] = row
    if not rows:
        sys.exit("there is no finished run")
    methods = sorted({row["method"] for row in rows.values()})
    return {"defaults": {method: _defaults(method) for method in methods}, "runs": list(rows.values())}


def write(path: Path, results: dict[str, Any]) -> None:
    """As JSON, one line per run."""
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in results["runs"])
    path.write_text(f'{{"defaults":{json.dumps(results["defaults"])},\n"runs":[\n{lines}\n]}}\n', encoding="utf-8")


def _row(folder: Path) -> Row:
    run, records = read_run(folder), read_records(folder / "records.jsonl")
    summary, metric = run.summary, run.metric
    evaluations = [r for r in records if r["kind"] == "evaluation" and r["model"] != "finished"]
    averages = [[r["step"], round(r["ratio"], 4)] for r in records if r["kind"] == "agreement"]
    same = ("method", "recipe", "split", "seed", "steps", "lr", "weight_decay")
    found = {
        "name": re.sub(r"-seed\d+$", "", folder.name),
        **{field: summary.get(field) for field in same},
        "metric": metric,
        "value": summary[metric],
        "before_truncation": summary.get(f"{metric}_before_truncation"),
        "compression": summary["compression"],
        "workers": summary["world_size"],
        "groups": len(summary["groups"]),
        "config": _differences(summary["method"], summary["config"]),
        "bytes": summary["traffic_vs_allreduce_fp32"],
        "ideal": summary["traffic_vs_ideal_fp32"],
        "sent": run.counted_bytes,
        "parameters_final": summary["parameters_final"],
        "wall_s": round(summary["wall_s"]),
        "phases": _phases(records),
        "curve": [[r["step"], r["phase"], r[metric]] for r in evaluations],
        "agreement": averages,
    }
    if found["bytes"] is None and is_fp32_allreduce(found):
        found["bytes"] = found["ideal"] = 1.0  # where one worker stands for all, nothing was sent
    return found


def _phases(records: Iterable[Row]) -> list[list[Any]]:
    """The first step of each stretch of steps in one phase."""
    found: list[list[Any]] = []
    for record in records:
        if record["kind"] == "step" and (not found or found[-1][1] != record["phase"]):
            found.append([record["step"], record["phase"]])
    return found


def _defaults(method: str) -> dict[str, Any]:
    """The fields of a method's config that have a default, as plain values."""
    found = {}
    for field in dataclasses.fields(METHODS[method].config):
        if field.name not in _OF_THE_RUN and field.default is not dataclasses.MISSING:
            value = field.default
            value = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def _differences(method: str, config: dict[str, Any]) -> dict[str, Any]:
    usual = _defaults(method)
    return {name: value for name, value in config.items() if name in usual and value != usual[name]}


def by_name(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of each setting, in order of appearance, all-reduce first, before that in codes."""
    groups: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["method"] != "allreduce", not is_fp32_allreduce(row))):
        groups.setdefault(row["name"], []).append(row)
    return groups


def shown(row: Row) -> float:
    """The metric as tables and pictures have it: accuracy in percent."""
    return 100 * row["value"] if row["metric"] == "accuracy" else row["value"]


def differences(own: Iterable[Row], rows: Iterable[Row]) -> list[float]:
    """To fp32 all-reduce at its best learning rate, with the same seed, recipe, length, weight decay and data.

    In points of accuracy, else in percent of it.
    """
    known = {_alike(row, "seed"): row["value"] for row in tuned(rows)}
    pairs = [(row, known[_alike(row, "seed")]) for row in own if _alike(row, "seed") in known]
    return [100 * (r["value"] - base if r["metric"] == "accuracy" else r["value"] / base - 1) for r, base in pairs]


def tuned(rows: Iterable[Row]) -> list[Row]:
    """The runs of fp32 all-reduce at the learning rate that is best for them."""
    candidates: dict[tuple[Any, ...], dict[float, list[Row]]] = {}
    for row in rows:
        if is_fp32_allreduce(row):
            candidates.setdefault(_alike(row), {}).setdefault(row["lr"], []).append(row)
    return [row for rates in candidates.values() for row in max(rates.values(), key=_goodness)]


def _goodness(rows: Sequence[Row]) -> float:
    mean = fmean(row["value"] for row in rows)
    return mean if rows[0]["metric"] == "accuracy" else -mean


def _alike(row: Row, *more: str) -> tuple[Any, ...]:
    return tuple(row[field] for field in ("recipe", "split", "steps", "weight_decay", *more))


def baseline(rows: list[Row]) -> list[Row]:
    """The runs of fp32 all-reduce at its best learning rate, with the weight decay that most rows have."""
    usual = most_common([row["weight_decay"] for row in rows])
    return [row for row in tuned(rows) if row["weight_decay"] == usual]


def most_common(values: list[Any]) -> Any:
    return Counter(values).most_common(1)[0][0]


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """The mean, and the standard deviation if there are several."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def is_fp32_allreduce(row: Row) -> bool:
    return row["method"] == "allreduce" and not row["config"]
