"""`thinwire stability`."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from thinwire.factor.stability import Measures, compare
from thinwire.report.tables import wide_console

_COLUMNS = {"stability": "stability", "stability_printed": "as\nprinted", "similarity": "similarity"}
_CAPTION = (
    "Stability: how similar the bases U Vᵀ are, 1 if equal; then as printed in Eq. 4.6, at most n/m. "
    "Similarity (Eq. 4.7): how similar the mixing matrices R are, 1 if equal."
)


@click.command()
@click.argument("before", type=click.Path(path_type=Path, exists=True))
@click.argument("after", type=click.Path(path_type=Path, exists=True))
@click.option("--json", "as_json", is_flag=True, help="Print the measures as JSON, and nothing else.")
def stability(before: Path, after: Path, as_json: bool) -> None:
    """How far the bases of every layer moved from BEFORE to AFTER.

    Each is a safetensors file, or the folder of a run, a finished model, a checkpoint or a save; layers may be full
    in one and factored in the other.
    """
    layers = compare(before, after)
    mean = {name: fmean(measures[name] for measures in layers.values()) for name in _COLUMNS}
    if as_json:
        click.echo(json.dumps({"before": str(before), "after": str(after), "layers": layers, "mean": mean}, indent=2))
        return
    wide_console().print(_table(layers, mean))


def _table(layers: dict[str, Measures], mean: Measures) -> Table:
    out = Table(caption=_CAPTION, box=SIMPLE_HEAD)
    out.add_column("layer", overflow="fold")
    for heading in _COLUMNS.values():
        out.add_column(heading, justify="right", no_wrap=True)
    for label, measures in layers.items():
        out.add_row(Text(label), *_cells(measures))
    out.add_section()
    out.add_row("mean", *_cells(mean), style="bold")
    return out


def _cells(measures: Measures) -> list[str]:
    return [f"{measures[name]:.4f}" for name in _COLUMNS]
