"""Records of a run, thinned out to what a screen can show: a long run has a hundred thousand of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.errors import DamagedError, one_line
from thinwire.files import raw_lines_of
from thinwire.report.records import parse_record

MOST = 500
"""Records of a kind that are kept."""
_KIND = re.compile(rb'\{"kind": "(\w{1,40})"')
_END = b"}\n"
_MOST_NAMED = 3


@dataclass(slots=True)
class _Sample:
    """Every n-th line of a kind, and the last; n doubles when there are too many."""

    most: int
    every: int = 1
    next: int = 1
    seen: int = 0
    kept: list[tuple[int, bytes]] = field(default_factory=list)
    last: tuple[int, bytes] = (0, b"")

    def add(self, number: int, line: bytes) -> None:
        self.last = (number, line)
        self.seen += 1
        if self.seen == self.next:
            self.kept.append(self.last)
            if len(self.kept) >= 2 * self.most:
                del self.kept[1::2]
                self.every *= 2
                self.next = self.seen - self.every // 2  # the one just added is among those left out
            self.next += self.every

    def lines(self) -> list[tuple[int, bytes]]:
        every = -(-len(self.kept) // self.most)
        thin = self.kept[::every]
        return thin if thin[-1] == self.last else [*thin, self.last]


@dataclass(frozen=True)
class Thinned:
    """What was read of a `records.jsonl`."""

    records: list[dict[str, Any]]
    """Those that are kept, in order."""
    counts: dict[str, int]
    """How many there are of each kind."""
    problems: list[str]
    """What could not be read, in words."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The records of a kind."""
        return [record for record in self.records if record["kind"] == kind]


def read_thinned(path: Path, most: int = MOST) -> Thinned:
    """At most about `most` records of each kind, evenly spaced, the first and the last among them.

    Only these are parsed; of the others it is checked that they begin and end as records do.
    """
    samples: dict[bytes, _Sample] = {}
    broken: list[int] = []
    problems: list[str] = []
    try:
        last, sample = b"\n", _Sample(most)
        for number, line in enumerate(raw_lines_of(path, "the run's other figures are shown"), start=1):
            # Nearly all lines are of the kind of the line before: this path is taken millions of times.
            if line.startswith(last) and line.endswith(_END):
                sample.add(number, line)
            elif (kind := _KIND.match(line)) and line.endswith(_END):
                last, sample = kind[0], samples.setdefault(kind[1], _Sample(most))
                sample.add(number, line)
            elif line.endswith(b"\n"):  # a running job may end in half a line
                broken.append(number)
    except (DamagedError, OSError) as error:
        problems.append(one_line(error))
    found: list[tuple[int, dict[str, Any]]] = []
    for number, line in sorted(chosen for sample in samples.values() for chosen in sample.lines()):
        try:
            found.append((number, parse_record(path, number, line.decode("utf-8", errors="replace"))))
        except DamagedError:
            broken.append(number)
    if broken:
        shown = ", ".join(f"{number:,}" for number in sorted(broken)[:_MOST_NAMED])
        more = f" and {len(broken) - _MOST_NAMED:,} more" if len(broken) > _MOST_NAMED else ""
        problems.append(f"`{path}` is damaged in line {shown}{more}; the other lines are shown")
    counts = {kind.decode(): sample.seen for kind, sample in samples.items()}
    return Thinned([record for _, record in found], counts, problems)
