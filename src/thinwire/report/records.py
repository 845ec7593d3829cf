"""Read run folders: `summary.json`, `records.jsonl` and the rows of `comparison.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from thinwire.base.errors import ConfigError, DamagedError
from thinwire.base.files import parse_json, raw_blocks_of, read_json
from thinwire.base.schema import ANY, COUNT, FIGURE, NUMBER, POSITIVE, TEXT, wrong
from thinwire.base.units import count
from thinwire.report.metrics import is_measurable, spread
from thinwire.report.steps import Block

_SENT = {"slow_bytes": NUMBER, "by_purpose": {str: {"slow_bytes?": NUMBER}}}
SUMMARY = {
    **dict.fromkeys(("recipe?", "method?", "metric?", "split?"), TEXT),
    **dict.fromkeys(("optimizer?", "usual_optimizer?", "link?"), (None, TEXT)),
    **dict.fromkeys(("seed?", "steps?", "trainable_full?", "split_size?"), COUNT),
    **dict.fromkeys(("world_size?", "parameters_full?", "parameters_final?"), POSITIVE),
    **dict.fromkeys(("traffic_vs_allreduce_fp32?", "traffic_vs_ideal_fp32?", "wall_s?"), (None, NUMBER)),
    **dict.fromkeys(("compression?", "trainable_share?"), (None, NUMBER)),
    "config?": {str: ANY},
    "identity?": {str: ANY},
    "traffic?": _SENT,
    "spent?": {str: NUMBER},
    "best_epoch?": (None, {"step": COUNT, "ended_at": {"step": COUNT}}),
}
"""Older summaries have fewer names; a missing one is reported when it is looked up."""
_RECORDS = {
    "evaluation": {"step": COUNT, "model": TEXT, "slow_bytes?": NUMBER, "evaluate_bytes?": NUMBER, "trainable?": COUNT},
    "ranks": {"step": COUNT, "ranks": {str: COUNT}},
    "stability": {
        "step": COUNT,
        "before": COUNT,
        "layers": {str: {"stability": FIGURE, "similarity": FIGURE}},
    },
    "spectra": {"step": COUNT, "layers": {str: [FIGURE]}},
    "agreement": {"step": COUNT, "ratio": (None, FIGURE), "layers?": {str: FIGURE}},
    "event": {"step": COUNT, "event": TEXT},
    "save": {"step": COUNT},
    "resume": {"step": COUNT, "lost_steps?": COUNT},
}
"""By kind; other kinds need only have one."""
_REMEDY = "restore it, or run again with `--overwrite`"
_LONGEST_LABEL = 500
_SIZES: dict[str, Callable[[int], str]] = {
    "world_size": lambda workers: count(workers, "worker"),
    "batch": "batch {}".format,
    "steps": lambda steps: count(steps, "step"),
}

UNDER_WAY = "under_way"
"""In the summary of a run that has not finished, made from its records."""
BASELINE = "allreduce"
"""The method that others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run, or for a live page one as far as it is."""

    folder: Path
    """The run's folder."""
    summary: dict[str, Any]
    """Its `summary.json`."""

    @property
    def metric(self) -> str:
        """The name of the run's metric."""
        return self.summary["metric"]

    @property
    def is_finished(self) -> bool:
        """Whether the summary is that of the whole run."""
        return UNDER_WAY not in self.summary

    @property
    def split(self) -> str:
        """The part of the data that the figure is of."""
        return self.summary.get("split", "test")

    @property
    def counted_bytes(self) -> float:
        """Slow-link bytes without evaluation."""
        traffic = self.summary["traffic"]
        return traffic["slow_bytes"] - traffic["by_purpose"].get("evaluate", {}).get("slow_bytes", 0)

    def evaluations(self) -> list[dict[str, Any]]:
        """Evaluation records during training, in order, each with its `counted_bytes`."""
        path = self.folder / "records.jsonl"
        points = [r for r in read_records(path, "evaluation") if r["model"] != "finished"]
        point = {self.metric: FIGURE, "slow_bytes": NUMBER, "evaluate_bytes": NUMBER, "wall_s": NUMBER}
        if what := next((w for r in points if (w := wrong(r, point))), None):
            raise DamagedError(f"`{path}` is damaged, {what}; {_REMEDY}")
        return [r | {"counted_bytes": r["slow_bytes"] - r["evaluate_bytes"]} for r in points]


def read_records(path: Path, *kinds: str) -> list[dict[str, Any]]:
    """Every complete line of a `records.jsonl`, or those of `kinds`; that of a running job may end in half a line."""
    return (
        [record for record in _records(path, kinds) if not kinds or record["kind"] in kinds] if path.is_file() else []
    )


def _records(path: Path, kinds: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    # Most lines are of steps: where they are not asked for, it is enough that they begin and end as a record does.
    skips = bool(kinds) and "step" not in kinds
    before = 0
    for text in raw_blocks_of(path):
        block = Block(text)
        for place, line in block.others() if skips else block.lines():
            yield parse_record(path, before + place + 1, line.decode("utf-8", errors="replace"))
        before += len(block.ends)


def parse_record(path: Path, number: int, line: str) -> dict[str, Any]:
    """One line; an error names it."""
    try:
        record = parse_json(line)
        if what := wrong(record, {"kind": TEXT}) or wrong(record, _RECORDS.get(record["kind"], ANY)):
            raise ValueError(what)
    except ValueError as error:
        raise DamagedError(
            f"`{path}` is damaged in line {number} ({error}); remove the line, or restore the file"
        ) from error
    return record


def read_run(folder: Path) -> Run:
    """The finished run in `folder`."""
    path = folder / "summary.json"
    if not path.is_file():
        raise ConfigError(
            f"no `summary.json` in `{folder}`: there is no finished run; train one with `thinwire run`, "
            "or resume an unfinished one with `thinwire run … --resume`"
        )
    summary = read_json(path, _REMEDY, SUMMARY)
    metric = summary.get("metric", "")
    if what := wrong(summary, {f"{metric}?": FIGURE, f"{metric}_before_truncation?": (None, FIGURE)}):
        raise DamagedError(f"`{path}` is damaged, {what}; {_REMEDY}")
    return Run(folder=folder, summary=summary)


def read_runs(folder: Path) -> list[Run]:
    """The finished run in `folder`, or all in its direct subfolders, the baseline first."""
    if (folder / "summary.json").is_file():
        return [read_run(folder)]
    found = [read_run(path.parent) for path in sorted(folder.glob("*/summary.json"))]
    if not found:
        raise ConfigError(f"no finished run in `{folder}`: looked for summary.json there and one folder below")
    return sorted(found, key=baseline_first)


def baseline_first(run: Run) -> tuple[Any, ...]:
    """Sort key of runs in tables and legends."""
    method, config = run.summary["method"], run.summary["config"]
    settings = [(name, *_in_order(value)) for name, value in sorted(config.items())]
    return method != BASELINE, method, not is_measured_baseline(run), settings, run.summary["seed"]


def _in_order(value: Any) -> tuple[float, str]:
    """Sort key: numbers by value, everything else by text."""
    return (value, "") if isinstance(value, int | float) else (0, show(value))


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


def show(value: Any) -> str:
    """A setting as written on the command line; escaped and cut off where no command line would have it."""
    text = _written(value)
    return (text if text.isprintable() else ascii(text))[:_LONGEST_LABEL]


def _written(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(show(part) for part in value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def is_measured_baseline(run: Run) -> bool:
    """Whether others are compared with its bytes."""
    return run.summary["method"] == BASELINE and run.summary["config"].get("wire", "fp32") == "fp32"


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
        f"{metric}_before_truncation_mean": _mean(runs, f"{metric}_before_truncation"),
        "slow_bytes_mean": fmean(run.counted_bytes for run in runs),
        "evaluate_bytes_mean": fmean(run.summary["traffic"]["slow_bytes"] - run.counted_bytes for run in runs),
        "traffic_vs_allreduce_fp32": _mean_ratio(runs, measured),
        "traffic_vs_ideal_fp32": _mean(runs, "traffic_vs_ideal_fp32"),
        "compression_mean": _mean(runs, "compression"),
        "trainable_share_mean": _mean(runs, "trainable_share"),
        "wall_s_mean": _mean(runs, "wall_s"),
        "link": runs[0].summary.get("link"),
    }


def _mean_ratio(runs: list[Run], measured: list[Run]) -> float | None:
    ratios = [share_of_baseline(run, measured) for run in runs]
    return None if None in ratios else fmean(ratio for ratio in ratios if ratio is not None)


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


def _mean(runs: list[Run], field: str) -> float | None:
    values = [run.summary.get(field) for run in runs]
    return None if None in values else fmean(v for v in values if v is not None)
