"""What a model is shown of its images, beside slow versions and Pillow's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import needs
from standins import folder_for, pixels
from thinwire.base.errors import ConfigError
from thinwire.experiments.augmentation import CIFAR10, IMAGENET, OPERATIONS, Pictures, _move, _recolour, rand_augment
from thinwire.experiments.data import image_folder
from thinwire.recipes import Recipe, installed, named
from thinwire.train.batcher import Batcher
from thinwire.train.data import Images
from thinwire.train.step_rng import StepRNG
from thinwire.train.task import AsIs

PLAIN = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
FILL = torch.tensor([10.0, 20.0, 30.0]).view(1, 3, 1, 1)


def images(count: int = 12) -> Tensor:
    return torch.from_numpy(pixels(0, count))


def step_rng(count: int = 12, **where: Any) -> StepRNG:
    return StepRNG(3, 5, batch=count, **where)


def test_heldout_images_are_normalised_and_nothing_else() -> None:
    x = images()
    shown = Pictures(statistics=CIFAR10, scale=(0.5, 1.0), rand_augment=9, pad=4, erase=1.0).heldout(x)
    for channel, (mean, deviation) in enumerate(zip(*CIFAR10, strict=True)):
        wanted = (x[:, channel].double() / 255 - mean) / deviation
        torch.testing.assert_close(shown[:, channel].double(), wanted, rtol=1e-5, atol=1e-5)
    assert x.dtype == torch.uint8 and torch.equal(x, images())
    assert AsIs().train(x, step_rng()) is x and AsIs().heldout(x) is x
    with pytest.raises(ConfigError, match="`erase`=2"):
        Pictures(statistics=CIFAR10, erase=2)
    with pytest.raises(ConfigError, match=r"`scale`=\(1.0, 0.5\)"):
        Pictures(statistics=CIFAR10, scale=(1.0, 0.5))


def test_shift_and_flip_are_as_image_by_image() -> None:
    pad, transform = 4, Pictures(statistics=IMAGENET, pad=4)
    x, chance = images(), step_rng()
    mirrored = (chance.uniform(1, 1, 1) < 0.5).flatten()
    places = chance.integers(0, 2 * pad + 1, 2, 1, 1, 1).flatten(1)
    wanted = []
    for image, mirror, (top, left) in zip(x, mirrored, places, strict=True):
        whole = torch.zeros(3, 32 + 2 * pad, 32 + 2 * pad, dtype=torch.uint8)
        whole[:, pad:-pad, pad:-pad] = image
        part = whole[:, top : top + 32, left : left + 32]
        wanted.append(part.flip(2) if mirror else part)
    assert torch.equal(transform.train(x, step_rng()), transform.heldout(torch.stack(wanted)))
    assert mirrored.any() and not mirrored.all() and places.unique().numel() > 3


def test_erased_boxes_lie_inside_and_hold_noise() -> None:
    count = 400
    transform = Pictures(statistics=PLAIN, flip=False, erase=0.25)
    x = torch.full((count, 3, 32, 32), 128, dtype=torch.uint8)
    shown = transform.train(x, step_rng(count))
    changed = (shown != transform.heldout(x)).any(1)  # (n, height, width)
    erased = changed.flatten(1).any(1)
    assert 0.16 < erased.float().mean() < 0.34  # four deviations
    for mask in changed[erased]:
        rows, columns = mask.any(1).nonzero().flatten(), mask.any(0).nonzero().flatten()
        box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert box.all() and 0.01 < box.float().sum() / 1024 < 0.36
    noise = shown[changed[:, None].expand_as(shown)]
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.05


def test_a_crop_is_a_stretched_part() -> None:
    ramp = torch.arange(32.0).view(1, 1, 1, -1).expand(64, 3, 32, 32) * 8
    transform = Pictures(statistics=PLAIN, flip=False, scale=(0.25, 0.5))
    shown = (
        255 / 8 * transform.train(ramp.byte(), step_rng(64))[:, 0, 16, 4:-4]
    )  # columns of the whole, along the middle row
    slopes = (shown[:, -1] - shown[:, 0]) / (shown.shape[1] - 1)
    assert shown.min() > -1 and shown.max() < 32.5
    assert slopes.min() > 0.4 and slopes.max() < 0.85  # √(area · aspect), of aspects from 3/4 to 4/3
    assert slopes.std() > 0.05
    whole = Pictures(statistics=PLAIN, flip=False, scale=(1.0, 1.0)).train(images(), step_rng())
    torch.testing.assert_close(whole, images() / 255, rtol=0, atol=1e-4)


# RandAugment, an operation at a time.


def recoloured(name: str, level: float, sign: float = 1.0) -> Tensor:
    x = images(4).float()
    drawn = {operation: torch.full((4, 1, 1, 1), operation == name) for operation in OPERATIONS}
    return _recolour(x, drawn, torch.full((4,), level), torch.full((4,), sign))


SIMPLE: dict[str, Callable[[Tensor, float], Tensor]] = {
    "invert": lambda x, level: 255 - x,
    "posterize": lambda x, level: x - x % 2 ** (4 + int(4 * level)),
    "solarize": lambda x, level: torch.where(x < 256 - int(256 * level), x, 255 - x),
    "solarize-add": lambda x, level: torch.where(x < 128, x + int(110 * level), x),
    "brightness": lambda x, level: (x * (1 + 0.9 * level)).clamp(0, 255),
}


@pytest.mark.parametrize("name", SIMPLE)
def test_an_operation_by_its_definition(name: str) -> None:
    for level in (0.0, 0.3, 0.9, 1.0):
        torch.testing.assert_close(recoloured(name, level), SIMPLE[name](images(4).float(), level), msg=f"{level}")


def test_operations_are_pillows() -> None:
    pillow = needs.package("PIL", "Pillow")
    from PIL import Image, ImageEnhance, ImageOps

    level = 0.6
    theirs: dict[str, Callable[[Any], Any]] = {
        "autocontrast": ImageOps.autocontrast,
        "equalize": ImageOps.equalize,
        "invert": ImageOps.invert,
        "posterize": lambda image: ImageOps.posterize(image, 4 - int(4 * level)),
        "solarize": lambda image: ImageOps.solarize(image, 256 - int(256 * level)),
        "color": lambda image: ImageEnhance.Color(image).enhance(1 - 0.9 * level),
        "contrast": lambda image: ImageEnhance.Contrast(image).enhance(1 - 0.9 * level),
        "brightness": lambda image: ImageEnhance.Brightness(image).enhance(1 - 0.9 * level),
        "sharpness": lambda image: ImageEnhance.Sharpness(image).enhance(1 - 0.9 * level),
    }
    for name, change in theirs.items():
        ours = recoloured(name, level, sign=-1.0)
        for image, changed in zip(images(4), ours, strict=True):
            wanted = np.asarray(change(Image.fromarray(image.permute(1, 2, 0).numpy()))).transpose(2, 0, 1)
            # They round after every step, we do not.
            assert np.abs(changed.numpy() - wanted).max() <= 1.5, (name, pillow.__version__)


def moved(name: str, level: float, x: Tensor) -> Tensor:
    drawn = {operation: torch.full((len(x),), operation == name) for operation in OPERATIONS}
    return _move(x, step_rng(len(x)), drawn, torch.full((len(x),), level), FILL)


def test_what_moves_leaves_the_fill_behind() -> None:
    x = torch.from_numpy(pixels(1, 6))[..., :20, :20].float()
    for name in ("rotate", "shear-x", "shear-y", "translate-x", "translate-y"):
        shown = moved(name, 0.8, x)
        assert shown.shape == x.shape and not torch.allclose(shown, x)
        torch.testing.assert_close(moved(name, 0.0, x), x, rtol=0, atol=1e-2)
    right = moved("translate-x", 1.0, x)  # 0.45 of the side: 9 pixels
    torch.testing.assert_close(right[..., :11], x[..., 9:], rtol=0, atol=1e-2)
    torch.testing.assert_close(right[..., 12:], FILL.expand(6, 3, 20, 8), rtol=0, atol=1e-2)
    torch.testing.assert_close(moved("translate-y", 1.0, x), moved("translate-x", 1.0, x.mT).mT, rtol=0, atol=1e-2)
    torch.testing.assert_close(moved("shear-y", 0.5, x), moved("shear-x", 0.5, x.mT).mT, rtol=0, atol=2e-2)
    # There and back again, where nothing left the image.
    smooth = torch.nn.functional.avg_pool2d(x, 9, 1, 4)
    back = moved("rotate", -0.3, moved("rotate", 0.3, smooth))
    assert (back - smooth)[..., 6:-6, 6:-6].abs().mean() < 2


def test_half_of_the_images_are_augmented() -> None:
    x = images(200).float()
    shown = rand_augment(x, step_rng(200), 9.0, fill=FILL)
    same = torch.isclose(shown, x, rtol=0, atol=1e-2).flatten(1).all(1)
    assert 0.36 < same.float().mean() < 0.64
    assert shown.min() >= 0 and shown.max() <= 255


def test_two_operations_are_applied_one_after_the_other() -> None:
    transform = Pictures(statistics=CIFAR10, flip=False, rand_augment=9)
    grey = 255 * torch.tensor(CIFAR10[0]).view(1, 3, 1, 1)
    chance, wanted = step_rng(40), images(40).float()
    for _ in range(2):
        wanted = rand_augment(wanted, chance, 9.0, fill=grey)
    shown = transform.train(images(40), step_rng(40))
    torch.testing.assert_close(shown, transform.heldout(wanted))
    as_they_were = torch.isclose(shown, transform.heldout(images(40)), rtol=0, atol=1e-2).flatten(1).all(1)
    assert 0 < as_they_were.sum() < 20  # a quarter of them


# The same for any number of workers.


def batchers(recipe: Recipe, source: Any, workers: int) -> list[Batcher]:
    cpu = torch.device("cpu")
    return [Batcher(recipe, source, cpu, seed=3, rank=rank, world_size=workers) for rank in range(workers)]


@pytest.mark.parametrize("name", [name for name in installed() if "cifar" in name or name.startswith("vitb16")])
def test_images_do_not_ask_how_many_workers_there_are(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    recipe = named(name).replace(batch=10)
    source: Any = Images(x=images(50), y=torch.arange(50), train_rows=np.arange(40), heldout_rows=np.arange(40, 50))
    if "imagenet" in name:
        source = image_folder(folder_for(name, tmp_path_factory.mktemp("data")), size=32)
    [whole] = batchers(recipe, source, 1)
    x, y = whole.batch(5)
    for workers in (2, 3):
        parts = [batcher.batch(5) for batcher in batchers(recipe, source, workers)]
        assert torch.equal(torch.cat([part[0] for part in parts]), x), workers
        assert torch.equal(torch.cat([part[1] for part in parts]), y), workers
        shown = [part for batcher in batchers(recipe, source, workers) for part in batcher.parts()]
        assert torch.equal(torch.cat([part[0] for part in shown]), torch.cat([part[0] for part in whole.parts()]))
    # A run that goes on from step 4 meets what it would have met.
    with batchers(recipe, source, 1)[0].steps(range(4, 6)) as batches:
        resumed = [batch[0] for batch in batches]
    assert torch.equal(resumed[1], x) and not torch.equal(resumed[0], x)
