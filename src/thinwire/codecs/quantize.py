"""Values in few bits: rows, or blocks of 256, with a scale or two each, as bytes.

Encoding leaves its error in the values it was given, ready to be added to the next ones (error feedback). No finite
input gives anything that is not finite; rows below 1e-33 or so are written as zeros, and all of them is error.

Small codes are packed into bytes: eight of one bit, four of two bits or two of four bits, the first one lowest. Both
directions treat a byte's codes as one integer, so that a few operations on integers handle all of them at once.
"""

import functools
import importlib.util
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.base.errors import unknown

log = logging.getLogger("thinwire")

# On a CPU several passes over a piece that stays in the cache beat one pass each over everything; on other devices
# large pieces bound the memory of intermediate results.
_CPU_PIECE = 1 << 18
_DEVICE_PIECE = 1 << 24
_ALL = 1 << 62

BLOCK = 256
"""Values that share a scale, where a code cuts what it is given into blocks."""

_SMALLEST = 1e-35
_LARGEST = 3.4e38  # just below the largest fp32


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


def longest(rows: Sequence[Rows], parts: int) -> list[list[Rows]]:
    """Of the parts that rows are cut into, some with the longest among them."""
    if len(rows) == 1:
        return [[Rows(-(-rows[0].number // parts), rows[0].width)]]
    return cut(rows, parts)


class Own(NamedTuple):
    """What a worker adds to a sum itself: instead of which of the payloads that were received, and the values."""

    place: int
    values: Tensor


def add(before: Tensor, values: Sequence[Tensor], out: Tensor) -> None:
    """Add flat tensors that lie one after the other to `before`; what they do not fill of `out` becomes zero."""
    place = 0
    for each in values:
        end = place + len(each)
        torch.add(before[place:end], each, out=out[place:end])
        place = end
    out[place:] = 0.0


class Quantizer(ABC):
    """Writes rows of values as bytes: all scales first, then all codes."""

    scales: int
    """32-bit words of scales per row."""

    def size(self, rows: Sequence[Rows]) -> int:
        """Bytes that rows take."""
        return sum(run.number * (4 * self.scales + self.code_width(run.width)) for run in rows)

    def encode(self, values: Tensor, rows: Sequence[Rows], out: Tensor) -> None:
        """Write the code of flat `values` to `out`, and leave exactly values − decoded in `values`."""
        for block, scales, codes in self._blocks(values, rows, out):
            self.encode_block(block, scales, codes)

    def decode(self, payload: Tensor, rows: Sequence[Rows], values: Tensor, weight: float | None = None) -> None:
        """Write the decoded payload to `values`; with a weight, add it times the weight instead."""
        for block, scales, codes in self._blocks(values, rows, payload):
            if weight is None:
                self.decode_block(codes, scales, block)
            else:
                self.add_block(codes, scales, block, weight)

    def add_and_encode(
        self, before: Tensor, values: Sequence[Tensor], left: Tensor, rows: Sequence[Rows], out: Tensor
    ) -> None:
        """Write the code of `before` plus the values (see `add`) to `out`, and what it leaves out to `left`."""
        add(before, values, left)
        self.encode(left, rows, out)

    def sum_and_encode(
        self,
        before: Tensor,
        received: Tensor,
        weights: Sequence[float],
        own: Own | None,
        left: Tensor,
        rows: Sequence[Rows],
        out: Tensor,
    ) -> None:
        """Write the code of `before` plus weighted payloads (n, bytes) to `out`, and what it leaves out to `left`.

        The worker's own values, which become zero, are added instead of one of the payloads.
        """
        left.copy_(before)
        for i, (payload, weight) in enumerate(zip(received, weights, strict=True)):
            if own is not None and i == own.place:
                left.add_(own.values, alpha=weight)
                own.values.zero_()
            else:
                self.decode(payload, rows, left, weight)
        self.encode(left, rows, out)

    def _blocks(self, values: Tensor, rows: Sequence[Rows], payload: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views of values, scales and codes, some rows at a time."""
        count = sum(run.number for run in rows)
        scales = payload[: 4 * self.scales * count].view(torch.float32).view(count, self.scales)
        place, row, code = 0, 0, 4 * self.scales * count
        for run in rows:
            width = self.code_width(run.width)
            step = max(1, self._piece(values.device, run.width) // run.width)
            for start in range(0, run.number, step):
                n = min(step, run.number - start)
                yield (
                    values[place : place + n * run.width].view(n, run.width),
                    scales[row : row + n],
                    payload[code : code + n * width].view(n, width),
                )
                place, row, code = place + n * run.width, row + n, code + n * width

    def _piece(self, device: torch.device, width: int) -> int:
        """Values to handle at a time."""
        return _CPU_PIECE if device.type == "cpu" else _DEVICE_PIECE

    @abstractmethod
    def code_width(self, width: int) -> int:
        """Bytes that the codes of one row take."""

    @abstractmethod
    def encode_block(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Write the scales (n, words) and codes (n, bytes) of x (n, width), and leave the error in x."""

    @abstractmethod
    def decode_block(self, codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
        """Write the decoded values to `out` (n, width) and return it."""

    def add_block(self, codes: Tensor, scales: Tensor, out: Tensor, weight: float) -> None:
        """Add the decoded values times the weight to `out` (n, width)."""
        out.add_(self.decode_block(codes, scales, torch.empty_like(out)), alpha=weight)


class PackedQuantizer(Quantizer):
    """A code of the same few bits for every value. The error is computed as decoding does it, so both round alike.

    On a GPU blocks of 256 have kernels (`kernels`), where torch came with Triton.
    """

    bits: int
    """Bits per value: 1, 2, 4 or 8."""

    def code_width(self, width: int) -> int:
        """Packed without gaps."""
        return packed_width(width, self.bits)

    def encode_block(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Choose, pack and subtract."""
        if kernels := self._kernels(x.device, x.shape[1]):
            return kernels.encode(x, scales, codes, self.bits)
        code = self.choose(x, scales)
        codes.copy_(pack(code, self.bits))
        x.sub_(self.values(code, scales, torch.empty_like(x)))

    def add_and_encode(
        self, before: Tensor, values: Sequence[Tensor], left: Tensor, rows: Sequence[Rows], out: Tensor
    ) -> None:
        """The same."""
        kernels = self._kernels_of(left.device, rows)
        if kernels and kernels.adds(before, values):
            for block, scales, codes in self._blocks(left, rows, out):
                kernels.add_and_encode(before, values, block, scales, codes, self.bits)
        else:
            super().add_and_encode(before, values, left, rows, out)

    def sum_and_encode(
        self,
        before: Tensor,
        received: Tensor,
        weights: Sequence[float],
        own: Own | None,
        left: Tensor,
        rows: Sequence[Rows],
        out: Tensor,
    ) -> None:
        """The same."""
        kernels = self._kernels_of(left.device, rows)
        # Codes of less than a byte are unpacked and added up faster one payload after the other.
        if kernels and self.bits == 8 and len(set(weights)) == 1:
            for block, scales, codes in self._blocks(left, rows, out):
                kernels.sum_and_encode(before, received, weights[0], own, block, scales, codes, self.bits)
        else:
            super().sum_and_encode(before, received, weights, own, left, rows, out)

    def decode_block(self, codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
        """Unpack and look up."""
        if kernels := self._kernels(out.device, out.shape[1]):
            kernels.decode(codes, scales, out, self.bits, None)
            return out
        return self.values(unpack(codes, self.bits, out.shape[1]), scales, out)

    def add_block(self, codes: Tensor, scales: Tensor, out: Tensor, weight: float) -> None:
        """The same, added up."""
        if kernels := self._kernels(out.device, out.shape[1]):
            kernels.decode(codes, scales, out, self.bits, weight)
        else:
            super().add_block(codes, scales, out, weight)

    def _kernels(self, device: torch.device, width: int) -> Any:
        return _with_triton() if device.type == "cuda" and self.scales == 1 and width == BLOCK else None

    def _kernels_of(self, device: torch.device, rows: Sequence[Rows]) -> Any:
        """Those that take all rows at once."""
        return self._kernels(device, rows[0].width) if len(rows) == 1 else None

    def _piece(self, device: torch.device, width: int) -> int:
        """All at once: a kernel has no intermediate results."""
        return _ALL if self._kernels(device, width) else super()._piece(device, width)

    @abstractmethod
    def choose(self, x: Tensor, scales: Tensor) -> Tensor:
        """Write the scales (n, words) of x (n, width), and return a code for each value (n, width), one per byte."""

    @abstractmethod
    def values(self, code: Tensor, scales: Tensor, out: Tensor) -> Tensor:
        """Write the values of codes (n, width) to `out` and return it; codes below 8 bits may be overwritten."""


class Int8Quantizer(PackedQuantizer):
    """Uniform levels −127 … 127, where 127 is the row's largest magnitude; errors are at most half a step."""

    scales = 1
    bits = 8

    def choose(self, x: Tensor, scales: Tensor) -> Tensor:
        """The nearest level."""
        torch.div(x.abs().amax(1, keepdim=True), 127, out=scales).clamp_(max=_LARGEST / 127)
        return to_bytes(torch.mul(x, _inverse(scales)).round_())

    def values(self, code: Tensor, scales: Tensor, out: Tensor) -> Tensor:
        """Levels times scales."""
        return out.copy_(code.view(torch.int8)).mul_(scales)


class Int4Quantizer(PackedQuantizer):
    """15 levels, denser near zero: ±k (k + 4) for k = 0 … 7, where 77 is the row's largest magnitude.

    Gradients have many small and few large values: on recorded ones these levels have about three quarters of the
    squared error of the best uniform levels, clipped ones included. A code is ±k in two's complement.
    """

    scales = 1
    bits = 4

    def choose(self, x: Tensor, scales: Tensor) -> Tensor:
        """The nearest level."""
        size = x.abs()
        torch.div(size.amax(1, keepdim=True), 77, out=scales).clamp_(max=_LARGEST / 77)
        # Levels k and k + 1 are equally near at k² + 5k + 2.5 = (k + 2.5)² − 3.75.
        k = size.mul_(_inverse(scales)).add_(3.75).sqrt_().sub_(1.5).floor_()
        return to_bytes(k.copysign_(x)).bitwise_and_(15)

    def values(self, code: Tensor, scales: Tensor, out: Tensor) -> Tensor:
        """Levels times scales."""
        k = code.bitwise_left_shift_(4).view(torch.int8).bitwise_right_shift_(4)  # extends the sign
        return out.copy_(k.abs().add_(4).mul_(k)).mul_(scales)


class Int2Quantizer(PackedQuantizer):
    """Four levels per row, ±inner and ±outer: the mean magnitudes below and above a threshold.

    The threshold is 0.75 · mean(x²) / mean(|x|), which zeros do not move. The best factor (Lloyd-Max) is 0.78 for a
    Gaussian and 0.80 for a Laplace distribution, 0.65 to 0.8 for recorded gradients, where the error hardly depends
    on it. A code is 1 for outer plus 2 for negative.
    """

    scales = 1
    bits = 2

    def choose(self, x: Tensor, scales: Tensor) -> Tensor:
        """By threshold and sign."""
        size = x.abs()
        largest = size.amax(1, keepdim=True)
        size.mul_(_inverse(largest))  # so that squares stay in range
        total = size.sum(1, keepdim=True)  # at least 1, except in rows of zeros
        squares = torch.linalg.vector_norm(size, dim=1, keepdim=True).square_()
        outer = torch.ge(size, squares.mul_(0.75).div_(total.clamp(min=1)), out=torch.empty_like(x))
        count = outer.sum(1, keepdim=True)
        above = size.mul_(outer).sum(1, keepdim=True)
        low = total.sub_(above).clamp_(min=0).div_((x.shape[1] - count).clamp_(min=1))
        _write_pair(scales, low.mul_(largest), above.div_(count.clamp_(min=1)).mul_(largest))
        return to_bytes(outer.add_(torch.lt(x, 0, out=size), alpha=2))

    def values(self, code: Tensor, scales: Tensor, out: Tensor) -> Tensor:
        """One of the four levels."""
        low, gap = _read_pair(scales)
        sign = code.bitwise_and(2).view(torch.int8).neg_().add_(1).to(out.dtype)
        return out.copy_(code.bitwise_and_(1)).mul_(gap).add_(low).mul_(sign)


class OneBitQuantizer(PackedQuantizer):
    """The mean of the row's values from zero on, or the mean of those below; in fp32, for rows of any width."""

    scales = 2
    bits = 1

    def choose(self, x: Tensor, scales: Tensor) -> Tensor:
        """1 from zero on."""
        signs = torch.ge(x, 0, out=torch.empty_like(x))  # as numbers: comparing to truth values is slow on a CPU
        above = signs.sum(1, keepdim=True)
        high = x.clamp(min=0).sum(1, keepdim=True)
        low = (x.sum(1, keepdim=True) - high).div_((x.shape[1] - above).clamp_(min=1))
        self.write_means(scales, low, high.div_(above.clamp_(min=1)))
        return to_bytes(signs)

    def values(self, code: Tensor, scales: Tensor, out: Tensor) -> Tensor:
        """One mean or the other."""
        low, gap = self.read_means(scales)
        return out.copy_(code).mul_(gap).add_(low)

    def write_means(self, scales: Tensor, low: Tensor, high: Tensor) -> None:
        """Store the lower mean and the distance of the upper one from it."""
        low, high = _bounded(low), _bounded(high)
        torch.cat([low, high.sub_(low)], 1, out=scales)

    def read_means(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        """The lower mean and the distance."""
        return scales[:, :1], scales[:, 1:]


class BitQuantizer(OneBitQuantizer):
    """The same with both means in bf16, one word per row: for blocks."""

    scales = 1

    def write_means(self, scales: Tensor, low: Tensor, high: Tensor) -> None:
        """Store both in one word."""
        _write_pair(scales, low, high)

    def read_means(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        """The lower mean and the distance."""
        return _read_pair(scales)


_QUANTIZERS: dict[str, type[Quantizer]] = {
    "int8": Int8Quantizer,
    "int4": Int4Quantizer,
    "int2": Int2Quantizer,
    "bit": BitQuantizer,
}


def quantizer(name: str) -> Quantizer:
    """The code of that name for blocks of 256 values: int8, int4, int2 or bit."""
    if name not in _QUANTIZERS:
        raise unknown("code", name, _QUANTIZERS)
    return _QUANTIZERS[name]()


def _inverse(scales: Tensor) -> Tensor:
    """1 / scales; 0 where that would overflow, so that tiny rows become zeros and stay in the error."""
    return torch.where(scales > _SMALLEST, scales.reciprocal(), 0.0)


def _bounded(means: Tensor) -> Tensor:
    """Finite means whose differences are finite too, even if the sums they come from overflowed."""
    return means.nan_to_num_(nan=0.0).clamp_(-_LARGEST / 4, _LARGEST / 4)


def _write_pair(scales: Tensor, low: Tensor, high: Tensor) -> None:
    """Store two numbers per row as bf16, which has the range of fp32, in one word (n, 1)."""
    scales.view(torch.bfloat16).copy_(torch.cat([_bounded(low), _bounded(high)], 1))


def _read_pair(scales: Tensor) -> tuple[Tensor, Tensor]:
    """The first number, and the distance of the second from it."""
    low, high = scales.view(torch.bfloat16).float().split(1, 1)
    return low, high - low


@functools.cache
def _with_triton() -> Any:
    """The kernels; None where torch came without Triton, or where Triton has no C compiler to start a kernel with."""
    if importlib.util.find_spec("triton") is None:
        return None
    kernels = importlib.import_module("thinwire.codecs.kernels")
    values, scale = torch.zeros(1, BLOCK, device="cuda"), torch.zeros(1, 1, device="cuda")
    try:
        kernels.encode(values, scale, torch.zeros_like(values, dtype=torch.uint8), 8)
    except Exception as error:  # whatever its compiler raises: codes work without
        log.warning("codes take some ten times longer on this GPU, since Triton cannot start a kernel: %s", error)
        return None
    return kernels


_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16}
"""By bits per code: the integer that holds a byte's codes with one code per byte."""


def to_bytes(whole: Tensor) -> Tensor:
    """Whole numbers −128 … 127 as bytes in two's complement; on a CPU this is faster than to unsigned bytes."""
    return whole.to(torch.int8).view(torch.uint8)


def packed_width(width: int, bits: int) -> int:
    """Bytes for `width` codes."""
    return -(-width * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack rows of codes (n, width), one per byte, into (n, packed_width); 8 bits are packed as they are."""
    if bits == 8:
        return codes
    spare = -codes.shape[1] % (8 // bits)
    padded = F.pad(codes, (0, spare)) if spare else codes.contiguous()
    # One multiplication adds up shifted copies such that code i lands at bit `bits * i` of the top byte; bits that
    # belong to no such place stay below the top byte or overflow.
    size = 64 // bits
    gather = sum(1 << (size - 8 - (8 - bits) * i) for i in range(8 // bits))
    words = padded.view(_WORDS[bits]).mul(gather)
    return words.bitwise_right_shift_(size - 8).bitwise_and_(0xFF).to(torch.uint8)


def unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    """Unpack to rows of codes (n, width), one per byte."""
    if bits == 8:
        return packed
    words = packed.to(_WORDS[bits])
    # Move the upper half of the codes to the upper half of the word, then the same within each half, and so on.
    size, kept = 32 // bits, 4
    while kept >= bits:
        mask = sum(((1 << kept) - 1) << place for place in range(0, 64 // bits, size))
        words = words.bitwise_or_(words.bitwise_left_shift(size - kept)).bitwise_and_(mask)
        size, kept = size // 2, kept // 2
    return words.view(torch.uint8)[:, :width]
