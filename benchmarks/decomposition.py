"""Time of `decompose` over all weights of a model against `torch.linalg.svd` of the same weights as they are.

Each weight is decomposed both ways, one right after the other; a pair is the two sums over the model.
Singular values must agree with the SVD's, and what the cut factors leave out must be what was cut.
"""

import argparse
from collections.abc import Iterator, Sequence

import torch
from measure import (
    THREADS,
    Figure,
    Pair,
    Span,
    arguments,
    figure_of_pairs,
    median_clock,
    report,
    time_of,
    waiting_for,
)
from models import VGG16_CLASSIFIER, Shape, random_weight, vgg16_shapes, vit_b16_shapes
from torch import Tensor

from thinwire.factor.matrix import Factors, decompose, decompose_if_smaller, view_of

CUTOFF = 0.15
TARGETS = {
    "cpu": {"VGG16-BN": ">= 4", "ViT-B/16": ">= 2"},
    "cuda": {"VGG16-BN": ">= 10", "ViT-B/16": ">= 10"},
}


def main() -> None:
    given = arguments(
        __doc__,
        threads=THREADS,
        pairs={"type": int, "default": 7, "help": "passes over a model"},
        classifier={"action": "store_true", "help": "VGG16's two 4096-wide layers too; minutes on a CPU"},
    )
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    if given.quick:
        print("quick: one pass, and one block of ViT-B/16 instead of twelve")
    report(measure_all(given), given)


def measure_all(given: argparse.Namespace) -> Iterator[Figure]:
    """Every model with both spectra."""
    pairs = 1 if given.quick else given.pairs
    models = {"VGG16-BN": vgg16_shapes(), "ViT-B/16": vit_b16_shapes(1 if given.quick else 12)}
    targets = TARGETS[given.device]
    for name, shapes in models.items():
        for spectrum in ("decaying", "flat"):
            yield compare(name, shapes, spectrum, given.device, pairs, targets[name])
    if given.classifier:
        wide = VGG16_CLASSIFIER
        yield compare("VGG16 4096-wide", wide, "decaying", given.device, 1, targets["VGG16-BN"])


def compare(model: str, shapes: Sequence[Shape], spectrum: str, device: str, pairs: int, target: str) -> Figure:
    """SVD / decompose over all weights of a model."""
    weights = {shape: random_weight(shape, spectrum).to(device) for shape in set(shapes)}
    errors = [check(weight) for weight in weights.values()]  # the first call of each shape, so not timed
    timed = [_one_pass(shapes, weights, device) for _ in range(pairs)]
    detail = {
        "SVD": f"{median_clock(svd for svd, _ in timed):.2f} s",
        "decompose": f"{median_clock(ours for _, ours in timed):.2f} s",
        "σ differ by": f"{max(e[0] for e in errors):.1e} of the largest",
        "residual off by": f"{max(e[1] for e in errors):.1e}",
    }
    return figure_of_pairs(f"{model}, {len(shapes)} weights, {spectrum}, SVD / decompose", timed, target, **detail)


def check(weight: Tensor) -> tuple[float, float]:
    """Error of the singular values in shares of σ₁, and of ‖W − AB‖ in shares of ‖W‖."""
    factors = _ours(weight)
    exact = torch.linalg.svdvals(weight.flatten(1).double())
    values = (factors.sigma - exact).abs().max() / exact[0]
    left_out = exact[factors.a.shape[1] :].norm()
    matrix = view_of(weight).to_matrix(weight).double()
    residual = (matrix - factors.a.double() @ factors.b.double()).norm()
    off = (residual - left_out).abs() / exact.norm()
    assert values < 1e-6 and off < 1e-5, f"{tuple(weight.shape)}: values off by {values:.1e}, residual by {off:.1e}"
    return float(values), float(off)


def _one_pass(shapes: Sequence[Shape], weights: dict[Shape, Tensor], device: str) -> Pair:
    svd, ours = [], []
    for i, shape in enumerate(shapes):
        ways = [(_svd, svd), (_as_in_training, ours)]
        for way, times in ways if i % 2 == 0 else reversed(ways):
            times.append(time_of(lambda way=way, w=weights[shape]: way(w), waiting_for(device)))
    return _sum(svd), _sum(ours)


def _sum(spans: Sequence[Span]) -> Span:
    return Span(*(sum(column) for column in zip(*spans, strict=True)))


def _svd(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.linalg.svd(weight.flatten(1), full_matrices=False)


def _ours(weight: Tensor) -> Factors:
    return decompose(view_of(weight).to_matrix(weight), CUTOFF)


def _as_in_training(weight: Tensor) -> Factors | None:
    return decompose_if_smaller(view_of(weight).to_matrix(weight), CUTOFF)


if __name__ == "__main__":
    main()
