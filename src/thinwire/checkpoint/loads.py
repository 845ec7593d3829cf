"""State dicts that are loaded in mid-run: a rollback to the best model, or weights from elsewhere.

What groups agreed on, the momentum of outer steps, residuals and averages under way belong to the values from before.
So a load is noticed, by hooks of the model and its optimizers, and before the next training batch all workers begin
again from what was loaded. A load that is taken back before then, as by a worker that evaluates other weights, is none.
A state of the model in another shape is refused, with words about what to do instead.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.base.errors import ThinwireError
from thinwire.comm.buckets import checksum
from thinwire.comm.fsdp import local, whole_of
from thinwire.factor.convert import Layer
from thinwire.factor.layers import names_of_factors
from thinwire.factor.moments import LINEAR, QUADRATIC
from thinwire.methods.runner import Runner

_loads: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Loads]]" = weakref.WeakKeyDictionary()
"""By references to both: a value that holds its key would keep a model, and its replica, for good."""
_ignored = 0


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """What is loaded inside is a save of ours, with all that belongs to it."""
    global _ignored
    _ignored += 1
    try:
        yield
    finally:
        _ignored -= 1


class Loads:
    """What was loaded into a model and its optimizers since this was last cleared."""

    def __init__(self, method: Runner) -> None:
        self.method = method
        self.model: nn.Module = whole_of(method.model)
        self.clear()

    def clear(self) -> None:
        """All workers have begun again."""
        self._models = self._optimizers = 0
        self._before: int | None = None

    def follow(self) -> list[Callable[[], None]]:
        """Notice loads from now on, also into parts of the model; returns how to stop."""
        releases: list[Callable[[], Any]] = []
        for module in self.model.modules():
            _loads[module] = weakref.ref(self)
            releases.append(module.register_load_state_dict_pre_hook(_before_load).remove)
            releases.append(functools.partial(_loads.pop, module, None))
        for optimizer in self.method.optimizers:
            releases.append(optimizer.register_load_state_dict_pre_hook(self._note_optimizer).remove)
        return releases

    def note(self, module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        """A state is about to be loaded into the model or a part of it; it is refused if it does not fit."""
        if module is self.model and self._knows_shapes:
            _refuse_model(self.method, state, prefix)
        if module is self.model or not prefix:  # not once more for each part of what is loaded
            self._models += 1
            if self._before is None:
                self._before = self._checksum()

    def _note_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        if not _ignored:
            if self._knows_shapes:
                _refuse_optimizer(self.method, optimizer, state)
            self._optimizers += 1

    @property
    def _knows_shapes(self) -> bool:
        """Not of a sharded model: a state may hold a shard or all of it."""
        return not self.method.wire.is_sharded

    @property
    def were_noted(self) -> bool:
        """Whether anything was loaded, perhaps to be taken back."""
        return bool(self._models or self._optimizers)

    @property
    def are_new(self) -> bool:
        """Whether anything was loaded, and not taken back."""
        if self._models > 1 and not self._optimizers and not self.are_others:
            self.clear()
        return self.were_noted

    @property
    def are_others(self) -> bool:
        """Whether the model has other values than before."""
        return self._before is not None and self._checksum() != self._before

    def _checksum(self) -> int:
        with torch.no_grad():
            return checksum([local(p) for p in self.model.parameters()])


# A function of the module, and not a method: a copy of a model has the same hooks, and so does a pickled one.


def _before_load(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    found = _loads.get(module, lambda: None)()
    if found is not None and not _ignored:
        found.note(module, state, prefix)


# States of another shape.

_REMEDY = (
    "layers change their shape when they are factored, and the optimizer's state with them; resume by "
    "replica.load(folder) from what replica.save(folder) wrote, which brings the shape back first, or load the state "
    "before attach()"
)


def _refuse_model(method: Runner, state: Mapping[str, Any], prefix: str) -> None:
    for layer in method.shape.layers:
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


def _refuse_optimizer(method: Runner, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    if len(state["param_groups"]) != len(optimizer.param_groups):
        return  # torch has words for that
    if not method.shape.layers:
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
