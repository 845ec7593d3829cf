"""Augmentation of colour images, on the device and the same for any number of workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.base.errors import ConfigError
from thinwire.train.step_rng import StepRNG

Channels = tuple[float, float, float]
CIFAR10: tuple[Channels, Channels] = (0.49139968, 0.48215841, 0.44653091), (0.24703223, 0.24348513, 0.26158784)
"""Mean and standard deviation of the training images' channels, of pixels / 255."""
CIFAR100: tuple[Channels, Channels] = (0.50707516, 0.48654887, 0.44091784), (0.26733429, 0.25643846, 0.27615047)
IMAGENET: tuple[Channels, Channels] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Colour images of bytes, (n, 3, height, width), each augmented independently."""

    statistics: tuple[Channels, Channels]
    """Mean and standard deviation of each channel, of pixels / 255."""
    scale: tuple[float, float] | None = None
    """Random resized crop: smallest and largest fraction of the area."""
    rand_augment: float | None = None
    """Magnitude, of 10, of two RandAugment operations; None for none."""
    pad: int = 0
    """Largest shift in pixels; the border is black."""
    flip: bool = True
    """Flip half of the images."""
    erase: float = 0.0
    """Fraction of images with random erasing: a box of noise."""

    def __post_init__(self) -> None:
        if not 0 <= self.erase <= 1:
            raise ConfigError(f"`erase`={self.erase} must be a fraction of the images, from 0 to 1")
        if self.scale is not None and not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ConfigError(f"`scale`={self.scale} must be two fractions of the area, the smaller one first")

    @torch.no_grad()
    def train(self, x: Tensor, rng: StepRNG) -> Tensor:
        if self.pad or self.flip:
            x = _shift(x, rng, self.pad, self.flip)
        if self.scale is not None:
            x = _resized_crop(x.float(), rng, self.scale)
        for _ in range(0 if self.rand_augment is None else 2):
            red, green, blue = self.statistics[0]
            grey = _channels((255 * red, 255 * green, 255 * blue), x.device)
            x = rand_augment(x.float(), rng, self.rand_augment or 0.0, fill=grey)
        x = self.heldout(x)
        if self.erase:
            x = _erase(x, rng, self.erase)
        return x

    @torch.no_grad()
    def heldout(self, x: Tensor) -> Tensor:
        # GPUs are faster with channels last; layers follow their input.
        layout = torch.channels_last if x.is_cuda else torch.contiguous_format
        (red, green, blue), (r, g, b) = self.statistics
        shift = _channels((-red / r, -green / g, -blue / b), x.device)
        scale = _channels((1 / (255 * r), 1 / (255 * g), 1 / (255 * b)), x.device)
        return torch.addcmul(shift, x.to(torch.float32, memory_format=layout), scale)


@cache
def _channels(values: Channels, device: torch.device) -> Tensor:
    """One value per channel, cached on the device: copying it again would wait for the device."""
    return torch.tensor(values, device=device).view(1, 3, 1, 1)


@cache
def _places(shape: torch.Size, device: torch.device) -> list[Tensor]:
    """Indices of images, channels, rows and columns, each along its own dimension."""
    return [torch.arange(n, device=device).view([-1 if i == d else 1 for i in range(4)]) for d, n in enumerate(shape)]


def _shift(x: Tensor, rng: StepRNG, pad: int, flip: bool) -> Tensor:
    """Shift by up to `pad` pixels and flip half of the images, in one look-up per pixel."""
    image, channel, rows, columns = _places(x.shape, x.device)
    if flip:
        columns = torch.where(rng.uniform(1, 1, 1) < 0.5, columns.flip(3), columns)
    if pad:
        down, right = rng.integers(0, 2 * pad + 1, 2, 1, 1, 1).unbind(1)
        rows, columns = rows + down, columns + right
        x = F.pad(x, (pad, pad, pad, pad))
    return x[image, channel, rows, columns]


def _resized_crop(x: Tensor, rng: StepRNG, scale: tuple[float, float]) -> Tensor:
    """A box of each image, resized to the whole; the whole image if no box fits."""
    tall, wide = x.shape[2:]
    height, width, top, left, found = _boxes(rng, (tall, wide), scale, 3 / 4, spare=0)
    height, width = torch.where(found, height, float(tall)), torch.where(found, width, float(wide))
    right, down = (2 * left * found + width) / wide - 1, (2 * top * found + height) / tall - 1
    zero = torch.zeros_like(width)
    return sample(x, [width / wide, zero, right, zero, height / tall, down], rng, outside="border")


def _erase(x: Tensor, rng: StepRNG, share: float) -> Tensor:
    """Noise in a box, in some of the images."""
    tall, wide = x.shape[2:]
    height, width, top, left, found = (
        t.view(-1, 1, 1, 1) for t in _boxes(rng, (tall, wide), (0.02, 1 / 3), 0.3, spare=1)
    )
    _, _, rows, columns = _places(x.shape, x.device)
    inside = (rows >= top) & (rows < top + height) & (columns >= left) & (columns < left + width)
    chosen = found & (rng.uniform(1, 1, 1) < share)
    noise = rng.noise(*x.shape[1:]).to(memory_format=torch.channels_last if x.is_cuda else torch.contiguous_format)
    return torch.where(inside & chosen, noise, x)


def _boxes(
    rng: StepRNG, size: tuple[int, int], area: tuple[float, float], aspect: float, *, spare: int
) -> tuple[Tensor, ...]:
    """Height, width, top, left of one box per image, and whether one fits: the first of ten that does."""
    tall, wide = size
    areas = rng.uniform(10, low=area[0], high=area[1]) * (tall * wide)
    aspects = rng.uniform(10, low=math.log(aspect), high=-math.log(aspect)).exp()
    heights, widths = (areas / aspects).sqrt().round(), (areas * aspects).sqrt().round()
    fits = (heights <= tall - spare) & (widths <= wide - spare)
    first = fits.int().argmax(1, keepdim=True)
    height, width, found = (each.gather(1, first).squeeze(1) for each in (heights, widths, fits))
    top, left = ((rng.uniform() * (whole + 1 - side)).floor() for whole, side in ((tall, height), (wide, width)))
    return height, width, top, left, found


OPERATIONS = (
    *("autocontrast", "equalize", "invert", "posterize", "solarize", "solarize-add"),
    *("color", "contrast", "brightness", "sharpness"),
    *("rotate", "shear-x", "shear-y", "translate-x", "translate-y"),
)
_GREY = (0.299, 0.587, 0.114)


def rand_augment(x: Tensor, rng: StepRNG, magnitude: float, *, fill: Tensor) -> Tensor:
    """One operation to half of the images of 0 to 255; what moves leaves `fill`, (1, 3, 1, 1), behind."""
    drawn = rng.integers(0, 2 * len(OPERATIONS))  # the second half are none
    is_drawn = {name: drawn == k for k, name in enumerate(OPERATIONS)}
    level = (rng.normal() * 0.05 + magnitude / 10).clamp(0, 1)
    signs = _signs(rng)
    x = _move(x, rng, is_drawn, level * signs, fill)
    return _recolour(x, {name: mask.view(-1, 1, 1, 1) for name, mask in is_drawn.items()}, level, signs)


def sample(x: Tensor, theta: list[Tensor], rng: StepRNG, *, outside: str) -> Tensor:
    """Where (u, v) of the new image comes from, bilinear or bicubic as it happens; `theta` is (2, 3) by rows."""
    grid = F.affine_grid(torch.stack(theta, 1).view(-1, 2, 3), list(x.shape), align_corners=False)
    linear, cubic = (
        F.grid_sample(x, grid, mode=mode, padding_mode=outside, align_corners=False) for mode in ("bilinear", "bicubic")
    )
    return torch.where(_signs(rng).view(-1, 1, 1, 1) > 0, linear, cubic)


def _move(x: Tensor, rng: StepRNG, is_drawn: dict[str, Tensor], level: Tensor, fill: Tensor) -> Tensor:
    """Rotations about the centre by up to 30°, shears from the corner by 0.3, shifts by 0.45 of the side."""
    angle = is_drawn["rotate"] * level * math.radians(30)
    shear_x, shear_y = (is_drawn[f"shear-{axis}"] * level * 0.3 for axis in "xy")
    shift_x, shift_y = (is_drawn[f"translate-{axis}"] * level * 0.9 for axis in "xy")
    cos, sin = angle.cos(), angle.sin()
    theta = [cos, sin + shear_x, shear_x + shift_x, shear_y - sin, cos, shear_y + shift_y]
    return sample(x - fill, theta, rng, outside="zeros") + fill


def _recolour(x: Tensor, is_drawn: dict[str, Tensor], level: Tensor, signs: Tensor) -> Tensor:
    """Operations on values of 0 to 255; levels are steps of 1/256 and bits where timm has whole numbers."""
    x = x.clamp(0, 255).round()
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    level = level.view(-1, 1, 1, 1)
    unit = torch.exp2(4 + (4 * level).floor())  # 4 bits are left at level 0, and none at 1
    new = {
        "autocontrast": torch.where(high > low, (x - low) * 255 / (high - low).clamp(min=1), x),
        "equalize": _equalized(x),
        "invert": 255 - x,
        "posterize": (x / unit).floor() * unit,
        "solarize": torch.where(x < 256 - (256 * level).floor(), x, 255 - x),
        "solarize-add": torch.where(x < 128, x + (110 * level).floor(), x),
        **_enhanced(x, (1 + 0.9 * level * signs.view(-1, 1, 1, 1)).clamp(min=0.1)),
    }
    for name, changed in new.items():
        x = torch.where(is_drawn[name], changed, x)
    return x.clamp(0, 255)


def _enhanced(x: Tensor, factor: Tensor) -> dict[str, Tensor]:
    """Away from, or towards, an image without colour, contrast, light or edges."""
    red, green, blue = _GREY
    grey = red * x[:, :1] + green * x[:, 1:2] + blue * x[:, 2:]
    flat = grey.mean((2, 3), keepdim=True)
    return {
        "color": grey + factor * (x - grey),
        "contrast": flat + factor * (x - flat),
        "brightness": factor * x,
        "sharpness": torch.lerp(_smooth(x), x, factor),
    }


def _smooth(x: Tensor) -> Tensor:
    """The mean of a pixel, weighted five times, and its eight neighbours; the border stays."""
    inner = (9 * F.avg_pool2d(x, 3, 1) + 4 * x[:, :, 1:-1, 1:-1]) / 13
    return torch.cat([x[:, :, :1], torch.cat([x[:, :, 1:-1, :1], inner, x[:, :, 1:-1, -1:]], 3), x[:, :, -1:]], 2)


def _equalized(x: Tensor) -> Tensor:
    """Histogram equalization of each channel, by PIL's rule."""
    values = x.flatten(2).long()  # (n, 3, pixels)
    counts = torch.zeros(*values.shape[:2], 256, device=x.device).scatter_add_(2, values, torch.ones_like(x).flatten(2))
    highest = counts.gather(2, values.amax(2, keepdim=True))
    step = ((values.shape[2] - highest) / 255).floor()
    table = (((step / 2).floor() + counts.cumsum(2) - counts) / step.clamp(min=1)).floor().clamp(max=255)
    return torch.where(step > 0, table.gather(2, values), values.float()).view_as(x)


def _signs(rng: StepRNG) -> Tensor:
    """1 or −1 per image."""
    return 2.0 * rng.integers(0, 2) - 1
