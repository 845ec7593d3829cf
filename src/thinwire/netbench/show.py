"""Tables of netbench's results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from thinwire import units
from thinwire.report.tables import size

_CAPTION = (
    "Bytes per host, mean over hosts. Ledger is what Thinwire counted, kernel what the interface sent; left is the "
    "kernel's count minus 66 bytes of headers per packet and the ledger's. Wire is the share of time spent waiting."
)
# Below this the remainder is shown in bytes: a percentage of very little means nothing.
_LITTLE = 100_000
_HEADINGS = ("per step", "planned", "speed-\nup", "planned", "wire", "ledger", "kernel", "headers", "left")


def tables(found: dict[str, Any]) -> Iterator[Table]:
    """One table per rate."""
    for at in found["rates"]:
        each = found["workers"] // found["hosts"]
        link = f"{at['rate']} ({units.rate(at['probe_bits'])} of payload measured)"
        title = f"{found['recipe']}, {found['steps']} steps, {found['hosts']} hosts × {each}, {link}"
        out = Table(title=title, caption=_CAPTION, box=SIMPLE_HEAD)
        out.add_column("method", no_wrap=True)
        for heading in _HEADINGS:
            out.add_column(heading, justify="right", no_wrap=True)
        for row in at["methods"]:
            out.add_row(*_cells(row))
            if row.get("planned_with_ranks"):
                again = row["planned_with_ranks"]
                planned = units.time(again["seconds_per_step"])
                out.add_row("  with its own ranks", "", planned, "", f"{again['speedup']:.2f}", style="dim")
            for phase, part in row["phases"].items():
                out.add_row(f"  {phase}", *[""] * 5, *_bytes(part), style="dim")
        yield out


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
