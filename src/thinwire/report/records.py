"""The lines of a `records.jsonl`: all of them, or as many as a screen can show."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from thinwire.base.errors import DamagedError, one_line
from thinwire.base.files import parse_json, raw_blocks_of
from thinwire.base.schema import ANY, COUNT, FIGURE, NUMBER, TEXT, wrong

_RECORDS = {
    "evaluation": {"step": COUNT, "model": TEXT, "slow_bytes?": NUMBER, "evaluate_bytes?": NUMBER, "trainable?": COUNT},
    "ranks": {"step": COUNT, "ranks": {str: COUNT}},
    "stability": {
        "step": COUNT,
        "before": COUNT,
        "layers": {str: {"stability": FIGURE, "similarity": FIGURE}},
    },
    "spectra": {"step": COUNT, "layers": {str: [FIGURE]}},
    "agreement": {"step": COUNT, "ratio": (None, FIGURE), "layers?": {str: FIGURE}},
    "event": {"step": COUNT, "event": TEXT},
    "save": {"step": COUNT},
    "resume": {"step": COUNT, "lost_steps?": COUNT},
}
"""By kind; other kinds need only have one."""


def read_records(path: Path, *kinds: str) -> list[dict[str, Any]]:
    """Every complete line of a `records.jsonl`, or those of `kinds`; that of a running job may end in half a line."""
    return (
        [record for record in _records(path, kinds) if not kinds or record["kind"] in kinds] if path.is_file() else []
    )


def _records(path: Path, kinds: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    # Most lines are of steps: where they are not asked for, it is enough that they begin and end as a record does.
    skips = bool(kinds) and "step" not in kinds
    before = 0
    for text in raw_blocks_of(path):
        block = Block(text)
        for place, line in block.others() if skips else block.lines():
            yield parse_record(path, before + place + 1, line.decode("utf-8", errors="replace"))
        before += len(block.ends)


def parse_record(path: Path, number: int, line: str) -> dict[str, Any]:
    """One line; an error names it."""
    try:
        record = parse_json(line)
        if what := wrong(record, {"kind": TEXT}) or wrong(record, _RECORDS.get(record["kind"], ANY)):
            raise ValueError(what)
    except ValueError as error:
        raise DamagedError(
            f"`{path}` is damaged in line {number} ({error}); remove the line, or restore the file"
        ) from error
    return record


_START = (b'{"kind":', b' "step",')
"""What the record of a step begins with, in words of 8 bytes that are compared at once."""
_LOSS = b'"loss": '
_LONGEST = 24
"""Characters of the longest number that Python writes."""
_LAYOUTS = 8
"""Places in a line where the loss is looked for, per block: it moves with the length of the step and the phase."""
_NEWLINE, _BRACE, _DOT = b"\n}."


def _every(byte: int) -> np.uint64:
    """A word of 8 such bytes."""
    return np.uint64(byte * 0x0101010101010101)


_ZEROS, _HIGH, _LOW, _ES = _every(ord("0")), _every(0x80), _every(0x01), _every(ord("e"))
_PAIRS = np.uint64(0x000000FF000000FF)
_WORD = np.dtype("<u8")


def _digits(words: np.ndarray) -> np.ndarray:
    """The numbers that 8 digits each are, the first in the lowest byte: pairs, then fours, then eights are joined."""
    found = words - _ZEROS
    found = found * np.uint64(10) + (found >> np.uint64(8))
    low, high = found & _PAIRS, (found >> np.uint64(16)) & _PAIRS
    return (low * np.uint64(100 + (1000000 << 32)) + high * np.uint64(1 + (10000 << 32))) >> np.uint64(32)


def _are_digits(words: np.ndarray) -> np.ndarray:
    return (((words + _every(0x46)) | (words - _ZEROS)) & _HIGH) == 0


def _has_e(words: np.ndarray) -> np.ndarray:
    """Whether one of 8 characters is an e."""
    apart = words ^ _ES
    return ((apart - _LOW) & ~apart & _HIGH) != 0


class Block:
    """Whole lines of a `records.jsonl`."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        padded = text + bytes(2 * _LONGEST)  # what is compared may be longer than the last line
        self._bytes = np.frombuffer(padded, np.uint8)
        # The 8 bytes from each place on, as one number.
        self._words = np.ndarray((len(padded) - 7,), _WORD, padded, strides=(1,))
        self.ends = np.flatnonzero(self._bytes == _NEWLINE)
        """Where each line ends."""
        self.starts = np.concatenate([[0], self.ends[:-1] + 1]).astype(np.int64)
        """Where each line starts."""
        ends_well = self._bytes[np.maximum(self.ends - 1, 0)] == _BRACE
        self.is_step = ends_well & self._has(_START[0], self.starts) & self._has(_START[1], self.starts + 8)
        """Of each line, whether it begins and ends as the record of a step does."""

    def line(self, place: int) -> bytes:
        """A line with its end."""
        return self.text[self.starts[place] : self.ends[place] + 1]

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """All lines, with their places."""
        return ((place, self.line(place)) for place in range(len(self.ends)))

    def others(self) -> Iterator[tuple[int, bytes]]:
        """Lines that are not of steps, with their places."""
        for place in np.flatnonzero(~self.is_step).tolist():
            yield place, self.line(place)

    def _has(self, word: bytes, places: np.ndarray) -> np.ndarray:
        """Whether these 8 bytes stand in each of the places."""
        return self._words[places] == np.frombuffer(word, _WORD)

    def losses(self) -> tuple[np.ndarray, np.ndarray]:
        """The places of the steps' lines, and their losses to about six decimals; NaN where a line has none."""
        places = np.flatnonzero(self.is_step)
        found = np.full(len(places), np.nan)
        left = np.arange(len(places))
        for _ in range(_LAYOUTS):
            if not len(left):
                return places, found
            first = places[left[0]]
            at = self.text.find(_LOSS, self.starts[first], self.ends[first])
            if at < 0:
                left = left[1:]
                continue
            where = self.starts[places[left]] + (at - self.starts[first])
            alike = self._has(_LOSS, np.minimum(where, len(self.text)))
            found[left[alike]] = self._numbers(where[alike] + len(_LOSS))
            left = left[~alike]
        for place in left:
            at = self.text.find(_LOSS, self.starts[places[place]], self.ends[places[place]])
            found[place] = self._number(at + len(_LOSS)) if at >= 0 else np.nan
        return places, found

    def _numbers(self, starts: np.ndarray) -> np.ndarray:
        """Decimals with up to three digits before the dot, all at once; the others one by one."""
        words = self._words[starts]
        found, odd = np.empty(len(starts)), np.ones(len(starts), bool)
        for dot in (1, 2, 3):
            byte = np.uint64(8 * dot)
            mine = odd & ((words >> byte) & np.uint64(0xFF) == _DOT)
            if not mine.any():
                continue
            own = words[mine]
            before = own & ((np.uint64(1) << byte) - np.uint64(1))
            joined = before | (own >> (byte + np.uint64(8))) << byte | np.uint64(ord("0") << 56)
            found[mine] = _digits(joined) / 10.0 ** (8 - dot)
            odd[mine] = ~_are_digits(joined)
        odd |= _has_e(self._words[starts + 8]) | _has_e(self._words[starts + 16])  # perhaps an exponent
        for place in np.flatnonzero(odd).tolist():
            found[place] = self._number(int(starts[place]))
        return found

    def _number(self, start: int) -> float:
        text = self.text[start : start + _LONGEST]
        end = min((at for mark in (b",", b"}") if (at := text.find(mark)) >= 0), default=_LONGEST)
        try:
            return float(text[:end])
        except ValueError:
            return np.nan


_NEIGHBOURS = 10
"""Buckets on either side that a peak is compared with."""
_FAR = 8.0
"""Times the usual ratio of a peak to those around it, in logarithms, from which on it is shown."""
_MUCH = 3.0
"""Times the median of the peaks around it that it must have, at least."""
_ALONE = 1.5
"""Times each of the peaks around it."""
Line = tuple[int, bytes]
"""Its number in the file, and its text."""


@dataclass(slots=True)
class Bucket:
    """Neighbouring lines of a kind: the last of them, and what the others say of one figure."""

    last: Line
    count: int = 0
    """Lines with a finite figure."""
    total: float = 0.0
    lowest: tuple[float, Line] | None = None
    highest: tuple[float, Line] | None = None

    @property
    def mean(self) -> float | None:
        """Of the figure."""
        return self.total / self.count if self.count else None

    def add(self, other: Bucket) -> None:
        """Take in the neighbour behind."""
        self.last = other.last
        self.count += other.count
        self.total += other.total
        if other.lowest and (self.lowest is None or other.lowest[0] < self.lowest[0]):
            self.lowest = other.lowest
        if other.highest and (self.highest is None or other.highest[0] > self.highest[0]):
            self.highest = other.highest


@dataclass(slots=True)
class Sample:
    """Lines of a kind in buckets of equal width, which doubles when there are too many."""

    most: int
    width: int = 1
    seen: int = 0
    first: Line | None = None
    buckets: list[Bucket] = field(default_factory=list)
    odd: int = 0
    """Lines whose figure is not finite."""

    def add(self, lines: int, new: Bucket, first: Line | None = None) -> None:
        """Add neighbouring lines, no more than fit into the bucket that is being filled."""
        self.first = self.first or first or new.last
        if self.seen % self.width == 0:
            if len(self.buckets) >= 2 * self.most:
                self._widen()
            self.buckets.append(new)
        else:
            self.buckets[-1].add(new)
        self.seen += lines

    def _widen(self) -> None:
        for left, right in zip(self.buckets[::2], self.buckets[1::2], strict=True):
            left.add(right)
        del self.buckets[1::2]
        self.width *= 2

    def add_line(self, line: Line, figure: float | None) -> None:
        """Add one line."""
        known = figure is not None and math.isfinite(figure)
        self.odd += figure is not None and not known
        pair = (figure, line) if known and figure is not None else None
        self.add(1, Bucket(line, int(known), pair[0] if pair else 0.0, pair, pair))

    def add_block(self, block: Block, before: int) -> None:
        """Add all steps of a block."""
        places, figures = block.losses()
        finite = np.isfinite(figures)
        self.odd += int((~finite).sum())
        low, high = np.where(finite, figures, np.inf), np.where(finite, figures, -np.inf)
        start = 0
        while start < len(places):
            stop = min(len(places), start + self.width - self.seen % self.width)

            def line(at: int) -> Line:
                place = int(places[at])
                return before + place + 1, block.line(place)

            known = int(finite[start:stop].sum())
            new = Bucket(line(stop - 1), known)
            if known:
                new.total = float(figures[start:stop][finite[start:stop]].sum())
                least, most = start + int(low[start:stop].argmin()), start + int(high[start:stop].argmax())
                new.lowest, new.highest = (low[least], line(least)), (high[most], line(most))
            self.add(stop - start, new, None if self.first else line(start))
            start = stop

    def thinned(self) -> list[Bucket]:
        """At most `most` buckets."""
        every = -(-len(self.buckets) // self.most)
        found = []
        for at in range(0, len(self.buckets), every):
            whole = Bucket(self.buckets[at].last)
            for bucket in self.buckets[at : at + every]:
                whole.add(bucket)
            found.append(whole)
        return found


def spikes(buckets: list[Bucket], most: int = 40) -> list[Line]:
    """Lines with a figure far above the highest of the buckets around them; of many, the highest."""
    peaks = [bucket.highest for bucket in buckets if bucket.highest and bucket.highest[0] > 0]
    values = [peak[0] for peak in peaks]
    around = [
        [*values[max(0, at - _NEIGHBOURS) : at], *values[at + 1 : at + 1 + _NEIGHBOURS]] for at in range(len(values))
    ]
    ratios = [value / median(near) if near else 1.0 for value, near in zip(values, around, strict=True)]
    usual = median(abs(math.log(ratio)) for ratio in ratios) if ratios else 0.0
    found = [
        peak
        for peak, ratio, near in zip(peaks, ratios, around, strict=True)
        if ratio > _MUCH and math.log(ratio) > _FAR * usual and peak[0] > _ALONE * max(near)
    ]
    return sorted(line for _, line in sorted(found, key=lambda peak: -peak[0])[:most])


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
