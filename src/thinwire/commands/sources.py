"""The sources of `thinwire export` as models in memory: a finished run, an unfinished one, a user's function.

Of a run that was saved while groups train apart, the groups' copies are merged by the config, as `finish` would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from thinwire.base.checks import check_cutoff
from thinwire.base.errors import ConfigError, DamagedError, unknown
from thinwire.base.files import check_file, read_json, read_tensors, understood
from thinwire.base.schema import COUNT, FLAG, POSITIVE, TEXT, Kind, wrong
from thinwire.checkpoint import snapshot
from thinwire.checkpoint.snapshot import WORKER
from thinwire.factor.export import arguments
from thinwire.factor.forms import LISTING
from thinwire.factor.layers import FORMS
from thinwire.factor.load_exported import fill, load
from thinwire.factor.matrix import view_of
from thinwire.methods.registry import METHODS
from thinwire.recipes import Recipe, call_model, installed, named
from thinwire.report import read_run
from thinwire.shape.factors import Sides
from thinwire.train import checkpoint
from thinwire.train.batcher import Batcher
from thinwire.train.data import Source
from thinwire.train.run import own_device

_AGAIN = "restore it, or run again"
_INPUT = {"shape": [(Kind("batch", lambda value: value == "batch"), POSITIVE)], "dtype": TEXT}
_LARGEST_INPUT = 1 << 28
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_POSITION = checkpoint.POSITION | {"identity": {"recipe": TEXT, "steps": COUNT, "split?": TEXT}}
_ROUNDING = 1e-5
"""Singular values below this fraction of the largest are rounding errors; a layer keeps the rank it had."""
_HOW = {
    "mean": "this is the mean of {} groups' copies",
    "trained": "this is the mean of {} groups' copies, and of each factor among those that trained it",
    "weighted": "this is the mean of {} groups' copies, weighted by their losses",
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """A model to write, and what is known about it."""

    model: nn.Module
    """With its trained values, dense or low-rank."""
    origin: str
    """What it is and where it came from."""
    dense: int
    """Bytes of the model before anything was low-rank."""
    parameters: int
    """Its parameters then."""
    cutoff: float = 0.0
    """The default cutoff."""
    keep: Mapping[str, Any] = field(default_factory=dict)
    """Which layers the run kept full."""
    example: Any = None
    """An input."""
    metric: str = ""
    """The name of its main figure."""
    evaluate: Callable[[nn.Module], float] | None = None
    """Evaluates a model on held-out data."""
    without: str = ""
    """Why it cannot be evaluated."""
    views: str | None = None
    """The transform of its inputs."""


class NoData:
    """Stands in for a missing source: most models can be built without one."""

    def __init__(self, recipe: Recipe, why: ConfigError) -> None:
        self._recipe, self._why = recipe, why

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(f"the model of the recipe {self._recipe.name!r} depends on its data: {self}")

    def __str__(self) -> str:
        return f"{str(self._why).split('; ', maxsplit=1)[0]}; give --data DIR"


def finished(folder: Path, recipe: str | None, data: Path | None) -> Found:
    """The model that a run wrote in the end, in the recipe's own class."""
    summary = read_run(folder).summary
    trained = recipe_of(summary, recipe)
    source, model = _built(trained, data)
    sizes = _sizes(model)
    read_json(folder / "model" / "layers.json", _AGAIN, LISTING)
    check_file(folder / "model" / "model.safetensors", _AGAIN)
    try:
        model = load(model, folder / "model")
    except ValueError as error:
        raise _misfit(f"the model in `{folder}`", _name(trained, source), error) from error
    origin = f"{folder}: a finished run of {summary['steps']} steps by {summary['method']}"
    known = {"example": _example(folder / "model")} | _judged(trained, source)
    return Found(model=model, origin=origin, **sizes, keep=_kept(summary["config"]), **known)


def unfinished(folder: Path, saved: Path, recipe: str | None, data: Path | None) -> Found:
    """A save of a run, its groups' copies merged as `finish` would and its factors multiplied out."""
    state = read_json(saved / "state.json", schema=snapshot.STATE)
    position = read_json(saved / "position.json", schema=_POSITION)
    if state["format"] != snapshot.FORMAT:
        raise ConfigError(
            f"the save in `{folder}` has format {state['format']}, this version reads {snapshot.FORMAT}; "
            "use the version that wrote it"
        )
    about = position["identity"]
    trained = recipe_of(about, recipe)
    source, model = _built(trained, data)
    try:
        with understood(saved):
            fill(model, _multiplied_out(model, _merged(saved, state)))
    except DamagedError:
        raise
    except ValueError as error:
        raise _misfit(f"the save in `{folder}`", _name(trained, source), error) from error
    origin = f"{folder}: not finished; saved at step {position['step']} of {about['steps']} by {state['method_name']}"
    if not state["in_sync"]:
        origin += f", in a group phase: {_how_merged(state)}"
    config = state["config"]
    if state["method_name"] not in METHODS:
        raise unknown("method", state["method_name"], METHODS)
    cuts: bool = METHODS[state["method_name"]].config.cuts_at_end
    if cuts:
        check_cutoff(config.get("cutoff"), zero_allowed=True)
    own: dict[str, Any] = {"cutoff": config["cutoff"] if cuts else _ROUNDING, "keep": _kept(config)}
    return Found(model=model, origin=origin, **_sizes(model), **own, **_judged(trained, source))


def of_function(text: str, weights: Path | None) -> Found:
    """The model that FILE.py:FUNCTION returns, alone or with its inputs; with the values of a file, if given."""
    model, inputs = call_model(text)
    if weights is not None:
        _fill_from(model, weights, text)
    if inputs is not None:
        args, keywords = arguments(inputs)
        try:
            with torch.no_grad():
                model.eval()(*args, **keywords)
        except Exception as error:
            raise ConfigError(
                f"the model of {text} fails on its own inputs: {type(error).__name__}: {error}"
            ) from error
    origin = f"the model of {text}, {f'with the weights of {weights}' if weights else 'with its own weights'}"
    return Found(model=model.to(own_device()), origin=origin, example=inputs, **_sizes(model))


def recipe_of(about: Mapping[str, Any], given: str | None) -> Recipe:
    """The recipe of a run, by its name or as given, evaluated on the same data."""
    name = about["recipe"]
    if given is None and name not in installed():
        raise ConfigError(
            f"the run's recipe {name!r} is not installed, and so its model cannot be built; "
            "give --recipe FILE.py:FUNCTION"
        )
    recipe = named(given or name, validate=about.get("split") == "validation")
    if recipe.name != name:
        raise ConfigError(
            f"the run is of the recipe {name!r}, and --recipe {given} is {recipe.name!r}; give the run's own"
        )
    return recipe


def _built(recipe: Recipe, data: Path | None) -> tuple[Source | NoData, nn.Module]:
    source: Source | NoData
    try:
        source = recipe.source(data)
    except ConfigError as error:
        if data is not None:
            raise
        source = NoData(recipe, error)
    return source, recipe.model(cast(Source, source)).to(own_device())


def _judged(recipe: Recipe, source: Source | NoData) -> dict[str, Any]:
    """An input, the metric, and a function that evaluates a model as a run does."""
    known = {"metric": recipe.task.metric, "views": recipe.transform_name}
    if isinstance(source, NoData):
        return known | {"without": str(source)}
    batcher = Batcher(recipe, source, own_device())

    def evaluate(model: nn.Module) -> float:
        with recipe.precision(own_device()):
            totals = torch.stack([recipe.task.totals(model(x), y) for x, y in batcher.parts()])
        return recipe.task.figures(totals.sum(0))[recipe.task.metric]

    return known | {"example": batcher.example(), "evaluate": evaluate}


def _example(folder: Path) -> Any:
    """An input like the one that a run's model was written with; None if there was none."""
    file = folder / "layers.json"
    inputs = read_json(file, _AGAIN, {"inputs?": [_INPUT]}).get("inputs")
    if not inputs:
        return None
    shape, dtype = inputs[0]["shape"][1:], inputs[0]["dtype"]  # a run's model takes one tensor
    if math.prod(shape) > _LARGEST_INPUT or dtype not in _DTYPES:
        raise DamagedError(f"`{file}` is damaged, no input has the shape {shape} and the type {dtype!r}; {_AGAIN}")
    return torch.zeros(2, *shape, dtype=getattr(torch, dtype), device=own_device())


def _name(recipe: Recipe, source: Source | NoData) -> str:
    text = f"the recipe {recipe.name!r}"
    return f"{text} as it is without data (give --data DIR)" if isinstance(source, NoData) else text


def _kept(config: Mapping[str, Any]) -> dict[str, Any]:
    if what := wrong(config, {"keep_first?": FLAG, "keep_last?": FLAG, "keep?": [TEXT]}, "config"):
        raise DamagedError(f"the run's config is damaged, {what}; restore the file, or use an older save")
    return {name: config[name] for name in ("keep_first", "keep_last") if name in config} | {
        "keep": tuple(config.get("keep", ()))
    }


def _sizes(model: nn.Module) -> dict[str, Any]:
    held = {t.data_ptr(): t.numel() * t.element_size() for t in model.state_dict().values()}
    return {"dense": sum(held.values()), "parameters": sum(p.numel() for p in model.parameters())}


def _multiplied_out(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A dense model's values from two or three factors per weight."""
    full = dict(tensors)
    for name, weight in model.state_dict().items():
        for form in FORMS.values():
            names = [f"{name}_{suffix}" for suffix in form]
            if all(own in full for own in names):
                m, n = view_of(weight).tall
                ends = full[names[0]].shape[0], full[names[-1]].shape[-1]
                if ends != (m, n):  # their product could have any size
                    raise ValueError(f"size mismatch for {name}: factors of {ends} for a weight of {(m, n)}")
                full[name] = view_of(weight).rebuild(*(full.pop(own) for own in names))
    return full


def _fill_from(model: nn.Module, weights: Path, text: str) -> None:
    if not weights.is_file():
        raise ConfigError(f"there is no file `{weights}`; give the weights that belong to {text}")
    try:
        fill(model, read_tensors(weights))
    except DamagedError as error:
        raise ConfigError(
            f"`{weights}` is not a safetensors file; write one with safetensors.torch.save_model(model, FILE)"
        ) from error
    except (ValueError, RuntimeError) as error:
        raise _misfit(f"`{weights}`", f"the model of {text}", error) from error


def _misfit(what: str, where: str, error: Exception) -> ConfigError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ConfigError(f"{what} does not fit {where}: {' '.join(lines[:2])}")


def _merged(folder: Path, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that all workers would hold after a merge."""
    if state["in_sync"]:
        return read_tensors(folder / "model.safetensors")
    files = [folder / f"model-rank{group[0]}.safetensors" for group in state["groups"]]
    copies = [read_tensors(file) for file in files]
    for file, copy in zip(files, copies, strict=True):
        if odd := copies[0].keys() ^ copy.keys():
            raise DamagedError(f"`{file}` is damaged, {min(odd)!r} is only there or only in `{files[0].name}`")
        if name := next((name for name, t in copy.items() if t.shape != copies[0][name].shape), None):
            raise DamagedError(f"`{file}` is damaged, {name!r} has another shape than in `{files[0].name}`")
    shape, config = state["method"]["shape"], state["config"]
    sides = Sides(config.get("train") or ("split" if config.get("merge") == "trained" else "both"), state["groups"])
    losses = _losses(folder, state["groups"]) if config.get("merge") == "weighted" else None
    weights = {kind: sides.weights(kind, shape.get("rounds", 0), losses) for kind in ("a", "b", "")}
    kinds = {f"{key}_{kind}": kind for key in shape.get("ranks", ()) for kind in "ab"}
    return {name: _mean([copy[name] for copy in copies], weights[kinds.get(name, "")]) for name in copies[0]}


def _how_merged(state: Mapping[str, Any]) -> str:
    """What a merge makes of the save, in words."""
    way = str(state["config"].get("merge", "mean"))
    if way not in _HOW:
        raise unknown("merge in the save", way, _HOW)
    return _HOW[way].format(len(state["groups"]))


def _losses(folder: Path, groups: Sequence[Sequence[int]]) -> list[float]:
    """The mean loss that each group has observed since it last merged."""
    observed = [
        [read_json(folder / f"worker-rank{rank}.json", schema=WORKER)["method"]["observed"] for rank in group]
        for group in groups
    ]
    losses, counts = ([sum(own[i] for own in group) for group in observed] for i in (0, 1))
    if not all(counts):
        raise ConfigError(
            "merge='weighted' needs losses, and since the last merge none was observed before this save; "
            "continue the run, or export a later save"
        )
    return [loss / count for loss, count in zip(losses, counts, strict=True)]


def _mean(copies: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """As in a merge: the mean of numbers that differ, the largest of counters, the first of anything else."""
    first = copies[0]
    if all(torch.equal(first, other) for other in copies[1:]):
        return first
    if first.is_floating_point():
        wide = sum(t.to(torch.promote_types(t.dtype, torch.float32)) * w for t, w in zip(copies, weights, strict=True))
        return torch.as_tensor(wide).to(first.dtype)
    return torch.stack(list(copies)).amax(0) if first.numel() == 1 and not first.is_complex() else first
