"""Recipes judged on a part of their *training* data, for choosing settings; what runs report on is not looked at.

`digits` and `shakespeare` are the recipes as they are, `digits_sgd_0.1` has SGD with momentum at that learning rate.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.optim import SGD

from thinwire.recipes import Recipe, named
from thinwire.train.data import Images, Source, Text

VALIDATION = {Images: 300, Text: 32_768}
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)


def _validated(name: str, rate: float | None = None) -> Recipe:
    recipe = named(name)

    def source(folder: Path | None) -> Source:
        return _without_heldout(recipe.source(folder))

    changed = replace(recipe, name=f"{name}-validation", source=source, suited={}, eval_every=recipe.steps)
    return changed if rate is None else replace(changed, optimizer=partial(SGD, lr=rate, momentum=0.9))


def _without_heldout(source: Source) -> Source:
    size = VALIDATION[type(source)]
    if isinstance(source, Images):
        return replace(source, train_rows=source.train_rows[:-size], heldout_rows=source.train_rows[-size:])
    assert isinstance(source, Text)
    return replace(source, train_ids=source.train_ids[:-size], heldout_ids=source.train_ids[-size:])


def _function(name: str, rate: float | None) -> Callable[[], Recipe]:
    return lambda: _validated(name, rate)


for _name in ("digits", "shakespeare"):
    globals()[_name] = _function(_name, None)
    for _rate in RATES:
        globals()[f"{_name}_sgd_{_rate}"] = _function(_name, _rate)
