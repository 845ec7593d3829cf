"""Saves: folders that are written beside their place by a thread on every worker, and renamed when they are whole.

No collective runs while files are written: each worker's thread leaves a note in the job's store when it is done, and
rank 0's thread then writes the manifest and renames the folder. So training goes on, and a save is in place as soon as
the last worker has written. A process that is killed at any moment leaves the old folder or the new one, the old one
perhaps under its name + ".old".
"""

import itertools
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire import manifest
from thinwire.comm import process_groups
from thinwire.comm.collectives import Wire
from thinwire.errors import ConfigError, SaveError, one_line
from thinwire.files import on_file
from thinwire.store import write_tensors

log = logging.getLogger("thinwire")

Files = dict[str, str | dict[str, Tensor]]
"""What a worker writes into a save: JSON as text, or tensors that nobody changes any more."""

_SAVED = re.compile(
    r"(manifest|state|position|random-\d+|worker-rank\d+|(model|method|optimizer|average).*)\.(json|safetensors)"
)
_ENDINGS = (".writing", ".old", ".removed")
_OTHERS_WRITE_S, _AT_EXIT_S = 1800.0, 60.0
_LOOK_S = 0.02
_numbers = itertools.count(1)  # the same on all workers, since saves are collective


class Save:
    """A save in progress. Making one is collective and waits for no disk but to make the folder."""

    def __init__(
        self, folder: Path | str, files: Files, wire: Wire, *, after: Callable[[], None] = lambda: None
    ) -> None:
        self.folder = Path(folder)
        self._draft = _beside(self.folder, ".writing")
        self._wire, self._rank = wire, wire.topology.rank
        self._after = after
        self._error: Exception | None = None
        self._raise_together(_outcome(self._make_draft) if self._rank == 0 else None)
        self._key = f"thinwire/written/{next(_numbers)}"
        process_groups.register_holder(self)
        # Not a daemon: a script may end while it still writes.
        self._thread = threading.Thread(target=self._work, args=(files,), name="thinwire-save")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save is in place; collective. Raises `SaveError` on all workers if it is not."""
        self._thread.join()
        self._raise_together(self._error)

    def release_groups(self) -> None:
        """Process groups are about to end, and with them the store that tells who has written."""
        self._thread.join()

    def _make_draft(self) -> None:
        _refuse_foreign_folder(self.folder)
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(parents=True)

    def _raise_together(self, error: Exception | None) -> None:
        """Raise on all workers if there is an error on one."""
        own = None if error is None else (isinstance(error, ConfigError), one_line(error))
        found = self._wire.all_gather_object(own)
        for rank, (is_config, why) in ((rank, each) for rank, each in enumerate(found) if each):
            if is_config:
                raise ConfigError(why) from error
            raise SaveError(
                f"the save `{self.folder}` was not written: rank {rank}: {why}; an earlier save is as it was"
            ) from error

    def _work(self, files: Files) -> None:
        try:
            entries = _write(files, self._draft)
            self._error = None
        except Exception as error:
            entries, self._error = {}, error
        files.clear()
        why = None if self._error is None else one_line(self._error)
        try:
            if self._rank:
                process_groups.post(f"{self._key}/{self._rank}", [entries, why])
            else:
                self._commit(entries)
        except Exception as error:
            self._error = self._error or error
        if self._error is not None and not threading.main_thread().is_alive():
            log.warning("the save `%s` was not written: %s", self.folder, one_line(self._error))

    def _commit(self, entries: dict[str, manifest.Entry]) -> None:
        others = self._reports()
        if self._error is not None or any(why for _, why in others):
            shutil.rmtree(self._draft, ignore_errors=True)  # frees space on a full disk
            return
        try:
            manifest.write(self._draft, dict(itertools.chain(entries.items(), *(own.items() for own, _ in others))))
            _put_in_place(self._draft, self.folder)
        except OSError:
            shutil.rmtree(self._draft, ignore_errors=True)
            raise
        self._after()

    def _reports(self) -> list[Any]:
        """What the other workers wrote, once they have."""
        keys = [f"{self._key}/{rank}" for rank in range(1, self._wire.topology.world_size)]
        found: dict[str, Any] = {}
        deadline = time.monotonic() + _OTHERS_WRITE_S
        while missing := [key for key in keys if key not in found]:
            found |= {key: note for key in missing if (note := process_groups.posted(key)) is not None}
            if not threading.main_thread().is_alive():
                deadline = min(deadline, time.monotonic() + _AT_EXIT_S)  # do not hold up a process that has failed
            if time.monotonic() > deadline:
                ranks = ", ".join(key.rpartition("/")[2] for key in missing)
                raise TimeoutError(f"nothing was heard of the files of rank {ranks}")
            if len(found) < len(keys):
                time.sleep(_LOOK_S)
        process_groups.remove_posted(keys)
        return [found[key] for key in keys]


def newest(path: Path | str) -> Path:
    """`path`, or `path`.old if a crash interrupted its replacement."""
    path = Path(path)
    for candidate in (path, _beside(path, ".old")):
        if candidate.is_dir():
            return candidate
    raise ConfigError(f"there is no saved folder at {str(path)!r}")


def remove(folder: Path) -> None:
    """Delete a save. One in which somebody put files of their own is left alone."""
    if not folder.is_dir() or not all(_SAVED.fullmatch(entry.name) for entry in folder.iterdir()):
        return
    doomed = folder
    if not folder.name.endswith(_ENDINGS):
        # Half a save under its own name would look like a damaged one.
        doomed = _beside(folder, ".removed")
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clear(folder: Path) -> None:
    """Delete a save's files and nothing else, and the folder if it is empty then."""
    for entry in folder.iterdir():
        if _SAVED.fullmatch(entry.name):
            entry.unlink()
    with suppress(OSError):
        folder.rmdir()


def leftovers(folder: Path, stems: Iterable[str]) -> list[Path]:
    """What interrupted saves under these names left behind, unless it is the only one of its name."""
    found = [folder / f"{stem}{ending}" for stem in stems for ending in _ENDINGS]
    return [path for path in found if path.is_dir() and (path.suffix != ".old" or path.with_suffix("").is_dir())]


def _outcome(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except (OSError, ConfigError) as error:
        return error
    return None


def _write(files: Mapping[str, str | dict[str, Tensor]], folder: Path) -> dict[str, manifest.Entry]:
    """Write this worker's files and return their entries."""
    for name, content in files.items():
        path = folder / name
        if isinstance(content, str):
            with on_file(path):
                path.write_text(content, encoding="utf-8")
        else:
            write_tensors(path, content)
    return {name: manifest.entry(folder / name, flush=True) for name in files}


def _refuse_foreign_folder(path: Path) -> None:
    """Other files with the names of a save's files would be overwritten."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"`{path}` is a file and cannot become a saved folder; give another name")
    if path.is_dir() and not any((path / name).is_file() for name in (manifest.MANIFEST, "state.json")):
        names = sorted(entry.name for entry in path.iterdir() if _SAVED.fullmatch(entry.name))
        if names:
            raise ConfigError(f"`{path}` holds {names[0]!r} but is not a Thinwire save; give another folder")


def _put_in_place(draft: Path, path: Path) -> None:
    """Replace an old save; other files in its folder are kept."""
    old = _beside(path, ".old")
    for entry in path.iterdir() if path.exists() else ():
        if not _SAVED.fullmatch(entry.name) and not (draft / entry.name).exists():
            if entry.is_dir() and not entry.is_symlink():
                shutil.copytree(entry, draft / entry.name, symlinks=True)
            else:
                shutil.copy2(entry, draft / entry.name, follow_symlinks=False)
    replaces = path.exists()
    if replaces:
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    draft.rename(path)
    _flush(path.parent)
    if replaces:
        shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Let the new name of a file in this folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)
