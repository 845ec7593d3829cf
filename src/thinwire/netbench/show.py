"""Tables of netbench's results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from thinwire.base import units
from thinwire.report.tables import fitting, simple_table, size

_CAPTION = (
    "Bytes per host, mean over hosts. Ledger is what Thinwire counted, kernel what the interface sent; left is the "
    "kernel's count minus 66 bytes of headers per packet and the ledger's. Wire is the share of time spent waiting."
)
# Below this the remainder is shown in bytes: a percentage of very little means nothing.
_LITTLE = 100_000
_HEADINGS = ("method", "per step", "planned", "speed-\nup", "plan-\nned", "wire", "ledger", "kernel", "headers", "left")
_DISPENSABLE = ("headers", "kernel", "plan-\nned", "wire")


def tables(found: dict[str, Any], width: int = 120) -> Iterator[Table]:
    """One table per rate, in so many characters."""
    for at in found["rates"]:
        each = found["workers"] // found["hosts"]
        link = f"{at['rate']} ({units.rate(at['probe_bits'])} of payload measured)"
        title = f"{found['recipe']}, {units.count(found['steps'], 'step')}, {found['hosts']} hosts × {each}, {link}"
        out = simple_table(title=title, caption=_CAPTION)
        lines = [line for row in at["methods"] for line in _lines(row)]
        widths = {
            name: max(map(len, (*name.split("\n"), *(cells[i] for cells, _ in lines))))
            for i, name in enumerate(_HEADINGS)
        }
        shown = fitting(widths, _DISPENSABLE, width)
        for name in shown:
            out.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
        for cells, style in lines:
            out.add_row(*(cells[_HEADINGS.index(name)] for name in shown), style=style)
        yield out


def _lines(row: dict[str, Any]) -> Iterator[tuple[list[str], str]]:
    """The rows of one method, with their style."""
    yield _cells(row), ""
    if again := row.get("planned_with_ranks"):
        planned = units.time(again["seconds_per_step"])
        yield ["  with its own ranks", "", planned, "", f"{again['speedup']:.2f}", *[""] * 5], "dim"
    for phase, part in row["phases"].items():
        yield [f"  {phase}", *[""] * 5, *_bytes(part)], "dim"


def _cells(row: dict[str, Any]) -> list[str]:
    whole, planned = row["whole"], row["planned"]
    spent = sum(phase["seconds"] for phase in row["time"].values())
    waited = sum(phase["wire"] for phase in row["time"].values())
    return [
        row["method"],
        units.time(row["step_s"]),
        units.time(planned["seconds_per_step"]),
        "–" if row["speedup"] is None else f"{row['speedup']:.2f}",
        f"{planned['speedup']:.2f}",
        f"{100 * waited / spent:.0f} %",
        *_bytes(whole),
    ]


def _bytes(part: dict[str, Any]) -> list[str]:
    ledger, left = part["ledger_bytes"], part["left_bytes"]
    share = f"{100 * left / ledger:.2f} %" if ledger > _LITTLE else size(left)
    return [size(ledger), size(part["kernel_bytes"]), size(part["headers_bytes"]), share]
