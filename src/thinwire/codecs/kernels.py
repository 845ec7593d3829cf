"""The codes of `quantize` for blocks of 256 values on a GPU: one kernel each way, and one pass over memory.

What is added to a residual before it is encoded, and payloads that are added up and encoded, take no pass of their own.

Bytes mean the same as torch's: whoever has no kernels decodes what they wrote to the same bits, and the error that is
left is what decoding leaves out. Where a code needs sums, their last bits, and so the scale's, may be others.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.codecs.quantize import Own

WIDTH = 256
_ENCODES = {8: (4, 4), 4: (4, 4), 2: (2, 1), 1: (2, 1)}
_DECODES = (4, 4)
"""Blocks that a program takes at a time and its warps, by bits: the best of those tried on an H200."""
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Of values that are added."""
_FEWEST = 64
"""Tensors that a kernel for several of them takes at least, so that few kernels are compiled."""

_SMALLEST = tl.constexpr(1e-35)
_LARGEST = tl.constexpr(3.4e38)
_ROUNDS = tl.constexpr(12582912.0)
"""1.5 · 2²³: a small number added to it and taken away again is rounded to the nearest whole one, ties to even."""


def encode(x: Tensor, scales: Tensor, codes: Tensor, bits: int) -> None:
    """Write the scales (n, 1) and codes (n, bytes) of x (n, 256), and leave the error in x."""
    grid, rows, settings = _started(len(x), bits)
    with torch.cuda.device_of(x):  # Triton takes the current one
        _encode[grid](x, scales.view(torch.int32), codes, len(x), bits, rows, WIDTH, **settings)


def adds(before: Tensor, values: Sequence[Tensor]) -> bool:
    """Whether `add_and_encode` takes them: one type for all, on one device, without gaps."""
    kinds = {(each.dtype, each.device) for each in values}
    dense = all(each.is_contiguous() for each in values)
    return dense and len(kinds) == 1 and values[0].dtype in _TYPES and values[0].device == before.device


def add_and_encode(
    before: Tensor, values: Sequence[Tensor], left: Tensor, scales: Tensor, codes: Tensor, bits: int
) -> None:
    """Encode `before` plus flat tensors that lie one after the other (zeros behind them), the error to `left`."""
    grid, rows, settings = _started(len(left), bits)
    count, of = sum(map(len, values)), _TYPES[values[0].dtype]
    # One tensor needs no table.
    where, slots, step = (values[0], 1, 1) if len(values) == 1 else _table(values)
    sizes = slots, step, step * values[0].element_size(), bits, rows, WIDTH
    with torch.cuda.device_of(left):
        _add_and_encode[grid](
            before, where, count, left, scales.view(torch.int32), codes, len(left), of, *sizes, **settings
        )


def sum_and_encode(
    before: Tensor,
    received: Tensor,
    weight: float,
    own: Own | None,
    left: Tensor,
    scales: Tensor,
    codes: Tensor,
    bits: int,
) -> None:
    """Encode `before` plus payloads (n, bytes) times the weight, the error to `left`; `own` becomes zero."""
    grid, rows, settings = _started(len(left), bits)
    place, values = (-1, left) if own is None else own
    sent = received, received.view(torch.int32), *received.shape, weight
    with torch.cuda.device_of(left):
        _sum_and_encode[grid](
            *(before, *sent, place, values, left, scales.view(torch.int32), codes, len(left), bits, rows, WIDTH),
            **settings,
        )


def _started(n: int, bits: int) -> tuple[tuple[int], int, dict[str, Any]]:
    """How kernels that encode n blocks are started: programs, blocks for each, and settings."""
    rows, warps = _ENCODES[bits]
    # A product and a sum stay two operations: the error must be what is left of the rounded product.
    return (triton.cdiv(n, rows),), rows, {"num_warps": warps, "enable_fp_fusion": False}


def _table(values: Sequence[Tensor]) -> tuple[Tensor, int, int]:
    """Where each begins and ends and its address (3, slots); the slots; and what divides all of them, in values."""
    slots = max(_FEWEST, triton.next_power_of_2(len(values)))
    ends = list(accumulate(map(len, values)))
    starts, spare = [0, *ends[:-1]], slots - len(values)
    addresses = [each.data_ptr() for each in values]
    table = [*starts, *[1 << 62] * spare, *ends, *[0] * spare, *addresses, *[0] * spare]
    aligned = not any(n % 4 for n in ends) and not any(a % (4 * values[0].element_size()) for a in addresses)
    device = values[0].device
    pinned = torch.tensor(table, pin_memory=device.type == "cuda")  # so that nobody waits for the copy
    return pinned.to(device, non_blocking=True), slots, 4 if aligned else 1


def decode(codes: Tensor, scales: Tensor, out: Tensor, bits: int, weight: float | None) -> None:
    """Write the values to `out` (n, 256); with a weight, add them times the weight."""
    n, (rows, warps) = len(out), _DECODES
    words, by = scales.view(torch.int32), 1.0 if weight is None else weight
    settings = {"num_warps": warps, "enable_fp_fusion": False}
    with torch.cuda.device_of(out):
        _decode[(triton.cdiv(n, rows),)](codes, words, out, by, n, bits, weight is not None, rows, WIDTH, **settings)


@triton.jit
def _encode(x_at, words_at, codes_at, n, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    _, there, place = _places(n, ROWS, WIDTH)
    x = tl.load(x_at + place, there, 0.0)
    _write(x, place, there, x_at, words_at, codes_at, n, BITS, ROWS, WIDTH)


@triton.jit
def _add_and_encode(
    before_at,
    values_at,
    count,
    left_at,
    words_at,
    codes_at,
    n,
    TYPE: tl.constexpr,
    SLOTS: tl.constexpr,
    STEP: tl.constexpr,
    BYTES: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    _, there, place = _places(n, ROWS, WIDTH)
    inside = place < count
    if SLOTS == 1:
        values = tl.load(values_at + place, inside, 0.0)
    else:
        values = _gathered(values_at, place, TYPE, SLOTS, STEP, BYTES, ROWS, WIDTH)
    x = tl.load(before_at + place, inside, 0.0) + values.to(tl.float32)
    _write(x, place, there, left_at, words_at, codes_at, n, BITS, ROWS, WIDTH)


@triton.jit
def _gathered(
    table,
    place,
    TYPE: tl.constexpr,
    SLOTS: tl.constexpr,
    STEP: tl.constexpr,
    BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The values of several tensors, of which few fall into one program."""
    starts = tl.load(table + tl.arange(0, SLOTS))
    begin = tl.program_id(0).to(tl.int64) * ROWS * WIDTH
    first = tl.sum((starts <= begin).to(tl.int32), 0) - 1
    last = tl.sum((starts < begin + ROWS * WIDTH).to(tl.int32), 0)
    values = tl.zeros((ROWS, WIDTH), TYPE)
    for i in range(first, last):
        start = tl.multiple_of(tl.load(table + i), STEP)
        end = tl.multiple_of(tl.load(table + SLOTS + i), STEP)
        address = tl.load(table + 2 * SLOTS + i).to(tl.pointer_type(TYPE))
        inside = (place >= start) & (place < end)
        at = tl.multiple_of(address, BYTES) + (place - start)
        values = tl.where(inside, tl.load(at, inside, 0.0), values)
    return values


@triton.jit
def _sum_and_encode(
    before_at,
    received_at,
    received_words_at,
    count,
    length,
    weight,
    own,
    own_at,
    left_at,
    words_at,
    codes_at,
    n,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, there, place = _places(n, ROWS, WIDTH)
    _, packed_there, packed_place = _places(n, ROWS, WIDTH * BITS // 8)
    x = tl.load(before_at + place, there, 0.0)
    word_at, packed_at = received_words_at + row, received_at + 4 * n + packed_place
    for i in range(count):
        if i == own:
            x += weight * tl.load(own_at + place, there, 0.0)
            tl.store(own_at + place, tl.zeros((ROWS, WIDTH), tl.float32), there)
        else:
            packed, word = tl.load(packed_at, packed_there, 0), tl.load(word_at, row < n, 0)
            x += weight * _values(_unpacked(packed, BITS, ROWS, WIDTH), word, BITS)
        word_at += length // 4
        packed_at += length
    _write(x, place, there, left_at, words_at, codes_at, n, BITS, ROWS, WIDTH)


@triton.jit
def _write(
    x,
    place,
    there,
    left_at,
    words_at,
    codes_at,
    n,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Choose scales and codes of x (rows, width), and write them and the error."""
    size = tl.abs(x)
    if BITS == 8:
        scale = tl.minimum(tl.div_rn(tl.max(size, 1), 127.0), _LARGEST / 127)
        level = (x * _inverse(scale)[:, None] + _ROUNDS) - _ROUNDS
        code, word = level.to(tl.int32) & 255, scale.to(tl.int32, bitcast=True)
    elif BITS == 4:
        scale = tl.minimum(tl.div_rn(tl.max(size, 1), 77.0), _LARGEST / 77)
        level = tl.floor(tl.sqrt_rn(size * _inverse(scale)[:, None] + 3.75) - 1.5).to(tl.int32)
        code, word = tl.where(x < 0, -level, level) & 15, scale.to(tl.int32, bitcast=True)
    elif BITS == 2:
        largest = tl.max(size, 1)
        size *= _inverse(largest)[:, None]
        total = tl.sum(size, 1)
        outer = size >= (tl.sum(size * size, 1) * 0.75 / tl.maximum(total, 1.0))[:, None]
        count, above = tl.sum(outer.to(tl.float32), 1), tl.sum(tl.where(outer, size, 0.0), 1)
        low = tl.maximum(total - above, 0.0) / tl.maximum(WIDTH - count, 1.0)
        code = outer.to(tl.int32) + 2 * (x < 0).to(tl.int32)
        word = _pair(low * largest, above / tl.maximum(count, 1.0) * largest)
    else:
        high = x >= 0
        count, above = tl.sum(high.to(tl.float32), 1), tl.sum(tl.where(high, x, 0.0), 1)
        below = tl.sum(tl.where(high, 0.0, x), 1)
        code = high.to(tl.int32)
        word = _pair(below / tl.maximum(WIDTH - count, 1.0), above / tl.maximum(count, 1.0))
    row, packed_there, packed_place = _places(n, ROWS, WIDTH * BITS // 8)
    tl.store(words_at + row, word, row < n)
    tl.store(left_at + place, x - _values(code, word, BITS), there)
    tl.store(codes_at + packed_place, _packed(code, BITS, ROWS, WIDTH), packed_there)


@triton.jit
def _decode(
    codes_at,
    words_at,
    out_at,
    weight,
    n,
    BITS: tl.constexpr,
    ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, there, place = _places(n, ROWS, WIDTH * BITS // 8)
    packed = tl.load(codes_at + place, there, 0)
    word = tl.load(words_at + row, row < n, 0)
    values = _values(_unpacked(packed, BITS, ROWS, WIDTH), word, BITS)
    _, there, place = _places(n, ROWS, WIDTH)
    if ADDS:
        values = tl.load(out_at + place, there, 0.0) + weight * values
    tl.store(out_at + place, values, there)


@triton.jit
def _places(n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's rows, and which of their elements are there and where."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    place = row[:, None] * COLUMNS + column[None, :]
    return row, (row < n)[:, None] & (column < COLUMNS)[None, :], place


@triton.jit
def _inverse(scale):
    """0 for what is so small that its inverse might overflow: such blocks become zeros and stay in the error."""
    return tl.where(scale > _SMALLEST, tl.div_rn(1.0, tl.maximum(scale, _SMALLEST)), 0.0)


@triton.jit
def _values(code, word, BITS: tl.constexpr):
    """What codes (rows, width) and their blocks' words mean."""
    if BITS == 8:
        return ((code << 24) >> 24).to(tl.float32) * word.to(tl.float32, bitcast=True)[:, None]
    elif BITS == 4:
        level = (code << 28) >> 28
        return (level * (tl.abs(level) + 4)).to(tl.float32) * word.to(tl.float32, bitcast=True)[:, None]
    else:
        low = (word << 16).to(tl.float32, bitcast=True)
        gap = (word & -65536).to(tl.float32, bitcast=True) - low
        size = (code & 1).to(tl.float32) * gap[:, None] + low[:, None]
        return tl.where(code >= 2, -size, size)


@triton.jit
def _pair(low, high):
    """Two numbers as bf16, rounded to the nearest and ties to even, in one word."""
    return _half(low) | (_half(high) << 16)


@triton.jit
def _half(value):
    value = tl.where(value == value, value, 0.0)  # sums that overflowed
    value = tl.minimum(tl.maximum(value, -_LARGEST / 4), _LARGEST / 4)
    whole = value.to(tl.int32, bitcast=True)
    return ((whole + 32767 + ((whole >> 16) & 1)) >> 16) & 65535


@triton.jit
def _packed(code, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The first code of a byte is its lowest."""
    if BITS == 8:
        return code.to(tl.uint8)
    PER: tl.constexpr = 8 // BITS
    shifts = tl.arange(0, PER) * BITS
    return tl.sum(tl.reshape(code, (ROWS, WIDTH // PER, PER)) << shifts[None, None, :], 2).to(tl.uint8)


@triton.jit
def _unpacked(packed, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    code = packed.to(tl.int32)
    if BITS == 8:
        return code
    PER: tl.constexpr = 8 // BITS
    shifts = tl.arange(0, PER) * BITS
    return tl.reshape((code[:, :, None] >> shifts[None, None, :]) & ((1 << BITS) - 1), (ROWS, WIDTH))
