"""The manifest of a save: size and digest of each of its files, written last and checked before anything is loaded.

BLAKE2b, because hashlib has it everywhere and it needs no special instructions: about as fast as a good disk. It runs
outside of Python's lock, so a save in the background does not stop training. A CRC would find accidents as well, but
Python's own has 32 bits, few for files of many gigabytes.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.base.errors import DamagedError, DisagreementError, one_line
from thinwire.base.files import REMEDY, on_file, read_json, write_json
from thinwire.base.schema import COUNT, TEXT
from thinwire.comm.wire import Wire

MANIFEST = "manifest.json"
Entry = Mapping[str, Any]
"""`size` in bytes and `blake2b`, the digest."""
_SCHEMA = {"files": {str: {"size": COUNT, "blake2b": TEXT}}}


def entry(path: Path, *, flush: bool = False) -> dict[str, Any]:
    """A file's entry; with `flush` the file is on the disk afterwards, not only in the system's memory."""
    with on_file(path), path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        if flush:
            os.fsync(file.fileno())
        return {"size": os.fstat(file.fileno()).st_size, "blake2b": digest}


def write(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Write the manifest: from now on the folder is a whole save."""
    write_json(folder / MANIFEST, {"files": dict(sorted(entries.items()))})
    entry(folder / MANIFEST, flush=True)


def sign(folder: Path) -> None:
    """Write the manifest again, for files that were changed on purpose."""
    write(folder, {name: entry(folder / name) for name in _listed(folder)})


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
        seen = entry(folder / MANIFEST)["blake2b"]
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
        if entry(path)["blake2b"] != known["blake2b"]:
            return f"`{path}` is damaged, its checksum is not that of what was saved; {REMEDY}"
    except FileNotFoundError:
        return f"`{path}` is missing; {REMEDY}"
    except OSError as error:
        return _unreadable(path, error)
    return None


def _unreadable(path: Path, error: Exception) -> str:
    return f"`{path}` cannot be read ({one_line(error)}); {REMEDY}"
