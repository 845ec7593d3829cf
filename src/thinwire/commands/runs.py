"""`thinwire runs`."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from thinwire.base.errors import ConfigError, printable
from thinwire.report.comparison import labels, shares
from thinwire.report.runs import Found, find
from thinwire.report.tables import figure, ratio, size, wide_console

_COLUMNS = ("date", "recipe", "method", "status", "result", "slow link", "vs all-reduce", "folder")
_WIDTH = 160
"""Where the terminal's is unknown."""


@click.command()
@click.argument(
    "folder", metavar="[DIR]", default=Path("runs"), type=click.Path(path_type=Path, exists=False, file_okay=False)
)
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON, and nothing else.")
def runs(folder: Path, as_json: bool) -> None:
    """List all runs in DIR and below, the newest first; DIR is runs/ if not given.

    Comparisons and searches are folders of runs, and each of their runs is a row. Runs that have not finished are
    listed with their last step, and files that cannot be read are named.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder `{folder}`; give the folder that `thinwire run … --out` wrote to")
    rows = _rows(folder, find(folder))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif rows:
        wide_console(_WIDTH).print(_table(rows))
        _say_what_is_wrong(rows)
    else:
        click.echo(f"no run in {folder} or below; train one with `thinwire run digits --method ab`")


def _rows(top: Path, found: list[Found]) -> list[dict[str, Any]]:
    finished = [each.run for each in found if each.run]
    named, share = labels(finished), shares(finished)
    return [_row(top, each, named, share) for each in found]


def _row(top: Path, found: Found, named: dict[Path, str], share: dict[Path, float | None]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "folder": str(found.folder.relative_to(top)),
        "date": datetime.fromtimestamp(found.written).astimezone().isoformat(timespec="seconds"),
        "recipe": found.recipe,
        "status": found.status,
        "note": found.note,
        "last_step": found.last_step,
    }
    if (run := found.run) is None:
        row |= {"method": found.method, "seed": found.seed}
        return row | dict.fromkeys(("metric", "result", "slow_bytes", "traffic_vs_allreduce_fp32"))
    return row | {
        "last_step": run.summary.get("steps"),
        "method": named[run.folder],
        "seed": run.summary["seed"],
        "metric": run.metric,
        "result": run.summary[run.metric],
        "slow_bytes": run.counted_bytes,
        "traffic_vs_allreduce_fp32": share[run.folder],
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    out = Table(box=SIMPLE_HEAD, caption="Slow-link bytes per node, without evaluation.")
    for name in _COLUMNS:
        right = name in ("result", "slow link", "vs all-reduce")
        out.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=name == "date")
    for row in rows:
        out.add_row(*(Text(printable(cell)) for cell in _cells(row)))  # names from files are no markup
    return out


def _cells(row: dict[str, Any]) -> list[str]:
    date = row["date"][:16].replace("T", " ")
    method = "–" if row["method"] is None else f"{row['method']}, seed {row['seed']}"
    if row["metric"] is None:
        at = "" if row["last_step"] is None else f", step {row['last_step']:,}"
        return [date, row["recipe"] or "–", method, row["status"] + at, "–", "–", "–", row["folder"]]
    return [
        date,
        row["recipe"],
        method,
        row["status"],
        f"{row['metric']} {figure(row['metric'], row['result'])}",
        size(row["slow_bytes"]),
        ratio(row["traffic_vs_allreduce_fp32"]),
        row["folder"],
    ]


def _say_what_is_wrong(rows: list[dict[str, Any]]) -> None:
    """Below the table: a reason does not fit a column."""
    for row in rows:
        if row["note"]:
            click.echo(printable(f"{row['folder']}: {row['status']}: {row['note']}"))
