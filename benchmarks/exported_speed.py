"""Time of a forward pass of a dense model against the compressed one at equal batch: PyTorch, and onnxruntime if there.

Both are what `thinwire export` writes: plain layers in PyTorch, `model.onnx` in onnxruntime. Ranks are shares of each
layer's full rank, first and last layer stay full. Ratios are dense / compressed. With --run DIR it is the finished
model of a run against its recipe's.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measure import THREADS, Figure, alternate, arguments, figure_of_pairs, median_clock, report, time_of, waiting_for
from models import give_decaying_spectra
from torch import Tensor, nn

import thinwire
from thinwire.commands.sources import finished
from thinwire.experiments.models import VGG16BN
from thinwire.factor import export
from thinwire.recipes import named
from thinwire.report import read_run
from thinwire.train.models import CharGPT

Run = Callable[[int], None]

SHARES = (0.5, 0.25, 0.125, 0.0625)
BATCHES = (1, 32)


def main() -> None:
    given = arguments(
        __doc__,
        threads=THREADS,
        pairs={"type": int, "default": 15, "help": "blocks of each"},
        run={"type": Path, "metavar": "DIR", "help": "a finished run of `thinwire run`, in place of the models here"},
        width={"type": int, "default": 128, "help": "CharGPT's width; the recipe's is 128"},
    )
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    if find_spec("onnxruntime") is None:
        print("without onnxruntime: pip install onnxruntime 'thinwire[onnx]' to have it too")
    with torch.inference_mode():
        report(measure_all(given), given)


def measure_all(given: argparse.Namespace) -> Iterator[Figure]:
    """Every pair of models, batch size and runtime."""
    for title, dense, made, example in _run(given.run) if given.run else _cut_models(given):
        ratio = sum(p.numel() for p in dense.parameters()) / made.parameters_after
        for runtime, (slow, fast) in _runtimes(dense, made, example, given):
            for batch in BATCHES[-1:] if given.quick else BATCHES:
                x = example[:1].repeat(batch, *(1 for _ in example.shape[1:])).to(given.device)
                yield _compare(f"{title} batch {batch}, {runtime}", slow(x), fast(x), ratio, given)


Models = Iterator[tuple[str, nn.Module, thinwire.Compressed, Tensor]]


def _cut_models(given: argparse.Namespace) -> Models:
    for name in ("VGG16-BN", "CharGPT"):
        dense, example = _model(name, given.width)
        give_decaying_spectra(dense)
        for share in SHARES[2:3] if given.quick else SHARES:
            yield f"{name} rank {share}", dense, thinwire.compress(dense, rank=share, example=example), example


def _run(folder: Path) -> Models:
    """A run's finished model, with the ranks that it has."""
    with torch.inference_mode(False):
        found = finished(folder, None, None)
        recipe = named(read_run(folder).summary["recipe"])
        dense = recipe.model(recipe.source(None)).eval()
        made = thinwire.compress(found.model, cutoff=0.0, **found.keep, example=found.example)
    yield folder.name, dense, made, found.example


def _model(name: str, width: int) -> tuple[nn.Module, Tensor]:
    if name == "CharGPT":
        return CharGPT(vocabulary=65, width=width).eval(), torch.arange(64)[None]
    return VGG16BN().eval(), torch.randn(1, 3, 32, 32)


def _runtimes(dense: nn.Module, made: Any, example: Tensor, given: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """What turns an input into a run, for the dense and the compressed model."""
    yield "PyTorch", [_torch(model.eval().to(given.device)) for model in (dense, made.model)]
    if find_spec("onnxruntime") is None or given.device != "cpu":
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, name) for name in ("dense", "small")]
        export.write(dense, paths[0], example_input=example, onnx=True)
        made.save(paths[1], onnx=True)
        yield "onnxruntime", [_onnx(path / "model.onnx", given.threads) for path in paths]


def _torch(model: nn.Module) -> Callable[[Tensor], Run]:
    def prepare(x: Tensor) -> Run:
        return lambda count: [model(x) for _ in range(count)] and None

    return prepare


def _onnx(path: Path, threads: int) -> Callable[[Tensor], Run]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options)
    name = session.get_inputs()[0].name

    def prepare(x: Tensor) -> Run:
        given = {name: x.numpy()}
        return lambda count: [session.run(None, given) for _ in range(count)] and None

    return prepare


def _compare(title: str, slow: Run, fast: Run, ratio: float, given: argparse.Namespace) -> Figure:
    wait = waiting_for(given.device)
    for run in (slow, fast):
        run(2)
    repeats = max(1, round(0.05 / (time_of(lambda: slow(2), wait).clock / 2)))
    timed = alternate(lambda: slow(repeats), lambda: fast(repeats), 4 if given.quick else given.pairs, wait)
    dense = 1e3 * median_clock(first for first, _ in timed) / repeats
    detail = {"dense": f"{dense:.2f} ms", "parameters": f"{ratio:.2f} : 1"}
    return figure_of_pairs(title, timed, "", **detail)


if __name__ == "__main__":
    main()
