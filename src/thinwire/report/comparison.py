"""Compare runs: which differ in their seed alone, what they reached and sent, and which differences mean something."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from thinwire.base.errors import ConfigError
from thinwire.base.units import count
from thinwire.report.runs import Run, is_measured_baseline, show

BETTER_HIGH = ("accuracy",)
BETTER_LOW = ("perplexity", "mse", "mae", "loss")
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Standard errors that 95 % of all differences by chance stay below, by degrees of freedom from 1."""
_STANDARD_ERRORS = 2.0
"""The same where a standard error is well known."""


def spread(values: Sequence[float]) -> float:
    """The standard deviation over seeds: 0 of one, nan where one of several diverged."""
    if len(values) < 2:
        return 0.0
    return stdev(values) if all(map(math.isfinite, values)) else math.nan


def is_measurable(row: dict[str, Any], other: dict[str, Any]) -> bool | None:
    """Whether the metrics of two rows of a comparison differ by more than chance; None where nothing tells.

    Nothing does where one of them diverged.
    """
    mean = f"{row['metric']}_mean"
    if not (math.isfinite(row[mean]) and math.isfinite(other[mean])):
        return None
    smallest = resolution(row, other)
    return None if smallest is None else abs(row[mean] - other[mean]) > smallest


def resolution(row: dict[str, Any], other: dict[str, Any]) -> float | None:
    """The difference of two rows' metrics up to which it may be chance, at 95 %; None where nothing tells.

    It is the larger of two. A test set of n examples shows an accuracy p with a standard error of sqrt(p (1 - p) / n),
    and two of them with sqrt(2) times that; less where both fail on the same examples, which is not recorded. Over
    several seeds it is Student's t times the standard error of the difference of two means.
    """
    metric = row["metric"]
    limits = [_by_examples(row, other)] if metric == "accuracy" else []
    limits.append(_by_seeds(row, other))
    return max((limit for limit in limits if limit is not None), default=None)


def _by_examples(row: dict[str, Any], other: dict[str, Any]) -> float | None:
    sizes = row.get("split_size"), other.get("split_size")
    if not (sizes[0] and sizes[1]):
        return None
    p = (row["accuracy_mean"] + other["accuracy_mean"]) / 2
    return _STANDARD_ERRORS * math.sqrt(max(0.0, p * (1 - p)) * (1 / sizes[0] + 1 / sizes[1]))


def _by_seeds(row: dict[str, Any], other: dict[str, Any]) -> float | None:
    std, counts = f"{row['metric']}_std", (len(row["seeds"]), len(other["seeds"]))
    freedom = sum(counts) - 2
    if freedom < 1:
        return None
    variance = sum((count - 1) * each[std] ** 2 for count, each in zip(counts, (row, other), strict=True)) / freedom
    times = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _STANDARD_ERRORS
    return times * math.sqrt(variance * (1 / counts[0] + 1 / counts[1]))


_SIZES: dict[str, Callable[[int], str]] = {
    "world_size": lambda workers: count(workers, "worker"),
    "batch": "batch {}".format,
    "steps": lambda steps: count(steps, "step"),
}


def compare(runs: list[Run]) -> list[dict[str, Any]]:
    """The rows of `comparison.json`: one per method and config over its seeds, in order of appearance."""
    for what, values in (("metrics", {run.metric for run in runs}), ("splits", {run.split for run in runs})):
        if len(values) > 1:
            raise ConfigError(f"runs with different {what} cannot be compared: {', '.join(sorted(values))}")
    measured = [run for run in runs if is_measured_baseline(run)]
    rows = [_row(label, alike, measured) for label, alike in grouped(runs).items()]
    base = baseline_row(rows)
    for row in rows:
        row["differs_from_allreduce"] = None if base is None or row is base else is_measurable(row, base)
    return rows


def baseline_row(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row that others are compared with: all-reduce in fp32."""
    usual = [row for row in rows if row["is_baseline"]]
    return max(usual, key=lambda row: row["slow_bytes_mean"], default=None)


def grouped(runs: list[Run], ignoring: Set[str] = frozenset()) -> dict[str, list[Run]]:
    """Runs that differ only in their seed, or in settings to ignore, by a distinctive label."""
    peers: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        peers.setdefault(run.summary["method"], []).append(run.summary)
    differing = {method: _differing([own["config"] for own in alike]) - ignoring for method, alike in peers.items()}
    groups: dict[str, list[Run]] = {}
    for run in runs:
        method = run.summary["method"]
        label = _label(run.summary, differing[method], peers[method]) + _sizes(run.summary, peers[method], ignoring)
        groups.setdefault(label, []).append(run)
    return groups


def _sizes(summary: dict[str, Any], peers: list[dict[str, Any]], ignoring: Set[str]) -> str:
    """Workers, batch and length where they differ: such runs are not seeds of the same thing."""
    own, others = _lengths(summary), [_lengths(peer) for peer in peers]
    named = {name for name in own if name not in ignoring and len({other[name] for other in others}) > 1}
    # The steps of a method that has to know them are in its settings.
    named -= {"steps"} if "total_steps" in summary["config"] else set()
    return "".join(f", {_SIZES[name](own[name])}" for name in _SIZES if name in named and own[name] is not None)


def _lengths(summary: dict[str, Any]) -> dict[str, Any]:
    # A run with patience may have ended before the steps it was to take.
    sizes = {name: summary.get(name) for name in _SIZES}
    return sizes | {"steps": summary.get("length") or summary.get("steps")}


def _differing(configs: list[dict[str, Any]]) -> set[str]:
    """Names of fields that are not the same in all configs."""
    first = configs[0]
    return {name for config in configs for name in {*first, *config} if config.get(name) != first.get(name)}


def _label(summary: dict[str, Any], differing: set[str], peers: list[dict[str, Any]]) -> str:
    """The method, the fields in which its configs differ, and the optimizer if it differs."""
    method, config = summary["method"], summary["config"]
    own = ",".join(f"{name}={show(config[name])}" for name in config if name in differing)
    link = f" at {summary.get('link') or 'unshaped'}" if len({peer.get("link") for peer in peers}) > 1 else ""
    return method + (f":{own}" if own else "") + _optimizer_note(summary, peers) + link


def _optimizer_note(summary: dict[str, Any], peers: list[dict[str, Any]]) -> str:
    name, rate = summary.get("optimizer"), show(summary.get("lr"))
    usual = summary.get("usual_optimizer"), show(summary.get("usual_lr"))
    seen = {(peer.get("optimizer"), show(peer.get("lr"))) for peer in peers}
    if name is None or (len(seen) == 1 and (name, rate) == usual):
        return ""
    name_tells = name != usual[0] and [other for other, _ in seen].count(name) == 1
    return f" ({name})" if name_tells else f" ({name}, lr {rate})"


def _row(label: str, runs: list[Run], measured: list[Run]) -> dict[str, Any]:
    metric = runs[0].metric
    figures = [run.summary[metric] for run in runs]
    return {
        "method": runs[0].summary["method"],
        "label": label,
        "recipe": runs[0].summary["recipe"],
        "metric": metric,
        "split": runs[0].split,
        "split_size": runs[0].summary.get("split_size"),
        "is_baseline": is_measured_baseline(runs[0]),
        "seeds": [run.summary["seed"] for run in runs],
        f"{metric}_mean": fmean(figures),
        f"{metric}_std": spread(figures),
        f"{metric}_before_truncation_mean": _mean([run.summary.get(f"{metric}_before_truncation") for run in runs]),
        "slow_bytes_mean": fmean(run.counted_bytes for run in runs),
        "evaluate_bytes_mean": fmean(run.summary["traffic"]["slow_bytes"] - run.counted_bytes for run in runs),
        "traffic_vs_allreduce_fp32": _mean([share_of_baseline(run, measured) for run in runs]),
        "traffic_vs_ideal_fp32": _mean([run.summary.get("traffic_vs_ideal_fp32") for run in runs]),
        "compression_mean": _mean([run.summary.get("compression") for run in runs]),
        "trainable_share_mean": _mean([run.summary.get("trainable_share") for run in runs]),
        "wall_s_mean": _mean([run.summary.get("wall_s") for run in runs]),
        "link": runs[0].summary.get("link"),
    }


def share_of_baseline(run: Run, measured: list[Run]) -> float | None:
    """Against the measured all-reduce run of the same seed if there is one, else against estimated bytes."""
    base = baseline_of(run, measured)
    whole = base.counted_bytes if base else 0
    return run.counted_bytes / whole if whole else run.summary["traffic_vs_allreduce_fp32"]


def baseline_of(run: Run, measured: list[Run]) -> Run | None:
    """All-reduce with the same seed and steps; of several such runs, the one with the same layout, or side by side."""
    alike = [other for other in measured if all(_same(run, other, field) for field in ("seed", "steps"))]
    return max(
        alike, key=lambda other: (_same(run, other, "nodes"), run.folder.parent == other.folder.parent), default=None
    )


def _same(run: Run, other: Run, field: str) -> bool:
    return run.summary.get(field) == other.summary.get(field)


def _mean(values: list[float | None]) -> float | None:
    """None where one is not known."""
    return None if None in values else fmean(v for v in values if v is not None)


def comparable(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs that can be compared with each other: of one recipe, metric and split."""
    found: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        found.setdefault((run.summary["recipe"], run.metric, run.split), []).append(run)
    return list(found.values())


def labels(runs: Iterable[Run]) -> dict[Path, str]:
    """By folder: the method with the settings in which it differs from others that it can be compared with."""
    return {run.folder: label for alike in comparable(runs) for label, same in grouped(alike).items() for run in same}


def shares(runs: list[Run]) -> dict[Path, float | None]:
    """By folder: slow-link bytes as a share of all-reduce's, as the table of a comparison has them.

    Only runs that lie side by side are compared with each other: elsewhere there may be another version, or other data.
    """
    measured: dict[tuple[Path, str], list[Run]] = {}
    for run in runs:
        if is_measured_baseline(run):
            measured.setdefault((run.folder.parent, run.summary["recipe"]), []).append(run)
    return {
        run.folder: share_of_baseline(run, measured.get((run.folder.parent, run.summary["recipe"]), [])) for run in runs
    }
