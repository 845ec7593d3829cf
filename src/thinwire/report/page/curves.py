"""Curves of a run over steps, bytes and time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from thinwire.report.page.numbers import number
from thinwire.report.records import Run
from thinwire.report.thinned import Thinned

Curve = dict[str, list[Any]]


def curves(run: Run, records: Thinned) -> dict[str, Curve]:
    """The metric and the loss; of a long run losses are means of neighbouring steps, and `spikes` are single ones."""
    evaluations = [record for record in records.of("evaluation") if record.get("model") != "finished"]
    return {
        "metric": _curve((record, record[run.metric]) for record in evaluations if run.metric in record),
        "loss": _curve((point.record, point.mean) for point in records.points),
        "spikes": _curve((record, record.get("loss")) for record in records.spikes),
    }


def _curve(points: Iterable[tuple[dict[str, Any], Any]]) -> Curve:
    """Values over steps, slow-link megabytes without evaluation, and seconds."""
    known = [(record, value) for record, value in points if isinstance(record.get("step"), int)]
    return {
        "step": [record["step"] for record, _ in known],
        "mb": [_megabytes(record) for record, _ in known],
        "s": [number(record.get("wall_s")) for record, _ in known],
        "y": [number(value) for _, value in known],
    }


def _megabytes(record: dict[str, Any]) -> float | None:
    sent, evaluation = (number(record.get(name), digits=None) for name in ("slow_bytes", "evaluate_bytes"))
    return None if sent is None else number((sent - (evaluation or 0)) / 1e6)
