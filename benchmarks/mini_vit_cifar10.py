"""A mini ViT on CIFAR-10 by any method, with the settings of OIALR's ablation (dissertation, section 4.4.4, Table A.2).

python benchmarks/mini_vit_cifar10.py --data DIR --method allreduce --preset baseline --json FILE
python benchmarks/mini_vit_cifar10.py --data DIR --method oialr --preset tuned --set cutoff=0.2 --json FILE
torchrun --nproc-per-node 4 benchmarks/mini_vit_cifar10.py --data DIR --method ab --epochs 40 --json FILE

Images are augmented on the device, each by itself, as timm does it on the host: a resized crop, a flip, two of
RandAugment's operations (`rand-m9-mstd0.5-inc1`) and erasing. DIR is as for vgg16_cifar10.py.
"""

import argparse
import math

import cifar10
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from thinwire.comm.topology import join
from thinwire.train.models import ViT

PRESETS = {
    "baseline": {"lr": 1e-4, "min_lr": 1e-5, "warmup_lr": 1e-5, "k_decay": 1.0, "warmup_epochs": 10.0},
    "tuned": {"lr": 2e-4, "min_lr": 8e-4, "warmup_lr": 8e-5, "k_decay": 0.4, "warmup_epochs": 17.0},
}
"""Table A.2's learning rates; the tuned ones rise as the trained parameters become fewer."""
SIDE = 32
MINI = {"image": SIDE, "patch": 8, "depth": 6, "heads": 6, "qkv_bias": False, "drop_path": 0.2}
"""ViT-B with patches of 8, six blocks and six heads: 42.7 M parameters."""
FILL = tuple(255 * mean for mean in cifar10.MEAN)
OPERATIONS = (
    *("autocontrast", "equalize", "invert", "posterize", "solarize", "solarize-add"),
    *("color", "contrast", "brightness", "sharpness"),
    *("rotate", "shear-x", "shear-y", "translate-x", "translate-y"),
)


def main() -> None:
    """One run."""
    options = _options()
    join()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    train, (x, y) = cifar10.load(options)
    train, test = tuple(t.to(device) for t in train), (cifar10.scaled(x).to(device), y.to(device))
    per_epoch = len(train[0]) // options.batch
    steps = options.epochs * per_epoch
    model = ViT(classes=10, **MINI).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=options.decay)
    scheduler = _schedule(optimizer, options, steps, per_epoch)
    replica = cifar10.attach(model, optimizer, options, steps)
    torch.manual_seed(options.seed * 1000 + replica.topology.rank)  # workers draw augmentations of their own
    history = cifar10.fit(replica, optimizer, scheduler, train, test, options, augment=augment)
    names = ("preset", *PRESETS["baseline"], "warmup_prefix", "decay")
    cifar10.tell(replica, history, test, {name: getattr(options, name) for name in names}, steps)


def _schedule(optimizer: Optimizer, options: argparse.Namespace, steps: int, per_epoch: int) -> LambdaLR:
    """timm's cosine: it counts from the first step, and so begins some way down (or up) after the warm-up."""
    warmup = round(options.warmup_epochs * per_epoch)

    def factor(step: int) -> float:
        if step < warmup:
            return (options.warmup_lr + (options.lr - options.warmup_lr) * step / warmup) / options.lr
        start = warmup if options.warmup_prefix else 0
        done = (min(step, steps) - start) / max(1, steps - start)
        weight = (1 + math.cos(math.pi * done**options.k_decay)) / 2
        return (options.min_lr + (options.lr - options.min_lr) * weight) / options.lr

    return LambdaLR(optimizer, factor)


# Augmentation.


@torch.no_grad()
def augment(pixels: Tensor) -> Tensor:
    """Bytes (n, 3, 32, 32) to what the model sees in training."""
    x = _crop_and_flip(pixels.float())
    for _ in range(2):
        x = _rand_augment(x)
    return _erase(cifar10.scaled(x))


def _crop_and_flip(x: Tensor) -> Tensor:
    height, width, top, left, found = _boxes(x, (0.8, 1.0), 3 / 4, SIDE)
    height, width = (side.masked_fill(~found, SIDE) for side in (height, width))
    top, left = top * found, left * found
    side = width / SIDE * _signs(x)
    zero = torch.zeros_like(side)
    right, down = ((2 * begin + length) / SIDE - 1 for begin, length in ((left, width), (top, height)))
    return _sample(x, [side, zero, right, zero, height / SIDE, down], "border")


def _boxes(x: Tensor, area: tuple[float, float], aspect: float, most: int) -> tuple[Tensor, ...]:
    """Height, width, top and left of a box an image: of ten drawn the first that fits, if one does."""
    tries = len(x), 10
    areas = torch.empty(tries, device=x.device).uniform_(*area) * SIDE**2
    aspects = torch.empty(tries, device=x.device).uniform_(math.log(aspect), -math.log(aspect)).exp()
    heights, widths = (areas / aspects).sqrt().round(), (areas * aspects).sqrt().round()
    fits = (heights <= most) & (widths <= most)
    first = fits.int().argmax(1, keepdim=True)
    height, width, found = (each.gather(1, first).squeeze(1) for each in (heights, widths, fits))
    top, left = ((torch.rand_like(side) * (SIDE + 1 - side)).floor() for side in (height, width))
    return height, width, top, left, found


def _erase(x: Tensor, share: float = 0.25) -> Tensor:
    """Noise in a box, in a quarter of the images."""
    height, width, top, left, found = (t.view(-1, 1, 1, 1) for t in _boxes(x, (0.02, 1 / 3), 0.3, SIDE - 1))
    rows = torch.arange(SIDE, device=x.device).view(1, 1, -1, 1)
    columns = rows.mT
    inside = (rows >= top) & (rows < top + height) & (columns >= left) & (columns < left + width)
    chosen = found & (torch.rand(len(x), 1, 1, 1, device=x.device) < share)
    return torch.where(inside & chosen, torch.randn_like(x), x)


def _rand_augment(x: Tensor) -> Tensor:
    """One operation to half of the images, at a level near 0.9 of its strongest."""
    drawn = torch.randint(2 * len(OPERATIONS), (len(x),), device=x.device)  # the second half are none
    is_drawn = {name: drawn == k for k, name in enumerate(OPERATIONS)}
    level = torch.empty(len(x), device=x.device).normal_(0.9, 0.05).clamp(0, 1)
    signs = _signs(x)
    x = _move(x, is_drawn, level * signs)
    return _recolour(x, {name: mask.view(-1, 1, 1, 1) for name, mask in is_drawn.items()}, level, signs)


def _move(x: Tensor, is_drawn: dict[str, Tensor], level: Tensor) -> Tensor:
    """Rotations about the centre by up to 30°, shears from the corner by 0.3, shifts by 0.45 of the side."""
    angle = is_drawn["rotate"] * level * math.radians(30)
    shear_x, shear_y = (is_drawn[f"shear-{axis}"] * level * 0.3 for axis in "xy")
    shift_x, shift_y = (is_drawn[f"translate-{axis}"] * level * 0.9 for axis in "xy")
    cos, sin = angle.cos(), angle.sin()
    fill = cifar10.channels(FILL, x.device)
    theta = [cos, sin + shear_x, shear_x + shift_x, shear_y - sin, cos, shear_y + shift_y]
    return _sample(x - fill, theta, "zeros") + fill


def _sample(x: Tensor, theta: list[Tensor], outside: str) -> Tensor:
    """Where (u, v) of the new image comes from, bilinear or bicubic as it happens."""
    grid = F.affine_grid(torch.stack(theta, 1).view(-1, 2, 3), list(x.shape), align_corners=False)
    linear, cubic = (
        F.grid_sample(x, grid, mode=mode, padding_mode=outside, align_corners=False) for mode in ("bilinear", "bicubic")
    )
    return torch.where(_signs(x).view(-1, 1, 1, 1) > 0, linear, cubic)


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
    grey = (x * cifar10.channels((0.299, 0.587, 0.114), x.device)).sum(1, keepdim=True)
    flat = grey.mean((2, 3), keepdim=True)
    return {
        "color": grey + factor * (x - grey),
        "contrast": flat + factor * (x - flat),
        "brightness": factor * x,
        "sharpness": torch.lerp(_smooth(x), x, factor),
    }


def _smooth(x: Tensor) -> Tensor:
    """The mean of a pixel, five times, and its eight neighbours; the rim stays."""
    inner = (9 * F.avg_pool2d(x, 3, 1) + 4 * x[:, :, 1:-1, 1:-1]) / 13
    return torch.cat([x[:, :, :1], torch.cat([x[:, :, 1:-1, :1], inner, x[:, :, 1:-1, -1:]], 3), x[:, :, -1:]], 2)


def _equalized(x: Tensor) -> Tensor:
    """Each channel's values spread so that all are about as frequent, by PIL's rule."""
    values = x.flatten(2).long()  # (n, 3, pixels)
    counts = torch.zeros(*values.shape[:2], 256, device=x.device).scatter_add_(2, values, torch.ones_like(x).flatten(2))
    highest = counts.gather(2, values.amax(2, keepdim=True))
    step = ((SIDE**2 - highest) / 255).floor()
    table = (((step / 2).floor() + counts.cumsum(2) - counts) / step.clamp(min=1)).floor().clamp(max=255)
    return torch.where(step > 0, table.gather(2, values), values.float()).view_as(x)


def _signs(x: Tensor) -> Tensor:
    """1 or -1 an image."""
    return 2.0 * torch.randint(2, (len(x),), device=x.device) - 1


def _options() -> argparse.Namespace:
    parser = cifar10.parser(__doc__, epochs=245)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="baseline", help="learning rates not given")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--min-lr", type=float, help="the last one; it may be the highest")
    parser.add_argument("--warmup-lr", type=float, help="the first one")
    parser.add_argument("--k-decay", type=float, help="below 1 the cosine hurries at first, above 1 at last")
    parser.add_argument("--warmup-epochs", type=float, help="of --paper-epochs: a shorter run has a shorter warm-up")
    parser.add_argument("--paper-epochs", type=float, default=245)
    parser.add_argument("--keep-warmup", action="store_true", help="the same warm-up, however short the run")
    parser.add_argument("--warmup-prefix", action="store_true", help="count the cosine's steps from the warm-up's end")
    parser.add_argument("--decay", type=float, default=0.05, help="weight decay")
    options = parser.parse_args()
    for name, value in PRESETS[options.preset].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if not options.keep_warmup:
        options.warmup_epochs *= min(1, options.epochs / options.paper_epochs)
    return options


if __name__ == "__main__":
    main()
