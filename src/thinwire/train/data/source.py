"""What a run reads its examples from, and batches that follow from (seed, step) alone.

Every worker computes the whole global batch's indices and takes its share, so the batches are the same
for every method and every number of workers, and a resumed run needs nothing but its step.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.train.step_rng import StepRNG

SHIPPED = Path(__file__).parent.parent.parent / "datasets"


class Source(Protocol):
    """A training part and a held-out part, each a numbered list of examples.

    A source whose examples fit in memory may have `to(device)`, which gives the same data held on that device;
    indices stay numpy's. One that is `streamed`, true, reads files for every batch and is worth reading ahead. One
    with a third part may have `validation_size` and `validation(indices)`. Workers of a run compare sizes and a few
    examples; one with `fingerprint()`, a text that differs for other data, need not read any for it. One whose
    examples overlap may say by `pass_size` how many of them are a pass over the data. For `--validate` it needs
    `for_validation()`, which returns the source with its validation part, or a part of its training examples, held out.
    """

    @property
    def train_size(self) -> int: ...
    @property
    def heldout_size(self) -> int: ...
    def train(self, indices: np.ndarray, rng: StepRNG | None = None) -> tuple[Tensor, Tensor]:
        """Examples to train on. What is random in reading one comes from `rng`, whose rows are these examples."""
        ...

    def heldout(self, indices: np.ndarray) -> tuple[Tensor, Tensor]: ...


def for_validation(source: Source) -> Source:
    """The source with validation examples in place of the held-out ones."""
    if not hasattr(source, "for_validation"):
        raise ConfigError(
            f"`--validate` needs a source that can hold out training examples; give {type(source).__name__} a method "
            "`for_validation()`, which returns the source with others held out"
        )
    return source.for_validation()


def cut_for_validation(size: int) -> int:
    """How many of the first training examples are left where the last tenth is held out."""
    return size - max(1, size // 10)


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


def unpacked(path: Path) -> bytes:
    """What a file holds, plain or, by its name, packed as `.gz`."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"`{path}` cannot be read ({type(error).__name__}: {error}); download it again") from error


def unpacked_text(path: Path) -> str:
    """The same as text, which must be UTF-8; its lines end as they do in the file."""
    try:
        return unpacked(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"`{path}` is not UTF-8 ({error}); convert it or download it again") from error


T = TypeVar("T")


def read_whole(read: Callable[[], T]) -> T:
    """What `read` gives; once more if the interpreter itself stumbles, which says nothing of the file.

    numpy parses a file's header as Python, and Python 3.11's parser now and then loses count when garbage is collected
    in its midst (SystemError).
    """
    try:
        return read()
    except SystemError:
        return read()


def damaged(path: Path, why: str) -> ConfigError:
    """The error for a file that can be read and holds something else."""
    return ConfigError(f"`{path}` is not what its name says, or damaged ({why}); download and unpack it again")


def rows_on(device: torch.device, rows: np.ndarray) -> Tensor:
    """Row numbers on a device, without waiting for what it is doing: copies from pinned memory queue up behind it."""
    found = torch.from_numpy(rows)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


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


def check_share(batch: int, workers: int) -> None:
    """Refuse a batch that leaves a worker without an example."""
    if workers > batch:
        raise ConfigError(f"a batch of {batch} cannot be shared by {workers} workers; use at most {batch}")
