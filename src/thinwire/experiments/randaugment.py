"""RandAugment on tensors: each image by itself, all of them at once, as timm does it on the host.

Cubuk et al., 2020, in timm's form `rand-mM-mstd0.5-inc1`: operations become stronger with the level, which is drawn
near M of 10 for every image.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.train.step_rng import StepRNG

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
