"""What runs read their examples from, and batches that depend only on (seed, step).

Every worker computes the indices of the whole global batch and takes its share. So batches are the same for every
method and any number of workers, and a resumed run needs only its step.
"""

from __future__ import annotations

import gzip
import itertools
import shlex
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
SHIPPED = Path(__file__).parent.parent / "datasets"


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


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text as ids of its tokens; an example is a window of `block` tokens, with the next tokens as targets."""

    train_ids: Tensor
    """Ids of the training part; windows may start anywhere."""
    heldout_ids: Tensor
    """Ids of the held-out part; its windows do not overlap."""
    block: int
    """Tokens in a window."""
    tokens: Sequence[str]
    """The vocabulary, in the order of ids: characters or words."""
    validation_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    """Ids of a validation part; empty if there is none."""

    def __post_init__(self) -> None:
        for part, ids in (("trained on", self.train_ids), ("held out", self.heldout_ids)):
            if len(ids) <= self.block:
                raise ConfigError(
                    f"the part {part} has {len(ids)} tokens, too few for one window of `block` {self.block} and the "
                    "token after it; give more text or a smaller `block`"
                )

    @property
    def vocabulary(self) -> int:
        """The number of different tokens."""
        return len(self.tokens)

    @property
    def train_size(self) -> int:
        return len(self.train_ids) - self.block

    @property
    def pass_size(self) -> int:
        """Windows that cover the training part once."""
        return -(-len(self.train_ids) // self.block)

    @property
    def heldout_size(self) -> int:
        return (len(self.heldout_ids) - 1) // self.block

    @property
    def validation_size(self) -> int:
        return max(0, (len(self.validation_ids) - 1) // self.block)

    def train(self, indices: np.ndarray, rng: StepRNG | None = None) -> tuple[Tensor, Tensor]:
        return _windows(self.train_ids, indices, self.block)

    def heldout(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return _windows(self.heldout_ids, indices * self.block, self.block)

    def validation(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return _windows(self.validation_ids, indices * self.block, self.block)

    def for_validation(self) -> Text:
        """The validation part held out, or the last tenth of the training part where there is none."""
        if self.validation_size:
            return replace(self, heldout_ids=self.validation_ids)
        cut = cut_for_validation(len(self.train_ids))
        return replace(self, train_ids=self.train_ids[:cut], heldout_ids=self.train_ids[cut:])

    def to(self, device: torch.device | str) -> Text:
        """The same text on `device`."""
        parts = ("train_ids", "heldout_ids", "validation_ids")
        return replace(self, **{part: getattr(self, part).to(device) for part in parts})


def _windows(ids: Tensor, starts: np.ndarray, block: int) -> tuple[Tensor, Tensor]:
    begin = rows_on(ids.device, starts)
    places = begin[:, None] + torch.arange(block + 1, device=ids.device)  # (examples, block + 1)
    window = ids[places].long()
    return window[:, :-1], window[:, 1:]


def shakespeare(folder: Path | None = None, *, block: int = 64, heldout: int = 32_768) -> Text:
    """Tiny Shakespeare by characters; the last `heldout` characters are held out."""
    text = unpacked_text(locate("tinyshakespeare.txt.gz", folder))
    characters = "".join(sorted(set(text)))
    number = {c: i for i, c in enumerate(characters)}
    ids = torch.tensor([number[c] for c in text], dtype=torch.uint8)
    return Text(train_ids=ids[:-heldout], heldout_ids=ids[-heldout:], block=block, tokens=characters)


def how_to_fill(folder: Path | None, addresses: Mapping[str, str]) -> str:
    """The commands that download files into a folder, and what to type then."""
    target = shlex.quote(str(folder)) if folder is not None else "DIR"
    fetch = (f"curl -fL --create-dirs -o {target}/{name} {address}" for name, address in addresses.items())
    return f"To fill the folder: {' && '.join(fetch)}; then give `--data {target}`"
