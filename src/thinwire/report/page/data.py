"""What a report shows, as plain values that fit a page: curves are thinned out, numbers rounded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinwire.errors import ThinwireError, one_line
from thinwire.report.folders import labels, shares
from thinwire.report.page.command import command
from thinwire.report.page.summary import sentences
from thinwire.report.records import Run
from thinwire.report.thinned import MOST, Thinned, read_thinned

_ALL_POINTS = 40_000
"""Points of a curve over all runs: about 3 MB of a page."""
_LEAST_POINTS = 40
_ALL_RANKS = 200_000
_MOST_LAYERS = 64
_DIGITS = 5


def collect(runs: list[Run], problems: Sequence[str], top: Path) -> dict[str, Any]:
    """Sentences, problems and runs, for `page.js`."""
    named, share = labels(runs), shares(runs)
    most = max(_LEAST_POINTS, min(MOST, _ALL_POINTS // max(1, len(runs))))
    problems = list(problems)
    shown = []
    for run in runs:
        records = _records(run, most)
        problems += [f"{_name(run, top)}: {problem}" for problem in records.problems]
        shown.append(
            _about(run, named[run.folder], share[run.folder])
            | {"name": _name(run, top), "curves": _curves(run, records), "ranks": _ranks(run, records, len(runs))}
        )
    try:
        summary = sentences([run for run in runs if run.is_finished])
    except (ThinwireError, KeyError) as error:  # a summary of an older version may lack a figure
        summary = []
        problems.append(f"no summary in words: {one_line(error)}")
    return {"sentences": summary, "problems": problems, "runs": shown}


def _name(run: Run, top: Path) -> str:
    return str(run.folder.relative_to(top)) if run.folder.is_relative_to(top) and run.folder != top else run.folder.name


def _records(run: Run, most: int) -> Thinned:
    path = run.folder / "records.jsonl"
    if not path.is_file():
        return Thinned([], {}, ["`records.jsonl` is missing; its curves are not shown"])
    return read_thinned(path, most)


def _about(run: Run, label: str, share: float | None) -> dict[str, Any]:
    about = run.summary
    traffic = about["traffic"]
    return {
        "label": label,
        "metric": run.metric,
        "split": run.split,
        "result": _number(about[run.metric]),
        "bytes": run.counted_bytes,
        "share": _number(share),
        "purposes": _amounts(traffic.get("by_purpose"), "slow_bytes"),
        "phases": _amounts(traffic.get("by_phase"), "slow_bytes"),
        "seconds": _seconds(about.get("time")),
        "config": _plain(about["config"]),
        "command": command(about),
        **{name: about[name] for name in ("recipe", "method", "seed")},
        **{name: _number(about.get(name)) for name in ("compression", "wall_s", "world_size", "steps", "lr")},
        "optimizer": about.get("optimizer"),
        "versions": _plain(about.get("versions")),
    }


def _amounts(parts: Any, field: str) -> dict[str, float]:
    """Positive amounts by name, the largest first."""
    if not isinstance(parts, dict):
        return {}
    found = {str(name): _number(part.get(field)) for name, part in parts.items() if isinstance(part, dict)}
    return dict(sorted(((name, amount) for name, amount in found.items() if amount), key=lambda item: -item[1]))


def _seconds(phases: Any) -> dict[str, float]:
    """Where the time went, over all phases."""
    whole: dict[str, float] = {}
    for phase in phases.values() if isinstance(phases, dict) else ():
        for name in ("compute", "wire", "decomposition", "other"):
            whole[name] = whole.get(name, 0.0) + (_number(phase.get(name)) or 0.0 if isinstance(phase, dict) else 0.0)
    return {name: seconds for name, seconds in whole.items() if seconds > 0}


def _curves(run: Run, records: Thinned) -> dict[str, dict[str, list[Any]]]:
    evaluations = [record for record in records.of("evaluation") if record.get("model") != "finished"]
    return {"metric": _curve(evaluations, run.metric), "loss": _curve(records.of("step"), "loss")}


def _curve(records: list[dict[str, Any]], field: str) -> dict[str, list[Any]]:
    """Values over steps, slow-link megabytes without evaluation, and seconds."""
    points = [record for record in records if isinstance(record.get("step"), int) and field in record]
    return {
        "step": [record["step"] for record in points],
        "mb": [_megabytes(record) for record in points],
        "s": [_number(record.get("wall_s")) for record in points],
        "y": [_number(record[field]) for record in points],
    }


def _megabytes(record: dict[str, Any]) -> float | None:
    sent, evaluation = _number(record.get("slow_bytes"), exact=True), _number(record.get("evaluate_bytes"), exact=True)
    return None if sent is None else _number((sent - (evaluation or 0)) / 1e6)


def _ranks(run: Run, records: Thinned, runs: int) -> dict[str, Any] | None:
    """Ranks of layers over the steps; of many layers some, evenly spaced."""
    found = [record for record in records.of("ranks") if record["ranks"]]
    names = list(dict.fromkeys(name for record in found for name in record["ranks"]))
    if not names:
        return None
    shown = names[:: -(-len(names) // _MOST_LAYERS)]
    times = max(2, _ALL_RANKS // runs // len(shown))
    thin = found[:: -(-len(found) // times)]
    thin = thin if thin[-1] is found[-1] else [*thin, found[-1]]
    return {
        "steps": [record["step"] for record in thin],
        "layers": {name: [record["ranks"].get(name) for record in thin] for name in shown},
        "of": len(names),
        "end": run.summary.get("steps"),
    }


def _plain(value: Any) -> Any:
    """The same in JSON, which has no NaN."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any, *, exact: bool = False) -> Any:
    """A finite number, rounded; None for anything else: JSON has no NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if exact or isinstance(value, int) else float(f"{value:.{_DIGITS}g}")
