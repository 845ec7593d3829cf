"""What a run recorded over its steps, as a page shows it: curves, tables of layers, and what happened."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from thinwire.report.records import Thinned
from thinwire.report.runs import Run

_DIGITS = 5
_LAYER_DIGITS = 3
_T = TypeVar("_T")


def number(value: Any, *, digits: int | None = _DIGITS) -> Any:
    """A finite number, rounded unless `digits` is None; None for anything else: JSON has no NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if digits is None or isinstance(value, int) else float(f"{value:.{digits}g}")


def plain(value: Any) -> Any:
    """The same in JSON, which has no NaN."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def evenly(values: Sequence[_T], most: int) -> list[_T]:
    """At most about `most` of them, evenly spaced, the first and the last among them."""
    thin = list(values[:: -(-len(values) // max(1, most))]) if values else []
    return thin if not thin or thin[-1] is values[-1] else [*thin, values[-1]]


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


_ALL_CELLS = 150_000
"""Of all runs together, for each kind of figure: less than a megabyte."""
_MOST_LAYERS = 64
_LEAST_TIMES = 2
_SPECTRA_TIMES = 3


def of_layers(run: Run, records: Thinned, runs: int) -> dict[str, Any]:
    """Tables of layers over steps, each None if nothing was recorded; the more runs, the smaller they are."""
    most = _ALL_CELLS // max(1, runs)
    stability = {record["step"]: record["layers"] for record in records.of("stability")}
    bases = {
        step: {name: measures["stability"] for name, measures in found.items()} for step, found in stability.items()
    }
    agreement = {record["step"]: record.get("layers", {}) for record in records.of("agreement")}
    return {
        "ranks": _table({record["step"]: record["ranks"] for record in records.of("ranks")}, most, run),
        "stability": _table(bases, most, run),
        "agreement": _table(agreement, most, run),
        "spectra": _spectra(records, most),
        "agrees": _agrees(run, records),
    }


def _table(found: Mapping[int, Mapping[str, Any]], most: int, run: Run) -> dict[str, Any] | None:
    """Values of layers over the steps; of many layers and steps some, evenly spaced."""
    known = [(step, values) for step, values in found.items() if values]
    names = list(dict.fromkeys(name for _, values in known for name in values))
    if not names:
        return None
    shown = evenly(names, min(_MOST_LAYERS, max(1, most // _LEAST_TIMES)))
    thin = evenly(known, max(_LEAST_TIMES, most // len(shown)))
    return {
        "steps": [step for step, _ in thin],
        "layers": {name: [number(values.get(name), digits=_LAYER_DIGITS) for _, values in thin] for name in shown},
        "of": len(names),
        "end": run.summary.get("steps"),
    }


def _spectra(records: Thinned, most: int) -> list[dict[str, Any]] | None:
    """At the first, the middle and the last evaluation."""
    found = [record for record in records.of("spectra") if record["layers"]]
    if not found:
        return None
    chosen = {record["step"]: record for record in (found[0], found[len(found) // 2], found[-1])}.values()
    names = list(found[-1]["layers"])
    each = max(len(values) for values in found[-1]["layers"].values())
    shown = evenly(names, min(_MOST_LAYERS, max(1, most // each // _SPECTRA_TIMES)))
    return [
        {
            "step": record["step"],
            "layers": {
                name: [number(value, digits=_LAYER_DIGITS) for value in record["layers"][name]]
                for name in shown
                if name in record["layers"]
            },
            "of": len(names),
        }
        for record in chosen
    ]


def _agrees(run: Run, records: Thinned) -> dict[str, Any] | None:
    """Of the whole model: 1 where groups moved alike, √groups where they moved in unrelated directions."""
    found = records.of("agreement")
    if not found:
        return None
    groups = run.summary.get("groups")
    return {
        "step": [record["step"] for record in found],
        "y": [number(record["ratio"], digits=_LAYER_DIGITS) for record in found],
        "noise": number(math.sqrt(len(groups))) if isinstance(groups, list) else None,
    }


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
