"""`thinwire export`."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from thinwire.base import units
from thinwire.base.errors import ConfigError
from thinwire.base.files import check_file, read_json
from thinwire.checkpoint import saves
from thinwire.commands import options
from thinwire.commands.sources import Found, finished, of_function, unfinished
from thinwire.commands.watch import Doing
from thinwire.factor.export import describe_inputs, refuse_onnx, write, write_loader, write_programs
from thinwire.factor.ranks import chooser
from thinwire.recipes import installed
from thinwire.replica.compress import Compressed, compress
from thinwire.report import read_run
from thinwire.report.tables import figure, size
from thinwire.train.run_folder import CHECKPOINTS, MODEL_FILES

log = logging.getLogger("thinwire")

_FILE = click.Path(path_type=Path, dir_okay=False)
_MOST_NAMED = 6
"""Most full layers that are named."""


@click.command()
@click.argument("source")
@click.option("--out", required=True, type=options.DIR, metavar="DIR", help="A new folder.")
@options.overwrite
@click.option("--cutoff", type=float, metavar="C", help="Truncate at this fraction of the largest singular value.")
@click.option("--rank", metavar="R", help="Largest rank per layer, or a fraction of its full rank, such as 0.25.")
@click.option("--target", type=float, metavar="T", help="Wanted ratio of SOURCE's parameters to the result's.")
@click.option("--onnx", is_flag=True, help="Write model.onnx too.")
@click.option(
    "--data",
    type=options.DATA,
    metavar="DIR",
    help="Folder with the data to evaluate a run's model on, if it is not in the package.",
)
@click.option("--weights", type=_FILE, metavar="FILE", help="Safetensors with the values for a function's model.")
@click.option("--recipe", metavar="FILE.py:FUNCTION", help="The run's recipe, if it is your own.")
def export(source: str, out: Path, overwrite: bool, onnx: bool, **flags: Any) -> None:
    """Write a model in plain torch.nn layers, without Thinwire, and smaller if asked for.

    SOURCE is the folder of a run, finished or not, or FILE.py:FUNCTION, a function of yours that returns an nn.Module,
    maybe with its inputs.
    """
    how = _asked_for(flags)
    _refuse_occupied(out, overwrite)
    with _new_folder(out) as folder, Doing(Console(stderr=True)) as doing:
        doing.update("loading the model")
        origin, *lines = _write(source, how, folder, onnx, flags, doing)
    files = f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}"
    program, onnx_file = out / "program.pt2", out / "model.onnx"
    uses = {
        "as it is": f'torch.export.load("{program}").module()' if program.is_file() else "",
        "as ONNX": f'onnxruntime.InferenceSession("{onnx_file}")' if onnx_file.is_file() else "",
        "into your own class": f'load(MyModel(), "{out}"), with `load` from {out / "load.py"}',
    }
    ways = [f"{f'{name}:':<21} {way}" for name, way in uses.items() if way]
    click.echo("\n".join([origin, files, *lines, *ways]))


def _asked_for(flags: dict[str, Any]) -> dict[str, Any]:
    """How to make it smaller; empty to write it as it is."""
    how = {name: flags[name] for name in ("cutoff", "rank", "target")}
    if (text := flags["rank"]) is not None:
        try:
            how["rank"] = int(text) if text.isdecimal() else float(text)
        except ValueError as error:
            raise ConfigError(
                f"`--rank`={text!r} must be a whole number, or a fraction of each layer's full rank"
            ) from error
    given = {name: value for name, value in how.items() if value is not None}
    if given:
        chooser(**how)
    return given


def _refuse_occupied(out: Path, overwrite: bool) -> None:
    """A model needs an empty folder; with `overwrite` it may have other files, which stay."""
    if out.is_file():
        raise ConfigError(f"`{out}` is a file; give a new folder")
    if not overwrite and out.exists() and any(out.iterdir()):
        raise ConfigError(
            f"`{out}` is not empty; give a new folder, or add `--overwrite` to replace what an export wrote there"
        )


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder that appears when it is complete; if it exists, its other files stay."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as aside:
        folder = Path(aside, "model")
        folder.mkdir()
        yield folder
        if not out.exists() or not any(out.iterdir()):
            folder.replace(out)
            return
        for name in MODEL_FILES:
            (out / name).unlink(missing_ok=True)
        for file in folder.iterdir():
            file.replace(out / file.name)


def _write(
    source: str, how: dict[str, Any], folder: Path, onnx: bool, flags: dict[str, Any], doing: Doing
) -> list[str]:
    """Write the model of SOURCE; returns lines that describe it."""
    if source.endswith(".py") or ".py:" in source:
        if flags["data"] is not None or flags["recipe"] is not None:
            raise click.UsageError("--data and --recipe are for runs; a function brings its own model and inputs")
        return _compress(of_function(source, flags["weights"]), how, folder, onnx, doing)
    run, own = Path(source), (flags["recipe"], flags["data"])
    if flags["weights"] is not None:
        raise click.UsageError("--weights is for FILE.py:FUNCTION; a run has its own")
    if not run.is_dir():
        raise ConfigError(f"`{source}` is neither the folder of a run nor FILE.py:FUNCTION; give one of them")
    if not (run / "summary.json").is_file() and saves.find(run / CHECKPOINTS):
        return _compress(unfinished(run, saves.find_sound(run / CHECKPOINTS), *own), how, folder, onnx, doing)
    read_run(run)
    if not (run / "model").is_dir():
        raise ConfigError(f"`{run}` has a summary but no model; run it again without `--no-model`")
    if how:
        return _compress(finished(run, *own), how, folder, onnx, doing)
    return _copy(run, folder, onnx, *own, doing)


def _compress(found: Found, how: dict[str, Any], folder: Path, onnx: bool, doing: Doing) -> list[str]:
    if onnx:
        refuse_onnx(found.example)
    how = how or {"cutoff": found.cutoff}
    made = compress(
        found.model, **how, **found.keep, evaluate=found.evaluate, example=found.example, report=doing.update
    )
    doing.update(f"writing the model, as a program{' and as ONNX' if onnx else ''} too")
    write(made.model, folder, made.example, onnx=onnx, views=found.views)
    _draw(made, folder)
    lines = [found.origin, _on_disk(folder, found.dense), _parameters(made, found), *_stay_full(made)]
    if found.without:
        program = "" if (folder / "program.pt2").is_file() else ", and no program.pt2"
        lines.append(f"no {found.metric} on held-out data{program}: {found.without}")
    if made.before is not None and made.after is not None:
        before = figure(found.metric, made.before)
        lines.append(f"{found.metric} {figure(found.metric, made.after)} on held-out data, {before} before")
    return lines


def _copy(run: Path, folder: Path, onnx: bool, recipe: str | None, data: Path | None, doing: Doing) -> list[str]:
    """A finished run's model as it is; with spectra, and evaluated on `data`, if its recipe is known."""
    summary = read_run(run).summary
    _copy_files(run / "model", folder)
    metric = summary["metric"]
    value, before = summary[metric], summary.get(f"{metric}_before_truncation")
    found, left_out = _of_recipe(run, summary["recipe"], recipe, data)
    if onnx:
        doing.update("writing it as ONNX")
        _write_onnx(found, folder, left_out)
    if found is not None:
        _describe_inputs(folder, found)
        judge = found.evaluate if data else None
        made = compress(
            found.model, cutoff=0.0, **found.keep, example=found.example, evaluate=judge, report=doing.update
        )
        _draw(made, folder)
        value, before = (value, before) if made.after is None else (made.after, None)
    full, final = summary["parameters_full"], summary["parameters_final"]
    return [
        f"{run}: a finished run of {summary['steps']} steps by {summary['method']}, as it is",
        _on_disk(folder),
        f"parameters {final:,} of {full:,}, {full / final:.2f} : 1",
        f"{metric} {figure(metric, value)} on held-out data"
        + ("" if before is None else f", {figure(metric, before)} before truncation"),
        *left_out,
    ]


def _copy_files(model: Path, folder: Path) -> None:
    """The files of a model, but for `load.py`: users run it, so it is always written anew."""
    for name in MODEL_FILES:
        file = model / name
        if file.is_symlink():
            raise ConfigError(f"`{file}` is a link to a file elsewhere; put the file itself in its place")
        if file.exists():
            check_file(file, "restore it, or run again")
            shutil.copy2(file, folder / name)
    for name in ("model.safetensors", "layers.json"):
        check_file(folder / name, f"the run in `{model.parent}` wrote no whole model; run it again")
    write_loader(folder)


def _write_onnx(found: Found | None, folder: Path, why: list[str]) -> None:
    """From the model in its recipe's class: a program in the run's folder is code, and may be anyone's."""
    if found is None:
        reason = why[0].removeprefix("no spectrum.png: ") if why else "its recipe is not installed"
        raise ConfigError(f"ONNX is written from the run's model, which cannot be built: {reason}; give --recipe")
    refuse_onnx(found.example)
    write_programs(found.model, folder, found.example, onnx=True)


def _of_recipe(run: Path, name: str, recipe: str | None, data: Path | None) -> tuple[Found | None, list[str]]:
    """The run's model in its recipe's class, or why not: a copy needs neither recipe nor data."""
    if recipe is None and data is None and name not in installed():
        return None, []
    try:
        return finished(run, recipe, data), []
    except ConfigError as error:
        if recipe is not None or data is not None:
            raise
        return None, [f"no spectrum.png: {error}"]


def _describe_inputs(folder: Path, found: Found) -> None:
    """Add a description of the inputs, if the version that wrote the model did not."""
    path = folder / "layers.json"
    about = read_json(path)
    if "inputs" not in about and found.example is not None:
        path.write_text(json.dumps({**describe_inputs(found.example, found.views), **about}, indent=1) + "\n")


def _draw(made: Compressed, folder: Path) -> None:
    try:
        made.plot(folder / "spectrum.png")
    except ConfigError as error:
        log.warning("no spectrum.png: %s", error)


def _on_disk(folder: Path, dense: int | None = None) -> str:
    small = (folder / "model.safetensors").stat().st_size
    whole = "" if dense is None else f", {size(dense)} full: {dense / small:.2f} : 1"
    return f"model.safetensors {size(small)}{whole}"


def _parameters(made: Compressed, found: Found) -> str:
    small, full = made.parameters_after, found.parameters
    text = f"parameters {small:,} of {full:,}, {full / small:.2f} : 1"
    if made.parameters_before != full:
        text += f"; of {made.parameters_before:,} before, {made.ratio:.2f} : 1"
    return text + ("" if made.cutoff is None else f"; cut at {made.cutoff:.4g} of the largest singular value")


def _stay_full(made: Compressed) -> list[str]:
    full = [f"{kept.name} ({kept.why})" for kept in made.kept]
    more = [f"{len(full) - _MOST_NAMED} more"] * (len(full) > _MOST_NAMED)
    return [f"{units.count(len(made.ranks), 'layer')} low-rank; full: {', '.join(full[:_MOST_NAMED] + more) or 'none'}"]
