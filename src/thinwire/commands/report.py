"""`thinwire report`, and what other commands write at their end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from thinwire.base import units
from thinwire.base.errors import ConfigError, ThinwireError, one_line, printable
from thinwire.base.files import refuse_link
from thinwire.commands import options, pictures
from thinwire.commands.report_live import keep_up
from thinwire.report import Run, table
from thinwire.report import compare as compare_runs
from thinwire.report.comparison import comparable
from thinwire.report.figures import FORMATS, write_figures
from thinwire.report.page import write_page
from thinwire.report.page.content import Content, collect
from thinwire.report.page.netbench import read_bench
from thinwire.report.runs import FINISHED, Found, baseline_first, look, run_folders
from thinwire.report.tables import wide_console

_FIGURES = "figures"


@click.command()
@click.argument(
    "folders",
    metavar="DIR…",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
)
@click.option("--out", type=options.DIR, metavar="DIR", help="Where to write; DIR itself if there is one.")
@click.option("--figures", type=click.Choice(FORMATS), help="Also write each chart of the page as a file, to figures/.")
@click.option("--live", is_flag=True, help="Keep report.html up to date while runs go on; it reloads itself.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON, and nothing else.")
def report(folders: tuple[Path, ...], out: Path | None, figures: str | None, live: bool, as_json: bool) -> None:
    """Write report.html, the table and the pictures of the finished runs in DIR.

    They come from the runs' own files, so report.html, comparison.json, comparison.png, ranks.png and stability.png are
    replaced, and of figures/ the files of the same names. Runs are looked for in DIR and one folder below, or where
    `thinwire netbench` wrote them. Several DIR need `--out`.
    """
    if out is None and len(folders) > 1:
        raise ConfigError(f"{len(folders)} folders were given, and one report is written; add `--out DIR` to say where")
    place = out or folders[0]
    place.mkdir(parents=True, exist_ok=True)
    under_way = keep_up(folders, place, quiet=as_json) if live else []
    content = read_content(folders, may_be_empty=live)
    for problem in content.problems:
        click.echo(printable(f"thinwire: left out: {problem}"), err=True)
    if not content.runs and live:  # Ctrl-C before the first one ended
        page(replace(content, runs=under_way), place, silent=as_json)
        return
    write_report(place, content, as_json=as_json, figures=figures)


def read_content(folders: Iterable[Path], *, may_be_empty: bool = False) -> Content:
    """The finished runs, the baseline first, and sentences on the others; else an error if none has finished."""
    folders = tuple(folders)
    benches = {folder: bench for folder in folders if (bench := read_bench(folder))}
    found: dict[Path, Found] = {}
    for folder in folders:
        links = _links(folder, benches[folder]["rates"]) if folder in benches else {}
        found |= {place: look(place, link=links.get(place)) for place in links or run_folders(folder)}
    runs = [each.run for each in found.values() if each.run]
    lost = [each for each in found.values() if not each.run]
    if not runs and lost and lost[0].status != FINISHED and (lost[0].folder / "summary.json").exists():
        raise ConfigError(lost[0].note)
    if not runs and not may_be_empty:
        names = ", ".join(f"`{folder}`" for folder in folders)
        raise ConfigError(f"no finished run in {names}: looked for summary.json there and one folder below")
    # With the links as they are in the file, from the slowest or as the user had them.
    runs = sorted(runs, key=baseline_first)
    order = [at["rate"] for bench in benches.values() for at in bench["rates"]]
    runs.sort(key=lambda run: order.index(link) if (link := run.summary.get("link")) in order else -1)
    return Content(runs, [_in_words(each) for each in lost], list(benches.values()))


def _links(folder: Path, rates: list[dict[str, Any]]) -> dict[Path, str]:
    """Where netbench put its runs, and the rate of each."""
    return {folder / at["folder"] / row["folder"]: at["rate"] for at in rates for row in at["methods"]}


def _in_words(found: Found) -> str:
    at = "" if found.last_step is None else f" after step {found.last_step:,}"
    return f"{found.folder.name}: {found.status}{at}" + (f": {found.note}" if found.note else "")


def write_report(folder: Path, content: Content, *, as_json: bool, figures: str | None = None) -> None:
    """Print the table and write `comparison.json`, the pictures and the page."""
    tables = [compare_runs(alike) for alike in comparable(content.runs)]
    rows = [row for own in tables for row in own]
    refuse_link(folder / "comparison.json")
    text = json.dumps([{name: _or_none(value) for name, value in row.items()} for row in rows], indent=2)
    (folder / "comparison.json").write_text(text + "\n", encoding="utf-8")
    if as_json:
        click.echo(text)
    else:
        wide = wide_console()
        wide.print(*(table(own, wide.width) for own in tables), sep="\n")
    written, data = _written(content, folder)
    pictures.of_comparison(content.runs, tables, folder, silent=as_json, known=_evaluations(content.runs, data))
    _say(written, data, folder, silent=as_json, figures=figures)


def page(content: Content, folder: Path, *, silent: bool) -> None:
    """Write `report.html` and print its path; if it cannot be written, a line says why and nothing is lost."""
    _say(*_written(content, folder), folder, silent=silent)


def _written(content: Content, folder: Path) -> tuple[list[Path], dict[str, Any]]:
    """The page, if it could be written, and what is in it."""
    data: dict[str, Any] = {}

    def write() -> Path:
        data.update(collect(content, folder))
        return write_page(content, folder, data)

    return pictures.drawn([write], "report"), data


def _or_none(value: Any) -> Any:
    """JSON has no NaN, which is what a run that diverged ends with."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _evaluations(runs: list[Run], data: dict[str, Any]) -> dict[Path, np.ndarray]:
    """Step, bytes, seconds and metric of runs whose records are whole: a long run's need not be read again."""
    found = {}
    for run, shown in zip(runs, data.get("runs", ()), strict=False):
        curve = shown["curves"]["metric"]
        if not shown["problems"] and None not in (*curve["mb"], *curve["s"], *curve["y"]):
            columns = curve["step"], [1e6 * mb for mb in curve["mb"]], curve["s"], curve["y"]
            found[run.folder] = np.array(columns, dtype=float).T
    return found


def _say(written: list[Path], data: dict[str, Any], folder: Path, *, silent: bool, figures: str | None = None) -> None:
    for path in written:
        if not silent:
            click.echo(f"report: {path}")
    if figures and data:
        charts = write_figures(data, folder / _FIGURES, figures)
        if not silent:
            click.echo(f"figures: {units.count(len(charts), 'file')} in {folder / _FIGURES}")


def page_of(places: Iterable[Path], folder: Path, *, silent: bool) -> None:
    """The page of runs in these folders; one that cannot be read is named in it."""
    found = [look(place) for place in places]
    lost = [_in_words(each) for each in found if not each.run]
    page(Content([each.run for each in found if each.run], lost), folder, silent=silent)


def page_of_bench(folder: Path, *, silent: bool) -> None:
    """The page of what netbench measured."""
    try:
        page(read_content([folder]), folder, silent=silent)
    except (ThinwireError, OSError) as error:  # the figures are written already
        click.echo(f"thinwire: no report: {one_line(error)}", err=True)
