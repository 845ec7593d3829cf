"""The table of a comparison."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.base.units import count, time

_WIDEST_LABEL, _NARROWEST_LABEL = 30, 12
_INDENT = 2
_BETWEEN = 2
"""Characters between two columns of a `simple_table`."""
_CAPTION = "Slow-link bytes per node, without evaluation; compared with fp32 all-reduce as run here, and an ideal one."
_ALIKE = " ≈: no measurable difference from all-reduce."
_TRAINED = " Trained at end: parameters that still had gradients, of the full model's."


def wide_console(width: int = 100, **options: Any) -> Console:
    """One for tables: of the terminal's width, or of $COLUMNS; elsewhere of `width`, so that no figure is cut off."""
    known = Console().is_terminal or "COLUMNS" in os.environ
    return Console(width=None if known else width, **options)


def simple_table(**options: Any) -> Table:
    """An empty one without lines but below its head, and with little space between columns."""
    return Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), **options)


def fitting(widths: Mapping[str, int], dispensable: Sequence[str], width: int) -> list[str]:
    """The columns of a `simple_table` that fit, given the widths of all; of `dispensable` ones, the first go first."""
    left = list(widths)
    for heading in dispensable:
        if sum(widths[each] + _BETWEEN for each in left) <= width:
            break
        left.remove(heading)
    return left


def table(rows: list[dict[str, Any]], width: int = 100) -> Table:
    """One row per method and config, in so many characters; bytes and ratios exclude evaluation."""
    metric, several = rows[0]["metric"], max(len(row["seeds"]) for row in rows) > 1
    seeds = len(set(rows[0]["seeds"]))  # a seed may have been run twice
    title = f"{rows[0]['recipe']}, {metric} on {examples(rows[0])}, {count(seeds, 'seed')}"
    if link := rows[0].get("link"):
        title += f", links of {link}"
    frozen = any((row.get("trainable_share_mean") or 1.0) < 1.0 for row in rows)
    alike = any(row.get("differs_from_allreduce") is False for row in rows)
    caption = _CAPTION + (_ALIKE if alike else "") + (_TRAINED if frozen else "")
    out = simple_table(title=Text(title), caption=caption)
    trained = ["trained\nat end"] if frozen else []
    headings = ["method", metric, "slow\nlink", "vs all-\nreduce", "vs\nideal", *trained, "compres-\nsion", "wall"]
    cells = [dict(zip(headings, _cells(row, several, frozen), strict=True)) for row in rows]
    widths = {name: max(map(_width, (name, *(row[name] for row in cells)))) for name in headings}
    widths["method"] = min(widths["method"], _NARROWEST_LABEL)
    shown = fitting(widths, ["vs\nideal", "wall", "compres-\nsion"], width)
    label = min(_WIDEST_LABEL, width - sum(widths[name] + _BETWEEN for name in shown[1:]) - _BETWEEN)
    for name in shown:
        first = name == "method"
        out.add_column(Text(name), justify="left" if first else "right", no_wrap=not first, overflow="fold")
    for row in cells:
        folded = {**row, "method": _folded(row["method"], max(label, _NARROWEST_LABEL))}
        out.add_row(*(Text(folded[name]) for name in shown))  # names from files are no markup
    return out


def _width(text: str) -> int:
    return max(map(len, text.split("\n")))


def _cells(row: dict[str, Any], several: bool, frozen: bool) -> list[str]:
    metric = row["metric"]
    share = row.get("trainable_share_mean")
    trained = ["–" if share is None else f"{100 * share:.1f} %"] if frozen else []
    return [
        row["label"],
        ("≈ " if row.get("differs_from_allreduce") is False else "")
        + figure(metric, row[f"{metric}_mean"], row[f"{metric}_std"] if several else None),
        size(row["slow_bytes_mean"]),
        ratio(row["traffic_vs_allreduce_fp32"]),
        ratio(row["traffic_vs_ideal_fp32"]),
        *trained,
        "–" if row["compression_mean"] is None else f"{row['compression_mean']:.2f} : 1",
        "–" if row["wall_s_mean"] is None else time(row["wall_s_mean"]),
    ]


def _folded(label: str, width: int) -> str:
    """Wrap a long label after colons, commas and spaces; a part that is too long itself after `=` and `_`."""
    lines = [""]
    for part in re.findall(r"[^:, ]+[:, ]*|[:, ]+", label):
        fits = len(part.rstrip()) <= width - _INDENT
        for piece in [part] if fits else re.findall(r"[^=_]+[=_]*|[=_]+", part):
            if len(lines[-1] + piece.rstrip()) <= width:
                lines[-1] += piece
            else:
                lines.append(" " * _INDENT + piece)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def figure(metric: str, mean: float, std: float | None = None) -> str:
    """Format a metric: accuracy in percent, others as they are."""
    if not math.isfinite(mean):
        return "diverged"
    scale, unit = (100, " %") if metric == "accuracy" else (1, "")
    digits = 2 if metric in ("accuracy", "perplexity") else 4
    spread = "" if std is None else f" ± {scale * std:.{digits}f}"
    return f"{scale * mean:.{digits}f}{spread}{unit}"


def examples(about: dict[str, Any]) -> str:
    """What a figure was measured on: 540 test examples, or test data where an older summary lacks their number."""
    split, number = about.get("split", "test"), about.get("split_size")
    return f"{split} data" if number is None else count(number, f"{split} example")


def best_epoch(summary: dict[str, Any]) -> list[str]:
    """A line on the epoch with the lowest validation loss, if the run selected it."""
    if not (best := summary.get("best_epoch")):
        return []
    end = best["ended_at"]["step"]
    return [f"model of step {best['step']:,}, with the lowest validation loss; trained until step {end:,}"]


def size(amount: float) -> str:
    """Format bytes, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def ratio(value: float | None) -> str:
    """Three decimals; a dash if there is nothing to compare with."""
    return "–" if value is None else f"{value:.3f}"


def duration(seconds: float) -> str:
    """Format seconds for people: 41 s, 3 min 20 s, 2 h 05 min, 3 days 4 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    if whole < 172_800:
        return f"{whole // 3600} h {whole % 3600 // 60:02} min"
    return f"{whole // 86_400} days {whole % 86_400 // 3600} h"
