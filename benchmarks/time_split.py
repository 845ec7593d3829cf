"""What taking the time costs: a step with the time split against one without it.

The same replica, digits' CNN on two gloo workers of one thread each, in alternating blocks; in every other one the
marks are taken out. A small model: the split costs the same few microseconds at any size. They are timed alone, too.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import Figure, Pair, alternate, arguments, figure, figure_of_pairs, median_clock, report, waiting_for
from workers import run_workers

import thinwire
from thinwire.comm.ledger import Ledger
from thinwire.comm.times import Clock, Times
from thinwire.comm.topology import Sent
from thinwire.train.models import DigitNet

TARGET = "<= 1.01"
WORKERS = 2
WAITS = 3  # of a step: gradients, and a broadcast for each kind of buffer


def main() -> None:
    given = arguments(
        __doc__,
        steps={"type": int, "default": 40, "help": "steps a block"},
        pairs={"type": int, "default": 40, "help": "pairs of blocks"},
    )
    report(compare(given), given)


def compare(given: argparse.Namespace) -> Iterator[Figure]:
    """With / without, and the marks alone."""
    pairs = 4 if given.quick else given.pairs
    timed = run_workers(WORKERS, 1, measure_split, given.device, given.steps, pairs)[0]
    step = median_clock(without for _, without in timed) / given.steps
    detail = {"step without": f"{1e3 * step:.2f} ms"}
    yield figure_of_pairs(f"with the split / without, {WORKERS} workers", timed, TARGET, **detail)
    alone = marks_alone(torch.device(given.device))
    yield figure("a step and its marks / a step", [1 + alone / step], TARGET, marks=f"{1e6 * alone:.1f} µs a step")


def measure_split(rank: int, device: str, steps: int, pairs: int) -> list[Pair]:
    """The times of each pair of blocks (with, without)."""
    torch.manual_seed(rank)
    x, y = torch.randn(32, 1, 8, 8, device=device), torch.randint(10, (32,), device=device)
    model = DigitNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    replica = thinwire.attach(model, optimizer, thinwire.AllReduce())

    def block() -> None:
        for _ in range(steps):
            loss = F.cross_entropy(replica(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    wait_for_device = waiting_for(device)

    def wait() -> None:
        wait_for_device()
        dist.barrier()

    without = _without_split(replica, block)
    alternate(block, without, 1, wait)
    return alternate(block, without, pairs, wait)


def _without_split(replica: thinwire.Replica, block: Callable[[], None]) -> Callable[[], None]:
    """The same block with every mark taken out."""

    def nothing(*_: Any) -> float:
        return 0.0

    ledger, replicated = replica.traffic, replica._method.gradients.replicated
    taken: list[tuple[Any, str]] = [(ledger, "waited"), (ledger.clock, "mark"), (ledger.times, "end_step")]
    taken += [(replicated, "_time_the_wait"), (replica, "_begin_step")]
    before = [getattr(owner, name) for owner, name in taken]

    def run() -> None:
        for owner, name in taken:
            setattr(owner, name, nothing)
        try:
            block()
        finally:
            for (owner, name), method in zip(taken, before, strict=True):
                setattr(owner, name, method)

    return run


def marks_alone(device: torch.device, rounds: int = 2000) -> float:
    """Seconds of what the split does in one step, without the step."""
    clock = Clock(device)
    times, ledger = Times(clock), Ledger(clock)
    sent = Sent(slow=1, slow_queue=1)
    leaf = torch.zeros(1, requires_grad=True)
    queue = torch.autograd.Variable._execution_engine.queue_callback
    leaf.register_post_accumulate_grad_hook(lambda _: queue(lambda: queue(lambda: None)) if clock.is_timing else None)
    plain = torch.zeros(1, requires_grad=True)
    plain.register_post_accumulate_grad_hook(lambda _: None)

    begin_step = torch.compiler.disable(times.begin_step)  # as a replica calls it

    def marks() -> None:
        begin_step()
        leaf.sum().backward()
        for _ in range(WAITS):
            ledger.waited("x", sent, clock.mark(), clock.mark())
        times.end_step()
        clock.time_all()

    def repeat(call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        for _ in range(rounds):
            call()
        return (time.perf_counter() - start) / rounds

    return repeat(marks) - repeat(lambda: plain.sum().backward())


if __name__ == "__main__":
    main()
