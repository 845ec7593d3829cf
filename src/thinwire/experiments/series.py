"""Autoformer on ETTm2, OIALR's experiment on time series (dissertation, section 4.4.5, Table A.4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW

from thinwire.experiments import data, models
from thinwire.recipes.sizes import checked
from thinwire.train.schedule import Cosine
from thinwire.train.task import MethodOverrides, Recipe

_TRAIN_ROWS = 34_560
_EPOCHS = 20


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Future values of a series."""

    metric: ClassVar[str] = "mse"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error."""
        return F.mse_loss(outputs.float(), targets)

    def totals(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(3,): squared errors, absolute errors and number of targets."""
        error = (outputs.float() - targets).double()
        return torch.stack([error.square().sum(), error.abs().sum(), error.new_full((), error.numel())])

    def figures(self, totals: Tensor) -> dict[str, float]:
        squares, sizes, count = totals.tolist()
        return {self.metric: squares / count, "mae": sizes / count, "loss": squares / count}


@dataclass(frozen=True, kw_only=True)
class Halving:
    """Half the rate after each epoch but the first: what Autoformer's authors call 'type1'."""

    factor_an_epoch: float = 0.5
    """Factor per epoch."""

    def factor(self, step: int, steps: int, epochs: float) -> float:
        epoch = int(step * epochs / steps)
        return self.factor_an_epoch ** max(0, epoch - 1)


def autoformer(horizon: int, **sizes: Any) -> Recipe:
    """`horizon` quarters of an hour ahead, with the authors' rates; stops early when validation does not improve."""
    # Variables and marks follow from the data; sizes that the data needs are passed on to it.
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
            "oialr": MethodOverrides(
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


autoformer_96, autoformer_192, autoformer_336, autoformer_720 = (partial(autoformer, n) for n in (96, 192, 336, 720))


def autoformer_tuned(**sizes: Any) -> Recipe:
    """The same, 96 ahead, with the rates that the dissertation's search found for OIALR."""
    return autoformer(96, **sizes).replace(
        name="autoformer-ettm2-tuned",
        summary="Autoformer on ETTm2, 96 steps ahead, with the rates found for OIALR (Table A.4, tuned)",
        optimizer=partial(AdamW, lr=0.01),
        rate=Cosine(warmup=3 / _EPOCHS, floor=0.04, start=0.01, k_decay=0.85, from_zero=True),
    )
