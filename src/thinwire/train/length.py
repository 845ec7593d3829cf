"""The length of a run, in passes over its data."""

from __future__ import annotations

import logging

from thinwire.comm.topology import place
from thinwire.train.data import Source
from thinwire.train.task import Recipe

_SLACK = 0.05
"""Relative difference between passes and epochs that is accepted without a warning."""

log = logging.getLogger("thinwire")


def passes(recipe: Recipe, source: Source) -> float:
    """How many times the run sees its training data."""
    return recipe.steps * recipe.batch / _examples(source)


def note_length(recipe: Recipe, source: Source) -> None:
    """Warn, on rank 0, if an epoch should be one pass over the data and is not."""
    here, found = place(), passes(recipe, source)
    if not recipe.epochs_are_passes or abs(found / recipe.epochs - 1) <= _SLACK or (here and here.rank):
        return
    examples = _examples(source)
    steps = max(1, round(recipe.epochs * examples / recipe.batch))
    log.warning(
        "%s steps of %s examples are %.3g passes over this data of %s, not %d epochs; "
        "for those give `--steps %d`, or replace(steps=%d) in a recipe of your own",
        *(f"{recipe.steps:,}", f"{recipe.batch:,}", found, f"{examples:,}", recipe.epochs, steps, steps),
    )


def _examples(source: Source) -> int:
    return getattr(source, "pass_size", source.train_size)
