"""The new lines of a `records.jsonl` that another process writes."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

from thinwire.base.files import parse_json
from thinwire.base.schema import COUNT, TEXT, wrong

_STEPS = 20
"""Steps of which records are read at a time, the last ones: the others say nothing about how far a run is."""
_LONGEST_LINE = 8 << 20
_STEP = b'{"kind": "step", '
_RECORD = {"kind": TEXT, "step": COUNT}


class Tail:
    """New complete lines of a file that is appended to, cut off or replaced."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self._path = path
        self._place, self._inode = 0, 0
        self.begins_anew = False
        """Whether the last call of `read` found another file, or one that was cut off, and read it from its start."""
        if path.is_file() and not from_start:
            # Skip what an earlier run wrote.
            self._place, self._inode = path.stat().st_size, path.stat().st_ino

    @property
    def written(self) -> float | None:
        """When the file was last written, in seconds since the epoch; None if there is none."""
        try:
            return self._path.stat().st_mtime
        except OSError:
            return None

    def read(self) -> list[dict[str, Any]]:
        """The records written since the last call; half a line is left until the rest of it is there."""
        self.begins_anew = False
        if not self._path.is_file():
            return []
        try:
            with self._path.open("rb") as file:
                lines = self._lines(file)
        except FileNotFoundError:  # it was removed just now
            return []
        return [record for line in lines if line and (record := _parse(line))]

    def _lines(self, file: BinaryIO) -> list[bytes]:
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._place:
            self.begins_anew = self._inode != 0
            self._place, self._inode = 0, status.st_ino
        file.seek(self._place)
        lines: list[bytes] = []
        steps: deque[int] = deque()
        while (line := file.readline(_LONGEST_LINE)).endswith(b"\n"):
            if line.startswith(_STEP):
                if len(steps) == _STEPS:
                    lines[steps.popleft()] = b""
                steps.append(len(lines))
            lines.append(line)
            self._place += len(line)
        return lines


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if wrong(record, _RECORD) is None else None
