"""Codes of few bits: against slow oracles, at the edges of fp32, and with error feedback."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from thinwire.base.errors import ConfigError
from thinwire.codecs import quantize
from thinwire.codecs.quantize import (
    OneBitQuantizer,
    Own,
    Quantizer,
    Rows,
    elements,
    pack,
    packed_width,
    quantizer,
    unpack,
)

NAMES = ["int8", "int4", "int2", "bit"]
BITS = {"int8": 8, "int4": 4, "int2": 2, "bit": 1}
LARGEST = torch.finfo(torch.float32).max


def coder(name: str) -> Quantizer:
    return OneBitQuantizer() if name == "onebit" else quantizer(name)


def encoded(code: Quantizer, x: Tensor, rows: list[Rows]) -> tuple[Tensor, Tensor]:
    """The payload, and the error that is left."""
    payload, left = torch.zeros(code.size(rows), dtype=torch.uint8), x.clone()
    code.encode(left, rows, payload)
    return payload, left


def decoded(code: Quantizer, payload: Tensor, rows: list[Rows]) -> Tensor:
    out = torch.full((elements(rows),), torch.nan)
    code.decode(payload, rows, out)
    return out


def heavy_tailed(n: int) -> Tensor:
    """Values of very different sizes, some of them zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, generator=generator) * torch.randn(n, generator=generator).mul(1.5).exp()
    return x * (torch.rand(n, generator=generator) > 0.1)


# Slow oracles: one row at a time, one code per array element, in fp64 where it matters.


def read_payload(name: str, payload: Tensor, rows: list[Rows]) -> np.ndarray:
    """What the bytes mean, by the definition of the format."""
    raw, count = payload.numpy(), sum(run.number for run in rows)
    bits, words = BITS.get(name, 1), 2 if name == "onebit" else 1
    scales = raw[: 4 * words * count].reshape(count, -1)
    place, row, found = 4 * words * count, 0, []
    for run in rows:
        for _ in range(run.number):
            size = -(-run.width * bits // 8)
            number = int.from_bytes(raw[place : place + size].tobytes(), "little")
            codes = np.array([(number >> (bits * i)) % (1 << bits) for i in range(run.width)])
            found.append(meaning(name, codes, scales[row]))
            place, row = place + size, row + 1
    return np.concatenate(found)


def meaning(name: str, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values of one row's codes."""
    if name in ("int8", "int4"):
        half = 1 << (BITS[name] - 1)
        k = np.where(codes >= half, codes - 2 * half, codes)
        level = k if name == "int8" else k * (np.abs(k) + 4)
        return level.astype(np.float32) * scales.view(np.float32)
    if name == "onebit":
        low, gap = scales.view(np.float32)
    else:
        low, high = (scales.view(np.uint16).astype(np.uint32) << 16).view(np.float32)  # bf16 is half of an fp32
        gap = high - low
    value = (codes % 2).astype(np.float32) * gap + low
    return np.where(codes >= 2, -value, value)


def nearest(levels: list[int]) -> Callable[[np.ndarray], np.ndarray]:
    def values(x: np.ndarray) -> np.ndarray:
        grid = np.array(levels) / max(levels) * np.abs(x).max()
        return grid[np.abs(x[:, None] - grid).argmin(1)]

    return values


def mean_of(x: np.ndarray, chosen: np.ndarray) -> float:
    return float(x[chosen].mean()) if chosen.any() else 0.0


def four_means(x: np.ndarray) -> np.ndarray:
    size = np.abs(x)
    outer = size >= 0.75 * (size**2).sum() / size.sum()
    return np.where(x < 0, -1, 1) * np.where(outer, mean_of(size, outer), mean_of(size, ~outer))


def two_means(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, mean_of(x, x >= 0), mean_of(x, x < 0))


ORACLES = {
    "int8": nearest(list(range(-127, 128))),
    "int4": nearest([k * (abs(k) + 4) for k in range(-7, 8)]),
    "int2": four_means,
    "bit": two_means,
    "onebit": two_means,
}
# How far a level may be off: rounding of fp32, or of means to bf16.
TOLERANCE = {"int8": 1e-5, "int4": 1e-5, "int2": 2**-8, "bit": 2**-8, "onebit": 1e-5}


@pytest.mark.parametrize("name", [*NAMES, "onebit"])
def test_values_are_the_oracle_s(name: str) -> None:
    rows = [Rows(40, 256), Rows(3, 37), Rows(1, 1)]
    x, code = heavy_tailed(elements(rows)), coder(name)
    payload, left = encoded(code, x, rows)
    said, place = decoded(code, payload, rows), 0
    assert np.array_equal(read_payload(name, payload, rows), said.numpy())
    for run in rows:
        for _ in range(run.number):
            row = x[place : place + run.width].double().numpy()
            expected = torch.from_numpy(ORACLES[name](row)) if row.any() else torch.zeros(run.width).double()
            size = float(expected.abs().max())
            ours = said[place : place + run.width].double()
            torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE[name] * size)
            place += run.width
    assert torch.equal(left, x - said)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [1, 7, 8, 64, 1001])
def test_packed_codes_unpack_to_the_same(bits: int, width: int) -> None:
    codes = torch.randint(1 << bits, (5, width), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (5, packed_width(width, bits)) and packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, bits, width), codes)


@pytest.mark.parametrize("name", NAMES)
def test_a_block_takes_one_word_beside_its_codes(name: str) -> None:
    assert quantizer(name).size([Rows(10, 256)]) == 10 * (4 + 256 * BITS[name] // 8)


def test_unknown_codes_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'int3', choose from: bit, int2, int4, int8"):
        quantizer("int3")


# The edges of fp32.

one_large = torch.zeros(256)
one_large[3] = -1e20
EDGES = {
    "zeros": torch.zeros(256),
    "negative zeros": -torch.zeros(256),
    "constant": torch.full((256,), 0.3),
    "negative constant": torch.full((256,), -7e-3),
    "denormal": heavy_tailed(256).mul(1e-40),
    "nearly denormal": heavy_tailed(256).mul(1e-36),
    "tiny": heavy_tailed(256).mul(1e-30),
    "scaled": heavy_tailed(256).mul(1e6),
    "huge": heavy_tailed(256).mul(1e30),
    "largest": torch.full((256,), LARGEST),
    "largest of both signs": torch.tensor([LARGEST, -LARGEST] * 128),
    "largest and small": torch.tensor([LARGEST, -1e-30, 0.0, 1.0] * 64),
    "one large": one_large,
    "one value and padding": torch.nn.functional.pad(torch.tensor([-2.5]), (0, 255)),
}


@pytest.mark.parametrize("name", [*NAMES, "onebit"])
@pytest.mark.parametrize("edge", EDGES)
def test_finite_values_stay_finite_and_the_error_is_exact(name: str, edge: str) -> None:
    x, rows, code = EDGES[edge], [Rows(1, 256)], coder(name)
    payload, left = encoded(code, x, rows)
    said = decoded(code, payload, rows)
    assert bool(torch.isfinite(said).all()) and bool(torch.isfinite(left).all())
    assert torch.equal(left, x - said)
    again, _ = encoded(code, x, rows)
    assert torch.equal(again, payload)
    # Error feedback at the edge stays finite too.
    for _ in range(3):
        _, left = encoded(code, left, rows)
        assert bool(torch.isfinite(left).all())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e6, 1e30])
def test_errors_are_in_proportion_to_the_values(name: str, size: float) -> None:
    rows = [Rows(64, 256)]
    x = torch.randn(elements(rows), generator=torch.Generator().manual_seed(0))
    _, left = encoded(quantizer(name), x * size, rows)
    bound = {"int8": 0.01, "int4": 0.115, "int2": 0.35, "bit": 0.61}[name]  # Lloyd-Max: 0.097, 0.343, 0.603
    assert float((left / size).norm() / x.norm()) < bound


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, 0.3, -7e-3, 1e30])
def test_constant_rows_are_exact_to_the_scale_s_precision(name: str, value: float) -> None:
    _, left = encoded(quantizer(name), torch.full((512,), value), [Rows(2, 256)])
    assert float(left.abs().max()) <= abs(value) * 2**-8


# How it is used.


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_adds_that_much(name: str) -> None:
    rows, code = [Rows(20, 256)], quantizer(name)
    payload, _ = encoded(code, heavy_tailed(elements(rows)), rows)
    start = torch.randn(elements(rows))
    total = start.clone()
    code.decode(payload, rows, total, 0.25)
    torch.testing.assert_close(total, start + 0.25 * decoded(code, payload, rows))


@pytest.mark.parametrize("name", [*NAMES, "onebit"])
def test_pieces_do_not_change_what_a_payload_means(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, code = [Rows(33, 256), Rows(5, 40)], coder(name)
    x = heavy_tailed(elements(rows))
    payload, left = encoded(code, x, rows)
    said = decoded(code, payload, rows)
    monkeypatch.setattr(quantize, "_CPU_PIECE", 1000)
    assert torch.equal(decoded(code, payload, rows), said)
    _, left_by_pieces = encoded(code, x, rows)
    torch.testing.assert_close(left_by_pieces, left, rtol=0, atol=2**-8 * float(x.abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_error_feedback_says_everything_in_the_end(name: str) -> None:
    """The sum of what was decoded is off by the last error alone, and that does not grow."""
    rows, code = [Rows(16, 256)], quantizer(name)
    total, said, left = (torch.zeros(elements(rows)) for _ in range(3))
    errors = []
    for step in range(200):
        values = torch.randn(elements(rows), generator=torch.Generator().manual_seed(step))
        total += values
        payload, left = encoded(code, left + values, rows)
        said += decoded(code, payload, rows)
        errors.append(float(left.norm()))
    torch.testing.assert_close(said + left, total, rtol=0, atol=1e-4 * float(total.abs().max()))
    assert max(errors[100:]) < 1.1 * max(errors[50:100])


@pytest.mark.parametrize("name", [*NAMES, "onebit"])
def test_tensors_are_added_before_they_are_encoded_and_what_fills_the_last_row_is_zero(name: str) -> None:
    rows, code, sizes = [Rows(4, 256)], coder(name), [300, 1, 211, 500]
    before, values = heavy_tailed(1024).flip(0), heavy_tailed(sum(sizes))
    left, sent = torch.full((1024,), torch.nan), torch.zeros(code.size(rows), dtype=torch.uint8)
    code.add_and_encode(before, values.split(sizes), left, rows, sent)
    payload, expected = encoded(code, torch.cat([before[: len(values)] + values, torch.zeros(12)]), rows)
    assert torch.equal(sent, payload) and torch.equal(left, expected)


@pytest.mark.parametrize("name", [*NAMES, "onebit"])
def test_payloads_are_added_up_with_values_of_one_s_own_which_are_then_gone(name: str) -> None:
    rows, code = [Rows(4, 256)], coder(name)
    before, own = heavy_tailed(1024).flip(0), heavy_tailed(1024).roll(9)
    payload, _ = encoded(code, heavy_tailed(1024), rows)
    left, sent, mine = torch.full((1024,), torch.nan), torch.zeros_like(payload), own.clone()
    code.sum_and_encode(before, torch.stack([payload, payload]), [0.25, 0.75], Own(1, mine), left, rows, sent)
    total = before.add(decoded(code, payload, rows), alpha=0.25).add_(own, alpha=0.75)
    expected, error = encoded(code, total, rows)
    assert torch.equal(sent, expected) and torch.equal(left, error) and not mine.any()


@pytest.mark.parametrize("name", NAMES)
def test_shapes_without_values_are_accepted(name: str) -> None:
    rows, code = [Rows(3, 256)], quantizer(name)
    x = torch.empty(elements(rows), device="meta")
    payload = torch.empty(code.size(rows), dtype=torch.uint8, device="meta")
    code.encode(x, rows, payload)
    code.decode(payload, rows, x)
