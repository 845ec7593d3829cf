"""`thinwire report`, and what other commands write at their end."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from thinwire.commands import options, pictures
from thinwire.commands.report_live import keep_up
from thinwire.errors import ConfigError, printable
from thinwire.files import refuse_link
from thinwire.report import Run, table
from thinwire.report import compare as compare_runs
from thinwire.report.folders import FINISHED, Found, look, run_folders
from thinwire.report.page import write_page
from thinwire.report.records import baseline_first


@click.command()
@click.argument(
    "folders",
    metavar="DIR…",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
)
@click.option("--out", type=options.DIR, metavar="DIR", help="Where to write; DIR itself if there is one.")
@click.option("--live", is_flag=True, help="Keep report.html up to date while runs go on; it reloads itself.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON, and nothing else.")
def report(folders: tuple[Path, ...], out: Path | None, live: bool, as_json: bool) -> None:
    """Write report.html, the table and the pictures of the finished runs in DIR.

    They come from the runs' own files, so report.html, comparison.json, comparison.png, ranks.png and stability.png are
    replaced. Runs are looked for in DIR and one folder below. Several DIR need `--out`.
    """
    if out is None and len(folders) > 1:
        raise ConfigError(f"{len(folders)} folders were given, and one report is written; add `--out DIR` to say where")
    place = out or folders[0]
    place.mkdir(parents=True, exist_ok=True)
    under_way = keep_up(folders, place, quiet=as_json) if live else []
    runs, problems = _read(folders, may_be_empty=live)
    for problem in problems:
        click.echo(printable(f"thinwire: left out: {problem}"), err=True)
    if not runs and live:  # Ctrl-C before the first one ended
        page(under_way, place, silent=as_json, problems=problems)
        return
    write_report(place, runs, as_json=as_json, problems=problems)


def _read(folders: tuple[Path, ...], *, may_be_empty: bool) -> tuple[list[Run], list[str]]:
    """The finished runs, the baseline first, and sentences on the others; else an error if none has finished."""
    found = {each.folder: each for folder in folders for each in map(look, run_folders(folder))}
    runs = [each.run for each in found.values() if each.run]
    lost = [each for each in found.values() if not each.run]
    if not runs and lost and lost[0].status != FINISHED and (lost[0].folder / "summary.json").exists():
        raise ConfigError(lost[0].note)
    if not runs and not may_be_empty:
        names = ", ".join(f"`{folder}`" for folder in folders)
        raise ConfigError(f"no finished run in {names}: looked for summary.json there and one folder below")
    return sorted(runs, key=baseline_first), [_in_words(each) for each in lost]


def _in_words(found: Found) -> str:
    at = "" if found.last_step is None else f" after step {found.last_step:,}"
    return f"{found.folder.name}: {found.status}{at}" + (f": {found.note}" if found.note else "")


def write_report(folder: Path, runs: list[Run], *, as_json: bool, problems: list[str] | None = None) -> None:
    """Print the table and write `comparison.json`, the pictures and the page."""
    rows = compare_runs(runs)
    refuse_link(folder / "comparison.json")
    (folder / "comparison.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        # Without a terminal the width is unknown, and a cut-off figure would be lost.
        wide = Console()
        Console(width=None if wide.is_terminal else 100).print(table(rows))
    pictures.of_comparison(runs, rows, folder, silent=as_json)
    page(runs, folder, silent=as_json, problems=problems)


def page(runs: list[Run], folder: Path, *, silent: bool, problems: list[str] | None = None) -> None:
    """Write `report.html` and print its path; if it cannot be written, a line says why and nothing is lost."""
    for path in pictures.drawn([partial(write_page, runs, folder, problems=problems or [])], "report"):
        if not silent:
            click.echo(f"report: {path}")


def page_of(places: list[Path], folder: Path, *, silent: bool) -> None:
    """The page of runs in these folders; one that cannot be read is named in it."""
    found = [look(place) for place in places]
    lost = [_in_words(each) for each in found if not each.run]
    page([each.run for each in found if each.run], folder, silent=silent, problems=lost)
