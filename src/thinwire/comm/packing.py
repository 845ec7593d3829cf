"""Small codes packed into bytes: eight of one bit, four of two bits or two of four bits, the first one lowest.

Both directions treat a byte's codes as one integer, so that a few operations on integers handle all of them at once.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

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
