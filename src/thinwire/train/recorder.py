"""The records of a run: one JSON line per step or evaluation, written by rank 0, whichever worker that is then."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from thinwire.base import units
from thinwire.base.errors import DamagedError, ThinwireError, one_line
from thinwire.base.files import lines_of, on_file, parse_json, refuse_link
from thinwire.base.schema import COUNT, wrong
from thinwire.loggers.log import Arriving, Loggers

log = logging.getLogger("thinwire")
_A_STEP = '{"kind": "step", '
_ADDED = "for loggers"


class Recorder:
    """Appends lines to `path` as long as `active()`, and else writes nothing.

    A worker that becomes active later goes on with the file of the one before: without lines of steps to come.

    It does not wait for numbers that a GPU is still computing: their line is written before the next, or by `flush`.
    Lines that the disk refuses do not end the run: they are kept in memory and written as soon as that is possible.
    """

    def __init__(self, path: Path, *, active: Callable[[], bool], keep_until: int = 0) -> None:
        self.loggers = Loggers()
        """They see each line too, and more."""
        self.takes_over: Callable[[], None] = lambda: None
        """Called in a worker that goes on with the file of another."""
        self._path, self._active = path, active
        self._file: FileIO | None = None
        self._unwritten = b""
        self._refused = False
        self._arriving = Arriving(self._deliver)
        self.lost_steps = 0
        """Steps after `keep_until` that the file had."""
        if active():
            self._open(keep_until)

    def _open(self, keep_until: int) -> None:
        refuse_link(self._path)
        kept, self.lost_steps = _lines_until(self._path, keep_until)
        with on_file(self._path):
            self._path.write_text("".join(kept), encoding="utf-8")
        self._file = FileIO(self._path, "a")

    def _is_open(self, step: int) -> bool:
        """Whether this worker writes now; opens and closes the file as that changes."""
        if not self._active():
            self._close()
        elif self._file is None:
            try:
                self._open(step)
            except (OSError, ThinwireError) as error:
                log.warning("%s; there are no more records, training goes on", one_line(error))
                self._active = lambda: False
            else:
                self.takes_over()
        return self._file is not None

    def write(self, kind: str, more: Callable[[], dict[str, Any]] | None = None, /, **values: Any) -> None:
        """One line; values may be tensors of one number. `more` is for loggers, and not in the line."""
        if self._is_open(values["step"] - (kind == "step")):
            added = more() if more is not None and self.loggers else {}
            self._arriving.put({"kind": kind, **values, _ADDED: added})

    def flush(self) -> None:
        """Write the pending line."""
        self._arriving.flush()

    def _deliver(self, record: dict[str, Any]) -> None:
        added = record.pop(_ADDED)
        self._unwritten += (json.dumps(record) + "\n").encode()
        self._append()
        self.loggers.write(record | added)

    def _append(self) -> None:
        """Write as much as the disk takes; half a line is continued by the rest of it."""
        assert self._file is not None
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not self._refused:
                log.warning("%s: %s; its lines are kept in memory, training goes on", error.strerror, self._path)
            self._refused = True

    def close(self) -> None:
        """Flush and close the file; nothing is written any more."""
        self._close()
        self._active = lambda: False

    def _close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None
            if lost := self._unwritten.count(b"\n"):
                log.warning("the last %s of %s could not be written", units.count(lost, "line"), self._path)


def _lines_until(path: Path, step: int) -> tuple[list[str], int]:
    """The lines up to this step, and how many steps come after it."""
    # A killed run may leave half a line; it is always later than the last checkpoint.
    if step == 0 or not path.is_file():
        return [], 0
    kept: list[str] = []
    lines = lines_of(path)
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n") or _step(path, number, line) > step:
            return kept, sum(other.startswith(_A_STEP) for other in (line, *lines))
        kept.append(line)
    return kept, 0


def _step(path: Path, number: int, line: str) -> int:
    try:
        record = parse_json(line)
        if what := wrong(record, {"step": COUNT}):
            raise ValueError(what)
    except ValueError as error:
        raise DamagedError(
            f"`{path}` is damaged in line {number} ({error}); remove the line, or restore the file"
        ) from error
    return record["step"]
