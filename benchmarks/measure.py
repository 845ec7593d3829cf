"""Timing by alternating pairs, and how figures are printed and kept."""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Span(NamedTuple):
    """Seconds by the clock, and of the processor, which other work on the machine lengthens less."""

    clock: float
    processor: float


Pair = tuple[Span, Span]

THREADS = {"type": int, "default": 2, "help": "on a busy machine take 1 and read the processor time"}


@dataclass(frozen=True)
class Figure:
    """A measured ratio with its interval, and the target it has to meet."""

    name: str
    ratio: float
    low: float
    high: float
    pairs: int
    target: str
    met: bool
    detail: dict[str, Any]

    def __str__(self) -> str:
        verdict = f"target {self.target}: {'met' if self.met else 'MISSED'}" if self.target else "no target"
        interval = f"[{self.low:.3f}, {self.high:.3f}]"
        told = ", ".join(f"{key} {value}" for key, value in self.detail.items())
        return f"{self.name:<52} {self.ratio:8.3f} {interval:<18} {verdict}  ({told})"


def figure(name: str, ratios: Sequence[float], target: str, **detail: Any) -> Figure:
    """The median of ratios; `target` is such as "<= 1.03" or "> 4"."""
    low, high = median_interval(sorted(ratios))
    ratio = statistics.median(ratios)
    return Figure(name, ratio, low, high, len(ratios), target, meets(ratio, target), detail)


def figure_of_pairs(name: str, pairs: Sequence[Pair], target: str, **detail: Any) -> Figure:
    """The median of first / second by the clock, and by the processor among the details."""
    processor = figure("", [first.processor / second.processor for first, second in pairs], target)
    detail["by processor time"] = f"{processor.ratio:.3f} [{processor.low:.3f}, {processor.high:.3f}]"
    return figure(name, [first.clock / second.clock for first, second in pairs], target, **detail)


def median_clock(spans: Iterable[Span]) -> float:
    """The median by the clock."""
    return statistics.median(span.clock for span in spans)


def meets(value: float, target: str) -> bool:
    """Whether a value meets a target such as "<= 1.03"; one without a target does."""
    if not target:
        return True
    sign, bound = target.split()
    return {"<=": value <= float(bound), ">=": value >= float(bound), ">": value > float(bound)}[sign]


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Two order statistics that hold the median with 95 % or more; all of the range below 6 values."""
    n = len(ordered)
    below, tail = 0, 0.0
    while below < n // 2:
        tail += math.comb(n, below) / 2**n
        if tail > 0.025:
            break
        below += 1
    first = max(0, below - 1)
    return ordered[first], ordered[n - 1 - first]


def alternate(first: Callable[[], Any], second: Callable[[], Any], pairs: int, wait: Callable[[], None]) -> list[Pair]:
    """The time of both, one after the other, who goes first changing from pair to pair."""
    timed = []
    for i in range(pairs):
        if i % 2 == 0:
            timed.append((time_of(first, wait), time_of(second, wait)))
        else:
            later = time_of(second, wait)
            timed.append((time_of(first, wait), later))
    return timed


def time_of(call: Callable[[], Any], wait: Callable[[], None]) -> Span:
    """The time of one call; `wait` returns when everything asked for is done."""
    wait()
    clock, processor = time.perf_counter(), time.process_time()
    call()
    wait()
    return Span(time.perf_counter() - clock, time.process_time() - processor)


def waiting_for(device: str) -> Callable[[], None]:
    """A GPU works behind the caller's back, a CPU does not."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def arguments(about: str, **more: dict[str, Any]) -> argparse.Namespace:
    """The options every benchmark has, and this one's own, by name."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures there")
    parser.add_argument("--quick", action="store_true", help="a few pairs, to see that it runs")
    for name, settings in more.items():
        parser.add_argument(f"--{name}", **settings)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    return given


def report(figures: Iterable[Figure], given: argparse.Namespace) -> None:
    """Print each figure when it is there, and keep all as JSON where asked for."""
    before, found = load(), []
    for each in figures:
        print(each, flush=True)
        found.append(each)
    where = machine(given.device) | {"load_before": before, "load_after": load(), "quick": given.quick}
    print(", ".join(f"{key}: {value}" for key, value in where.items()))
    if given.json:
        kept = {"command": " ".join(sys.argv), "machine": where, "figures": [asdict(f) for f in found]}
        given.json.write_text(json.dumps(kept, indent=1) + "\n")


def machine(device: str) -> dict[str, Any]:
    """What a figure was measured on."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{_cpu_name()}, {os.cpu_count()} cores"
    return {"device": name, "torch": torch.__version__, "threads": torch.get_num_threads()}


def load() -> float:
    """Processes that wanted a core over the last minute."""
    return round(os.getloadavg()[0], 2)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "CPU")
