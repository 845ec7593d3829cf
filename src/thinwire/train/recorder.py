"""The records of a run: one JSON line per step or evaluation, written by rank 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from thinwire.errors import DamagedError
from thinwire.files import lines_of, on_file, parse_json, refuse_link
from thinwire.schema import COUNT, wrong


class Recorder:
    """Appends lines to `path`. With `active=False` it writes nothing.

    It does not wait for numbers that a GPU is still computing: their line is written before the next, or by `flush`.
    """

    def __init__(self, path: Path, *, active: bool, keep_until: int = 0) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._waiting: dict[str, Any] | None = None
        if active:
            refuse_link(path)
            kept = _lines_until(path, keep_until)
            with on_file(path):
                path.write_text("".join(kept), encoding="utf-8")
            self._file = path.open("a", encoding="utf-8", buffering=1)

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
            with on_file(self._path):
                self._file.write(json.dumps(arrived) + "\n")
            self._waiting = None

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()


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


def _lines_until(path: Path, step: int) -> list[str]:
    # A killed run may leave half a line; it is always later than the last checkpoint.
    if step == 0 or not path.is_file():
        return []
    kept = []
    for number, line in enumerate(lines_of(path), 1):
        if not line.endswith("\n") or _step(path, number, line) > step:
            break
        kept.append(line)
    return kept


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
