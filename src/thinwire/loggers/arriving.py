"""Records whose numbers a GPU may still be computing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Arriving:
    """Passes records on when their numbers are there, without waiting: a record goes before the next, or by `flush`."""

    def __init__(self, deliver: Callable[[dict[str, Any]], None]) -> None:
        self._deliver = deliver
        self._waiting: dict[str, Any] | None = None

    def put(self, record: dict[str, Any]) -> None:
        """One record; values may be tensors of one number."""
        self.flush()
        self._waiting = {name: _pending(value) for name, value in record.items()}
        if not any(isinstance(value, _Pending) for value in self._waiting.values()):
            self.flush()

    def flush(self) -> None:
        """Wait for the numbers of the last record, and pass it on."""
        if self._waiting is not None:
            arrived = {n: v.number() if isinstance(v, _Pending) else v for n, v in self._waiting.items()}
            self._waiting = None
            self._deliver(arrived)


class _Pending:
    """A number being copied from a GPU to pinned memory."""

    def __init__(self, value: Tensor) -> None:
        self._here = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(
            value.detach(), non_blocking=True
        )
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def number(self) -> float:
        self._arrived.synchronize()
        return self._here.item()


def _pending(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _Pending(value) if value.is_cuda else value.item()
