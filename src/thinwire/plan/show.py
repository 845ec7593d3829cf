"""A plan as a table, and as a picture over bandwidth and over nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, JustifyMethod
from rich.table import Table

from thinwire.base import units
from thinwire.plan.forecast import Links
from thinwire.plan.planner import Plan, over_nodes
from thinwire.report.plots import colours, dress, two_panels
from thinwire.report.tables import fitting, ratio, simple_table, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BANDWIDTHS = np.geomspace(1e8, 4e11, 48)
_TICKS = (0.1, 0.2, 0.5, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500)
NODES = tuple(2**i for i in range(1, 11))
_COLUMNS = {
    "slow link\nper step": 9,
    "slow link\ntotal": 9,
    "vs all-\nreduce": 7,
    "time\nper step": 9,
    "time\ntotal": 9,
    "speed-\nup": 6,
    "pays\nbelow": 12,
    "memory /\nworker": 9,
}
"""Headings, and the width of the widest figure below each."""
_DISPENSABLE = ("pays\nbelow", "memory /\nworker", "slow link\ntotal", "time\ntotal")
"""Columns that a narrow console leaves out, in this order."""
_LONGEST = 26
"""Of the labels of methods in the table; more settings than fit are left to the caption."""


class Rows:
    """A plan's table, printed one method at a time; so every column has a fixed width."""

    def __init__(self, console: Console, methods: Iterable[str]) -> None:
        self._console = console
        self._names = _short(methods)
        self._widths = {"method": max(map(len, ("method", *self._names.values()))), **_COLUMNS}
        self._shown = fitting(self._widths, _DISPENSABLE, console.width)

    def begin(self, plan: Plan) -> None:
        """The title and the columns' names."""
        links = plan.links
        where = f"{units.count(plan.layout.workers, 'worker')} on {units.count(plan.baseline.nodes, 'node')}"
        title = (
            f"{plan.workload.name}, {units.count(plan.workload.steps, 'step')}, {where}, "
            f"{units.rate(links.bandwidth)} and {units.time(links.latency)} between them"
        )
        self._console.print(title, style="italic", highlight=False)
        self._console.print(self._table(with_names=True))

    def add(self, row: dict[str, Any]) -> None:
        """One method, and its range of bytes where they depend on ranks."""
        out = self._table(with_names=False)
        cells = dict(zip(self._widths, (self._names[row["method"]], *_cells(row)), strict=True))
        out.add_row(*(cells[heading] for heading in self._shown))
        self._console.print(out)
        if row["slow_bytes_range"]:
            low, high = row["slow_bytes_range"]
            self._console.print(f"   {size(low)} to {size(high)} in total", style="dim", highlight=False)

    def end(self, plan: dict[str, Any], advice: Iterable[str]) -> None:
        """The caption, and what to use."""
        self._console.print()
        left_out = [" ".join(heading.split()) for heading in self._widths if heading not in self._shown]
        more = f" Left out of this narrow table: {', '.join(left_out)}." if left_out else ""
        self._console.print(caption(plan) + more, style="italic", highlight=False)
        self._console.print()
        for line in advice:
            self._console.print(line, highlight=False, markup=False)

    def _table(self, *, with_names: bool) -> Table:
        out = simple_table(show_header=with_names)
        for heading in self._shown:
            justify: JustifyMethod = "left" if heading == "method" else "right"
            out.add_column(heading, justify=justify, no_wrap=True, width=self._widths[heading])
        return out


def caption(plan: dict[str, Any]) -> str:
    """What the figures of a plan are based on, in sentences."""
    names = _short([row["method"] for row in plan["methods"]])
    text = [f"{short} is {name}." for name, short in names.items() if short != name]
    text.append("Bytes per node without evaluation. Speed-up over fp32 all-reduce.")
    if plan["ranks"]:
        text.append(f"Ranks of {plan['ranks']}.")
    elif any(row["slow_bytes_range"] for row in plan["methods"]):
        text.append("Ranks of a typical run; below, rank 1 to full rank. For a run's own ranks: --ranks DIR.")
    assumed: dict[str, list[str]] = {}
    for row in plan["methods"]:
        assumed.setdefault(row["assumes"], []).append(names[row["method"]])
    text += [f"{', '.join(methods)}: if {what}." for what, methods in assumed.items() if what]
    held: dict[str, list[str]] = {}
    for row in plan["methods"]:
        held.setdefault(beside(row["memory_by_phase"]), []).append(names[row["method"]])
    if parts := "; ".join(f"{', '.join(methods)} {what}" for what, methods in held.items() if what):
        text.append(f"Held beside model and optimizer: {parts}.")
    if plan["allreduce"] == "tree":
        text.append("All-reduce by a tree over nodes; the ledger counts gloo's ring.")
    if plan["compute_measured"]:
        text.append("Compute measured here, activations counted.")
    else:
        text.append("Compute as given, in every phase; decompositions and activations left out.")
    return " ".join(text)


def _short(methods: Iterable[str]) -> dict[str, str]:
    """Labels with their first settings, as many as fit; the whole label where two would be alike."""
    found = {}
    for name in methods:
        found[name] = name
        while len(found[name]) > _LONGEST + 1 and ":" in found[name]:
            found[name] = found[name].rstrip("…").rpartition(":")[0] + "…"
    alike = Counter(found.values())
    return {name: short if alike[short] == 1 else name for name, short in found.items()}


def beside(phases: dict[str, dict[str, Any]]) -> str:
    """What a method holds beside model and optimizer, when it holds most, in words; nothing if it holds nothing."""
    most = max(phases.values(), key=lambda memory: memory["method_bytes"], default=None)
    if most is None or not most["method_bytes"]:
        return ""
    parts = ", ".join(f"{name} {size(part)}" for name, part in most["method"].items() if name != "other")
    text = size(most["method_bytes"]) + (f" ({parts})" if parts else "")
    if most["offloaded_bytes"]:
        text += f", {size(most['offloaded_bytes'])} of it on the CPU between averages: without activations the device "
        text += f"has {size(most['step_bytes'])} in a step and {size(most['average_bytes'])} in an average"
    return text


def _cells(row: dict[str, Any]) -> list[str]:
    pays = row["pays_below_bits"]
    return [
        size(row["slow_bytes_per_step"]),
        size(row["slow_bytes"]),
        ratio(row["traffic_vs_allreduce_fp32"]),
        units.time(row["seconds_per_step"]),
        units.time(row["seconds"]),
        f"{row['speedup']:.2f}",
        "any" if pays is None else "–" if pays == 0 else units.rate(float(f"{pays:.2g}")),
        size(row["memory_bytes"]),
    ]


def draw(plan: Plan, path: Path) -> dict[str, Any]:
    """Write the picture as PNG; returns its curves as plain values."""
    figure, (over_bandwidth, over_count) = two_panels()
    by_rate = {row.method: _over_bandwidth(plan, row) for row in plan.rows}
    by_count = over_nodes(plan, NODES)
    counts = list(by_count)
    for colour, row in zip(colours(len(plan.rows)), plan.rows, strict=False):
        name = row.method
        over_bandwidth.plot(BANDWIDTHS / 1e9, by_rate[name], color=colour, linewidth=2, label=name)
        over_count.plot(
            counts, [by_count[n][name] for n in counts], color=colour, linewidth=2, marker="o", markersize=3
        )
    dress(over_bandwidth, "bandwidth between nodes (Gbit/s)", "speed-up over fp32 all-reduce")
    dress(over_count, f"nodes, at {units.rate(plan.links.bandwidth)}", "")
    over_count.set_xscale("log", base=2)
    _logarithmic(over_bandwidth)
    _logarithmic(over_count)
    figure.suptitle(f"{plan.workload.name}: time to the same number of steps, planned")
    figure.savefig(path)
    return {
        "bandwidth_bits": BANDWIDTHS.tolist(),
        "speedup_over_bandwidth": by_rate,
        "nodes": counts,
        "speedup_over_nodes": {row.method: [by_count[n][row.method] for n in counts] for row in plan.rows},
    }


def _over_bandwidth(plan: Plan, row: Any) -> list[float]:
    return [row.speedup(plan.baseline, Links(**{**vars(plan.links), "bandwidth": float(b)})) for b in BANDWIDTHS]


def _logarithmic(axes: Axes) -> None:
    """Factors are seen best on a logarithmic axis, read best as plain numbers."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if axes.get_xscale() == "linear":
        axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in _TICKS if low <= tick <= high])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.axhline(1.0, color="#999999", linewidth=0.8)
