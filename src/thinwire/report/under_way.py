"""Runs that have not finished, as a page shows them: with what their records say so far in place of a summary."""

from __future__ import annotations

import time

from thinwire.base.schema import FIGURE, wrong
from thinwire.report.followed import FollowedRun
from thinwire.report.panel import is_silent, line, silence
from thinwire.report.records import SUMMARY, UNDER_WAY, Run

_OF_START = ("recipe", "method", "config", "seed", "world_size", "metric", "split", "batch", "parameters_full")
_IF_KNOWN = ("optimizer", "lr", "weight_decay", "usual_optimizer", "usual_lr", "split_size")


def so_far(run: FollowedRun) -> Run | None:
    """The run at its last evaluation; None before the first, or if its records cannot be used."""
    start, last = run.progress.start, run.progress.evaluation
    if not start or not last or any(name not in start for name in _OF_START):
        return None
    evaluate = {"slow_bytes": last.get("evaluate_bytes", 0)}
    summary = {
        UNDER_WAY: True,
        **{name: start[name] for name in (*_OF_START, *_IF_KNOWN) if name in start},
        "steps": last["step"],
        "length": start["steps"],
        start["metric"]: last.get(start["metric"]),
        "wall_s": last.get("wall_s"),
        "time": last.get("time"),
        "traffic": {"slow_bytes": last["slow_bytes"], "by_purpose": {"evaluate": evaluate}},
        "traffic_vs_allreduce_fp32": run.progress.share,
    }
    if wrong(summary, SUMMARY | {start["metric"]: FIGURE, "config": {}}):
        return None
    return Run(folder=run.folder, summary=summary)


def in_words(run: FollowedRun) -> str:
    """How far it is, or since when nothing was heard."""
    quiet_s = 0.0 if run.written is None else time.time() - run.written
    if run.written is not None and is_silent(run.progress, quiet_s):
        return f"{run.progress.title}: {silence(run.written, quiet_s)}"
    return line(run.progress).replace("  ", ", ")  # a browser shows several spaces as one
