"""The records of a run: one JSON line per step or evaluation, written by rank 0."""

from __future__ import annotations

import json
import logging
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.errors import DamagedError
from thinwire.files import lines_of, on_file, parse_json, refuse_link
from thinwire.schema import COUNT, wrong

log = logging.getLogger("thinwire")
_A_STEP = '{"kind": "step", '


class Recorder:
    """Appends lines to `path`. With `active=False` it writes nothing.

    It does not wait for numbers that a GPU is still computing: their line is written before the next, or by `flush`.
    Lines that the disk refuses do not end the run: they are kept in memory and written as soon as that is possible.
    """

    def __init__(self, path: Path, *, active: bool, keep_until: int = 0) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._unwritten = b""
        self._refused = False
        self._waiting: dict[str, Any] | None = None
        self.lost_steps = 0
        """Steps after `keep_until` that the file had."""
        if active:
            refuse_link(path)
            kept, self.lost_steps = _lines_until(path, keep_until)
            with on_file(path):
                path.write_text("".join(kept), encoding="utf-8")
            self._file = FileIO(path, "a")

    def write(self, kind: str, **values: Any) -> None:
        """One line; values may be tensors of one number."""
        if self._file is None:
            return
        self.flush()
        self._waiting = {"kind": kind} | {name: _pending(value) for name, value in values.items()}
        if not any(isinstance(value, _Pending) for value in self._waiting.values()):
            self.flush()

    def flush(self) -> None:
        """Write the pending line."""
        if self._file is not None and self._waiting is not None:
            arrived = {n: v.number() if isinstance(v, _Pending) else v for n, v in self._waiting.items()}
            self._unwritten += (json.dumps(arrived) + "\n").encode()
            self._waiting = None
            self._append()

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
        """Flush and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None
            if lost := self._unwritten.count(b"\n"):
                log.warning("the last %d lines of %s could not be written", lost, self._path)


class _Pending:
    """A number being copied from a GPU to pinned memory."""

    def __init__(self, value: Tensor) -> None:
        self._here = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(
            value.detach(), non_blocking=True
        )
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def number(self) -> float:
        self._arrived.synchronize()
        return self._here.item()


def _pending(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _Pending(value) if value.is_cuda else value.item()


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
