"""A progress line for a running job, read from its `records.jsonl`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from thinwire.files import parse_json
from thinwire.report.tables import figure, size

_EVERY_S = 0.25
_PLAIN_EVERY_S = 5.0


class Tail:
    """New complete lines of a file that another process appends to or rewrites."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place, self._inode = 0, 0
        if path.is_file():
            # Skip what an earlier run wrote.
            self._place, self._inode = path.stat().st_size, path.stat().st_ino

    def read(self) -> list[dict[str, Any]]:
        """The records written since the last call."""
        if not self._path.is_file():
            return []
        status = self._path.stat()
        if status.st_ino != self._inode or status.st_size < self._place:
            self._place, self._inode = 0, status.st_ino
        with self._path.open("rb") as file:
            file.seek(self._place)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._place += len(whole)
        return [record for line in whole.splitlines() if (record := _parse(line))]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class Progress:
    """The text of the progress line."""

    def __init__(self, title: str, steps: int, metric: str) -> None:
        self._title, self._steps, self._metric = title, steps, metric
        self._seen: dict[str, Any] = {}

    def update(self, record: dict[str, Any]) -> None:
        """Add a record; an evaluation's loss is held-out and does not replace the training loss."""
        if record["kind"] not in ("step", "evaluation"):
            return
        if record["kind"] == "evaluation":
            record = {k: v for k, v in record.items() if k != "loss"}
        self._seen |= record

    def line(self) -> str:
        """Phase, step, loss, metric, slow-link bytes and ranks, as far as known."""
        seen = self._seen
        if not seen:
            return f"{self._title}  starting"
        parts = [self._title, seen["phase"], f"step {seen['step']}/{self._steps}"]
        if "loss" in seen:
            parts.append(f"loss {seen['loss']:.4f}")
        if self._metric in seen:
            parts.append(f"{self._metric} {figure(self._metric, seen[self._metric])}")
        parts.append(f"slow link {size(seen['slow_bytes'])}")
        if seen.get("ranks"):
            low, high = min(seen["ranks"].values()), max(seen["ranks"].values())
            parts.append(f"ranks {low}–{high}" if low < high else f"rank {low}")
        return "  ".join(parts)


@contextmanager
def following(path: Path, progress: Progress, console: Console) -> Iterator[None]:
    """Show the run that writes `path`: a live line on a terminal, occasional lines elsewhere."""
    over, tail = threading.Event(), Tail(path)
    show = _show_live if console.is_terminal else _show_plain
    thread = threading.Thread(target=show, args=(tail, progress, console, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _show_live(tail: Tail, progress: Progress, console: Console, over: threading.Event) -> None:
    with Live(Text(progress.line()), console=console, auto_refresh=False, transient=True) as live:
        while not over.wait(_EVERY_S):
            for record in tail.read():
                progress.update(record)
            live.update(Text(progress.line(), no_wrap=True, overflow="ellipsis"), refresh=True)


def _show_plain(tail: Tail, progress: Progress, console: Console, over: threading.Event) -> None:
    due = time.monotonic()
    while not over.wait(_EVERY_S):
        for record in tail.read():
            progress.update(record)
            if record["kind"] == "evaluation" and time.monotonic() >= due:
                console.print(progress.line(), highlight=False, soft_wrap=True, markup=False)
                due = time.monotonic() + _PLAIN_EVERY_S
