"""State dicts that are loaded in mid-run: a rollback to the best model, or weights from elsewhere.

What groups agreed on, the momentum of outer steps, residuals and averages under way belong to the values from before.
So a load is noticed, by hooks of the model and its optimizers, and before the next training batch all workers begin
again from what was loaded. A load that is taken back before then, as by a worker that evaluates other weights, is none.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from thinwire.comm.buckets import checksum
from thinwire.factor.optimizers import Optimizers
from thinwire.shards import local

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

    def __init__(self, model: nn.Module, optimizers: Optimizers) -> None:
        self.model = model
        self.optimizers = optimizers
        self.clear()

    def clear(self) -> None:
        """All workers have begun again."""
        self._models = self._optimizers = 0
        self._before: int | None = None

    def follow(self) -> list[Callable[[], None]]:
        """Notice loads from now on, also into parts of the model; returns how to stop."""
        releases = []
        for module in self.model.modules():
            _loads[module] = weakref.ref(self)
            releases.append(module.register_load_state_dict_pre_hook(_before_load).remove)
            releases.append(lambda module=module: _loads.pop(module, None))
        for optimizer in self.optimizers:
            releases.append(optimizer.register_load_state_dict_pre_hook(self._note_optimizer).remove)
        return releases

    def note(self, module: nn.Module, prefix: str) -> None:
        """A state is about to be loaded into the model or a part of it."""
        if module is self.model or not prefix:  # not once more for each part of what is loaded
            self._models += 1
            if self._before is None:
                self._before = self._checksum()

    def _note_optimizer(self, *_: Any) -> None:
        self._optimizers += not _ignored

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


# Functions of the module, and not methods: a copy of a model has the same hooks, and so does a pickled one.


def _before_load(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    found = _loads.get(module, lambda: None)()
    if found is not None and not _ignored:
        found.note(module, prefix)
