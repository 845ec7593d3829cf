"""What the files of a save may hold; checked when they are read, and before memory is taken for what they claim."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.base.errors import DamagedError
from thinwire.base.files import REMEDY, header
from thinwire.base.schema import ANY, COUNT, FIGURE, FLAG, NUMBER, POSITIVE, TEXT, Row, wrong
from thinwire.factor.layers import FORMS
from thinwire.factor.moments import LINEAR, QUADRATIC

_SPENT = (None, {"seconds": NUMBER})
_TIMES = {"steps": COUNT} | dict.fromkeys(
    ("whole?", "in_steps?", "waiting_in_steps?", "decomposing?", "after_steps?"), _SPENT
)
_LEDGER = {"rows": [Row([TEXT] * 3 + [NUMBER] * 3)], "times": {str: _TIMES}, "kernel": {str: [NUMBER]}}
STATE = {
    "format": ANY,
    "method_name": TEXT,
    "config": {str: ANY},
    "world_size": POSITIVE,
    "in_sync": FLAG,
    "groups": [[COUNT]],
    "optimizers": [TEXT],
    "method": {"step": COUNT, "phase": TEXT, "events": [{str: ANY}]},
    "scaler": (None, {str: NUMBER}),
    "traffic": _LEDGER,
    "baseline?": (None, {str: NUMBER}),
}
WORKER = {
    "method": {"forwards": COUNT, "idle?": COUNT, "observed": Row([FIGURE] * 2)},
    "ledger": _LEDGER,
    "scaler": (None, {str: NUMBER}),
}
OPTIMIZERS = {"state": {str: ANY}, "param_groups": [{str: ANY}]}


def refuse(file: Path, what: str | None) -> None:
    if what:
        raise DamagedError(f"`{file}` is damaged, {what}; {REMEDY}")


def check_ranks(folder: Path, shared: Mapping[str, Any], model: Path) -> None:
    """Layers get no other rank than their factors in the file have: a rank alone could take any amount of memory."""
    ranks = shared.get("ranks")
    if not ranks:
        return
    firsts = tuple(f"_{form[0]}" for form in FORMS.values())
    there = {name: shape[1] for name, shape in header(model).items() if name.endswith(firsts) and len(shape) == 2}
    for key, rank in ranks.items():
        found = [there[key + first] for first in firsts if key + first in there]
        if rank not in (found or there.values()):  # a tied weight is there under one of its names
            refuse(folder / "state.json", f"the rank {rank!r} of {key!r} is not that in `{model.name}`")


def check_groups(state: Mapping[str, Any]) -> None:
    """Every worker is in one group."""
    ranks = sorted(rank for group in state["groups"] for rank in group)
    if len(ranks) != state["world_size"] or ranks != [*range(len(ranks))] or not all(state["groups"]):
        raise DamagedError(f"the save is damaged, its groups are not those of {state['world_size']} workers; {REMEDY}")


def check_state(file: Path, name: str, value: Any) -> None:
    """A moment is a tensor of numbers, or absent."""
    is_numbers = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    if name in LINEAR | QUADRATIC and value is not None and not is_numbers:
        refuse(file, f"{name!r} is not a tensor of floating-point numbers")


def check_complete(file: Path, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """The state that torch's own optimizers would otherwise miss in the next step."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    known: dict[tuple[int, int, torch.dtype], Mapping[str, Any]] = {}
    for p in parameters:
        group, state = groups[id(p)], optimizer.state.get(p, {})
        key = id(group), p.dim(), p.dtype
        if key not in known:
            known[key] = _state_of(optimizer, group, p, file)
        for name, wanted in known[key].items() if state else ():
            there = state.get(name, "missing")
            # A momentum that has not begun is None.
            if there is not None and getattr(there, "ndim", None) != getattr(wanted, "ndim", None):
                refuse(file.with_suffix(".safetensors"), f"a parameter of shape {list(p.shape)} has no valid {name!r}")


def _state_of(optimizer: Optimizer, group: Mapping[str, Any], p: nn.Parameter, file: Path) -> Mapping[str, Any]:
    """What a parameter like this one has after a step; nothing for an optimizer that is not torch's own."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return {}
    settings = {name: group[name] for name in inspect.signature(kind).parameters if name in group and name != "params"}
    trial = nn.Parameter(p.new_zeros([1] * p.dim()))
    trial.grad = torch.zeros_like(trial)
    try:
        once = kind([trial], **settings)
        once.step()
    except (ArithmeticError, ValueError) as error:
        refuse(file, f"{kind.__name__} cannot step with its settings ({error})")
    except (RuntimeError, TypeError):
        return {}
    return once.state[trial]


def check_settings(file: Path, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """The settings of a parameter group are of the kind they have here, and do not replace its parameters."""
    if "params" in saved:
        refuse(file, "it has 'params', which are the model's")
    refuse(file, wrong(saved, {f"{name}?": _setting(value) for name, value in group.items()}, "param_groups"))


def _setting(value: Any) -> Any:
    """The kind of a setting of a parameter group; where it is None, most may come."""
    if isinstance(value, bool):
        return FLAG
    if isinstance(value, int | float | Tensor):
        return FIGURE
    if isinstance(value, tuple | list):
        return Row([_setting(each) for each in value])
    return TEXT if isinstance(value, str) else (None, FLAG, FIGURE, TEXT)
