"""What a report shows, as plain values that fit a page: curves are thinned out, numbers rounded."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.base.errors import ThinwireError, one_line
from thinwire.report.comparison import baseline_of, labels, share_of_baseline
from thinwire.report.page.history import curves, number, of_layers, plain, timeline
from thinwire.report.page.netbench import bench_sentences
from thinwire.report.page.summary import pareto, sentences
from thinwire.report.records import MOST, Thinned, read_thinned
from thinwire.report.runs import Run, is_measured_baseline
from thinwire.report.tables import examples

_ALL_POINTS = 30_000
"""Points of a curve over all runs: about 2 MB of a page."""
_LEAST_POINTS = 40


@dataclass(frozen=True)
class Content:
    """What a report is about."""

    runs: list[Run]
    """Finished runs, in the order of the table."""
    problems: Sequence[str] = ()
    """Sentences on what cannot be shown."""
    benches: Sequence[dict[str, Any]] = field(default_factory=tuple)
    """Measurements of netbench, as `netbench.read_bench` returns them."""


def collect(content: Content, top: Path) -> dict[str, Any]:
    """All that is in the page, for its scripts and for figures; runs are named as seen from `top`."""
    runs, problems = content.runs, list(content.problems)
    labelled, names = labels(runs), _names(runs, top)
    most = max(_LEAST_POINTS, min(MOST, _ALL_POINTS // max(1, len(runs))))
    shown = []
    for run in runs:
        records = _records(run, most)
        problems += [f"{names[run.folder]}: {problem}" for problem in records.problems]
        shown.append(
            _about(run, labelled[run.folder])
            | _compared(run, runs, names)
            | {"name": names[run.folder], "curves": curves(run, records), "timeline": timeline(run, records)}
            | {"layers": of_layers(run, records, len(runs)), "problems": len(records.problems)}
        )
    said = [sentence for bench in content.benches for sentence in bench_sentences(bench)]
    points: list[dict[str, Any]] = []
    try:
        ended = [run for run in runs if run.is_finished]
        said += sentences(ended)
        points = pareto(ended, labelled)
    except (ThinwireError, KeyError) as error:  # a summary of an older version may lack a figure
        problems.append(f"no summary in words: {one_line(error)}")
    return {
        "sentences": said,
        "problems": problems,
        "pareto": points,
        "benches": list(content.benches),
        "runs": shown,
    }


def _names(runs: list[Run], top: Path) -> dict[Path, str]:
    """By folder: the path from `top` if all runs are in it, else from the folder that they have in common."""
    folders = [run.folder.absolute() for run in runs]
    top = top.absolute()
    if not all(folder.is_relative_to(top) for folder in folders):
        top = Path(os.path.commonpath([folder.parent for folder in folders]))
    return {
        run.folder: str(folder.relative_to(top)) if folder != top else folder.name for run, folder in zip(runs, folders)
    }


def _records(run: Run, most: int) -> Thinned:
    path = run.folder / "records.jsonl"
    if not path.is_file():
        return Thinned({}, [], [], {}, ["`records.jsonl` is missing; its curves are not shown"])
    return read_thinned(path, most, {"evaluation": run.metric})


def _compared(run: Run, runs: list[Run], names: dict[Path, str]) -> dict[str, Any]:
    """The share of all-reduce's bytes, and which run of it that is against."""
    about = (run.summary["recipe"], run.metric, run.split)
    measured = [o for o in runs if is_measured_baseline(o) and (o.summary["recipe"], o.metric, o.split) == about]
    base = baseline_of(run, measured)
    return {"share": number(share_of_baseline(run, measured)), "against": names[base.folder] if base else None}


def _about(run: Run, label: str) -> dict[str, Any]:
    about = run.summary
    traffic = about["traffic"]
    return {
        "label": label,
        "metric": run.metric,
        "split": run.split,
        "examples": examples(about),
        "result": number(about[run.metric]),
        "bytes": run.counted_bytes,
        "purposes": _amounts(traffic.get("by_purpose"), "slow_bytes"),
        "phases": _amounts(traffic.get("by_phase"), "slow_bytes"),
        "links": _links(traffic),
        "kernel": _kernel(traffic),
        "seconds": _seconds(about.get("time")),
        "config": plain(about["config"]),
        "command": command(about),
        **{name: about[name] for name in ("recipe", "method", "seed")},
        **{name: number(about.get(name)) for name in ("compression", "wall_s", "world_size", "steps", "lr")},
        "optimizer": about.get("optimizer"),
        "versions": plain(about.get("versions")),
    }


def _amounts(parts: Any, name: str) -> dict[str, float]:
    """Positive amounts by name, the largest first."""
    if not isinstance(parts, dict):
        return {}
    found = {str(own): number(part.get(name)) for own, part in parts.items() if isinstance(part, dict)}
    return dict(sorted(((own, amount) for own, amount in found.items() if amount), key=lambda item: -item[1]))


def _links(traffic: dict[str, Any]) -> dict[str, float]:
    """Bytes over each link, evaluation included."""
    found = {f"{link} link": number(traffic.get(f"{link}_bytes")) for link in ("slow", "fast")}
    return {name: amount for name, amount in found.items() if amount}


def _kernel(traffic: dict[str, Any]) -> float | None:
    """What the kernel counted on the slow link, headers included, if a run watched an interface."""
    counted = _amounts(traffic.get("by_phase"), "kernel_bytes")
    return sum(counted.values()) or None


def _seconds(phases: Any) -> dict[str, float]:
    """Where the time went, over all phases."""
    whole: dict[str, float] = {}
    for phase in phases.values() if isinstance(phases, dict) else ():
        for name in ("compute", "wire", "decomposition", "other"):
            whole[name] = whole.get(name, 0.0) + (number(phase.get(name)) or 0.0 if isinstance(phase, dict) else 0.0)
    return {name: seconds for name, seconds in whole.items() if seconds > 0}


def command(summary: dict[str, Any]) -> str:
    """The command as it was given, on as many workers; if the run was not started by one, what comes nearest."""
    given = summary.get("command")
    if not (isinstance(given, list) and given and all(isinstance(word, str) for word in given)):
        return _rebuilt(summary)
    workers = ["--workers", str(summary["world_size"])] if "world_size" in summary else []
    return shlex.join(["thinwire", *given, *workers])


def _rebuilt(summary: dict[str, Any]) -> str:
    """Every setting of the method, but no data, optimizer, `--rate`, `--with` or own file."""
    words = ["thinwire", "run", summary["recipe"], "--method", summary["method"], "--seed", summary["seed"]]
    optional = {
        "--workers": summary.get("world_size"),
        "--steps": summary.get("length", summary.get("steps")),
        "--batch-size": summary.get("batch"),
        # Also where they are the recipe's own: a summary does not say whether the user gave them. No option takes a
        # list, where parameter groups differ.
        **{f"--{name.replace('_', '-')}": number(summary.get(name), digits=None) for name in ("lr", "weight_decay")},
        "--group-size": summary["config"].get("group_size"),
    }
    for flag, value in optional.items():
        words += [] if value is None else [flag, value]
    words += ["--validate"] if summary.get("split") == "validation" else []
    for name, value in summary["config"].items():
        if name != "group_size" and (text := _typed(value)) is not None:
            words += ["--set", f"{name}={text}"]
    return shlex.join(str(word) for word in words)


def _typed(value: Any) -> str | None:
    """A setting as `--set` takes it; None for what cannot be typed."""
    if isinstance(value, list):
        return ",".join(str(part) for part in value)
    if isinstance(value, dict):  # an outer step, which is written as LR or LR/MOMENTUM, or `radial`
        if "lr" not in value:
            return "radial" if value == {"most": None} else None
        momentum = value.get("momentum")
        return f"{value['lr']}" + ("" if momentum is None else f"/{momentum}")
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
