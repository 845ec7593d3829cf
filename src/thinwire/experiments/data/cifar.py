"""CIFAR-10 and CIFAR-100, from the files their authors publish or from npz files."""

from __future__ import annotations

import pickle
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from thinwire.base.errors import ConfigError
from thinwire.base.files import check_file
from thinwire.train.data import LARGEST, Images, arrays, damaged, read_whole

Arrays = tuple[np.ndarray, np.ndarray]
"""uint8 pixels (examples, 3, 32, 32) and classes (examples,)."""

_PICKLED: dict[tuple[str, str], Any] = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0] for core in ("core", "_core")},
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}
"""All names in a pickled array. A pickle may name any function, and unpickling calls it."""


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """One layout of a data set in a folder; the last of its files is the held-out part."""

    files: tuple[str, ...]
    """Names of the files."""
    read: Callable[[Path], Arrays]
    """Reads one of them."""
    inner: str = "."
    """The folder that the archive unpacks to; it or its parent may be given."""

    def missing(self, folder: Path) -> tuple[Path, list[str]]:
        """The folder to read from, and what is missing there; of two folders, the more complete one."""
        found = [
            (place, [f for f in self.files if not (place / f).is_file()]) for place in (folder, folder / self.inner)
        ]
        return min(found, key=lambda pair: len(pair[1]))


def cifar10(folder: Path | None) -> Images:
    """CIFAR-10: 50,000 images of 32×32 pixels to train on and 10,000 held out, as bytes, in 10 classes.

    `folder` holds the files of `cifar-10-python.tar.gz` or the folder that it unpacks to, or `cifar10_train_1.npz` …
    `cifar10_train_5.npz` and `cifar10_test.npz`.
    """
    batches = tuple(f"data_batch_{k}" for k in range(1, 6))
    packed = tuple(f"cifar10_train_{k}.npz" for k in range(1, 6))
    original = _Layout(files=(*batches, "test_batch"), inner="cifar-10-batches-py", read=_pickled("labels"))
    npz = _Layout(files=(*packed, "cifar10_test.npz"), read=_npz)
    return _load(10, folder, original, npz)


def cifar100(folder: Path | None) -> Images:
    """CIFAR-100: 50,000 images of 32×32 pixels to train on and 10,000 held out, as bytes, in 100 classes.

    `folder` holds the files of `cifar-100-python.tar.gz` or the folder that it unpacks to.
    """
    original = _Layout(files=("train", "test"), inner="cifar-100-python", read=_pickled("fine_labels"))
    return _load(100, folder, original)


def _load(classes: int, folder: Path | None, *layouts: _Layout) -> Images:
    place, files, read = _choose(f"CIFAR-{classes}", f"cifar-{classes}-python", folder, *layouts)
    with ThreadPoolExecutor(len(files)) as pool:
        parts = list(pool.map(lambda file: _checked(read, place / file, classes), files))
    x, y = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts))
    cut = len(x) - len(parts[-1][0])
    return Images(x=x, y=y.long(), train_rows=np.arange(cut), heldout_rows=np.arange(cut, len(x)))


def _choose(
    name: str, archive: str, folder: Path | None, *layouts: _Layout
) -> tuple[Path, tuple[str, ...], Callable[[Path], Arrays]]:
    """The first complete layout."""
    looked = []
    for layout in layouts:
        files = f"{', '.join(layout.files)}{f' (there or in {layout.inner}/)' if layout.inner != '.' else ''}"
        if folder is not None:
            place, missing = layout.missing(Path(folder))
            if not missing:
                return place, layout.files, layout.read
            files += f"; missing: {', '.join(missing)}" if len(missing) < len(layout.files) else "; none is there"
        looked.append(files)
    where = f"no {name} in `{folder}`" if folder is not None else f"{name} does not come with Thinwire"
    url = f"https://www.cs.toronto.edu/~kriz/{archive}.tar.gz"
    target = shlex.quote(str(folder)) if folder is not None else "DIR"
    raise ConfigError(
        f"{where}; looked for " + ", or for ".join(looked) + f". To fill the folder: mkdir -p {target} && "
        f"curl -fLO {url} && tar xzf {archive}.tar.gz -C {target}; then give `--data {target}`"
    )


def _checked(read: Callable[[Path], Arrays], path: Path, classes: int) -> Arrays:
    """The content of a file, if it has the shape of images and `classes` classes."""
    try:
        x, y = read_whole(lambda: read(path))
    except ConfigError:
        raise
    except Exception as error:  # a damaged archive or pickle can raise anything
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    if x.dtype != np.uint8 or x.shape[1:] != (3, 32, 32) or y.shape != x.shape[:1] or y.dtype.kind not in "iu":
        raise damaged(path, f"it holds {x.dtype} {x.shape} and {y.dtype} {y.shape}")
    if len(strange := y[(y < 0) | (y >= classes)]):
        raise damaged(path, f"it has an image of class {strange[0]}, where classes are 0 to {classes - 1}")
    return x, y


def _npz(path: Path) -> Arrays:
    """Pixels are stored as differences that wrap around: red and blue minus green, then along columns and rows."""
    d, y = arrays(path, "d", "y")
    x = np.cumsum(np.cumsum(d, 2, dtype=np.uint8), 3, dtype=np.uint8)  # (3, examples, 32, 32)
    x[::2] += x[1]
    return np.ascontiguousarray(x.transpose(1, 0, 2, 3)), y


def _pickled(labels: str) -> Callable[[Path], Arrays]:
    def read(path: Path) -> Arrays:
        check_file(path, "download it again", LARGEST)
        with path.open("rb") as file:
            held = _Unpickler(file, path).load()
        return held[b"data"].reshape(-1, 3, 32, 32), np.array(held[labels.encode()])

    return read


class _Unpickler(pickle.Unpickler):
    """Reads arrays, bytes, text, numbers, lists and dicts, as Python 2 wrote them, and nothing else."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file, encoding="bytes")
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PICKLED:
            return _PICKLED[module, name]
        raise ConfigError(
            f"`{self._path}` asks to run `{module}.{name}`, which no file of CIFAR does; "
            "it was not run. Delete the file and download it again"
        )
