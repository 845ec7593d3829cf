"""What a method computes beside the step itself: coding, selecting, factoring, averaging, without waiting for the wire.

VGG16-BN with SGD and momentum on two gloo workers of one thread each. The processor time of the thread that trains is
taken, in and outside of the method; waiting takes none of it. A figure is (step + method) / step; the step is forward
and backward pass and update as plain training has them. What happens every so many steps is spread over them.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from measure import Figure, arguments, figure, report
from workers import run_workers

import thinwire
from thinwire.experiments.models import VGG16BN

TARGET = "<= 1.10"
WORKERS = 2
METHODS: dict[str, tuple[Any, int]] = {
    "AllReduce, int8": (thinwire.AllReduce(wire="int8"), 1),
    "PowerSGD, rank 4": (thinwire.PowerSGD(rank=4), 1),
    "TopK, density 0.001": (thinwire.TopK(density=0.001), 1),
    "TopK, density 0.01": (thinwire.TopK(density=0.01), 1),
    "OneBit": (thinwire.OneBit(), 1),
    "LocalSGD, every 8": (thinwire.LocalSGD(every=8), 8),
    "DiLoCo, every 8": (thinwire.DiLoCo(every=8), 8),
}


def main() -> None:
    given = arguments(
        __doc__,
        batch={"type": int, "nargs": "+", "default": [32, 128], "help": "images a worker"},
        steps={"type": int, "default": 8, "help": "steps that are timed, a multiple of 8"},
        only={"help": "one of the methods, by the beginning of its name"},
    )
    report(compare(given), given)


def compare(given: argparse.Namespace) -> Iterator[Figure]:
    """Each method at each batch."""
    for batch in given.batch:
        for name, (config, every) in METHODS.items():
            if given.only and not name.startswith(given.only):
                continue
            steps = max(every, 2 if given.quick else given.steps)
            inside, whole = run_workers(WORKERS, 1, measure, config, batch, steps)[0]
            step = statistics.median(w - i for i, w in zip(inside, whole, strict=True))
            spread = statistics.mean(inside) if every > 1 else statistics.median(inside)
            detail = {"method": f"{1e3 * spread:.0f} ms", "step": f"{1e3 * step:.0f} ms"}
            yield figure(f"{name}, batch {batch}", [1 + spread / step], TARGET, **detail)


def measure(rank: int, config: Any, batch: int, steps: int) -> tuple[list[float], list[float]]:
    """Processor seconds of each step: of the method in it, and of all of it."""
    torch.manual_seed(rank)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    model = VGG16BN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    replica = thinwire.attach(model, optimizer, config)
    method, spent = replica._method, [0.0]
    method.end_step = _timed(method.end_step, spent)
    if method.gradients.replicated.after_backward:
        method.gradients.replicated.after_backward = _timed(method.gradients.replicated.after_backward, spent)
    inside, whole = [], []
    for _ in range(steps + 1):
        spent[0], start = 0.0, time.thread_time()
        loss = F.cross_entropy(replica(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        inside.append(spent[0])
        whole.append(time.thread_time() - start)
    return inside[1:], whole[1:]  # the first step makes buffers


def _timed(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        start = time.thread_time()
        try:
            return call(*args)
        finally:
            spent[0] += time.thread_time() - start

    return timed


if __name__ == "__main__":
    main()
