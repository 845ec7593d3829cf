"""Load a low-rank model into your own code; needs only torch and safetensors.

    model = load(MyModel(), "this/folder")     # MyModel builds the dense model, as before training

Every low-rank layer is replaced by the plain torch.nn layers that it consists of now. The files may come from anyone:
they cannot run code, and layers are built only as large as their values in the file are.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

_CLASSES = {"Linear": nn.Linear, "Conv1d": nn.Conv1d, "Conv2d": nn.Conv2d, "Conv3d": nn.Conv3d}
_SIZES = {"in_features", "out_features", "in_channels", "out_channels", "bias"}
_SETTINGS = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
_LARGEST = 32 << 20
"""Bytes of `layers.json`."""


def load(model: nn.Module, folder: str | Path = ".") -> nn.Module:
    """Give `model` the saved layers and values."""
    folder = Path(folder)
    layers, tensors = _layers(folder / "layers.json"), _tensors(folder / "model.safetensors")
    for name, about in layers.items():
        try:
            model = _rebuilt(model, name, about, tensors)
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ValueError(f"the layer {name!r} in `{folder / 'layers.json'}` cannot be built ({what})") from error
    fill(model, tensors)
    return model


def fill(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load all values; a tied weight may be stored under either name."""
    own = model.state_dict()
    for name, t in own.items():
        if name in tensors and tensors[name].shape != t.shape:
            shapes = f"{list(tensors[name].shape)} in the file, {list(t.shape)} in the model"
            raise ValueError(f"the weights are of a different model: size mismatch for {name}, {shapes}")
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    own = model.state_dict()
    filled = {own[name].data_ptr() for name in tensors if name in own}
    missing = [name for name in missing if own[name].data_ptr() not in filled]
    if missing or unexpected:
        raise ValueError(f"the weights are of a different model: missing {missing[:3]}, unexpected {unexpected[:3]}")


def _layers(file: Path) -> dict[str, Any]:
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST:
            raise ValueError("missing, or too large")
        layers = json.loads(file.read_text(encoding="utf-8"))["layers"]
        if not isinstance(layers, dict):
            raise TypeError("`layers` is not an object")
    except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
        raise ValueError(f"`{file}` is damaged ({error}); restore it, or export the model again") from error
    return layers


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        if not file.is_file():
            raise OSError("not a file")
        return load_file(file)
    except (SafetensorError, OSError, MemoryError) as error:
        raise ValueError(f"`{file}` is damaged ({error}); restore it, or export the model again") from error


def _rebuilt(model: nn.Module, name: str, about: dict, tensors: dict[str, Tensor]) -> nn.Module:
    """The model with one layer as it is in the file."""
    layer, prefix = model.get_submodule(name), f"{name}." if name else ""
    if about["kind"] == "parametrized":
        for weight, shape in about["weights"].items():
            _parametrize(layer, weight, shape, f"{prefix}parametrizations.{weight}.", tensors)
        return model
    if about["kind"] != "sequential":
        raise TypeError(f"unknown kind {about['kind']!r}")
    parts: list[Any] = [_part(part, f"{prefix}{i}.", tensors) for i, part in enumerate(about["parts"])]
    _check_pair(parts, layer)
    like = next(layer.parameters())
    pair: Any = nn.Sequential(*parts).to(like.dtype).to_empty(device=like.device).train(layer.training)
    pair.low_rank = True  # lets Thinwire recognise its layers and compress them further
    if not name:
        return pair
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, pair)
    return model


def _part(part: dict, prefix: str, tensors: dict[str, Tensor]) -> nn.Module:
    """One of the layers, without values, if the file has its values in this size."""
    arguments = dict(part["arguments"])
    if odd := arguments.keys() - _SIZES - set(_SETTINGS):
        raise TypeError(f"unknown argument {min(odd)!r}")
    layer = _CLASSES[part["class"]](**arguments, device="meta")
    for name, p in layer.named_parameters():
        _check_shape(tensors, prefix + name, p.shape)
    return layer


def _check_pair(parts: list[Any], dense: Any) -> None:
    """Two layers in the place of one, with its inputs and outputs."""
    first, second = parts
    _check_settings(first, dense)
    _check_settings(second, None)
    ends = second.weight.shape[0], first.weight.shape[1]
    if first.weight.shape[0] != second.weight.shape[1] or sorted(ends) != sorted(dense.weight.shape[:2]):
        raise TypeError(f"{first} and {second} do not fit in the place of {dense}")


def _check_settings(part: Any, dense: nn.Module | None) -> None:
    """The first convolution moves over the input as the dense one does, the second one takes single points."""
    if isinstance(part, nn.Linear):
        return
    plain = type(part)(1, 1, 1, device="meta")
    for setting in _SETTINGS:
        found, wanted = getattr(part, setting), getattr(dense or plain, setting)
        if found != wanted:
            raise TypeError(f"{setting} is {found}, and not {wanted}")


def _parametrize(module: nn.Module, name: str, shape: list[int], prefix: str, tensors: dict[str, Tensor]) -> None:
    weight = dict(module.named_parameters(recurse=False))[name]
    rows, rank = shape
    inner = "0.weight" if weight.dim() == 2 else "0.0.weight"
    _check_shape(tensors, f"{prefix}original", torch.Size((rows, rank)))
    _check_shape(tensors, prefix + inner, torch.Size((weight[0].numel(), rank)))
    spread: Any = nn.Linear(rank, weight[0].numel(), bias=False)
    if weight.dim() > 2:
        spread = nn.Sequential(spread, nn.Unflatten(1, tuple(weight.shape[1:])))
    spread.to(weight).low_rank = True
    setattr(module, name, nn.Parameter(weight.new_zeros(shape)))
    parametrize.register_parametrization(module, name, spread, unsafe=True)


def _check_shape(tensors: dict[str, Tensor], name: str, shape: torch.Size) -> None:
    """Before memory is taken for it."""
    if name not in tensors or tensors[name].shape != shape:
        there = list(tensors[name].shape) if name in tensors else "not there"
        raise TypeError(f"{name!r} should have the shape {list(shape)}, and is {there} in model.safetensors")
