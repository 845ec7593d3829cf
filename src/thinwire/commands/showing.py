"""What a run shows while it goes on and when it is over."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from thinwire.launch.jobs import Job
from thinwire.report.live import FollowedRun, following
from thinwire.report.page.summary import percent
from thinwire.report.progress import Progress
from thinwire.report.tables import best_epoch, duration, examples, figure, ratio, size

_PARTS = {
    "computing": "computing",
    "waiting": "waiting for the wire",
    "method": "the method's own work",
    "evaluating": "evaluating",
    "finishing": "finishing",
    "other": "other",
}


def shown(job: Job, title: str, console: Console, *, silent: bool) -> AbstractContextManager[None]:
    """Show the job while it runs: rank 0's records are read, so it makes no difference which process runs it."""
    if silent or (job.resume and (job.out / "summary.json").is_file()):
        return nullcontext()
    progress = Progress(title, job.trained.steps, job.trained.task.metric)
    return following(FollowedRun(job.out, progress), console)


def print_summary(summary: dict[str, Any], folder: Path) -> None:
    """The result of a run, in a few lines."""
    if "stopped_at" in summary:
        click.echo(
            f"saved after step {summary['stopped_at']} of {summary['steps']} in {folder}; continue with --resume"
        )
        return
    metric = summary["metric"]
    before = figure(metric, summary[f"{metric}_before_truncation"])
    share = ratio(summary["traffic_vs_allreduce_fp32"])
    lines = [
        f"{metric} {figure(metric, summary[metric])} on {examples(summary)} ({before} before truncation)",
        *best_epoch(summary),
        f"slow link {size(_sent(summary))} without evaluation, {share} of all-reduce fp32",
        f"model {summary['parameters_final']:,} of {summary['parameters_full']:,} parameters, "
        f"{100 * summary['trainable_share']:.1f} % of the full ones trained at the end",
        *_spent(summary),
        f"records.jsonl, summary.json{' and model/' if (folder / 'model').is_dir() else ''} are in {folder}",
    ]
    click.echo("\n".join(lines))


def closing_line(title: str, summary: dict[str, Any]) -> str:
    """One run of several, when it is over."""
    if "stopped_at" in summary:
        return f"{title}: saved after step {summary['stopped_at']} of {summary['steps']}"
    metric, share = summary["metric"], summary.get("traffic_vs_allreduce_fp32")
    of_usual = "" if share is None else f", {percent(share)} of fp32 DDP"
    seconds = summary.get("wall_s")  # as in the table: without finishing
    lasted = "" if seconds is None else f", {duration(seconds)}"
    return f"{title}: {metric} {figure(metric, summary[metric])}, slow link {size(_sent(summary))}{of_usual}{lasted}"


def _spent(summary: dict[str, Any]) -> list[str]:
    """Where the time went; summaries of earlier versions do not say."""
    if not (parts := summary.get("spent")) or not (whole := sum(parts.values())):
        return []
    shares = ", ".join(f"{_PARTS[name]} {100 * parts[name] / whole:.0f} %" for name in _PARTS if name in parts)
    return [f"time {duration(whole)}: {shares}"]


def _sent(summary: dict[str, Any]) -> float:
    traffic = summary["traffic"]
    return traffic["slow_bytes"] - traffic["by_purpose"].get("evaluate", {}).get("slow_bytes", 0)
