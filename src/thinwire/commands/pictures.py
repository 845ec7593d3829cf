"""Pictures of results. The files hold the same figures, so a picture that cannot be drawn loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from thinwire.report import Run, draw
from thinwire.report.layer_plots import draw_ranks, draw_stability

_MOST_RUNS = 6
"""Runs up to which each has pictures of its layers."""

Draw = Callable[[], Path | None]


def of_comparison(
    runs: list[Run],
    tables: list[list[dict[str, Any]]],
    folder: Path,
    *,
    silent: bool,
    known: Mapping[Path, np.ndarray] | None = None,
) -> None:
    """The curves side by side, the stability of bases, and the ranks, for runs that recorded them.

    Curves of several tables, which cannot be compared, are only in the page. `known` are evaluations that have been
    read already.
    """
    picture = folder / "comparison.png"
    # A link to a run elsewhere is read, and nothing is written there.
    own = [run for run in runs if run.folder == folder or not run.folder.is_symlink()]
    own = own if len(own) <= _MOST_RUNS else []  # each takes a second, and the page shows them
    curves = [partial(_curves, runs, rows, picture, known) for rows in tables] if len(tables) == 1 else []
    found = drawn([*curves, *_stability(own), *(partial(draw_ranks, r) for r in own)])
    if silent:
        return
    if not curves:
        click.echo("no comparison.png: runs of several recipes, metrics or splits are compared in report.html")
    ranks = [path for path in found if path.name == "ranks.png"]
    for path in found:
        if path not in ranks:
            click.echo(f"picture: {path}")
    if ranks:
        click.echo(f"ranks over time: {ranks[0]}{f' and {len(ranks) - 1} more' if len(ranks) > 1 else ''}")


def of_stability(runs: list[Run], *, silent: bool) -> None:
    """One picture for every run that recorded the stability of its bases."""
    for path in drawn(_stability(runs)):
        if not silent:
            click.echo(f"picture: {path}")


def drawn(pictures: Iterable[Draw], what: str = "picture") -> list[Path]:
    """The paths of those that could be drawn; errors are reported once and not raised."""
    found: list[Path] = []
    reported: set[str] = set()
    for picture in pictures:
        try:
            path = picture()
        except Exception as error:  # of any kind: the results are written already
            if str(error) not in reported:
                reported.add(str(error))
                click.echo(f"thinwire: no {what}: {error}", err=True)
        else:
            found += [path] if path else []
    return found


def _curves(runs: list[Run], rows: list[dict[str, Any]], path: Path, known: Mapping[Path, np.ndarray] | None) -> Path:
    draw(runs, rows, path, known)
    return path


def _stability(runs: list[Run]) -> list[Draw]:
    return [partial(draw_stability, run) for run in runs]
