"""`thinwire plot`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from thinwire.base.errors import ConfigError, printable
from thinwire.commands.report import read_content
from thinwire.report.plots import as_rows, draw_over

_FORMATS = (".png", ".svg", ".pdf")


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
