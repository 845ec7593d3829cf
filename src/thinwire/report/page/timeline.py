"""What happened to a run: saves, resumes, groups that were lost or came, and what else its method noted."""

from __future__ import annotations

from typing import Any

from thinwire.report.page.numbers import evenly, plain
from thinwire.report.records import Run
from thinwire.report.thinned import Thinned

_MOST_EVENTS = 100
_MOST_SAVES = 50
_MOST_PHASES = 100
_LONGEST = 300


def timeline(run: Run, records: Thinned) -> dict[str, Any] | None:
    """Events in order, saves, and where each phase begins; None if nothing happened."""
    happened = [_resumed(record) for record in records.of("resume")] + [
        _event(record) for record in records.of("event")
    ]
    if not happened:
        return None
    return {
        "events": evenly(sorted(happened, key=lambda one: one["step"]), _MOST_EVENTS),
        "saves": [record["step"] for record in evenly(records.of("save"), _MOST_SAVES)],
        "phases": _phases(records),
        "end": run.summary.get("steps"),
    }


def _resumed(record: dict[str, Any]) -> dict[str, Any]:
    lost = record.get("lost_steps")
    again = f", {lost:,} step{'s' if lost > 1 else ''} again" if isinstance(lost, int) and lost else ""
    return {"step": record["step"], "kind": "resume", "text": f"resumed from a save{again}"}


def _event(record: dict[str, Any]) -> dict[str, Any]:
    known = ("kind", "step", "event")
    more = ", ".join(f"{name} {plain(value)}" for name, value in record.items() if name not in known)
    if record["event"] != "groups":
        return {"step": record["step"], "kind": "event", "text": f"{record['event']}: {more}"[:_LONGEST]}
    lost, came = record.get("lost") or [], record.get("came") or []
    parts = [f"lost group {_names(lost)}"] if lost else []
    parts += [f"group {_names(came)} joined"] if came else []
    kind = "lost" if lost else "joined"
    return {"step": record["step"], "kind": kind, "text": f"{' and '.join(parts)}, {record.get('groups')} go on"}


def _names(groups: Any) -> str:
    return ", ".join(map(str, groups)) if isinstance(groups, list) else str(groups)


def _phases(records: Thinned) -> list[list[Any]]:
    """Where each begins, as far as the thinned-out steps tell."""
    found: list[list[Any]] = []
    for record in records.of("step"):
        if isinstance(record.get("phase"), str) and (not found or found[-1][1] != record["phase"]):
            found.append([record["step"] - 1 if not found else record["step"], record["phase"]])
    return found if len(found) <= _MOST_PHASES else []
