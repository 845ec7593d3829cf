"""Neighbouring lines of a file put together: left of them are the last, the mean of a figure and its extremes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from thinwire.report.steps import Block

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
