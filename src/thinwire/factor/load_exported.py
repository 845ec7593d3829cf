"""Load a low-rank model into your own code; needs torch and safetensors alone.

    model = load(MyModel(), "this/folder")     # MyModel builds the dense model, as before training

Every layer that became low-rank is replaced by the plain torch.nn layers it is made of now.
"""

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrize


def load(model: nn.Module, folder: str | Path = ".") -> nn.Module:
    """Give `model` the saved shape and values."""
    folder = Path(folder)
    for name, told in json.loads((folder / "layers.json").read_text())["layers"].items():
        if told["kind"] == "parametrized":
            for weight, shape in told["weights"].items():
                _parametrize(model.get_submodule(name), weight, shape)
        else:
            model = _replace(model, name, nn.Sequential(*(_layer(part) for part in told["parts"])))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model


def _layer(part: dict) -> nn.Module:
    return getattr(nn, part["class"])(**part["arguments"])


def _replace(model: nn.Module, name: str, new: nn.Module) -> nn.Module:
    if not name:
        return new
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
    return model


def _parametrize(module: nn.Module, name: str, shape: list[int]) -> None:
    weight = getattr(module, name)
    spread: nn.Module = nn.Linear(shape[1], weight[0].numel(), bias=False)
    if weight.dim() > 2:
        spread = nn.Sequential(spread, nn.Unflatten(1, tuple(weight.shape[1:])))
    setattr(module, name, nn.Parameter(weight.new_zeros(shape)))
    parametrize.register_parametrization(module, name, spread, unsafe=True)
