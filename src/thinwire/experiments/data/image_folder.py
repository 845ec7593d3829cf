"""Images in folders, one per class, decoded when they are needed."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from thinwire.base.errors import ConfigError
from thinwire.train.step_rng import StepRNG

if TYPE_CHECKING:
    from PIL import Image

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels of the whole image."""
TRIES = 10
"""Random crops that are tried before the centre is taken, as in torchvision."""
_ASPECT = (3 / 4, 4 / 3)


def random_box(width: int, height: int, scale: tuple[float, float], numbers: Sequence[Sequence[float]]) -> Box:
    """A crop of random area, aspect and position: torchvision's `RandomResizedCrop`.

    `numbers` has `TRIES` rows of four numbers from 0 to 1: for area, aspect, top and left.
    """
    low, high = map(math.log, _ASPECT)
    for area, aspect, top, left in numbers:
        wanted = width * height * (scale[0] + area * (scale[1] - scale[0]))
        ratio = math.exp(low + aspect * (high - low))
        w, h = round(math.sqrt(wanted * ratio)), round(math.sqrt(wanted / ratio))
        if 0 < w <= width and 0 < h <= height:
            x, y = min(int(left * (width - w + 1)), width - w), min(int(top * (height - h + 1)), height - h)
            return x, y, x + w, y + h
    w, h = min(width, round(height * _ASPECT[1])), min(height, round(width / _ASPECT[0]))
    return _middle(width, height, w, h)


def centre_box(width: int, height: int, crop_pct: float) -> Box:
    """The middle square with a side of `crop_pct` of the shorter one."""
    side = min(width, height) * crop_pct
    return _middle(width, height, side, side)


def _middle(width: int, height: int, w: float, h: float) -> Box:
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2


def decode(path: Path, size: int, choose: Callable[[int, int], Box]) -> np.ndarray:
    """The part of an image that `choose` picks by its width and height, as uint8 (3, size, size)."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            width, height = image.size
            left, top, right, bottom = choose(width, height)
            # A JPEG is decoded at 1/2, 1/4 or 1/8 of its size if the crop still has enough pixels.
            across, down = size / max(right - left, 1), size / max(bottom - top, 1)
            image.draft("RGB", (math.ceil(width * across), math.ceil(height * down)))
            x, y = image.width / width, image.height / height
            box = (left * x, top * y, min(right * x, image.width), min(bottom * y, image.height))
            whole = image if image.mode == "RGB" else _in_bytes(image).convert("RGB")
            small = whole.resize((size, size), Image.Resampling.BILINEAR, box=box)
        return np.asarray(small).transpose(2, 0, 1)
    except Exception as error:  # a damaged image can raise anything
        raise ConfigError(
            f"`{path}` cannot be decoded ({type(error).__name__}: {error}); replace or remove the file"
        ) from error


def _in_bytes(image: Image.Image) -> Image.Image:
    """The high bytes of 16-bit grey values, as Pillow reads 16-bit colours; it would clip these at 255."""
    from PIL import Image

    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 2**16 - 1) >> 8).astype(np.uint8))


_ENDINGS = (".jpg", ".jpeg", ".png")
_HELDOUT = ("val", "validation")
_SCRIPT = "https://raw.githubusercontent.com/pytorch/examples/main/imagenet/extract_ILSVRC.sh"
_FILL = (
    "ImageNet is for those who register at https://www.image-net.org/download.php: download ILSVRC2012_img_train.tar "
    "(138 GB) and ILSVRC2012_img_val.tar (6.3 GB) there into one folder, and in it "
    f"curl -fLO {_SCRIPT} && bash extract_ILSVRC.sh; this leaves imagenet/train/CLASS and imagenet/val/CLASS, "
    "then give `--data imagenet`"
)
Crop = Sequence[Sequence[float]] | None
"""Random numbers for an example's crop; None takes the centre."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """The images of one part. ImageNet has over a million, so their names are in one array."""

    folder: Path
    """Holds one folder per class."""
    names: np.ndarray
    """File names as bytes, (examples,)."""
    numbers: np.ndarray
    """Their classes, int64 (examples,)."""

    def of(self, rows: np.ndarray) -> Files:
        """Some of them."""
        return replace(self, names=self.names[rows], numbers=self.numbers[rows])


@dataclass(frozen=True, kw_only=True)
class Folder:
    """Images in folders, one per class; a file is read whenever its example is needed."""

    train_files: Files
    """The part that is trained on."""
    heldout_files: Files
    """The part held out."""
    classes: tuple[str, ...]
    """Names of the classes, in the order of their numbers."""
    size: int
    """Height and width of an example."""
    crop_pct: float
    """Fraction of the shorter side that evaluation sees."""
    scale: tuple[float, float]
    """Smallest and largest fraction of an image's area in a training crop."""
    threads: int
    """Images decoded at a time."""

    @property
    def streamed(self) -> bool:
        return True

    @property
    def train_size(self) -> int:
        return len(self.train_files.names)

    @property
    def heldout_size(self) -> int:
        return len(self.heldout_files.names)

    def train(self, indices: np.ndarray, rng: StepRNG | None = None) -> tuple[Tensor, Tensor]:
        """uint8 (examples, 3, size, size) and classes, randomly cropped; without `rng` from the centre."""
        crops = [None] * len(indices) if rng is None else rng.uniform(TRIES, 4).tolist()
        return self._decode(self.train_files, indices, crops)

    def heldout(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """uint8 (examples, 3, size, size) and classes, from the centre of each image."""
        return self._decode(self.heldout_files, indices, [None] * len(indices))

    def for_validation(self) -> Folder:
        """Every tenth training image held out, because images are sorted by class."""
        held = np.arange(self.train_size) % 10 == 0
        train, heldout = (self.train_files.of(rows) for rows in (~held, held))
        return replace(self, train_files=train, heldout_files=heldout)

    def fingerprint(self) -> str:
        """A hash of the classes, their sizes and a thousand or two file names; opens no file."""
        numbers = np.arange(len(self.classes))
        digest = hashlib.blake2b(repr(self.classes).encode(), digest_size=8)
        for files in (self.train_files, self.heldout_files):
            digest.update(np.searchsorted(files.numbers, numbers).tobytes())  # where each class starts
            digest.update(files.names[:: max(1, len(files.names) // 1000)].tobytes())
        return digest.hexdigest()

    def _decode(self, files: Files, indices: np.ndarray, crops: Sequence[Crop]) -> tuple[Tensor, Tensor]:
        assert len(crops) == len(indices), "`rng` is for another number of examples"
        x = torch.empty(len(indices), 3, self.size, self.size, dtype=torch.uint8)
        pixels = x.numpy()

        def fill(row: int) -> None:
            index = indices[row]
            path = files.folder / self.classes[files.numbers[index]] / os.fsdecode(files.names[index])
            pixels[row] = decode(path, self.size, lambda width, height: self._box(width, height, crops[row]))

        with ThreadPoolExecutor(self.threads) as pool:  # Pillow releases the GIL while it decodes
            list(pool.map(fill, range(len(indices))))
        return x, torch.from_numpy(files.numbers[indices])

    def _box(self, width: int, height: int, crop: Crop) -> Box:
        if crop is None:
            return centre_box(width, height, self.crop_pct)
        return random_box(width, height, self.scale, crop)


def image_folder(
    folder: Path | None,
    *,
    size: int,
    crop_pct: float = 0.875,
    scale: tuple[float, float] = (0.08, 1.0),
    threads: int | None = None,
) -> Folder:
    """Images of `folder/train/CLASS` to train on and of `folder/val/CLASS`, or `validation`, held out.

    Classes are numbered by their sorted names. The list of files is read once, here. `threads` is this worker's share
    of the machine's cores unless given.
    """
    if find_spec("PIL") is None:
        raise ConfigError("reading image files needs Pillow: pip install 'thinwire[images]'")
    train, heldout = _part(folder, ("train",)), _part(folder, _HELDOUT)
    classes = _classes(train)
    _compare(train, classes, heldout, _classes(heldout))
    return Folder(
        train_files=_scan(train, classes),
        heldout_files=_scan(heldout, classes),
        classes=classes,
        size=size,
        crop_pct=crop_pct,
        scale=scale,
        threads=threads or _cores(),
    )


def _part(folder: Path | None, names: tuple[str, ...]) -> Path:
    for name in names:
        if folder is not None and (path := Path(folder) / name).is_dir():
            return path
    where = f"no folder `{names[0]}` in `{folder}`" if folder is not None else "images do not come with Thinwire"
    raise ConfigError(
        f"{where}; give `--data DIR` with DIR/train/CLASS/*.jpg and DIR/{' (or '.join(_HELDOUT)})/CLASS/*.jpg, "
        f"or .jpeg or .png. {_FILL}"
    )


def _classes(part: Path) -> tuple[str, ...]:
    with os.scandir(part) as entries:
        found = tuple(sorted(e.name for e in entries if e.is_dir() and not e.name.startswith(".")))
    if not found:
        raise ConfigError(f"`{part}` holds no folder; sort its images into one folder per class. {_FILL}")
    return found


def _compare(train: Path, known: tuple[str, ...], heldout: Path, found: tuple[str, ...]) -> None:
    lone = {train: sorted(set(known) - set(found)), heldout: sorted(set(found) - set(known))}
    differing = [
        f"only in `{part}`: {', '.join(names[:5])}{' …' * (len(names) > 5)}" for part, names in lone.items() if names
    ]
    if differing:
        raise ConfigError(f"both parts must have the same class folders; {'; '.join(differing)}")


def _scan(part: Path, classes: tuple[str, ...]) -> Files:
    names, numbers = [], []
    for number, name in enumerate(classes):
        with os.scandir(part / name) as entries:
            found = sorted(
                os.fsencode(e.name) for e in entries if e.name.lower().endswith(_ENDINGS) and e.name[0] != "."
            )
        if not found:
            raise ConfigError(f"`{part / name}` holds no image that ends in {', '.join(_ENDINGS)}; remove or fill it")
        names += found
        numbers += [number] * len(found)
    return Files(folder=part, names=np.array(names), numbers=np.array(numbers, dtype=np.int64))


def _cores() -> int:
    """This worker's share of the machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
