"""Tiny folders that lie like the real data sets, the same every time."""

import gzip
import pickle
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

IMAGES = 20
"""Images in a file of CIFAR."""
CLASSES = ("n01", "n02", "n03")
"""Classes of the image folder: eight images each to train on and two held out."""


def folder_for(kind: str, place: Path) -> Path:
    """A folder within `place` that stands in for the data set whose name `kind` is, or contains, as a recipe's does."""
    chosen = max((name for name in _KINDS if name in kind), key=len)
    folder = place / chosen
    if not folder.exists():
        folder.mkdir(parents=True)
        _KINDS[chosen](folder)
    return folder


def pixels(seed: int, count: int = IMAGES) -> np.ndarray:
    """uint8 (count, 3, 32, 32)."""
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)


def pickled(path: Path, held: dict[str, Any]) -> None:
    """As Python 2 wrote it, which CIFAR's authors used."""
    with path.open("wb") as file:
        _Python2(file, protocol=2).dump(held)


class _Python2(pickle._Pickler):
    """Text and bytes as one kind, and numpy under the name that it had."""

    dispatch = dict(pickle._Pickler.dispatch)

    def _string(self, value: str | bytes) -> None:
        held = value.encode() if isinstance(value, str) else value
        self.write(pickle.BINSTRING + len(held).to_bytes(4, "little") + held)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = _string

    def save_global(self, obj: Any, name: str | None = None) -> None:
        module = obj.__module__.replace("numpy._core", "numpy.core")
        self.write(pickle.GLOBAL + f"{module}\n{obj.__name__}\n".encode())
        self.memoize(obj)

    dispatch[type] = dispatch[type(pickled)] = save_global


def _cifar10(folder: Path) -> None:
    inner = folder / "cifar-10-batches-py"
    inner.mkdir()
    for seed, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        pickled(inner / name, {"data": pixels(seed).reshape(IMAGES, -1), "labels": [i % 10 for i in range(IMAGES)]})


def _cifar10_npz(folder: Path) -> None:
    for seed, name in enumerate([*(f"train_{k}" for k in range(1, 6)), "test"]):
        x = pixels(seed).transpose(1, 0, 2, 3).copy()  # (3, examples, 32, 32)
        x[::2] -= x[1]
        d = np.diff(np.diff(x, axis=2, prepend=np.uint8(0)), axis=3, prepend=np.uint8(0))
        np.savez_compressed(folder / f"cifar10_{name}.npz", d=d, y=np.arange(IMAGES, dtype=np.uint8) % 10)


def _cifar100(folder: Path) -> None:
    inner = folder / "cifar-100-python"
    inner.mkdir()
    for seed, name in enumerate(("train", "test")):
        labels = {"fine_labels": [5 * i % 100 for i in range(IMAGES)], "coarse_labels": [i % 20 for i in range(IMAGES)]}
        pickled(inner / name, {"data": pixels(seed).reshape(IMAGES, -1), **labels})


def _imagenet(folder: Path) -> None:
    from PIL import Image

    chance = np.random.default_rng(0)
    for part, count in (("train", 8), ("val", 2)):
        for number, name in enumerate(CLASSES):
            (folder / part / name).mkdir(parents=True)
            for k in range(count):
                height, width = chance.integers(40, 100, 2)
                coarse = chance.integers(0, 256, (4, 4, 3), dtype=np.uint8)
                image = Image.fromarray(coarse).resize((int(width), int(height)), Image.Resampling.BICUBIC)
                ending = ("JPEG", "png", "jpg")[(k + number) % 3]
                (image.convert("L") if k == 3 else image).save(folder / part / name / f"{name}_{k}.{ending}")


def _wikitext2(folder: Path) -> None:
    chance = np.random.default_rng(0)
    words = np.array(["<unk>", ",", ".", "=", *(f"w{i}" for i in range(60))])
    for part, lines in (("train", 400), ("valid", 120), ("test", 120)):
        text = "".join(f" {' '.join(words[chance.integers(0, len(words), 20)])} \n" for _ in range(lines))
        (folder / f"{part}.txt").write_text(text, encoding="utf-8")


def _ettm2(folder: Path) -> None:
    start, rows = datetime(2016, 7, 1), 3_600  # a fifth of it holds a window of 720
    walk = np.random.default_rng(0).standard_normal((rows, 7)).cumsum(0) * 0.2
    day = np.sin(np.arange(rows) * 2 * np.pi / 96)[:, None]
    lines = ["date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT"]
    for k, values in enumerate(20 + 5 * day + walk):
        lines.append(f"{start + timedelta(minutes=15 * k)},{','.join(f'{v:.6f}' for v in values)}")
    (folder / "ETTm2.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _text(folder: Path) -> None:
    words = np.array(["the", "wire", "is", "thin", "and", "words", "are", "few", "but", "they", "come", "home"])
    text = " ".join(words[np.random.default_rng(0).integers(0, len(words), 4_000)])
    (folder / "a.txt").write_text(text, encoding="utf-8")
    (folder / "b.txt.gz").write_bytes(gzip.compress(text[::-1].encode(), mtime=0))


_KINDS: dict[str, Callable[[Path], None]] = {
    "cifar10": _cifar10,
    "cifar10-npz": _cifar10_npz,
    "cifar100": _cifar100,
    "imagenet": _imagenet,
    "wikitext2": _wikitext2,
    "ettm2": _ettm2,
    "text": _text,
}
