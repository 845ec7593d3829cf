"""The files of a run in its folder. They are known by name; other files are never touched."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from thinwire import saves
from thinwire.errors import ConfigError
from thinwire.files import refuse_link
from thinwire.loggers.to_tensorboard import SUFFIX as EVENTS_SUFFIX
from thinwire.loggers.tracker import FILE as TRACKERS

_FILES = ("records.jsonl", "summary.json", "stability.png", "ranks.png", TRACKERS)
_EVENTS = f"events.out.tfevents.*{EVENTS_SUFFIX}"
CHECKPOINTS = "checkpoint"
"""The folder of a run's saves."""
_SAVE = re.compile(r"(step|best)-\d+(\.old|\.writing|\.removed)?")
MODEL = "model"
MODEL_FILES = (
    "model.safetensors",
    "layers.json",
    "load.py",
    "program.pt2",
    "model.onnx",
    "model.onnx.data",
    "spectrum.png",
)
"""The files of a written model."""


def of_a_run(out: Path) -> list[Path]:
    """The existing files and folders of a run in `out`."""
    if not out.is_dir():
        return []
    found = [out / name for name in _FILES if (out / name).is_file()]
    found += [path for path in sorted(out.glob(_EVENTS)) if path.is_file() and not path.is_symlink()]
    if any((out / MODEL / name).exists() for name in MODEL_FILES):
        found.append(out / MODEL)
    checkpoints = out / CHECKPOINTS
    if checkpoints.is_dir() and (not any(checkpoints.iterdir()) or _saves(checkpoints)):
        found.append(checkpoints)
    return found + _saves(out)


def best_epochs(out: Path) -> list[Path]:
    """Saves of single epochs."""
    return [path for path in _saves(out) if path.name.startswith("best-")]


def _saves(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _SAVE.fullmatch(path.name) and path.is_dir())


def refuse_occupied(out: Path, found: Iterable[Path], *, resume: bool = False) -> None:
    """Raise if anything was found: a command overwrites only if asked to."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"`{out}` is a file; give a folder as `--out`")
    names = [str(path.relative_to(out)) for path in found]
    if not names:
        return
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    ways = [*(["`--resume` to continue it"] if resume else []), "`--overwrite` to replace it"]
    raise ConfigError(
        f"`{out}` is in use, it holds {', '.join(names[:3])}{more}; add {', '.join(ways)}, or give another `--out`"
    )


def refuse_links(out: Path) -> None:
    """Raise if a name that a run writes to is a link: whoever made the folder would choose what is overwritten."""
    names = [*_FILES, "summary.new", MODEL, CHECKPOINTS, *(f"{MODEL}/{name}" for name in MODEL_FILES)]
    folders = [folder for folder in (out, out / CHECKPOINTS) if folder.is_dir()]
    saved = [path for folder in folders for path in folder.iterdir() if _SAVE.fullmatch(path.name)]
    for path in (*(out / name for name in names), *saved):
        refuse_link(path)


def clear(out: Path) -> None:
    """Delete a run from its folder, and nothing else there."""
    for path in of_a_run(out):
        if path.name == MODEL:
            remove_model(path)
        elif path.name == CHECKPOINTS:
            for save in _saves(path):
                saves.clear(save)
            with suppress(OSError):
                path.rmdir()
        elif path.is_dir():
            saves.clear(path)
        else:
            path.unlink()


def remove_model(folder: Path) -> None:
    """Delete a written model, and its folder if it is empty then."""
    for name in MODEL_FILES:
        (folder / name).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
