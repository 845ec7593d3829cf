"""Autoformer on ETTm2: what OIALR was tried on beyond images (dissertation, section 4.4.5, Table A.4)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.optim import AdamW

from thinwire.recipes.sizes import checked
from thinwire.train import data, models
from thinwire.train.schedule import Cosine, Halving
from thinwire.train.task import Forecast, Recipe, Suited

HORIZONS = (96, 192, 336, 720)
_TRAIN_ROWS = 34_560
_EPOCHS = 20


def autoformer(horizon: int, **sizes: Any) -> Recipe:
    """`horizon` quarters of an hour ahead, with the authors' own rates; ends early when validation does not improve."""
    # Variables and marks are the data's; what it must know of the model is handed on to it.
    checked(models.Autoformer, sizes, "horizon", "variables", "marks")
    rows = {"inputs": 96, "label": 48, "horizon": horizon} | {n: sizes[n] for n in ("inputs", "label") if n in sizes}
    batch = 32
    steps = round(_EPOCHS * (_TRAIN_ROWS - rows["inputs"] - horizon + 1) / batch)
    return Recipe(
        name=f"autoformer-ettm2-{horizon}",
        summary=f"Autoformer on ETTm2, {horizon} steps ahead (dissertation, Table A.4)",
        task=Forecast(),
        source=partial(data.ett, **rows),
        model=lambda source: models.Autoformer(**{**sizes, **rows}),
        optimizer=partial(AdamW, lr=4e-4),
        steps=steps,
        epochs=_EPOCHS,
        epochs_are_passes=True,
        batch=batch,
        rate=Halving(),
        eval_every=steps,
        patience=3,
        suited={
            "oialr": Suited(
                {
                    "factor_at": 0,
                    "updates_from": 600 / steps,
                    "redecompose": 400 / steps,
                    "cutoff": 0.4,
                    "keep_first": True,
                }
            ),
        },
    )


def autoformer_tuned(**sizes: Any) -> Recipe:
    """The same, 96 ahead, with the rates that the dissertation's search found for OIALR."""
    return autoformer(96, **sizes).but(
        name="autoformer-ettm2-tuned",
        summary="Autoformer on ETTm2, 96 steps ahead, with the rates found for OIALR (Table A.4, tuned)",
        optimizer=partial(AdamW, lr=0.01),
        rate=Cosine(warmup=3 / _EPOCHS, floor=0.04, start=0.01, k_decay=0.85, from_zero=True),
    )
