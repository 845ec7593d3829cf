"""Records of a run, thinned out to what a screen can show: a long run has a hundred thousand of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.base.errors import DamagedError, one_line
from thinwire.base.files import raw_blocks_of
from thinwire.report.buckets import Bucket, Line, Sample, spikes
from thinwire.report.records import parse_record
from thinwire.report.steps import Block

MOST = 500
"""Records of a kind that are kept."""
_KIND = re.compile(rb'\{"kind": "(\w{1,40})"')
_END = b"}\n"
_STEP = "step"
_MOST_NAMED = 3


@dataclass(frozen=True)
class Point:
    """A bucket of steps."""

    record: dict[str, Any]
    """The last of them."""
    mean: float | None
    """Their mean loss, over those that are finite."""


@dataclass(frozen=True)
class Thinned:
    """What was read of a `records.jsonl`."""

    records: dict[str, list[dict[str, Any]]]
    """Those that are kept, by kind, in order."""
    points: list[Point]
    """The steps."""
    spikes: list[dict[str, Any]]
    """Steps with a loss far above that of others around them."""
    counts: dict[str, int]
    """How many there are of each kind."""
    problems: list[str]
    """What could not be read, in words."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The records of a kind."""
        return self.records.get(kind, [])


def read_thinned(path: Path, most: int = MOST, figures: Mapping[str, str] | None = None) -> Thinned:
    """About `most` records of each kind, evenly spaced, the first and the last among them.

    `figures` names, by kind, a figure of which no extreme is left out. Only what is kept is parsed; of other records it
    is checked that they begin and end as records do.
    """
    reader = _Reader(path, most, dict(figures or {}))
    reader.read()
    steps = reader.of(_STEP)
    points = [point for bucket in steps if (point := reader.point(bucket))]
    high = [record for line in spikes(steps) if (record := reader.parsed(line))]
    kept = {kind: reader.records(kind) for kind in reader.samples if kind != _STEP}
    counts = {kind: sample.seen for kind, sample in reader.samples.items()}
    return Thinned({**kept, _STEP: [point.record for point in points]}, points, high, counts, reader.problems())


class _Reader:
    def __init__(self, path: Path, most: int, figures: dict[str, str]) -> None:
        self.path, self.most = path, most
        self.samples: dict[str, Sample] = {}
        self._figures = {
            kind: re.compile(rb'"%s": ([^,}]+)' % re.escape(name.encode())) for kind, name in figures.items()
        }
        self._broken: set[int] = set()
        self._error = ""

    def read(self) -> None:
        before = 0
        try:
            for text in raw_blocks_of(self.path, "the run's other figures are shown"):
                block = Block(text)
                for place, line in block.others():
                    self._add(before + place + 1, line)
                if block.is_step.any():
                    steps = self.samples.setdefault(_STEP, Sample(self.most, self._usual_width(block)))
                    steps.add_block(block, before)
                before += len(block.ends)
        except (DamagedError, OSError) as error:
            self._error = one_line(error)

    def _usual_width(self, block: Block) -> int:
        """Buckets that a file of this size will have about the right number of: fewer of them are faster."""
        lines = int(block.is_step.sum()) * self.path.stat().st_size / len(block.text)
        return max(1, int(lines / self.most))

    def _add(self, number: int, line: bytes) -> None:
        found = _KIND.match(line)
        if not found or not line.endswith(_END):
            self._broken.add(number)
            return
        kind = found[1].decode()
        pattern = self._figures.get(kind)
        figure = pattern.search(line) if pattern else None
        self.samples.setdefault(kind, Sample(self._most_of(kind))).add_line((number, line), _float(figure))

    def _most_of(self, kind: str) -> int:
        return self.most if kind not in self._figures else max(1, self.most // 3)  # each may stand for three

    def of(self, kind: str) -> list[Bucket]:
        return self.samples[kind].thinned() if kind in self.samples else []

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The first, the last of each bucket, and extremes."""
        sample = self.samples[kind]
        lines = {sample.first} | {bucket.last for bucket in self.of(kind)}
        if kind in self._figures:
            extremes = (end for bucket in self.of(kind) for end in (bucket.lowest, bucket.highest))
            lines |= {end[1] for end in extremes if end}
        return [record for line in sorted(line for line in lines if line) if (record := self.parsed(line))]

    def point(self, bucket: Bucket) -> Point | None:
        record = self.parsed(bucket.last)
        return Point(record, bucket.mean) if record else None

    def parsed(self, line: Line) -> dict[str, Any] | None:
        try:
            return parse_record(self.path, line[0], line[1].decode("utf-8", errors="replace"))
        except DamagedError:
            self._broken.add(line[0])
            return None

    def problems(self) -> list[str]:
        return [text for text in (self._error, *self._damage(), *self._odd_losses()) if text]

    def _damage(self) -> Iterator[str]:
        if self._broken:
            shown = ", ".join(f"{number:,}" for number in sorted(self._broken)[:_MOST_NAMED])
            more = f" and {len(self._broken) - _MOST_NAMED:,} more" if len(self._broken) > _MOST_NAMED else ""
            yield f"`{self.path}` is damaged in line {shown}{more}; the other lines are shown"

    def _odd_losses(self) -> Iterator[str]:
        steps = self.samples.get(_STEP)
        if steps and steps.odd:
            yield f"the loss of {steps.odd:,} of {steps.seen:,} steps is missing or not finite; the others are shown"


def _float(found: re.Match[bytes] | None) -> float | None:
    try:
        return float(found[1]) if found else None
    except ValueError:
        return None
