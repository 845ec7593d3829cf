"""Recipes judged on a part of their *training* data, for choosing settings; what runs report on is not looked at.

`digits` and `shakespeare` are the recipes as they are, `digits_sgd_0.1` has SGD with momentum at that learning rate,
`digits_lr_0.001` the recipe's own optimizer at that one.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.optim import SGD

from thinwire.recipes import Recipe, named
from thinwire.train.data import Images, Source, Text

VALIDATION = {Images: 300, Text: 32_768}
RATES = {"sgd": (0.01, 0.03, 0.1, 0.3, 1.0), "lr": (0.0005, 0.001, 0.002, 0.003)}


def _validated(name: str, kind: str = "", rate: float = 0.0) -> Recipe:
    recipe = named(name)

    def source(folder: Path | None) -> Source:
        return without_heldout(recipe.source(folder))

    changed = replace(recipe, name=f"{name}-validation", source=source, suited={}, eval_every=recipe.steps)
    if kind == "sgd":
        return replace(changed, optimizer=partial(SGD, lr=rate, momentum=0.9))
    return replace(changed, optimizer=partial(recipe.optimizer, lr=rate)) if kind else changed


def without_heldout(source: Source) -> Source:
    """The last part of the training data in the place of what runs report on."""
    size = VALIDATION[type(source)]
    if isinstance(source, Images):
        return replace(source, train_rows=source.train_rows[:-size], heldout_rows=source.train_rows[-size:])
    assert isinstance(source, Text)
    return replace(source, train_ids=source.train_ids[:-size], heldout_ids=source.train_ids[-size:])


def _function(name: str, kind: str = "", rate: float = 0.0) -> Callable[[], Recipe]:
    return lambda: _validated(name, kind, rate)


for _name in ("digits", "shakespeare"):
    globals()[_name] = _function(_name)
    for _kind, _rates in RATES.items():
        for _rate in _rates:
            globals()[f"{_name}_{_kind}_{_rate}"] = _function(_name, _kind, _rate)
