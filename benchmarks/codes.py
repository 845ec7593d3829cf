"""Codes for values on the wire: their size, their speed and their errors on real gradients.

Gradients and differences of parameters over 24 steps come from short runs on the bundled data. "Once" is the relative
error of one gradient, ‖decoded − true‖ / ‖true‖; "100 rounds" is that of the sum of 100 gradients that were sent one
after the other with error feedback. Times are the shortest of several: processor time of one thread on a CPU, where
encoding and decoding must take less than sending the bytes they save at 1 Gbit/s, and the clock's on a GPU. There "of a
copy" is the time that a copy needs for as many bytes as are read and written, over the time taken: 0.7 must be reached.

On a GPU a second table compares one pass that adds and encodes with several: of values that are added to what an
earlier code left out, and of payloads of groups that the owner of a part adds up, with values of its own. The same
bytes and errors must come out.
"""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from measure import arguments, load, machine, time_of, waiting_for
from torch import Tensor

from thinwire.codecs.quantize import Own, Quantizer, Rows, quantizer
from thinwire.recipes import named
from thinwire.train.task import Recipe

BLOCK = 256
TIMED = {"cpu": 25_000_192, "cuda": 500_000_000 // BLOCK * BLOCK}
"""Values, in whole blocks: 100 MB, and on a GPU so many that starting a kernel takes no time beside them."""
TENSORS = 200
"""Into which values are cut, as those of a large model are."""
BUCKET = 1 << 20
"""Values that are exchanged at once where gradients are."""
GROUPS = (2, 4, 8)
BETWEEN = 24
"""Steps between two states whose difference is taken."""

Approximate = Callable[[Tensor], Tensor]
"""Decoded values of blocks (n, 256)."""


class Recorded(NamedTuple):
    """What a run would send: one row per step, padded to whole blocks."""

    gradients: Tensor
    differences: Tensor


def main() -> None:
    given = arguments(__doc__)
    torch.set_num_threads(1)
    before = load()
    recorded = {
        name: on(given.device, record(named(name), start, 2 * BETWEEN if given.quick else 100))
        for name, start in (("digits", 50), ("shakespeare", 40))[: 1 if given.quick else 2]
    }
    passes = one_pass(given.device, given.quick) if given.device == "cuda" else []
    found = [*measured_codes(given.device, recorded, given.quick), *passes, *compared_levels(recorded)]
    for i, row in enumerate(found):
        if i == 0 or found[i - 1].keys() != row.keys():
            print("\n| " + " | ".join(row) + " |\n" + "| --- " * len(row) + "|")
        print("| " + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()) + " |")
    where = machine(given.device) | {"load_before": before, "load_after": load(), "quick": given.quick}
    print("\n" + ", ".join(f"{key}: {value}" for key, value in where.items()))
    if given.json:
        kept = {"command": " ".join(sys.argv), "machine": where, "rows": found}
        given.json.write_text(json.dumps(kept, indent=1) + "\n")


def record(recipe: Recipe, start: int, steps: int) -> Recorded:
    """Train by the recipe's optimizer on a CPU, and keep `steps` gradients from step `start` on."""
    torch.manual_seed(0)
    source = recipe.source(None)
    model = recipe.model(source)
    optimizer = recipe.optimizer(model.parameters())
    chosen, gradients, states = np.random.default_rng(0), [], []
    for step in range(start + steps):
        x, y = source.train(chosen.integers(0, source.train_size, recipe.batch))
        optimizer.zero_grad()
        recipe.task.loss(model(x), y).backward()
        if step >= start:
            gradients.append(flat([p.grad for p in model.parameters() if p.grad is not None]))
            if (step - start) % BETWEEN == 0:
                states.append(flat([p.detach() for p in model.parameters()]))
        optimizer.step()
    return Recorded(torch.stack(gradients), torch.stack(states).diff(dim=0))


def flat(tensors: list[Tensor]) -> Tensor:
    """One vector of whole blocks."""
    vector = torch.cat([t.flatten() for t in tensors])
    return torch.nn.functional.pad(vector, (0, -len(vector) % BLOCK))


def on(device: str, recorded: Recorded) -> Recorded:
    return Recorded(*(t.to(device) for t in recorded))


def measured_codes(device: str, recorded: dict[str, Recorded], quick: bool) -> Iterator[dict[str, Any]]:
    """One row per code."""
    count = 1 << 20 if quick else TIMED[device]
    copy = seconds_of_a_copy(count, device)
    codes = {"fp32": Plain(torch.float32), "bf16": Plain(torch.bfloat16)}
    for name, code in {**codes, **{name: quantizer(name) for name in ("int8", "int4", "int2", "bit")}}.items():
        rows = [Rows(count // BLOCK, BLOCK)]
        encode, decode = seconds(code, rows, device, 3 if quick else 7)
        per_value = code.size(rows) / count
        saved = (4 - per_value) * count * 8 / 1e9
        speed: dict[str, Any] = {"code": name, "bytes per value": per_value}
        if device == "cpu":
            verdict = "" if name == "fp32" else "met" if encode + decode < saved else "missed"
            speed |= {"encode s": encode, "decode s": decode, "saved s": saved, "target": verdict}
        else:
            shares = [
                copy * touched / (8 * seconds)
                for touched, seconds in ((8 + per_value, encode), (4 + per_value, decode))
            ]
            speed |= {f"{what} ms": 1e3 * s * 1e7 / count for what, s in (("encode", encode), ("decode", decode))}
            speed |= {"encode, of a copy": shares[0], "decode, of a copy": shares[1]}
            speed |= {"target": "" if isinstance(code, Plain) else "met" if min(shares) >= 0.7 else "missed"}
        yield speed | errors(lambda x, code=code: through(code, x), recorded)


def one_pass(device: str, quick: bool) -> Iterator[dict[str, Any]]:
    """One row per code and what is added."""
    count = 1 << 20 if quick else TIMED[device]
    copied = seconds_of_a_copy(count, device) / (8 * count)
    even = [count // TENSORS // 4 * 4] * (TENSORS - 1)
    odd = [n + i % 3 for i, n in enumerate(even)]
    for name in ("int8", "int4", "int2", "bit"):
        code = quantizer(name)
        for what, make in {
            "one tensor": partial(Added, code, [count], device),
            "one tensor of bf16": partial(Added, code, [count], device, torch.bfloat16),
            f"{TENSORS} tensors": partial(Added, code, [*even, count - sum(even)], device),
            f"{TENSORS} tensors of odd sizes": partial(Added, code, [*odd, count - sum(odd)], device),
            "a bucket of one tensor": partial(Added, code, [BUCKET], device),
            "a bucket of 16 tensors": partial(Added, code, [BUCKET // 16] * 16, device),
            **{
                f"payloads of {n} groups": partial(Summed, code, count // 2 // BLOCK * BLOCK, n, device)
                for n in (GROUPS if name == "int8" else ())  # others take several passes
            },
        }.items():
            yield {"code": name, "added": what} | compared(make(), copied, device, 3 if quick else 9)


class Way(ABC):
    """Something to add and to encode, in one pass or in two."""

    code: Quantizer
    left: Tensor
    sent: Tensor
    bytes: int
    """Read and written in one pass."""

    def begin(self) -> None:  # noqa: B027
        """Make what the last run has changed as it was."""

    @abstractmethod
    def run(self, code: Any) -> None:
        """By the code itself in one pass, by its base class in several."""


class Added(Way):
    """Values that are added to what an earlier code left out."""

    def __init__(self, code: Quantizer, sizes: list[int], device: str, dtype: torch.dtype = torch.float32) -> None:
        self.code, self.rows = code, [Rows(-(-sum(sizes) // BLOCK), BLOCK)]
        size, sent = self.rows[0].elements, code.size(self.rows)
        self.before = torch.randn(size, device=device)
        self.values = [torch.randn(n, device=device).to(dtype) for n in sizes]
        self.left, self.sent = torch.empty(size, device=device), torch.zeros(sent, dtype=torch.uint8, device=device)
        self.bytes = 8 * size + dtype.itemsize * sum(sizes) + sent

    def run(self, code: Any) -> None:
        code.add_and_encode(self.before, self.values, self.left, self.rows, self.sent)


class Summed(Way):
    """Payloads that the owner of a part adds up, with values of its own."""

    def __init__(self, code: Quantizer, size: int, groups: int, device: str) -> None:
        self.code, self.rows = code, [Rows(size // BLOCK, BLOCK)]
        sent = code.size(self.rows)
        self.before, self.left = torch.randn(size, device=device), torch.empty(size, device=device)
        self.received = torch.zeros(groups, sent + 4, dtype=torch.uint8, device=device)  # as it is sent, with a flag
        for payload in self.received:
            code.encode(torch.randn(size, device=device), self.rows, payload)
        self.own, self.sent = Own(1, torch.empty(size, device=device)), torch.zeros_like(self.received[0])
        self.weights = [1 / groups] * groups
        self.bytes = 16 * size + groups * sent

    def begin(self) -> None:
        torch.mul(self.before, -0.75, out=self.own.values)

    def run(self, code: Any) -> None:
        code.sum_and_encode(self.before, self.received, self.weights, self.own, self.left, self.rows, self.sent)


class Separate:
    """A code that adds in passes of their own."""

    def __init__(self, code: Quantizer) -> None:
        self.add_and_encode = partial(Quantizer.add_and_encode, code)
        self.sum_and_encode = partial(Quantizer.sum_and_encode, code)


def compared(way: Way, copied: float, device: str, times: int) -> dict[str, Any]:
    """The shortest times of one pass and of several; `copied` is what a copy takes for a byte."""
    results, found, wait = [], {}, waiting_for(device)
    for name, code in (("several passes", Separate(way.code)), ("one pass", way.code)):

        def run(code: Any = code) -> None:
            with no_waiting(device):
                way.run(code)

        spans = []
        for _ in range(times):
            way.begin()
            way.left.fill_(torch.nan)
            spans.append(time_of(run, wait).clock)
        results.append((way.left.clone(), way.sent.clone()))
        found[f"{name}, ms"] = 1e3 * min(spans)
    same = all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    of_a_copy = 1e3 * copied * way.bytes / found["one pass, ms"]
    # Of a bucket the time is that of starting kernels.
    target = "" if way.bytes < 64 * BUCKET else "met" if of_a_copy >= 0.7 else "missed"
    return found | {"one pass, of a copy": of_a_copy, "the same": "yes" if same else "NO", "target": target}


class Plain(Quantizer):
    """Values in another type, without scales."""

    scales = 0

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def code_width(self, width: int) -> int:
        return width * self.dtype.itemsize

    def encode_block(self, x: Tensor, scales: Tensor, codes: Tensor) -> None:
        x.sub_(codes.view(self.dtype).copy_(x))

    def decode_block(self, codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
        return out.copy_(codes.view(self.dtype))


def seconds(code: Quantizer, rows: list[Rows], device: str, times: int) -> tuple[float, float]:
    """The shortest times of encoding and decoding normal values, neither of which may wait for a GPU."""
    x = torch.randn(sum(run.elements for run in rows), device=device)
    left, out = x.clone(), torch.empty_like(x)
    payload = torch.zeros(code.size(rows), dtype=torch.uint8, device=device)
    encodes, decodes, wait = [], [], waiting_for(device)

    def encode() -> None:
        with no_waiting(device):
            code.encode(left, rows, payload)

    def decode() -> None:
        with no_waiting(device):
            code.decode(payload, rows, out)

    for _ in range(times):
        left.copy_(x)
        encodes.append(time_of(encode, wait))
        decodes.append(time_of(decode, wait))
    assert torch.equal(left, x - out), "the error that is left is not what decoding leaves out"
    field = "clock" if device == "cuda" else "processor"
    return min(getattr(s, field) for s in encodes), min(getattr(s, field) for s in decodes)


def seconds_of_a_copy(count: int, device: str) -> float:
    """Of so many values of fp32, 8 bytes each to read and to write."""
    x, wait = torch.randn(count, device=device), waiting_for(device)
    out = torch.empty_like(x)
    return min(time_of(lambda: out.copy_(x), wait).clock for _ in range(7))


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Raise an error where an operation waits for the GPU."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def through(code: Quantizer, x: Tensor) -> Tensor:
    """Blocks (n, 256) as the receiver sees them."""
    rows = [Rows(*x.shape)]
    payload = torch.zeros(code.size(rows), dtype=torch.uint8, device=x.device)
    code.encode(x.flatten().clone(), rows, payload)
    out = torch.empty_like(x)
    code.decode(payload, rows, out.view(-1))
    return out


def errors(approximate: Approximate, recorded: dict[str, Recorded]) -> dict[str, float]:
    """Relative errors on every run."""
    found = {}
    for name, (gradients, differences) in recorded.items():
        for what, values in (("gradient", gradients[::10]), ("difference", differences)):
            blocks = values.reshape(-1, BLOCK)
            found[f"{name}: {what}, once"] = float((approximate(blocks) - blocks).norm() / blocks.norm())
        found[f"{name}: {len(gradients)} rounds"] = with_feedback(approximate, gradients)
    return found


def with_feedback(approximate: Approximate, gradients: Tensor) -> float:
    """Relative error of the sum of all gradients, sent one after the other."""
    left, sent = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0], dtype=torch.float64)
    for gradient in gradients:
        left = left + gradient
        decoded = approximate(left.view(-1, BLOCK)).view(-1)
        left -= decoded
        sent += decoded
    total = gradients.sum(0, dtype=torch.float64)
    return float((sent - total).norm() / total.norm())


def compared_levels(recorded: dict[str, Recorded]) -> Iterator[dict[str, Any]]:
    """Errors of our levels and of others at 4 and 2 bits."""
    ways: dict[str, Approximate] = {
        "int4: ±k (k + 4), 77 at the largest value": lambda x: through(quantizer("int4"), x),
        "int4: uniform, 15 levels, 7 at the largest value": lambda x: uniform15(x, None),
        "int4: uniform, 15 levels, clipped at 2.7 rms": lambda x: uniform15(x, 2.7),
        "int4: uniform, 15 levels, clipped at 3.5 rms": lambda x: uniform15(x, 3.5),
        "int2: bin means": lambda x: through(quantizer("int2"), x),
        "int2: uniform, 1.5 steps at the largest value": lambda x: uniform4(x, None),
        "int2: uniform, step of 0.9957 rms, the best for a Gaussian": lambda x: uniform4(x, 0.9957),
    }
    for name, approximate in ways.items():
        yield {"levels": name} | errors(approximate, recorded)


def uniform15(x: Tensor, clip: float | None) -> Tensor:
    """−7 … 7 times a step."""
    largest = x.abs().amax(1, keepdim=True)
    if clip is not None:
        largest = torch.minimum(largest, clip * x.square().mean(1, keepdim=True).sqrt())
    step = (largest / 7).clamp(min=1e-35)
    return (x / step).round().clamp(-7, 7) * step


def uniform4(x: Tensor, of_rms: float | None) -> Tensor:
    """±0.5 and ±1.5 times a step."""
    if of_rms is None:
        step = x.abs().amax(1, keepdim=True) / 1.5
    else:
        step = of_rms * x.square().mean(1, keepdim=True).sqrt()
    step = step.clamp(min=1e-35)
    return ((x / step).floor() + 0.5).clamp(-1.5, 1.5) * step


if __name__ == "__main__":
    main()
