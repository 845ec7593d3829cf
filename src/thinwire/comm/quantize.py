"""Numbers in fewer bits: rows of values with a scale or two each, as bytes.

What a coder cannot say it leaves behind in the values it was given, so that it can be said the next time.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# On a CPU several passes over a piece that stays in the cache beat one pass each over everything.
_PIECE = 1 << 17


class Rows(NamedTuple):
    """Rows of one width that follow one another in a flat vector; each gets scales of its own."""

    number: int
    width: int

    @property
    def elements(self) -> int:
        return self.number * self.width


def elements(rows: Sequence[Rows]) -> int:
    """Values in all of them."""
    return sum(run.elements for run in rows)


def cut(rows: Sequence[Rows], parts: int) -> list[list[Rows]]:
    """Split rows into parts of nearly as many values each, in order, never inside a row."""
    found: list[list[Rows]] = [[] for _ in range(parts)]
    total, seen = elements(rows), 0
    for number, width in rows:
        start = 0
        while start < number:
            # The part that the middle of this row falls into, and the rows from here whose middles do too.
            part = min(parts - 1, (2 * seen + width) * parts // (2 * total))
            fitting = math.ceil((2 * (part + 1) * total / parts - 2 * seen - width) / (2 * width))
            taken = number - start if part == parts - 1 else min(number - start, max(1, fitting))
            found[part].append(Rows(taken, width))
            start += taken
            seen += taken * width
    return found


class Quantizer(ABC):
    """Writes rows of values as bytes: all scales first, then all codes."""

    scales: int
    """Scales a row."""

    def size(self, rows: Sequence[Rows]) -> int:
        """Bytes that rows take."""
        return sum(run.number * (4 * self.scales + self.code_width(run.width)) for run in rows)

    def encode(self, values: Tensor, rows: Sequence[Rows], out: Tensor) -> None:
        """Write flat `values` to `out`; what is left in them is what the code does not say."""
        if not values.is_meta:
            for block, scales, codes in self._blocks(values, rows, out):
                self.encode_block(block, scales, codes)

    def decode(self, payload: Tensor, rows: Sequence[Rows], values: Tensor, weight: float | None = None) -> None:
        """Write what `payload` says into `values`; with a weight, add that much of it."""
        if values.is_meta:
            return
        for block, scales, codes in self._blocks(values, rows, payload):
            if weight is None:
                self.decode_block(codes, scales, block)
            else:
                block.add_(self.decode_block(codes, scales, torch.empty_like(block)), alpha=weight)

    def _blocks(self, values: Tensor, rows: Sequence[Rows], payload: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views of values, scales and codes, a few rows at a time."""
        count = sum(run.number for run in rows)
        scales = payload[: 4 * self.scales * count].view(torch.float32).view(count, self.scales)
        place, row, code = 0, 0, 4 * self.scales * count
        for run in rows:
            width = self.code_width(run.width)
            step = run.number if values.is_cuda else max(1, _PIECE // run.width)
            for start in range(0, run.number, step):
                n = min(step, run.number - start)
                yield (
                    values[place : place + n * run.width].view(n, run.width),
                    scales[row : row + n],
                    payload[code : code + n * width].view(n, width),
                )
                place, row, code = place + n * run.width, row + n, code + n * width

    @abstractmethod
    def code_width(self, width: int) -> int:
        """Bytes of the codes of a row."""

    @abstractmethod
    def encode_block(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Write scales and codes, leave the error in `x`."""

    @abstractmethod
    def decode_block(self, codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
        """What the codes say."""


class Int8Quantizer(Quantizer):
    """A byte an element: the row's largest value is 127; nothing is off by more than half a scale."""

    scales = 1

    def code_width(self, width: int) -> int:
        """One each."""
        return width

    def encode_block(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Round to the nearest."""
        torch.div(x.abs().amax(1, keepdim=True), 127, out=scales)
        steps = torch.mul(x, torch.where(scales > 1e-35, scales.reciprocal(), 0.0)).round_()
        codes.view(torch.int8).copy_(steps)
        x.addcmul_(steps, scales, value=-1)

    def decode_block(self, codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
        """Codes times scales."""
        return out.copy_(codes.view(torch.int8)).mul_(scales)


# Eight bytes that are 0 or 1, read as one integer, times this: the top byte holds them as bits, the first one lowest.
_GATHER_BITS = 0x0102040810204080


class OneBitQuantizer(Quantizer):
    """A bit an element: the mean of the row's values from zero on, or of those below."""

    scales = 2

    def code_width(self, width: int) -> int:
        """One for eight elements."""
        return -(-width // 8)

    def encode_block(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Signs; the mean of the values below zero, and how far that of the others is from it."""
        signs = torch.ge(x, 0, out=torch.empty_like(x))  # as numbers: comparing to truth values is slow on a CPU
        above = signs.sum(1, keepdim=True)
        high = x.clamp(min=0).sum(1, keepdim=True)
        low = (x.sum(1, keepdim=True) - high).div_((x.shape[1] - above).clamp_(min=1))
        high.div_(above.clamp_(min=1))
        torch.cat([low, high.sub_(low)], 1, out=scales)
        codes.copy_(pack_signs(signs.bool()))
        x.sub_(signs.mul_(scales[:, 1:]).add_(scales[:, :1]))  # in the order decoding has it, so that both round alike

    def decode_block(self, codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
        """One mean or the other."""
        return out.copy_(unpack_signs(codes, out.shape[1])).mul_(scales[:, 1:]).add_(scales[:, :1])


def pack_signs(signs: Tensor) -> Tensor:
    """Rows of truth values, eight to a byte."""
    spare = -signs.shape[1] % 8
    padded = torch.nn.functional.pad(signs, (0, spare)) if spare else signs.contiguous()
    return padded.view(torch.int64).mul(_GATHER_BITS).bitwise_right_shift_(56).bitwise_and_(0xFF).to(torch.uint8)


def unpack_signs(packed: Tensor, width: int) -> Tensor:
    """Rows of zeros and ones again."""
    spread = _spread_table(packed.device).index_select(0, packed.reshape(-1).int())
    return spread.view(torch.uint8).view(len(packed), -1)[:, :width]


_tables: dict[torch.device, Tensor] = {}


def _spread_table(device: torch.device) -> Tensor:
    """For each byte, its bits as eight bytes that are 0 or 1, read as one integer."""
    if device not in _tables:
        byte = torch.arange(256, dtype=torch.int64)
        _tables[device] = sum(((byte >> i) & 1) << (8 * i) for i in range(8)).to(device)  # type: ignore[union-attr]
    return _tables[device]
