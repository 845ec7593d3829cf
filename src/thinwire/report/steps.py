"""Records of steps, thousands at a time: a long run has a hundred thousand, and parsing each takes too long."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

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
