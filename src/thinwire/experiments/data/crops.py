"""One image file decoded, cropped and resized."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from thinwire.base.errors import ConfigError

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
