"""What a plan is for: a recipe, or a model that a user's function builds."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from thinwire.base.errors import ConfigError, unknown
from thinwire.plan.shapes_only import NoInitialValues
from thinwire.plan.workload import Workload
from thinwire.recipes import Recipe, call_model, model_without_values
from thinwire.train.batcher import Batcher
from thinwire.train.data import check_share

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
}


def of_recipe(recipe: Recipe, workers: int, data: Path | None = None) -> Workload:
    """A recipe, seen from one of its workers."""
    check_share(recipe.batch, workers)
    source = recipe.source(data)
    x, y = Batcher(recipe, source, torch.device("cpu"), world_size=workers).batch(0)
    return Workload(
        name=recipe.name,
        model=model_without_values(recipe, source),
        values=lambda: recipe.model(source),
        optimizer=recipe.optimizer,
        steps=recipe.steps,
        inputs=(x,),
        loss=lambda outputs: recipe.task.loss(outputs, y.to(outputs.device)),
        clip=recipe.clip,
        recipe=recipe.name,
        eval_every=recipe.eval_every,
        epochs=recipe.epochs,
        rate=_rate(recipe),
        suited={method: _own(recipe, method) for method in recipe.suited},
    )


def _rate(recipe: Recipe) -> Callable[[int], float]:
    return lambda step: recipe.rate.factor(step, recipe.steps, recipe.epochs)


def _own(recipe: Recipe, method: str) -> dict[str, Any]:
    """What a method has in place of the recipe's."""
    suited = recipe.suited_to(method)
    return {"optimizer": suited.optimizer, "rate": _rate(suited)}


def of_function(text: str, steps: int | None, optimizer: str = "adamw", *, values: bool = True) -> Workload:
    """The model that FILE.py:FUNCTION returns, alone or with the inputs of one worker's batch.

    Without `values` the model gets no initial ones: no step is timed with them.
    """
    if steps is None:
        raise ConfigError(f"a plan for the model of {text} needs the steps of a run; give --steps")
    if optimizer not in OPTIMIZERS:
        raise unknown("optimizer", optimizer, OPTIMIZERS)
    with nullcontext() if values else NoInitialValues():
        model, inputs = call_model(text)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"the model of {text} has no parameters to train")
    by_name = isinstance(inputs, Mapping)
    in_order = () if by_name or inputs is None else inputs if isinstance(inputs, tuple | list) else (inputs,)
    return Workload(
        name=text.rpartition(":")[2],
        model=model,
        optimizer=OPTIMIZERS[optimizer],
        steps=steps,
        inputs=tuple(in_order),
        keywords=dict(inputs) if by_name else {},
    )
