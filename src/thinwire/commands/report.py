"""Commands that read finished runs: `thinwire report`, `plot`, `runs`; and the report that other commands end with.

The files of runs hold the same figures, so a page or a picture that cannot be written loses nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from thinwire.base import units
from thinwire.base.errors import ConfigError, ThinwireError, one_line, printable
from thinwire.base.files import refuse_link
from thinwire.commands import options
from thinwire.commands.watch import Doing
from thinwire.report import Run, draw, table
from thinwire.report import compare as compare_runs
from thinwire.report.comparison import comparable, labels, shares
from thinwire.report.figures import FORMATS, write_figures
from thinwire.report.layer_plots import draw_ranks, draw_stability
from thinwire.report.live import Followed, FollowedRun, in_words, so_far
from thinwire.report.page import live_part, write_page
from thinwire.report.page.content import Content, collect
from thinwire.report.page.netbench import read_bench
from thinwire.report.plots import as_rows, draw_over
from thinwire.report.runs import FINISHED, Found, baseline_first, find, look, run_folders
from thinwire.report.tables import figure, ratio, size, wide_console

_FIGURES = "figures"
RELOAD_S = 5
_LOOK_S = 1.0
_SHARE = 0.1
"""Of the time that may be spent on writing pages."""
_MOST_RUNS = 6
"""Runs up to which each has pictures of its layers."""
_FORMATS = (".png", ".svg", ".pdf")
_RUNS_COLUMNS = ("date", "recipe", "method", "status", "result", "slow link", "vs all-reduce", "folder")
_RUNS_WIDTH = 160
"""Where the terminal's is unknown."""


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
        rates = benches[folder]["rates"] if folder in benches else []
        links = {folder / at["folder"] / row["folder"]: at["rate"] for at in rates for row in at["methods"]}
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
    draw_comparison(content.runs, tables, folder, silent=as_json, known=_evaluations(content.runs, data))
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

    return drawn([write], "report"), data


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


def keep_up(folders: Sequence[Path], place: Path, *, quiet: bool) -> list[Run]:
    """Write the page again and again until all runs have ended, or Ctrl-C; then those that were still under way."""
    followed = Followed(folders, find=run_folders)
    due, seen = 0.0, None
    try:
        with Doing(Console(stderr=True), quiet=quiet) as doing:
            while not followed.is_over(runs := followed.refresh()):
                now = time.monotonic()
                state = [(run.folder, run.written, run.end) for run in runs]
                if now >= due and state != seen:
                    path = _write(runs, place)
                    seen, due = state, now + max(RELOAD_S, (time.monotonic() - now) / _SHARE)
                    doing.update(f"keeping {path} up to date until all runs have ended, or Ctrl-C")
                time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        pass
    return _under_way(followed.refresh())


def _write(runs: list[FollowedRun], place: Path) -> Path:
    found = [look(run.folder) for run in runs if run.end == FINISHED]
    finished = [each.run for each in found if each.run]
    states = [in_words(run) for run in runs if run.end is None]
    states += [f"{run.progress.title}: {run.end}" for run in runs if run.end not in (None, FINISHED)]
    problems = [printable(f"{each.folder.name}: {each.note}") for each in found if not each.run]
    shown = sorted([*finished, *_under_way(runs)], key=baseline_first)
    return write_page(Content(shown, problems), place, live=live_part(states or ["no run yet"], RELOAD_S))


def _under_way(runs: list[FollowedRun]) -> list[Run]:
    return [known for run in runs if run.end != FINISHED and (known := so_far(run))]


Draw = Callable[[], Path | None]


def draw_comparison(
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

    def draw_curves() -> Path:
        draw(runs, tables[0], picture, known)
        return picture

    is_one = len(tables) == 1
    of_runs = [partial(draw_one, run) for draw_one in (draw_stability, draw_ranks) for run in own]
    found = drawn([*([draw_curves] if is_one else []), *of_runs])
    if silent:
        return
    if not is_one:
        click.echo("no comparison.png: runs of several recipes, metrics or splits are compared in report.html")
    ranks = [path for path in found if path.name == "ranks.png"]
    for path in found:
        if path not in ranks:
            click.echo(f"picture: {path}")
    if ranks:
        click.echo(f"ranks over time: {ranks[0]}{f' and {len(ranks) - 1} more' if len(ranks) > 1 else ''}")


def draw_stabilities(runs: list[Run], *, silent: bool) -> None:
    """One picture for every run that recorded the stability of its bases."""
    for path in drawn(partial(draw_stability, run) for run in runs):
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


@click.command()
@click.argument(
    "folders", metavar="DIR…", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False)
)
@click.option("--over", required=True, metavar="A[,B]", help="Settings: nodes, batch, lr, or a field of the method.")
@click.option(
    "--show", metavar="X,Y", help="The metric, bytes, share, compression, seconds; default: metric and share."
)
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="A png, svg or pdf file.")
@click.option("--overwrite", is_flag=True, help="Replace the file.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures too, as JSON.")
def plot(folders: tuple[Path, ...], over: str, show: str | None, out: Path, overwrite: bool, as_json: bool) -> None:
    """Draw what the runs in DIR reached and sent over a setting, or over two of them as a grid.

    Bars are the standard deviation over seeds. Runs are looked for in DIR and one folder below.
    """
    if out.suffix not in _FORMATS:
        raise ConfigError(f"`--out`={str(out)!r} must end in one of: {', '.join(_FORMATS)}")
    if out.exists() and not overwrite:
        raise ConfigError(f"`{out}` exists; give another `--out`, or `--overwrite`")
    settings = over.split(",")
    if len(settings) > 2 or not all(settings):
        raise ConfigError(f"`--over`={over!r} must be one or two settings, such as batch or every,overlap")
    content = read_content(folders)
    runs = content.runs
    for problem in content.problems:
        click.echo(printable(f"thinwire: left out: {problem}"), err=True)
    if len({(run.summary["recipe"], run.metric, run.split) for run in runs}) > 1:
        raise ConfigError("the runs are of different recipes, metrics or parts of the data; draw them one by one")
    out.parent.mkdir(parents=True, exist_ok=True)
    found = draw_over(runs, settings, show.split(",") if show else [runs[0].metric, "share"], out)
    click.echo(json.dumps(as_rows(found, settings), indent=2) if as_json else f"picture: {out}")


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
    found = find(folder)
    finished = [each.run for each in found if each.run]
    named, share = labels(finished), shares(finished)
    rows = [_runs_row(folder, each, named, share) for each in found]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    elif rows:
        wide_console(_RUNS_WIDTH).print(_runs_table(rows))
        for row in rows:
            if row["note"]:  # below the table: a reason does not fit a column
                click.echo(printable(f"{row['folder']}: {row['status']}: {row['note']}"))
    else:
        click.echo(f"no run in {folder} or below; train one with `thinwire run digits --method ab`")


def _runs_row(top: Path, found: Found, named: dict[Path, str], share: dict[Path, float | None]) -> dict[str, Any]:
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


def _runs_table(rows: list[dict[str, Any]]) -> Table:
    out = Table(box=SIMPLE_HEAD, caption="Slow-link bytes per node, without evaluation.")
    for name in _RUNS_COLUMNS:
        right = name in ("result", "slow link", "vs all-reduce")
        out.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=name == "date")
    for row in rows:
        out.add_row(*(Text(printable(cell)) for cell in _runs_cells(row)))  # names from files are no markup
    return out


def _runs_cells(row: dict[str, Any]) -> list[str]:
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
