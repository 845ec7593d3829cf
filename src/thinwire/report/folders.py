"""Find runs in folders: finished, unfinished and damaged ones, each with what its files say."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.base.errors import ConfigError, one_line
from thinwire.base.files import check_file, parse_json, read_json
from thinwire.base.schema import COUNT, TEXT, wrong
from thinwire.report.records import Run, grouped, is_measured_baseline, read_run, share_of_baseline

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
    start = _start(folder)
    about = {"recipe": start.get("recipe"), "method": start.get("method")}
    return {"status": status, "note": note, "last_step": _last_step(folder), **about, "seed": start.get("seed")}


def _start(folder: Path) -> dict[str, Any]:
    """The first record, if it says what the run trains."""
    path = folder / "records.jsonl"
    if not path.is_file():
        return {}
    check_file(path)
    with path.open("rb") as file:
        line = file.readline(_TAIL_BYTES)
    try:
        record = parse_json(line)
    except ValueError:
        return {}
    return record if wrong(record, _STARTED) is None else {}


def _last_step(folder: Path) -> int | None:
    """From the end of the records: there may be millions before it."""
    path = folder / "records.jsonl"
    if not path.is_file():
        return None
    check_file(path)
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
