"""Random numbers that depend only on (seed, step), not on how many workers share a batch."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

_BLOCK = 64
"""Examples per seed in `noise`, where much is drawn for each."""


class StepRNG:
    """Random numbers for one step's examples.

    Every call draws for the whole global batch and returns this worker's rows. So an example gets the same numbers on
    any worker and with any method, and a resumed run needs only its step. Independent users within a step have
    different `stream`s.
    """

    def __init__(
        self,
        seed: int,
        step: int,
        *,
        batch: int,
        rank: int = 0,
        world_size: int = 1,
        stream: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._key = (seed, step, stream)
        self._batch = batch
        self._rank, self._world_size = rank, world_size
        self._device = device
        self._calls = 0

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """(examples, *shape), uniform between `low` and `high`."""
        drawn = self._mine(torch.rand(self._batch, *shape, **self._own))
        return drawn if (low, high) == (0, 1) else drawn * (high - low) + low

    def normal(self, *shape: int) -> Tensor:
        """(examples, *shape), normal with mean 0 and standard deviation 1."""
        return self._mine(torch.randn(self._batch, *shape, **self._own))

    def noise(self, *shape: int) -> Tensor:
        """Like `normal`, for large shapes: draws little more than this worker's rows."""
        mine = torch.tensor_split(torch.arange(self._batch), self._world_size)[self._rank]
        self._calls += 1
        first, last = int(mine[0]), int(mine[-1])
        blocks = range(first // _BLOCK, last // _BLOCK + 1)
        drawn = [torch.randn(_BLOCK, *shape, **self._generator(self._calls, block)) for block in blocks]
        return torch.cat(drawn)[first - blocks[0] * _BLOCK :][: len(mine)]

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """(examples, *shape), whole numbers from `low` to `high` − 1."""
        return self._mine(torch.randint(low, high, (self._batch, *shape), **self._own))

    @cached_property
    def _own(self) -> dict[str, Any]:
        return self._generator()

    def _generator(self, *more: int) -> dict[str, Any]:
        word = np.random.SeedSequence((*self._key, *more)).generate_state(1, np.uint64)[0]
        generator = torch.Generator(self._device).manual_seed(int(word >> np.uint64(1)))
        return {"generator": generator, "device": generator.device}

    def _mine(self, drawn: Tensor) -> Tensor:
        return torch.tensor_split(drawn, self._world_size)[self._rank]
