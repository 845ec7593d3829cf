"""Time of a training step of a factored layer against the dense one, at 1/8 of the weight's smaller side.

A step is forward, backward (to the input too, as inside a network) and SGD. "trains A" and "trains B" are a
group phase, with the other factor frozen; "trains both" has neither frozen. Ratios are dense / factored.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator

import torch
from measure import (
    THREADS,
    Figure,
    alternate,
    arguments,
    figure_of_pairs,
    median_clock,
    report,
    time_of,
    waiting_for,
)
from torch import Tensor, nn

from thinwire.factor.convert import Layer, to_factors
from thinwire.factor.matrix import decompose, view_of

TARGET = "> 1"
TRAINS = {"trains A": (True, False), "trains B": (False, True), "trains both": (True, True)}
# Rows of a Linear are tokens; images of a convolution are 8×8, as in VGG16's third stage.
BATCHES = {
    "cpu": {"Linear": (64, 256, 1024), "Conv2d": (8, 32, 128)},
    "cuda": {"Linear": (1024, 8192, 65536), "Conv2d": (256, 2048, 8192)},
}
# A small batch leaves a GPU waiting for launches, of which two thin products need more than one full one;
# there the target is for the batch that fills the chip, and the others are shown beside it.


def main() -> None:
    given = arguments(__doc__, threads=THREADS)
    torch.set_num_threads(given.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    report(measure_all(given.device, given.quick), given)


def measure_all(device: str, quick: bool) -> Iterator[Figure]:
    """Every layer, batch size and precision."""
    for precision in ("fp32",) if device == "cpu" else ("fp32", "bf16"):
        for kind, batches in BATCHES[device].items():
            for batch in batches[:1] if quick else batches:
                target = TARGET if device == "cpu" or batch == batches[-1] else ""
                yield from compare(kind, batch, precision, device, target, pairs=4 if quick else 15)


def compare(kind: str, batch: int, precision: str, device: str, target: str, pairs: int) -> Iterator[Figure]:
    """Dense against factored, for each choice of what is trained."""
    dense, x = _layer_and_input(kind, batch, device)
    for name, trained in TRAINS.items():
        slow = _steps(copy.deepcopy(dense), x, precision)
        fast = _steps(_factored(dense, trained), x, precision)
        repeats = _repeats(slow, device)
        wait = waiting_for(device)
        timed = alternate(lambda f=slow, n=repeats: f(n), lambda f=fast, n=repeats: f(n), pairs, wait)
        step = median_clock(first for first, _ in timed) / repeats
        title = f"{kind} batch {batch} {precision}, dense / {name}"
        yield figure_of_pairs(title, timed, target, **{"dense step": f"{1e3 * step:.3f} ms"})


def _layer_and_input(kind: str, batch: int, device: str) -> tuple[nn.Module, Tensor]:
    if kind == "Linear":
        return nn.Linear(1024, 4096, device=device), torch.randn(batch, 1024, device=device)
    return nn.Conv2d(256, 256, 3, padding=1, device=device), torch.randn(batch, 256, 8, 8, device=device)


def _factored(dense: nn.Module, trained: tuple[bool, bool]) -> nn.Module:
    module = copy.deepcopy(dense)
    view = view_of(module.weight)
    layer = Layer("", module, "weight", view)
    factors = decompose(layer.matrix(), 0.0, rank=view.tall[1] // 8)
    to_factors(layer, factors.a, factors.b)
    for factor, trains in zip(layer.factors, trained, strict=True):
        factor.requires_grad_(trains)
    return module


def _steps(module: nn.Module, x: Tensor, precision: str) -> Callable[[int], None]:
    """A function that takes that many training steps; called once here, so that nothing is first later."""
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1e-6, momentum=0.9)
    x = x.clone().requires_grad_()
    upstream = torch.randn_like(module(x))
    rounded = upstream.bfloat16() if precision == "bf16" else upstream

    def run(count: int) -> None:
        for _ in range(count):
            with _autocast(x.device.type, precision):
                y = module(x)
            optimizer.zero_grad()
            x.grad = None
            y.backward(rounded)
            optimizer.step()

    run(3)
    return run


def _autocast(device: str, precision: str) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def _repeats(run: Callable[[int], None], device: str) -> int:
    """Steps that take about 50 ms, so that neither the clock nor one launch is what is measured."""
    two = time_of(lambda: run(2), waiting_for(device)).clock
    return max(1, round(0.05 / (two / 2)))


if __name__ == "__main__":
    main()
