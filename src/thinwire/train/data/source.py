"""What a run reads its examples from, and batches that depend only on (seed, step).

Every worker computes the indices of the whole global batch and takes its share. So batches are the same for every
method and any number of workers, and a resumed run needs only its step.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from thinwire.base.errors import ConfigError
from thinwire.base.files import check_file
from thinwire.train.step_rng import StepRNG

LARGEST = 1 << 30
"""Most bytes of a data file that is held in memory, packed or not."""
_PIECE = 1 << 20
SHIPPED = Path(__file__).parent.parent.parent / "datasets"


class Source(Protocol):
    """Training examples and held-out examples, each numbered from 0.

    A source may also have:
    `to(device)`: the same data held on that device, for data that fits in memory; indices stay numpy's.
    `streamed`: true if it reads files for every batch, which are then prefetched.
    `validation_size`, `validation(indices)`: a third part.
    `for_validation()`: the source with its validation part, or some training examples, held out; for `--validate`.
    `fingerprint()`: a string that identifies the data. Without it, workers compare sizes and a few examples.
    `pass_size`: the number of examples in one pass over the data, if examples overlap.
    """

    @property
    def train_size(self) -> int: ...
    @property
    def heldout_size(self) -> int: ...
    def train(self, indices: np.ndarray, rng: StepRNG | None = None) -> tuple[Tensor, Tensor]:
        """Training examples. Random numbers come from `rng`, which has one row per example."""
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
    """The number of training examples that remain when the last tenth is held out."""
    return size - max(1, size // 10)


def locate(name: str, folder: Path | None = None) -> Path:
    """The file `name` in `folder`, or the copy in the package."""
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
    """The content of a file, decompressed if its name ends in `.gz`; a few bytes may stand for any number of them."""
    check_file(path, "download it again", LARGEST)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            # In pieces: reading a number of bytes at once takes memory for all of them first.
            pieces = list(itertools.islice(iter(partial(file.read, _PIECE), b""), LARGEST // _PIECE + 1))
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"`{path}` cannot be read ({type(error).__name__}: {error}); download it again") from error
    if len(pieces) > LARGEST // _PIECE:
        raise ConfigError(f"`{path}` holds more than {LARGEST:,} bytes; give a smaller file, or download it again")
    return b"".join(pieces)


def arrays(path: Path, *names: str) -> tuple[np.ndarray, ...]:
    """Arrays of an npz file; none is unpickled, which could run code."""
    check_file(path, "download it again", LARGEST)
    with path.open("rb") as held, np.load(held, allow_pickle=False) as file:  # numpy would leave a damaged file open
        if (size := sum(part.file_size for part in file.zip.infolist())) > LARGEST:
            raise ValueError(f"it unpacks to {size:,} bytes, more than {LARGEST:,}")
        return tuple(file[name] for name in names)


def unpacked_text(path: Path) -> str:
    """The content as UTF-8 text; line ends stay as they are."""
    try:
        return unpacked(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"`{path}` is not UTF-8 ({error}); convert it or download it again") from error


T = TypeVar("T")


def read_whole(read: Callable[[], T]) -> T:
    """The result of `read`, tried again after a SystemError, which is the interpreter's fault and not the file's.

    numpy parses a file's header as Python, and Python 3.11's parser may fail when garbage is collected meanwhile.
    """
    try:
        return read()
    except SystemError:
        return read()


def damaged(path: Path, why: str) -> ConfigError:
    """The error for a readable file with the wrong content."""
    return ConfigError(f"`{path}` is not what its name says, or damaged ({why}); download and unpack it again")


def rows_on(device: torch.device, rows: np.ndarray) -> Tensor:
    """Row numbers on a device, without waiting for it: copies from pinned memory are queued."""
    found = torch.from_numpy(rows)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The order in which a run sees its examples: each once per epoch, shuffled by (seed, epoch)."""

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
    """Worker `rank`'s part of a global list; sizes differ by one at most.

    If they differ, every worker's mean loss still has the same weight, as with DDP and a sharded loader.
    """
    return np.array_split(indices, world_size)[rank]


def check_share(batch: int, workers: int) -> None:
    """Refuse a batch with fewer examples than workers."""
    if workers > batch:
        raise ConfigError(f"a batch of {batch} cannot be shared by {workers} workers; use at most {batch}")
