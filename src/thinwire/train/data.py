"""Data held in memory, and batches that follow from (seed, step) alone.

Every worker computes the whole global batch's indices and takes its share, so the batches are the same
for every method and every number of workers, and a resumed run needs nothing but its step.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import ConfigError

SHIPPED = Path(__file__).parent.parent / "datasets"
_SPLIT_SEED = 1797


class Source(Protocol):
    """A training part and a held-out part, each a numbered list of examples."""

    @property
    def train_size(self) -> int: ...
    @property
    def heldout_size(self) -> int: ...
    def train(self, indices: np.ndarray) -> tuple[Tensor, Tensor]: ...
    def heldout(self, indices: np.ndarray) -> tuple[Tensor, Tensor]: ...


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

    def train(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return self._rows(self.train_rows[indices])

    def heldout(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return self._rows(self.heldout_rows[indices])

    def _rows(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(rows)
        return self.x[chosen], self.y[chosen]


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text as character ids; an example is a window of `block` characters and the same one further on."""

    train_ids: Tensor
    """Ids of the part that is trained on; windows may begin anywhere in it."""
    heldout_ids: Tensor
    """Ids of the part held out; its windows do not overlap."""
    block: int
    """Characters in a window."""
    characters: str
    """The vocabulary, in the order of ids."""

    @property
    def train_size(self) -> int:
        return len(self.train_ids) - self.block

    @property
    def heldout_size(self) -> int:
        return (len(self.heldout_ids) - 1) // self.block

    def train(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return _windows(self.train_ids, indices, self.block)

    def heldout(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return _windows(self.heldout_ids, indices * self.block, self.block)


def _windows(ids: Tensor, starts: np.ndarray, block: int) -> tuple[Tensor, Tensor]:
    places = torch.from_numpy(starts)[:, None] + torch.arange(block + 1)  # (examples, block + 1)
    window = ids[places].long()
    return window[:, :-1], window[:, 1:]


def digits(folder: Path | None = None) -> Images:
    """1,797 handwritten digits of 8×8 pixels: 1,257 to train on and 540 held out, by a fixed permutation."""
    with np.load(locate("digits8x8.npz", folder)) as file:
        x, y = file["x"], file["y"]
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(x))
    cut = len(x) * 7 // 10
    pixels = torch.from_numpy(x.astype(np.float32))[:, None] / 8 - 1
    classes = torch.from_numpy(y.astype(np.int64))
    return Images(x=pixels, y=classes, train_rows=order[:cut], heldout_rows=order[cut:])


def shakespeare(folder: Path | None = None, *, block: int = 64, heldout: int = 32_768) -> Text:
    """Tiny Shakespeare by characters; the last `heldout` characters are held out."""
    with gzip.open(locate("tinyshakespeare.txt.gz", folder), "rt", encoding="utf-8") as file:
        text = file.read()
    characters = "".join(sorted(set(text)))
    number = {c: i for i, c in enumerate(characters)}
    ids = torch.tensor([number[c] for c in text], dtype=torch.uint8)
    return Text(train_ids=ids[:-heldout], heldout_ids=ids[-heldout:], block=block, characters=characters)


def locate(name: str, folder: Path | None = None) -> Path:
    """The file `name` in `folder`, or the copy that travels with the package."""
    path = Path(folder or SHIPPED) / name
    if path.is_file():
        return path
    if folder is None:
        raise ConfigError(f"the package's own `{name}` is missing; reinstall thinwire or give `--data DIR`")
    raise ConfigError(
        f"no `{name}` in `{folder}`; give a folder that holds a file of that name, "
        "or leave `--data` out to use the copy in the package"
    )


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The order in which a run sees its examples: each once an epoch, drawn from (seed, epoch)."""

    size: int
    """Examples in the training part."""
    batch: int
    """Examples in a global batch."""
    seed: int
    """The run's seed."""

    def indices(self, step: int) -> np.ndarray:
        """The global batch of `step`, counted from 0; a batch may reach into the next epoch."""
        places = np.arange(step * self.batch, (step + 1) * self.batch)
        epochs, within = np.divmod(places, self.size)
        return np.concatenate([_order(self.size, self.seed, int(e))[within[epochs == e]] for e in np.unique(epochs)])


@lru_cache(maxsize=2)
def _order(size: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(size)


def share(indices: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    """Worker `rank`'s part of a global list; parts differ by one at most.

    Where they do, every worker's mean loss still weighs the same, as with DDP and a sharded loader.
    """
    return np.array_split(indices, world_size)[rank]
