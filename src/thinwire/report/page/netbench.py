"""The panel of `netbench.json`: what a step took at each rate of the links, measured and planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from thinwire.base import units
from thinwire.base.files import read_json
from thinwire.base.schema import COUNT, NUMBER, TEXT
from thinwire.report.page.history import number

NAME = "netbench.json"
_METHOD = {
    "method": TEXT,
    "out": TEXT,
    "step_s": NUMBER,
    "speedup": (None, NUMBER),
    "planned": {"seconds_per_step": NUMBER},
    "time": {str: {"seconds": NUMBER, "wire": NUMBER}},
}
_SCHEMA = {
    "recipe": TEXT,
    "workers": COUNT,
    "hosts": COUNT,
    "steps": COUNT,
    "rates": [{"rate": TEXT, "probe_bits": NUMBER, "methods": [_METHOD]}],
}
_SAME = 1.05
"""Speed-up up to which a method counts as no faster."""
_REMEDY = "restore it, or run `thinwire netbench` again with `--overwrite`"


def read_bench(folder: Path) -> dict[str, Any] | None:
    """What a page shows of the measurement in a folder, if there is one."""
    path = folder / NAME
    if not path.is_file():
        return None
    found = read_json(path, _REMEDY, _SCHEMA)
    about = {name: found[name] for name in ("recipe", "workers", "hosts", "steps")}
    return about | {"rates": [_rate(at) for at in found["rates"]]}


def _rate(at: dict[str, Any]) -> dict[str, Any]:
    return {
        "rate": at["rate"],
        "probe": units.rate(at["probe_bits"]),
        "folder": at["rate"].replace(" ", "").replace("/s", ""),
        "methods": [_method(row) for row in at["methods"]],
    }


def _method(row: dict[str, Any]) -> dict[str, Any]:
    spent, waited = (sum(phase[name] for phase in row["time"].values()) for name in ("seconds", "wire"))
    again = row.get("planned_with_ranks") or row["planned"]
    return {
        "label": row["method"],
        "folder": Path(row["out"]).name,
        "step_s": number(row["step_s"]),
        "planned_s": number(again["seconds_per_step"]),
        "speedup": number(row["speedup"]),
        "wire": number(waited / spent) if spent else None,
    }


def bench_sentences(bench: dict[str, Any]) -> list[str]:
    """What the fastest method gained at each rate."""
    return [sentence for at in bench["rates"] if (sentence := _sentence(at))]


def _sentence(at: dict[str, Any]) -> str:
    rows = [row for row in at["methods"] if row["step_s"] is not None]
    if not rows:
        return ""
    best = min(rows, key=lambda row: row["step_s"])
    link = "Over unshaped links" if at["rate"] == "unshaped" else f"At {at['rate']}"
    gain = best["speedup"] if len(rows) > 1 else None
    faster = f", {gain:.1f} times as fast as all-reduce" if gain and gain > _SAME else ", and nothing else was faster"
    return f"{link} a step took {units.time(best['step_s'])} with {best['label']}{faster if gain else ''}."
