"""The run's diary: one JSON line a step or evaluation, by rank 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO


class Recorder:
    """Appends to `path`, every line before the next step. With `active=False` it writes nothing."""

    def __init__(self, path: Path, *, active: bool, keep_until: int = 0) -> None:
        self._file: TextIO | None = None
        if active:
            kept = _lines_until(path, keep_until)
            path.write_text("".join(kept), encoding="utf-8")
            self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, kind: str, **values: Any) -> None:
        """One line."""
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind} | values) + "\n")

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()


def _lines_until(path: Path, step: int) -> list[str]:
    # A run killed in the middle of a line leaves half of it; it lies beyond every checkpoint.
    if step == 0 or not path.is_file():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n") or json.loads(line)["step"] > step:
            break
        kept.append(line)
    return kept
