"""Saves: folders that are written beside their place by a thread on every worker, and renamed when they are whole.

No collective runs while files are written: each worker's thread leaves a note in the job's store when it is done, and
rank 0's thread then writes the manifest and renames the folder. So training goes on, and a save is in place as soon as
the last worker has written. A process that is killed at any moment leaves the old folder or the new one, the old one
perhaps under its name + ".old".

The manifest has size and digest of each file, and is compared before anything is loaded. The digest is BLAKE2b, because
hashlib has it everywhere and it needs no special instructions: about as fast as a good disk. It runs outside of
Python's lock, so a save in the background does not stop training. A CRC would find accidents as well, but Python's own
has 32 bits, few for files of many gigabytes.
"""

import hashlib
import itertools
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from thinwire.base.errors import (
    AbandonedSaveError,
    CollectiveError,
    ConfigError,
    DamagedError,
    DisagreementError,
    SaveError,
    one_line,
)
from thinwire.base.files import REMEDY, on_file, read_json, write_json, write_tensors
from thinwire.base.schema import COUNT, TEXT
from thinwire.comm import process_groups
from thinwire.comm.wire import Wire

log = logging.getLogger("thinwire")


class OccupiedError(ConfigError):
    """Something that is no save has the name of one."""


Files = dict[str, str | dict[str, Tensor]]
"""What a worker writes into a save: JSON as text, or tensors that nobody changes any more."""
MANIFEST = "manifest.json"
Entry = Mapping[str, Any]
"""`size` in bytes and `blake2b`, the digest."""
_SCHEMA = {"files": {str: {"size": COUNT, "blake2b": TEXT}}}

_SAVED = re.compile(
    r"(manifest|state|position|random-\d+|(worker|also)-rank\d+|(model|method|optimizer|average).*)\.(json|safetensors)"
)
_ENDINGS = (".writing", ".old", ".removed")
_STEP = re.compile(r"(step-(\d+))(\.old|\.writing|\.removed)?")
_OTHERS_WRITE_S, _AT_EXIT_S = 1800.0, 60.0
_LOOK_S = 0.02
_LOST = "a group was lost while it was written"


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the CPU's memory, which training does not change."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


class Save:
    """A save in progress. Making one is collective and waits for no disk but to make the folder."""

    def __init__(
        self, folder: Path | str, files: Files, wire: Wire, *, after: Callable[[], None] = lambda: None
    ) -> None:
        self.folder = Path(folder)
        self._draft = _beside(self.folder, ".writing")
        self._wire, self._rank, self._size = wire, wire.topology.rank, wire.topology.world_size
        self._after = after
        self._error: Exception | None = None
        self._abandoned = threading.Event()
        key = self._raise_together(_outcome(self._make_draft) if self._rank == 0 else None)
        self._key = f"thinwire/written/{key}"
        if not wire.outlives_groups:
            process_groups.register_holder(self)
        # Not a daemon: a script may end while it still writes.
        self._thread = threading.Thread(target=self._work, args=(files,), name="thinwire-save")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save is in place; collective. Raises `SaveError` on all workers if it is not."""
        while self._thread.is_alive():
            self._thread.join(_LOOK_S)
            try:
                self._wire.watch.check()
            except CollectiveError:
                self.abandon()
                raise
        try:
            self._raise_together(self._error)
        except SaveError:
            if self._wire.topology.rank == 0:  # nobody writes there any more, and whoever began it may be gone
                shutil.rmtree(self._draft, ignore_errors=True)
            raise

    def abandon(self) -> None:
        """Give it up: a group is gone, and with it its files. Waits for this worker's own disk."""
        self._abandoned.set()
        self._thread.join()

    def release_groups(self) -> None:
        """Process groups are about to end, and with them the store that tells who has written."""
        self._thread.join()

    def _make_draft(self) -> None:
        _refuse_foreign_folder(self.folder)
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(parents=True)

    def _raise_together(self, error: Exception | None) -> str:
        """Raise on all workers if there is an error on one; return a name that all have in common."""
        own = None if error is None else (_kind(error), one_line(error))
        found, names = zip(*self._wire.all_gather_object((own, uuid.uuid4().hex[:12])), strict=True)
        in_place = False
        if any(each and each[0] == "abandoned" for each in found):  # only who puts it in place knows whether it is
            in_place = any(self._wire.all_gather_object(self._rank == 0 and own is None))
        for rank, (kind, why) in ((rank, each) for rank, each in enumerate(found) if each):
            if kind == "abandoned" and in_place:
                continue
            if kind == "config":
                raise OccupiedError(why) from error
            raise (AbandonedSaveError if kind == "abandoned" else SaveError)(
                f"the save `{self.folder}` was not written: rank {rank}: {why}; an earlier save is as it was"
            ) from error
        return names[0]

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
                self._tell([entries, why])
            else:
                self._commit(entries)
        except Exception as error:
            self._error = self._error or error
        if self._error is not None and not threading.main_thread().is_alive():
            log.warning("the save `%s` was not written: %s", self.folder, one_line(self._error))

    def _tell(self, note: Any) -> None:
        """Leave a note of what was written; until rank 0 is done with it, if the store may forget it."""
        key, done = f"{self._key}/{self._rank}", f"{self._key}/done"
        deadline = time.monotonic() + _OTHERS_WRITE_S
        process_groups.post(key, note)
        while self._wire.outlives_groups:
            abandoned = self._abandoned.wait(10 * _LOOK_S)
            in_place = process_groups.posted(done)
            if abandoned or in_place is not None or time.monotonic() > deadline:
                process_groups.remove_posted([key])  # also before a rank 0 that was frozen finds it
                if not in_place:
                    raise AbandonedSaveError(_LOST)
                return
            if not threading.main_thread().is_alive():
                deadline = min(deadline, time.monotonic() + _AT_EXIT_S)
            if process_groups.posted(key) is None:
                process_groups.post(key, note)

    def _commit(self, entries: dict[str, Entry]) -> None:
        """Put the save in place, or remove what there is of it; then the others need not wait any more."""
        keys, in_place = [f"{self._key}/{rank}" for rank in range(1, self._size)], False
        try:
            in_place = self._put_together(entries, self._reports(keys))
        finally:
            if not in_place:
                shutil.rmtree(self._draft, ignore_errors=True)  # frees space on a full disk
            if self._wire.outlives_groups:
                process_groups.post(f"{self._key}/done", in_place)
        if in_place:
            self._after()

    def _put_together(self, entries: dict[str, Entry], others: list[Any]) -> bool:
        if self._error is not None or any(why for _, why in others):
            return False
        write_manifest(self._draft, dict(itertools.chain(entries.items(), *(own.items() for own, _ in others))))
        _put_in_place(self._draft, self.folder)
        return True

    def _reports(self, keys: list[str]) -> list[Any]:
        """What the other workers wrote, once they have."""
        found: dict[str, Any] = {}
        deadline = time.monotonic() + _OTHERS_WRITE_S
        while missing := [key for key in keys if key not in found]:
            found |= {key: note for key in missing if (note := process_groups.posted(key)) is not None}
            if self._abandoned.is_set():
                raise AbandonedSaveError(_LOST)
            if not threading.main_thread().is_alive():
                deadline = min(deadline, time.monotonic() + _AT_EXIT_S)  # do not hold up a process that has failed
            if time.monotonic() > deadline:
                ranks = ", ".join(key.rpartition("/")[2] for key in missing)
                raise TimeoutError(f"nothing was heard of the files of rank {ranks}")
            if len(found) < len(keys):
                time.sleep(_LOOK_S)
        if not self._wire.outlives_groups:
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


# A folder of saves, one per step.


def at_step(folder: Path, step: int) -> Path:
    """Where the save of this step belongs."""
    return folder / f"step-{step:06}"


def all_saves(folder: Path) -> list[Path]:
    """The saves in `folder`, the latest first; whether they are sound is not looked at."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if (name := _STEP.fullmatch(path.name)) and path.is_dir() and name[3] in (None, ".old"):
            found[int(name[2])] = folder / name[1]
    return [newest(found[step]) for step in sorted(found, reverse=True)]


def find(folder: Path) -> Path | None:
    """The latest save in `folder`, if there is one."""
    return next(iter(all_saves(folder)), None)


def find_sound(folder: Path) -> Path:
    """The latest save in `folder` whose checksums are right; warns of later ones, and raises if there is none."""
    return _first_sound(all_saves(folder), verify)


def prune(folder: Path, keep: int, step: int) -> None:
    """Delete all but the last `keep` saves, after the one of `step`; later ones are those it was not resumed from."""
    found = all_saves(folder)
    kept = [path for path in found if _step(path) <= step][:keep]
    names = {name[1] for path in folder.iterdir() if (name := _STEP.fullmatch(path.name))}
    for path in [*(path for path in found if path not in kept), *leftovers(folder, names)]:
        with suppress(OSError):  # what cannot be deleted takes space, no more
            remove(path)


def find_sound_together(folder: Path, wire: Wire) -> Path | None:
    """The latest save in `folder` that is sound, the same one on all workers; None if there is none; collective.

    A damaged save is reported, and the one before it is taken.
    """
    here = [path.name for path in all_saves(folder)]
    names = {name for own in wire.all_gather_object(here) for name in own}
    if not names:
        return None
    candidates = sorted((folder / name for name in names), key=_step, reverse=True)
    return _first_sound(candidates, lambda path: verify(path, wire), says=wire.topology.rank == 0)


def _first_sound(candidates: list[Path], check: Callable[[Path], None], *, says: bool = True) -> Path:
    last: DamagedError | None = None
    for path in candidates:
        try:
            check(path)
        except DamagedError as error:
            last = error
            if says and path != candidates[-1]:
                log.warning("a save is damaged and is not used: %s", error)
            continue
        if last is not None and says:
            log.warning("using the save before it, `%s`", path)
        return path
    if last is None:
        raise ConfigError("there is no save")
    raise last


def _step(path: Path) -> int:
    name = _STEP.fullmatch(path.name)
    assert name is not None
    return int(name[2])


def _kind(error: Exception) -> str:
    if isinstance(error, ConfigError):
        return "config"
    return "abandoned" if isinstance(error, AbandonedSaveError) else ""


def _outcome(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except (OSError, ConfigError) as error:
        return error
    return None


def _write(files: Mapping[str, str | dict[str, Tensor]], folder: Path) -> dict[str, Entry]:
    """Write this worker's files and return their entries."""
    for name, content in files.items():
        path = folder / name
        if isinstance(content, str):
            with on_file(path):
                path.write_text(content, encoding="utf-8")
        else:
            write_tensors(path, content)
    return {name: digest_of(folder / name, flush=True) for name in files}


def _refuse_foreign_folder(path: Path) -> None:
    """Other files with the names of a save's files would be overwritten."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"`{path}` is a file and cannot become a saved folder; give another name")
    if path.is_dir() and not any((path / name).is_file() for name in (MANIFEST, "state.json")):
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


# The manifest.


def digest_of(path: Path, *, flush: bool = False) -> dict[str, Any]:
    """A file's entry; with `flush` the file is on the disk afterwards, not only in the system's memory."""
    with on_file(path), path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        if flush:
            os.fsync(file.fileno())
        return {"size": os.fstat(file.fileno()).st_size, "blake2b": digest}


def write_manifest(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Write the manifest: from now on the folder is a whole save."""
    write_json(folder / MANIFEST, {"files": dict(sorted(entries.items()))})
    digest_of(folder / MANIFEST, flush=True)


def sign(folder: Path) -> None:
    """Write the manifest again, for files that were changed on purpose."""
    write_manifest(folder, {name: digest_of(folder / name) for name in _listed(folder)})


def _listed(folder: Path) -> dict[str, Entry]:
    """What the manifest says of each file; none may be outside the folder."""
    listed: dict[str, Entry] = read_json(folder / MANIFEST, schema=_SCHEMA)["files"]
    if odd := next((name for name in listed if Path(name).name != name), None):
        raise DamagedError(f"`{folder / MANIFEST}` is damaged, {odd!r} is no file of this folder; {REMEDY}")
    return listed


def verify(folder: Path, wire: Wire | None = None) -> None:
    """Raise if a file of the save is missing or not as it was written; collective if there is a wire.

    Each worker reads a part of the files, and all raise the same error: either all load this save or none does.
    """
    rank, workers = (wire.topology.rank, wire.topology.world_size) if wire else (0, 1)
    fault, seen = None, None
    try:
        listed = _listed(folder)
        seen = digest_of(folder / MANIFEST)["blake2b"]
        fault = _fault(folder, {name: listed[name] for name in sorted(listed)[rank::workers]})
    except (DamagedError, OSError) as error:
        fault = str(error) if isinstance(error, DamagedError) else _unreadable(folder / MANIFEST, error)
    found = wire.all_gather_object((fault, seen)) if wire else [(fault, seen)]
    if faults := [fault for fault, _ in found if fault]:
        raise DamagedError(faults[0])
    odd = [other for other, (_, digest) in enumerate(found) if digest != found[0][1]]
    if odd:
        raise DisagreementError(f"rank {odd[0]} and rank 0 see different saves in `{folder}`; give all the same folder")


def _fault(folder: Path, listed: Mapping[str, Entry]) -> str | None:
    """What is wrong with the first of these files that is not as listed."""
    return next((fault for name, known in listed.items() if (fault := _fault_of(folder / name, known))), None)


def _fault_of(path: Path, known: Entry) -> str | None:
    try:
        size = path.stat().st_size
        if not path.is_file():  # opening a pipe could wait for ever
            return f"`{path}` is damaged, it is not a file; {REMEDY}"
        if size != known["size"]:
            return f"`{path}` is damaged, it has {size:,} bytes instead of {known['size']:,}; {REMEDY}"
        if digest_of(path)["blake2b"] != known["blake2b"]:
            return f"`{path}` is damaged, its checksum is not that of what was saved; {REMEDY}"
    except FileNotFoundError:
        return f"`{path}` is missing; {REMEDY}"
    except OSError as error:
        return _unreadable(path, error)
    return None


def _unreadable(path: Path, error: Exception) -> str:
    return f"`{path}` cannot be read ({one_line(error)}); {REMEDY}"
