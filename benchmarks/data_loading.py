"""What examples cost: a training step of VGG16 on batches as they come, against one on a batch that is there already.

Plain steps with the recipe's optimizer, precision and clipping, in blocks, by turns; the device is waited for at the
end of a block. The difference is what is left of loading, cropping, mirroring and normalising after the device has done
some of it beside other work. Beside it stands a batch alone, with the device waited for. Ratios are
(with loading − without) / with.

    python benchmarks/data_loading.py --data DIR --device cuda
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from measure import Figure, alternate, arguments, figure, median_clock, report, time_of, waiting_for
from torch import nn

from thinwire.recipes import named
from thinwire.train.batcher import Batcher

TARGET = "<= 0.1"
BLOCK = 20


def main() -> None:
    """Both VGG16s, at the recipes' batch of 1024 or at --batch."""
    options = {
        "data": {"type": Path, "required": True, "help": "CIFAR-10's folder"},
        "batch": {"type": int, "default": 1024},
    }
    given = arguments(__doc__, **options)
    torch.backends.cudnn.benchmark = given.device == "cuda"
    recipes = ("vgg16-cifar10", "vgg16bn-cifar10")
    report((_share(name, given.data, given.batch, given.device, 2 if given.quick else 10) for name in recipes), given)


def _share(name: str, data: Path, batch: int, device: str, pairs: int) -> Figure:
    recipe = named(name).replace(batch=batch)
    source, place = recipe.source(data), torch.device(device)
    model = recipe.model(source).to(place)
    optimizer = recipe.optimizer(model.parameters())
    batcher = Batcher(recipe, source, place)
    fixed = batcher.batch(0)

    def block(batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for x, y in batches:
            with recipe.precision(place):
                loss = recipe.task.loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip or 1.0)
            optimizer.step()

    steps, wait = BLOCK if device == "cuda" else 1, waiting_for(device)
    ways = [lambda: block(map(batcher.batch, range(steps))), lambda: block(iter([fixed] * steps))]
    for way in ways:
        way()  # to warm up
    turns = alternate(*ways, pairs, wait)
    alone = median_clock(time_of(partial(batcher.batch, step), wait) for step in range(20))
    whole = median_clock(first for first, _ in turns) / steps
    detail = {"step": f"{1e3 * whole:.2f} ms", "a batch alone": f"{1e3 * alone:.2f} ms ({alone / whole:.3f} of a step)"}
    shares = [1 - second.clock / first.clock for first, second in turns]
    return figure(f"{name}, batch {batch}", shares, TARGET, **detail)


if __name__ == "__main__":
    main()
