"""Find runs in folders and read their summaries: finished, unfinished and damaged ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.base.errors import ConfigError, DamagedError, one_line
from thinwire.base.files import check_file, parse_json, read_json
from thinwire.base.schema import ANY, COUNT, FIGURE, NUMBER, POSITIVE, TEXT, wrong
from thinwire.report.records import read_records

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
_REMEDY = "restore it, or run again with `--overwrite`"
_LONGEST_LABEL = 500
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


FINISHED, UNFINISHED, DAMAGED = "finished", "unfinished", "damaged"
_MARKS = ("summary.json", "records.jsonl", "trial.json")
"""Files that only the folder of a run has."""
_NOT_RUNS = ("model", "checkpoint")
_TAIL_BYTES = 1 << 16
_STARTED = {"recipe": TEXT, "method": TEXT, "seed": COUNT}


@dataclass(frozen=True, kw_only=True)
class Found:
    """A folder with a run in it, whatever its state."""

    folder: Path
    run: Run | None = None
    """The run, if it has finished and its summary can be read."""
    status: str
    """finished, unfinished or damaged; of a trial that did not finish, what trial.json says."""
    note: str = ""
    """Why it is not finished, or what is wrong with its files."""
    last_step: int | None = None
    """Of an unfinished run, if it recorded any."""
    recipe: str | None = None
    method: str | None = None
    """Of an unfinished run, as its first record says."""
    seed: int | None = None
    """As `method`."""
    written: float = 0.0
    """When its newest file was written, in seconds since the epoch."""


def find(top: Path) -> list[Found]:
    """Every run in `top` and below, the newest first; links are read and not followed further."""
    found = [look(folder) for folder in all_folders(top)]
    return sorted(found, key=lambda each: (-each.written, str(each.folder)))


def all_folders(top: Path) -> Iterator[Path]:
    """Every folder of a run in `top` and below; those of models and saves are not searched."""
    for place, folders, files in os.walk(top):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if any(name in _MARKS for name in files):
            yield Path(place)
            folders[:] = [name for name in folders if name not in _NOT_RUNS]
        links = (Path(place, name) for name in folders if Path(place, name).is_symlink())
        yield from (link for link in links if _is_run(link))


def run_folders(top: Path) -> list[Path]:
    """The folder itself if it is of a run, else those directly below that are."""
    if _is_run(top):
        return [top]
    return sorted(path for path in top.iterdir() if path.is_dir() and not path.name.startswith(".") and _is_run(path))


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _MARKS)


def look(folder: Path, *, link: str | None = None) -> Found:
    """What is in the folder of a run; files that cannot be read are named and raise nothing.

    `link` is the rate of the links, where that is what runs differ in.
    """
    about: dict[str, Any] = {"folder": folder, "written": last_written(folder)}
    try:
        if (folder / "summary.json").exists():
            run = read_run(folder)
            for name in ("recipe", "method", "config", "seed", "metric", "traffic"):
                _ = run.summary[name]  # an error that names the file, if it is missing
            _ = run.summary[run.metric], run.counted_bytes
            run = replace(run, summary={**run.summary, "link": link}) if link else run
            return Found(**about, run=run, status=FINISHED, recipe=run.summary["recipe"])
        return Found(**about, **_unfinished(folder))
    except (ConfigError, OSError, KeyError, TypeError) as error:
        return Found(**about, status=DAMAGED, note=one_line(error))


def last_written(folder: Path) -> float:
    """When the newest file of a run was written, in seconds since the epoch."""
    times = []
    for name in _MARKS:
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)


def _unfinished(folder: Path) -> dict[str, Any]:
    status, note = UNFINISHED, ""
    if (folder / "trial.json").is_file():
        trial = read_json(folder / "trial.json", "remove its folder", {"status?": TEXT, "reason?": TEXT})
        status, note = trial.get("status", UNFINISHED), trial.get("reason", "")
    about: dict[str, Any] = {"status": status, "note": note}
    path = folder / "records.jsonl"
    if path.is_file():
        check_file(path)
        start = _start(path)
        about |= {"last_step": _last_step(path), **{name: start.get(name) for name in _STARTED}}
    return about


def _start(path: Path) -> dict[str, Any]:
    """The first record, if it says what the run trains."""
    with path.open("rb") as file:
        line = file.readline(_TAIL_BYTES)
    try:
        record = parse_json(line)
    except ValueError:
        return {}
    return record if wrong(record, _STARTED) is None else {}


def _last_step(path: Path) -> int | None:
    """From the end of the records: there may be millions before it."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines(keepends=True)
    for line in reversed(lines):
        try:
            record = parse_json(line)  # that of a running job may end in half a line
        except ValueError:
            continue
        if wrong(record, {"step": COUNT}) is None:
            return record["step"]
    return None
