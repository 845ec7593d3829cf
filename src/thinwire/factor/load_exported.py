"""Load a low-rank model into your own code; needs only torch and safetensors.

    model = load(MyModel(), "this/folder")     # MyModel builds the dense model, as before training

Every low-rank layer is replaced by the plain torch.nn layers that it consists of now.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize


def load(model: nn.Module, folder: str | Path = ".") -> nn.Module:
    """Give `model` the saved layers and values."""
    folder = Path(folder)
    for name, about in json.loads((folder / "layers.json").read_text())["layers"].items():
        if about["kind"] == "parametrized":
            for weight, shape in about["weights"].items():
                _parametrize(model.get_submodule(name), weight, shape)
        else:
            model = _replace(model, name, _pair(about["parts"]))
    fill(model, load_file(folder / "model.safetensors"))
    return model


def fill(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load all values; a tied weight may be stored under either name."""
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    own = model.state_dict()
    filled = {own[name].data_ptr() for name in tensors if name in own}
    missing = [name for name in missing if own[name].data_ptr() not in filled]
    if missing or unexpected:
        raise ValueError(f"the weights are of a different model: missing {missing[:3]}, unexpected {unexpected[:3]}")


def _pair(parts: list[dict]) -> nn.Module:
    pair: Any = nn.Sequential(*(getattr(nn, part["class"])(**part["arguments"]) for part in parts))
    pair.low_rank = True  # lets Thinwire recognise its layers and compress them further
    return pair


def _replace(model: nn.Module, name: str, new: nn.Module) -> nn.Module:
    old = model.get_submodule(name)
    new.to(next(old.parameters())).train(old.training)
    if not name:
        return new
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
    return model


def _parametrize(module: nn.Module, name: str, shape: list[int]) -> None:
    weight = getattr(module, name)
    spread: Any = nn.Linear(shape[1], weight[0].numel(), bias=False)
    if weight.dim() > 2:
        spread = nn.Sequential(spread, nn.Unflatten(1, tuple(weight.shape[1:])))
    spread.to(weight).low_rank = True
    setattr(module, name, nn.Parameter(weight.new_zeros(shape)))
    parametrize.register_parametrization(module, name, spread, unsafe=True)
