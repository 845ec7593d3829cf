"""`compress`: make a trained model smaller, however it was trained.

1. copy the model, and multiply out layers that Thinwire made low-rank before
2. find its layers, in their order of use
3. decompose each, up to the rank at which factors are smaller than the weight
4. choose the ranks: by a cutoff, by a rank, or by the size of the model
5. truncate, and replace the layers by plain torch.nn layers
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from thinwire.base.checks import patterns
from thinwire.base.errors import ConfigError
from thinwire.factor.convert import (
    Kept,
    Layer,
    OrderOfUse,
    copy_of,
    find_layers,
    layer_of,
    to_factors,
    warn_unmatched_patterns,
)
from thinwire.factor.export import arguments, write
from thinwire.factor.forms import label_of
from thinwire.factor.plain import Pair, to_dense, to_plain
from thinwire.factor.ranks import Part, Whole, chooser
from thinwire.replica.replica import Replica

Batches = Iterable[tuple[Any, Tensor]]
Evaluate = Callable[[nn.Module], float]
Report = Callable[[str, int, int], None]
"""Is called with what is being done, how many parts of it are done, and of how many."""


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """A compressed model, and what was done to its layers."""

    model: nn.Module
    """The small model, in plain torch.nn layers."""
    ranks: Mapping[str, int]
    """The rank of every layer that is low-rank now."""
    spectra: Mapping[str, Tensor]
    """All singular values of every layer that was decomposed, largest first."""
    kept: tuple[Kept, ...]
    """Weights that stayed full, and why."""
    cutoff: float | None
    """Share of the largest singular value at which layers were truncated; None if ranks were given."""
    parameters_before: int
    """Parameters of the given model."""
    parameters_after: int
    """Parameters of the small one."""
    sizes: tuple[tuple[float, int], ...] = field(repr=False)
    """The model's size at other cutoffs, as pairs of cutoff and parameters."""
    before: float | None = None
    """The given model's accuracy on `data`, or what `evaluate` returned for it."""
    after: float | None = None
    """The same for the small model."""
    example: Any = field(default=None, repr=False)
    """An input of the model, if one is known."""

    @property
    def ratio(self) -> float:
        """How many times fewer parameters."""
        return self.parameters_before / self.parameters_after

    def plot(self, path: Path | str) -> None:
        """Plot the layers' singular values with their ranks, and the model's size over the cutoff."""
        from thinwire.report.layer_plots import draw_spectra  # plotting is imported only when used

        values = {label: sigma.tolist() for label, sigma in self.spectra.items()}
        draw_spectra(Path(path), values, self.ranks, self.sizes, self.parameters_after, self.cutoff)

    def save(self, folder: Path | str, *, onnx: bool = False) -> Path:
        """Write the small model so that it loads without Thinwire; see `thinwire.factor.export.write`."""
        return write(self.model, folder, example_input=self.example, onnx=onnx)


def compress(
    model: nn.Module,
    *,
    cutoff: float | None = None,
    rank: float | None = None,
    target: float | None = None,
    keep_first: bool = True,
    keep_last: bool = True,
    keep: Sequence[str] = (),
    data: Batches | None = None,
    evaluate: Evaluate | None = None,
    example: Any = None,
    report: Report | None = None,
) -> Compressed:
    """A smaller copy of `model` in plain torch.nn layers; the model itself is left as it is.

    Give one of `cutoff` (a share of the largest singular value), `rank` (a whole number, the most for every layer, or a
    share of each layer's full rank) and `target` (how many times fewer parameters). Figures before and after come from
    `data`, batches (x, y) of a classifier, or from `evaluate(model)`. `example` is an input: a tensor, a tuple of
    arguments or a mapping of them by name. A pass over it shows which layer is first and last, and whose weights other
    code reads; without one the first batch or `evaluate` is used. `report` is called before every layer.
    """
    report = report or (lambda what, done, of: None)
    choose, keep = chooser(cutoff, rank, target), patterns(keep)
    if data is not None and evaluate is not None:
        raise ConfigError("give `data` or `evaluate`, not both: each defines how the model is evaluated")
    model = _bare(model)
    if data is not None:
        data, example = _with_first(data, example)
    trial = None if example is None and evaluate is None else lambda small: _try(small, example, evaluate)
    small, had = to_dense(copy_of(model))
    with _all_trained(small):
        order = _order_of_use(small, trial)
        layers, kept = find_layers(
            small, trained=small.parameters(), order=order, keep_first=keep_first, keep_last=keep_last, keep=keep
        )
        warn_unmatched_patterns(small, keep)
    whole = _whole(small, layers, had, _count(model), report)
    ranks, cut_at = choose(whole)
    small, made, full = _cut(small, whole.parts, ranks, had, trial)
    if data is not None or evaluate is not None:
        report("evaluating before and after", 0, 0)
    before, after = _figures(model, small, data, evaluate)
    return Compressed(
        model=small,
        ranks=made,
        spectra={part.layer.label: part.factors.sigma.cpu() for part in whole.parts},
        kept=(*(weight for weight in kept if label_of(weight.name) not in made), *full),
        cutoff=cut_at,
        parameters_before=whole.parameters,
        parameters_after=_count(small),
        sizes=whole.sizes(),
        before=before,
        after=after,
        example=example,
    )


def _bare(model: nn.Module) -> nn.Module:
    """The model inside DataParallel, DDP or torch.compile."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"compress() takes an nn.Module, not {type(model).__name__}")
    if isinstance(model, Replica):
        raise ConfigError("compress() takes a model, not a replica: give it replica.finish(), or replica.module")
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module
    return getattr(model, "_orig_mod", model)  # torch.compile's wrapper


def _with_first(data: Batches, example: Any) -> tuple[Batches, Any]:
    """All batches, and the example, by default the first input; `data` may be an iterator."""
    rest = iter(data)
    first = next(rest, None)
    if first is None:
        raise ConfigError("`data` has no batches; give (x, y) batches; an iterator must not be exhausted")
    return itertools.chain([first], rest), first[0] if example is None else example


def _try(model: nn.Module, example: Any, evaluate: Evaluate | None) -> None:
    """One pass through the model, for its hooks."""
    with _evaluating(model):
        if example is not None:
            _outputs(model, example)
        elif evaluate is not None:
            evaluate(model)


@contextmanager
def _all_trained(model: nn.Module) -> Iterator[None]:
    """Unfreeze the model temporarily: frozen layers are to be compressed too."""
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    yield
    for p in frozen:
        p.requires_grad_(False)


def _order_of_use(model: nn.Module, trial: Callable[[nn.Module], None] | None) -> list[str]:
    if trial is None:
        return []
    usage = OrderOfUse(model)
    usage.watch()
    trial(model)
    usage.stop()
    return usage.order


def _cut(
    model: nn.Module,
    parts: Sequence[Part],
    ranks: Sequence[int],
    had: Mapping[str, Pair],
    trial: Callable[[nn.Module], None] | None,
) -> tuple[nn.Module, dict[str, int], list[Kept]]:
    """The model in plain layers of these ranks, the ranks by layer, and the weights that stay full after all."""
    cut: dict[str, Layer] = {}
    full = []
    for part, rank in zip(parts, ranks, strict=True):
        layer = part.layer
        if not layer.view.is_smaller(rank):
            full.append(Kept(layer.key, f"not smaller at rank {rank} of {part.full_rank}"))
        elif rank != part.own:
            cut[layer.key] = layer
            _factor(layer, part.factors.a[:, :rank], part.factors.b[:rank])
    for key in had.keys() - cut.keys():
        layer, pair = layer_of(model, key), had[key]
        if layer.view.is_smaller(pair.rank):
            cut[key] = layer
            _factor(layer, pair.a, pair.b)
    if trial is not None:
        trial(model)  # records whose weights other code reads
    made = {layer.label: layer.rank or 0 for layer in cut.values()}
    frozen = [layer.name for layer in cut.values() if not layer.factors[0].requires_grad]
    plain = to_plain(model)
    for name in frozen:
        plain.get_submodule(name).requires_grad_(False)
    return plain, made, full


def _saved(model: nn.Module, key: str, had: Pair) -> int:
    """Parameters saved in a low-rank layer that is not truncated: it becomes plain factors, or its full weight."""
    m, n = (view := layer_of(model, key).view).tall
    return had.numbers - (had.rank * (m + n) if view.is_smaller(had.rank) else m * n)


def _whole(
    small: nn.Module, layers: Sequence[Layer], had: Mapping[str, Pair], parameters: int, report: Report
) -> Whole:
    """All layers decomposed; factors that the model came with and that stay as they are count with their size."""
    parts = []
    for done, layer in enumerate(layers):
        report("decomposing layers", done, len(layers))
        pair = had.get(layer.key)
        parts.append(Part.of(layer) if pair is None else Part.of(layer, pair.rank, pair.numbers))
    aside = {key: pair for key, pair in had.items() if key not in {layer.key for layer in layers}}
    return Whole(parameters, parts, saved=sum(_saved(small, *item) for item in aside.items()))


def _factor(layer: Layer, a: Tensor, b: Tensor) -> None:
    trained = layer.weight.requires_grad
    to_factors(layer, a, b)
    for factor in layer.factors:
        factor.requires_grad_(trained)


def _figures(
    model: nn.Module, small: nn.Module, data: Batches | None, evaluate: Evaluate | None
) -> tuple[float | None, float | None]:
    with _evaluating(model), _evaluating(small):
        if evaluate is not None:
            return float(evaluate(model)), float(evaluate(small))
        return _accuracies(model, small, data) if data is not None else (None, None)


def _accuracies(model: nn.Module, small: nn.Module, data: Batches) -> tuple[float, float]:
    """Accuracies of both models, in one pass over the data."""
    hits, count = [0, 0], 0
    for x, y in data:
        for i, each in enumerate((model, small)):
            found = _outputs(each, x).argmax(-1)
            if found.shape != y.shape:
                raise ConfigError(
                    f"`data` has targets of shape {tuple(y.shape)} for predictions of shape {tuple(found.shape)}; it "
                    "is for classifiers with classes last, give `evaluate` for other models"
                )
            hits[i] += int((found == y.to(found.device)).sum())
        count += y.numel()
    return hits[0] / count, hits[1] / count


def _outputs(model: nn.Module, inputs: Any) -> Tensor:
    """The model's output on its own device; for transformers' models the logits."""
    device = next(model.parameters()).device
    args, keywords = arguments(tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, inputs))
    found = model(*args, **keywords)
    return getattr(found, "logits", found)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; restores the training flags."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            yield model.eval()  # type: ignore[misc]
    finally:
        for module, training in modes:
            module.training = training


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
