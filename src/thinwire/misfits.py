"""Refuse a state or a moving average of the model in another shape, with words about what to do instead."""

import functools
import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from thinwire.errors import ThinwireError
from thinwire.factor.convert import Layer
from thinwire.factor.layers import names_of_factors
from thinwire.factor.moments import LINEAR, QUADRATIC
from thinwire.methods.base import Method
from thinwire.shards import local, whole_of

_REMEDY = (
    "layers change their shape when they are factored, and the optimizer's state with them; resume by "
    "replica.load(folder) from what replica.save(folder) wrote, which brings the shape back first, or load the state "
    "before attach()"
)


def refuse_misfits(method: Method) -> list[Callable[[], None]]:
    """Check every state that the model or an optimizer of it is given to load; returns what ends this."""
    if method.wire.is_sharded or method.wire.is_simulated:  # a state may hold a shard or all of it
        return []
    model = whole_of(method.model).register_load_state_dict_pre_hook(_ModelCheck(method))
    optimizers = [
        o.register_load_state_dict_pre_hook(functools.partial(_check_optimizer, method)) for o in method.optimizers
    ]
    return [handle.remove for handle in (model, *optimizers)]


class _ModelCheck:
    """A hook on the model, which a copy of the model does not take along."""

    def __init__(self, method: Method | None = None) -> None:
        self._method = (lambda: None) if method is None else weakref.ref(method)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ModelCheck, ()

    def __call__(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        method = self._method()
        for layer in method.layers if method is not None else ():
            if (what := _misfit(layer, state, prefix)) is not None:
                raise ThinwireError(f"the state does not fit the model: {what}; {_REMEDY}")


def _misfit(layer: Layer, state: Mapping[str, Any], prefix: str) -> str | None:
    key = prefix + layer.key
    there = {name: list(state[name].shape) for name in (key, *names_of_factors(key)) if name in state}
    if not layer.is_factored:
        factors = [name for name in there if name != key]
        return f"{factors[0]!r} is a factor there, and {key!r} is whole here" if factors else None
    shapes = sorted(list(factor.shape) for factor in layer.factors)
    if key in there:
        return f"{key!r} is whole there, and has factors of rank {layer.rank} here"
    if there and sorted(there.values()) != shapes:
        return f"the factors of {key!r} have shapes {sorted(there.values())} there and {shapes} here"
    return None


def _check_optimizer(method: Method, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    if not method.layers or len(state["param_groups"]) != len(optimizer.param_groups):  # torch has words for the latter
        return
    for number, (saved, group) in enumerate(zip(state["param_groups"], optimizer.param_groups, strict=True)):
        kept, here = len(saved["params"]), len(group["params"])
        if kept != here:
            what = f"parameter group {number} has {kept} parameters there and {here} here"
            raise ThinwireError(f"the state does not fit the optimizer: {what}; {_REMEDY}")
        for index, p in zip(saved["params"], group["params"], strict=True):
            for name, value in state["state"].get(index, {}).items():
                if _is_moment(name, value) and local(value).shape != local(p).shape:
                    raise ThinwireError(
                        f"the state does not fit the optimizer: {name!r} of parameter {index} is {list(value.shape)} "
                        f"there, and the parameter {list(p.shape)} here; {_REMEDY}"
                    )


def _is_moment(name: str, value: Any) -> bool:
    return name in LINEAR | QUADRATIC and isinstance(value, Tensor) and value.dim() > 0


def guard_averages() -> None:
    """Let each of torch's moving averages say what to use instead, once its model has another shape.

    They are found among all objects, since a model does not know what was copied from it.
    """
    kinds: set[type[AveragedModel]] = {AveragedModel, *AveragedModel.__subclasses__()}
    torchs = {kind for kind in kinds if kind.update_parameters is AveragedModel.update_parameters}  # not thinwire.EMA
    averages: list[Any] = [each for each in gc.get_objects() if type(each) in torchs]
    for average in averages:
        average.update_parameters = functools.partial(_update, average)


def _update(average: AveragedModel, model: nn.Module) -> None:
    if [p.shape for p in average.module.parameters()] != [p.shape for p in model.parameters()]:
        raise ThinwireError(
            "torch's AveragedModel cannot follow a model whose layers have been factored: use thinwire.EMA(replica, "
            "decay), made after attach(), which averages full weights and goes on through every change of shape"
        )
    AveragedModel.update_parameters(average, model)
