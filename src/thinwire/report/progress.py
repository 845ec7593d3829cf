"""How far a run is, from the records that it writes."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from statistics import fmean
from typing import Any, BinaryIO, NamedTuple

from thinwire.base.files import parse_json
from thinwire.base.schema import COUNT, FIGURE, NUMBER, POSITIVE, TEXT, wrong

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


FINISHING = "finishing"
_WINDOW_S = 60.0
"""Speed and waiting are of the last minute."""
_APART_S = 0.2
_LOSSES = 20
_SO_FAR = {"slow_bytes": NUMBER, "evaluate_bytes?": NUMBER, "wire_s?": NUMBER, "wall_s?": NUMBER}
_START = {
    **dict.fromkeys(("recipe", "method", "metric"), TEXT),
    **dict.fromkeys(("steps", "batch", "world_size"), POSITIVE),
    **dict.fromkeys(("seed", "usual_bytes", "usual_bytes_at_end"), COUNT),
    **_SO_FAR,
}
_KINDS: dict[str, Any] = {
    "start": _START,
    "step": {"phase": TEXT, "loss?": FIGURE, **_SO_FAR},
    "evaluation": {"phase": TEXT, "ranks?": {str: COUNT}, **_SO_FAR},
    "ranks": {"ranks": {str: COUNT}},
    "work": {"phase": TEXT, "what": TEXT, "done?": COUNT, "of?": COUNT},
    "stopped": {},
}


class _Point(NamedTuple):
    step: int
    wall_s: float
    wire_s: float


class Progress:
    """The figures of a run so far. What is not known is None."""

    def __init__(self, title: str = "", steps: int | None = None, metric: str | None = None) -> None:
        self.title, self.steps, self.metric = title, steps, metric
        self._given = steps, metric
        self.reset()

    def reset(self) -> None:
        """Forget all records."""
        self.steps, self.metric = self._given
        self.start: dict[str, Any] = {}
        """The record of the run's start."""
        self.step: int | None = None
        self.phase = ""
        self.evaluation: dict[str, Any] = {}
        """The last one."""
        self.work: dict[str, Any] | None = None
        """What is being done, if that is no step."""
        self.ranks: dict[str, int] = {}
        self.is_stopped = False
        """Whether it was stopped in order, to be resumed."""
        self._last: dict[str, Any] = {}
        self._losses: deque[float] = deque(maxlen=_LOSSES)
        self._points: deque[_Point] = deque()

    def update(self, record: dict[str, Any]) -> None:
        """Add a record; kinds that are not known, or not as they should be, are passed over."""
        kind = record["kind"]
        if kind not in _KINDS or wrong(record, _KINDS[kind]):
            return
        if kind == "start":
            self._begin(record)
        if kind == "ranks":
            self.ranks = record["ranks"]
            return
        self.step, self.phase = record["step"], record.get("phase", self.phase)
        self.work = record if kind == "work" else None
        self.is_stopped = kind == "stopped"
        if kind == "step" and "loss" in record:
            self._losses.append(record["loss"])
        if kind == "evaluation":
            self.evaluation, self.ranks = record, record.get("ranks", {})
        if "slow_bytes" in record:
            self._last = record
            self._add_point(record)

    def _begin(self, record: dict[str, Any]) -> None:
        self.start, self.steps, self.metric = record, record["steps"], record["metric"]
        self._points.clear()  # what was before a stop says nothing about the speed

    def _add_point(self, record: dict[str, Any]) -> None:
        if "wall_s" not in record:
            return
        point, points = _Point(record["step"], record["wall_s"], record.get("wire_s", 0.0)), self._points
        if points and (point.step < points[-1].step or point.wall_s < points[-1].wall_s):
            points.clear()
        if len(points) > 1 and point.wall_s - points[-2].wall_s < _APART_S:
            points.pop()
        points.append(point)
        while len(points) > 2 and point.wall_s - points[1].wall_s > _WINDOW_S:
            points.popleft()

    # Figures.

    @property
    def loss(self) -> float | None:
        """The mean of the last training losses of rank 0."""
        return fmean(self._losses) if self._losses else None

    @property
    def figure(self) -> float | None:
        """The metric at the last evaluation."""
        value = self.evaluation.get(self.metric or "")
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def sent(self) -> float | None:
        """Slow-link bytes of rank 0's node, without evaluation."""
        return self._last["slow_bytes"] - self._last.get("evaluate_bytes", 0) if self._last else None

    @property
    def share(self) -> float | None:
        """The same as a share of what fp32 all-reduce would have sent by now."""
        begun = self.start
        if self.sent is None or not begun or begun["steps"] <= begun["step"]:
            return None
        each = (begun["usual_bytes_at_end"] - begun["usual_bytes"]) / (begun["steps"] - begun["step"])
        usual = begun["usual_bytes"] + each * (self._last["step"] - begun["step"])
        return self.sent / usual if usual > 0 else None

    @property
    def steps_per_s(self) -> float | None:
        """Over the last minute, with evaluations."""
        seconds, steps, _ = self._since()
        return steps / seconds if seconds > 0 and steps else None

    @property
    def samples_per_s(self) -> float | None:
        speed = self.steps_per_s
        return speed * self.start["batch"] if speed and self.start else None

    @property
    def waiting(self) -> float | None:
        """The share of the last minute that rank 0 waited for the wire."""
        seconds, steps, waited = self._since()
        return min(1.0, max(0.0, waited / seconds)) if seconds > 0 and steps and self.start else None

    @property
    def mean_rank(self) -> float | None:
        """Over the layers that are factored."""
        return fmean(self.ranks.values()) if self.ranks else None

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step, at the present speed."""
        speed = self.steps_per_s
        if speed is None or self.steps is None or self.step is None:
            return None
        return max(0, self.steps - self.step) / speed

    def _since(self) -> tuple[float, int, float]:
        """Seconds, steps and seconds of waiting in the window."""
        if len(self._points) < 2:
            return 0.0, 0, 0.0
        first, last = self._points[0], self._points[-1]
        return last.wall_s - first.wall_s, last.step - first.step, last.wire_s - first.wire_s
