"""The codes' kernels by Triton's interpreter, which needs no GPU: they read and write what torch's versions do.

    TRITON_INTERPRET=1 python tests/test_kernels.py

Triton decides while it is imported whether to interpret, so a process of its own does.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import needs
from test_quantize import BITS, NAMES, heavy_tailed
from thinwire.codecs.quantize import BLOCK, Own, PackedQuantizer, Quantizer, Rows, packed_width, quantizer

pytestmark = pytest.mark.slow

ROWS = 37
"""Not a multiple of what a program takes."""


def main() -> None:
    from thinwire.codecs import kernels

    found = {name: compared(name, kernels) for name in NAMES}
    for name in NAMES:
        code = quantizer(name)
        torchs = [*added(code), *summed(code)]
        with patch.object(PackedQuantizer, "_kernels", lambda self, device, width: kernels):
            pairs = zip(torchs, [*added(code), *summed(code)], strict=True)
        found[name] |= {what: torch.equal(ours, theirs) for (what, theirs), (_, ours) in pairs}
    print(json.dumps(found))


def compared(name: str, kernels: Any) -> dict[str, bool]:
    """Whether the kernels agree with torch's versions, both ways."""
    x, code, bits = values(), quantizer(name), BITS[name]
    left, (scales, packed) = x.clone(), payload(bits)
    code.encode_block(left, scales, packed)
    ours, (own_scales, own_packed) = x.clone(), payload(bits)
    kernels.encode(ours, own_scales, own_packed, bits)
    decoded = code.decode_block(own_packed, own_scales, torch.empty_like(x))
    found, total = torch.full_like(x, torch.nan), torch.ones_like(x)
    kernels.decode(own_packed, own_scales, found, bits, None)
    kernels.decode(own_packed, own_scales, total, bits, 0.25)
    return {
        "codes": torch.equal(own_packed, packed),
        # Where means are sent, their sums may be added up in another order.
        "scales": torch.equal(own_scales, scales)
        or (bits < 4 and bool((words(own_scales) - words(scales)).abs().max() <= 1)),
        "ties go to the even one": torch.equal(own_scales[11:13], scales[11:13]),
        "the error is what decoding leaves out": torch.equal(ours, x - decoded) and bool(ours.isfinite().all()),
        "values": torch.equal(found, decoded),
        "values are added": torch.allclose(total, torch.ones_like(x).add(decoded, alpha=0.25), rtol=1e-6),
    }


def added(code: Quantizer) -> Iterator[tuple[str, Tensor]]:
    """What is left and what is sent of tensors that are added: in one, in several, and in some of any size."""
    total, few = ROWS * BLOCK - 8, [1024, 512, 40]
    odd = [1000, 24, 300, 1, 2, 3]
    several, uneven = [*few, total - sum(few)], [*odd, total - sum(odd) - 1, 1]
    x = moderate(total)
    ways = {
        "one": [x],
        "one that ends anywhere": [x[:-1]],
        "several": x.split(several),
        "several of odd sizes": x.split(uneven),
        "one of bf16": [x.bfloat16()],
        "several of bf16": x.bfloat16().split(several),
        "several of fp16, of odd sizes": x.half().split(uneven),
        "two types": [x[:1000].bfloat16(), x[1000:]],
        "gaps": [x.repeat_interleave(2)[::2][:1000], x[:1].expand(total - 1000)],
    }
    rows, before = [Rows(ROWS, BLOCK)], moderate(ROWS * BLOCK).flip(0)
    for name, values in ways.items():
        left, sent = torch.full_like(before, torch.nan), torch.zeros(code.size(rows) + 4, dtype=torch.uint8)
        code.add_and_encode(before, values, left, rows, sent)
        yield f"{name}: left", left
        yield f"{name}: sent", sent


def summed(code: Quantizer) -> Iterator[tuple[str, Tensor]]:
    """What is left and what is sent of payloads that are added up, without and with values of one's own."""
    rows, size = [Rows(ROWS, BLOCK)], ROWS * BLOCK
    received = torch.zeros(4, code.size(rows) + 4, dtype=torch.uint8)
    for i, payload in enumerate(received):
        code.encode(moderate(size).roll(i * BLOCK), rows, payload)
    for own in (None, 0, 3):
        mine, left, sent = moderate(size).roll(7), torch.full((size,), torch.nan), torch.zeros_like(received[0])
        place = None if own is None else Own(own, mine)
        code.sum_and_encode(moderate(size).flip(0), received, [0.25] * 4, place, left, rows, sent)
        yield f"own {own}, left", left
        yield f"own {own}, sent", sent
        yield f"own {own}, its values", mine


def moderate(n: int) -> Tensor:
    """Neither so small nor so large that a type of two bytes has no such values."""
    x = heavy_tailed(n)
    x[3 * BLOCK : 4 * BLOCK] = 0
    return x


def values() -> Tensor:
    """Blocks of common values, and of those at the edges of fp32."""
    x = heavy_tailed(ROWS * BLOCK).view(ROWS, BLOCK)
    x[3], x[4], x[5], x[6], x[7, 1:], x[8] = 0, 1e-38, -3e38, 3.4e38, 0, -0.0
    x[9], x[10] = x[9].abs(), -x[10].abs()
    x[11], x[12] = 1 + 2**-8, 1 + 3 * 2**-8  # sums are exact, and their means between two numbers of bf16
    return x


def payload(bits: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(ROWS, 1), torch.zeros(ROWS, packed_width(BLOCK, bits), dtype=torch.uint8)


def words(scales: Tensor) -> Tensor:
    """Both means of a block as whole numbers, of which neighbours differ by one."""
    return scales.view(torch.int16).int()


@pytest.fixture(scope="module")
def found() -> Any:
    needs.package("triton")
    words = [sys.executable, "-W", "ignore:overflow encountered:RuntimeWarning", __file__]
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}
    return json.loads(subprocess.run(words, env=interpreted, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("name", NAMES)
def test_they_are_what_torchs_versions_are(name: str, found: Any) -> None:
    assert all(found[name].values()), found[name]


if __name__ == "__main__":
    main()
