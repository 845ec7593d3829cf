"""The optimizers' part of a save: their state, and the settings of their parameter groups."""

import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.base.errors import ConfigError
from thinwire.base.files import json_text, read_json
from thinwire.checkpoint.saved_state import OPTIMIZERS, check_complete, check_settings, check_state
from thinwire.checkpoint.saves import Files
from thinwire.checkpoint.tensors import apart, copied, like, read_tensors, together
from thinwire.comm.fsdp import local, whole_of
from thinwire.comm.sharded import like_whole
from thinwire.factor.moments import LINEAR, QUADRATIC
from thinwire.factor.optimizers import Optimizers
from thinwire.methods.base import Method

_NESTED = "nested."
"""Begins the names of tensors that are in lists of an optimizer's state, as SOAP's and Shampoo's matrices."""


def _held(method: Method) -> list[list[nn.Parameter]]:
    """This model's parameters, by the optimizer that holds them, which may train other models too."""
    own = {id(whole_of(p)) for p in method.model.parameters()}
    return [[p for p in Optimizers(o).parameters if id(p) in own] for o in method.optimizers]


def captured(suffix: str, method: Method) -> Files:
    """State by OPTIMIZER.PARAMETER.NAME, both counted from 0, and the settings of every parameter group."""
    optimizers = method.optimizers
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {}
    for number, (optimizer, held) in enumerate(zip(optimizers, _held(method), strict=True)):
        for i, p in enumerate(held):
            for name, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{number}.{i}.{name}"] = local(value)
                else:
                    plain[f"{number}.{i}.{name}"], nested = apart(value, f"{_NESTED}{number}.{i}.{name}")
                    tensors |= nested
    groups = [{k: _json(v) for k, v in group.items() if k != "params"} for _, group in optimizers.groups]
    return {
        f"optimizer{suffix}.safetensors": copied(tensors),
        f"optimizer{suffix}.json": json_text({"state": plain, "param_groups": groups}),
    }


def read(folder: Path, suffix: str, method: Method) -> None:
    """Fill the optimizers with what `captured` gave, where the model has its shape."""
    optimizers, held = method.optimizers, _held(method)
    file = folder / f"optimizer{suffix}.json"
    saved, tensors = read_json(file, schema=OPTIMIZERS), read_tensors(file.with_suffix(".safetensors"))
    if len(saved["param_groups"]) != len(optimizers.groups):
        raise ConfigError(
            f"{file} holds {len(saved['param_groups'])} parameter groups, the optimizers here have "
            f"{len(optimizers.groups)}; build them as they were when it was saved"
        )
    for optimizer, parameters in zip(optimizers, held, strict=True):
        for p in parameters:
            optimizer.state.pop(p, None)
    device = next(method.model.parameters()).device
    nested = {name: tensors.pop(name).to(device) for name in [*tensors] if name.startswith(_NESTED)}
    for key, value in {**together(saved["state"], nested), **tensors}.items():
        found = re.fullmatch(r"(\d{1,9})\.(\d{1,9})\.(.+)", key)
        if not found or int(found[1]) >= len(held) or int(found[2]) >= len(held[int(found[1])]):
            raise ConfigError(f"{file} holds state {key!r} of a parameter that is not here; build the same optimizers")
        _put_state(optimizers[int(found[1])], held[int(found[1])][int(found[2])], found[3], value, file)
    for (_, group), values in zip(optimizers.groups, saved["param_groups"], strict=True):
        check_settings(file, group, values)
        for name, value in values.items():
            group[name] = like(value, group.get(name))
    for optimizer, parameters in zip(optimizers, held, strict=True):
        check_complete(file, optimizer, parameters)


def _put_state(optimizer: Optimizer, p: nn.Parameter, name: str, value: Any, file: Path) -> None:
    check_state(file, name, value)
    if isinstance(value, Tensor) and value.dim() and name in LINEAR | QUADRATIC and value.shape != local(p).shape:
        raise ConfigError(
            f"{file} holds {name!r} of shape {list(value.shape)} for a parameter of shape "
            f"{list(local(p).shape)}; build model and optimizers as they were when it was saved"
        )
    put_state(optimizer, p, name, value)


def put_state(optimizer: Optimizer, p: nn.Parameter, name: str, value: Any) -> None:
    """Set one value of a parameter's state in its own dtype: torch's `load_state_dict` rounds to the parameter's."""
    # Steps are on the CPU unless the optimizer's settings ask for them on the parameter's device.
    on_device = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
    moves = isinstance(value, Tensor) and (value.dim() > 0 or on_device)
    kept = value.to(p.device) if moves else value
    per_element = isinstance(kept, Tensor) and kept.shape == local(p).shape
    optimizer.state[p][name] = like_whole(kept, p) if per_element else kept


def lay_out_in_rows(method: Method) -> None:
    """Let a run that goes on hold its matrices as one that resumes will."""
    for state in (state for optimizer in method.optimizers for state in optimizer.state.values()):
        state.update({name: _in_rows(value) for name, value in state.items() if isinstance(value, list | tuple)})


def _in_rows(value: Any) -> Any:
    """Matrices laid out as a save holds them: products of others, such as SOAP's bases, are rounded in another way."""
    if isinstance(value, list | tuple):
        return [_in_rows(part) for part in value]
    return value.contiguous() if isinstance(value, Tensor) else value


def _json(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
