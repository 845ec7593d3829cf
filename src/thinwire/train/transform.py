"""What happens to examples between the data and the model: on the device, the same for any number of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from thinwire.train.step_rng import StepRNG


class Transform(Protocol):
    """Turns stored examples into what the model takes."""

    def train(self, x: Tensor, rng: StepRNG) -> Tensor:
        """For a training step; all random numbers come from `rng`."""
        ...

    def heldout(self, x: Tensor) -> Tensor:
        """For evaluation."""
        ...


@dataclass(frozen=True)
class AsIs:
    """Leaves examples as they are."""

    def train(self, x: Tensor, rng: StepRNG) -> Tensor:
        return x

    def heldout(self, x: Tensor) -> Tensor:
        return x
