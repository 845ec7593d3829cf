"""The files of a run in its folder. They are known by name; other files are never touched."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.base.errors import ConfigError
from thinwire.base.files import refuse_link
from thinwire.checkpoint import saves
from thinwire.loggers.trackers import FILE as TRACKERS
from thinwire.loggers.trackers import SUFFIX as EVENTS_SUFFIX

_FILES = ("records.jsonl", "summary.json", "stability.png", "ranks.png", TRACKERS)
_EVENTS = f"events.out.tfevents.*{EVENTS_SUFFIX}"
CHECKPOINTS = "checkpoint"
"""The folder of a run's saves."""
LOCK = ".lock"
"""The file by which a command keeps others out of its folder; it says whose folder it is."""
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
    refuse_locked(out)  # by a command that began a moment ago: it can be neither resumed nor replaced
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    ways = [*(["`--resume` to continue it"] if resume else []), "`--overwrite` to replace it"]
    raise ConfigError(
        f"`{out}` is in use, it holds {', '.join(names[:3])}{more}; add {', '.join(ways)}, or give another `--out`"
    )


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other commands from writing to `out`, and refuse it if another one does; rank 0 of a job calls this.

    The system releases the lock of a process that has died. Without locks in the file system, nobody is refused.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / LOCK
    refuse_link(path)
    file = _lock(path)
    try:
        yield
    finally:
        if file is not None:
            if _is_at(path, file):
                path.unlink()
            os.close(file)


def refuse_locked(out: Path) -> None:
    """Raise if another command writes to `out` now."""
    if (out / LOCK).exists():
        with locked(out):
            pass


def _lock(path: Path) -> int | None:
    """The locked file, with this process's name in it; None where there are no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError:  # no space or no permission: whatever is written to the folder next says so better
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 200, 0).decode(errors="replace") or "another process"
            os.close(file)
            raise ConfigError(
                f"`{path.parent}` is in use by {holder}; wait for its end, stop it, or give another `--out`"
            ) from None
        except OSError:  # some network file systems
            os.close(file)
            return None
        if _is_at(path, file):
            break
        os.close(file)  # its holder has just removed it
    with suppress(OSError):  # a full disk
        os.ftruncate(file, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.write(file, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode())
    return file


def _is_at(path: Path, file: int) -> bool:
    """Whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except OSError:
        return False


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
