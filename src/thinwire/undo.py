"""What groups do together, taken back."""

from typing import Any

import torch
from torch import Tensor

from thinwire.methods.base import Method


class Undo:
    """A copy of what an average may change: model, optimizers and method."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.state = _copied(method.state_dict())
        self.values = [(t, t.detach().clone()) for t in (*method.model.parameters(), *method.model.buffers())]
        self.moments = [
            (optimizer, p, _copied(dict(optimizer.state.get(p, {}))))
            for optimizer in method.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]

    @torch.no_grad()
    def restore_values(self) -> None:
        """Put parameters, buffers and optimizer state back."""
        for t, value in self.values:
            t.copy_(value)
        for optimizer, p, state in self.moments:
            if state:
                optimizer.state[p] = state
            else:
                optimizer.state.pop(p, None)


def _copied(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list | tuple) else tree
