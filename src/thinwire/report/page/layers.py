"""What a run recorded of its layers: ranks, stability of bases, singular values, agreement of groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from thinwire.report.page.numbers import evenly, number
from thinwire.report.records import Run
from thinwire.report.thinned import Thinned

_ALL_CELLS = 150_000
"""Of all runs together, for each kind of figure: less than a megabyte."""
_MOST_LAYERS = 64
_LEAST_TIMES = 2
_SPECTRA_TIMES = 3
_DIGITS = 3


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
        "layers": {name: [number(values.get(name), digits=_DIGITS) for _, values in thin] for name in shown},
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
            "layers": {name: _rounded(record["layers"][name]) for name in shown if name in record["layers"]},
            "of": len(names),
        }
        for record in chosen
    ]


def _rounded(values: list[float]) -> list[Any]:
    return [number(value, digits=_DIGITS) for value in values]


def _agrees(run: Run, records: Thinned) -> dict[str, Any] | None:
    """Of the whole model: 1 where groups moved alike, √groups where they moved in unrelated directions."""
    found = records.of("agreement")
    if not found:
        return None
    groups = run.summary.get("groups")
    return {
        "step": [record["step"] for record in found],
        "y": [number(record["ratio"], digits=_DIGITS) for record in found],
        "noise": number(math.sqrt(len(groups))) if isinstance(groups, list) else None,
    }
