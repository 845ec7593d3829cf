"""Pictures beside results. What they show is in the files too, so one that cannot be drawn costs nothing but itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import click

from thinwire.report import Run, draw
from thinwire.report.heatmap import draw_stability
from thinwire.report.ranks import draw_ranks

Draw = Callable[[], Path | None]


def of_comparison(runs: list[Run], rows: list[dict[str, Any]], folder: Path, *, silent: bool) -> None:
    """The curves side by side, the bases of every run that looked at them, the ranks of every one that has some."""
    picture = folder / "comparison.png"
    found = drawn([partial(_curves, runs, rows, picture), *_stability(runs), *(partial(draw_ranks, r) for r in runs)])
    if silent:
        return
    ranks = [path for path in found if path.name == "ranks.png"]
    for path in found:
        if path not in ranks:
            click.echo(f"picture: {path}")
    if ranks:
        click.echo(f"ranks over time: {ranks[0]}{f' and {len(ranks) - 1} more' if len(ranks) > 1 else ''}")


def of_stability(runs: list[Run], *, silent: bool) -> None:
    """A picture beside the records of every run that looked at its bases."""
    for path in drawn(_stability(runs)):
        if not silent:
            click.echo(f"picture: {path}")


def drawn(pictures: Iterable[Draw]) -> list[Path]:
    """Where those that could be drawn lie; why one could not is said once, and never raised."""
    found: list[Path] = []
    said: set[str] = set()
    for picture in pictures:
        try:
            path = picture()
        except Exception as error:  # of any kind: the results are written, and must not be lost behind it
            if str(error) not in said:
                said.add(str(error))
                click.echo(f"thinwire: no picture: {error}", err=True)
        else:
            found += [path] if path else []
    return found


def _curves(runs: list[Run], rows: list[dict[str, Any]], path: Path) -> Path:
    draw(runs, rows, path)
    return path


def _stability(runs: list[Run]) -> list[Draw]:
    return [partial(draw_stability, run) for run in runs]
