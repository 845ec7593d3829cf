"""What groups do together, taken back."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.factor.layers import Shape
from thinwire.methods.base import Method


class Undo:
    """A copy of what groups may change together: the model, in its shape, its optimizers and the method."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.state = _copied(method.state_dict())
        self._shape = Shape(method.model)
        self._found = {name: getattr(method, name) for name in ("layers", "kept", "decompositions", "found_ranks")}
        self._values = [
            (t, t.requires_grad, t.detach().clone()) for t in (*method.model.parameters(), *method.model.buffers())
        ]
        self._optimizers = [_OptimizerState(optimizer) for optimizer in method.optimizers]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back but the method's own state, which it has to load."""
        self._shape.restore()
        vars(self.method).update(self._found)
        for t, trains, value in self._values:
            t.requires_grad_(trains).copy_(value)
        for state in self._optimizers:
            state.restore()


class _OptimizerState:
    """Which parameters an optimizer has, and what it keeps of each."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        lists = ("params", "param_names")
        self._groups = [
            {name: list(group[name]) for name in lists if name in group} for group in optimizer.param_groups
        ]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._states = [(p, _copied(dict(optimizer.state.get(p, {})))) for p in held]

    def restore(self) -> None:
        now = [p for group in self.optimizer.param_groups for p in group["params"]]
        for group, before in zip(self.optimizer.param_groups, self._groups, strict=True):
            for name, values in before.items():
                group[name][:] = values
        for p in now:
            self.optimizer.state.pop(p, None)
        for p, state in self._states:
            if state:
                self.optimizer.state[p] = state


def _copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list | tuple) else tree
