"""Images held in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire.base.errors import ConfigError
from thinwire.train.data.source import arrays, cut_for_validation, damaged, locate, read_whole, rows_on
from thinwire.train.step_rng import StepRNG

_SPLIT_SEED = 1797


@dataclass(frozen=True, kw_only=True)
class Images:
    """Images and their classes."""

    x: Tensor
    """All images, (examples, channels, height, width)."""
    y: Tensor
    """All classes, (examples,)."""
    train_rows: np.ndarray
    """Rows of `x` that are trained on."""
    heldout_rows: np.ndarray
    """Rows of `x` that are held out."""

    @property
    def train_size(self) -> int:
        return len(self.train_rows)

    @property
    def heldout_size(self) -> int:
        return len(self.heldout_rows)

    def train(self, indices: np.ndarray, rng: StepRNG | None = None) -> tuple[Tensor, Tensor]:
        return self._rows(self.train_rows[indices])

    def heldout(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return self._rows(self.heldout_rows[indices])

    def for_validation(self) -> Images:
        """The last tenth of the training images held out."""
        cut = cut_for_validation(self.train_size)
        return replace(self, train_rows=self.train_rows[:cut], heldout_rows=self.train_rows[cut:])

    def to(self, device: torch.device | str) -> Images:
        """The same images on `device`."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def _rows(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        chosen = rows_on(self.x.device, rows)
        return self.x[chosen], self.y[chosen]


def digits(folder: Path | None = None) -> Images:
    """1,797 handwritten digits of 8×8 pixels: 1,257 to train on and 540 held out, by a fixed permutation."""
    path = locate("digits8x8.npz", folder)
    try:
        x, y = read_whole(lambda: arrays(path, "x", "y"))
        if x.shape[1:] != (8, 8) or y.shape != x.shape[:1] or not {x.dtype.kind, y.dtype.kind} <= set("iu"):
            raise ValueError(f"it holds {x.dtype} {x.shape} and {y.dtype} {y.shape}")
        if not len(y) or y.min() < 0 or y.max() > 9:
            raise ValueError("classes are not 0 to 9")
    except ConfigError:
        raise
    except Exception as error:  # a damaged archive can raise anything
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(x))
    cut = len(x) * 7 // 10
    pixels = torch.from_numpy(x.astype(np.float32))[:, None] / 8 - 1
    classes = torch.from_numpy(y.astype(np.int64))
    return Images(x=pixels, y=classes, train_rows=order[:cut], heldout_rows=order[cut:])
