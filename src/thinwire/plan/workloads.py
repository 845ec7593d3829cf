"""What a plan is for: a recipe, or a model that a user's function builds."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from thinwire.errors import ConfigError, unknown
from thinwire.plan.shapes_only import NoInitialValues
from thinwire.plan.workload import Workload
from thinwire.recipes import Recipe, call_function, model_without_values
from thinwire.train.batcher import Batcher
from thinwire.train.data.source import check_share

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
}


def of_recipe(recipe: Recipe, workers: int, data: Path | None = None) -> Workload:
    """A recipe as one of its workers meets it."""
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
        suited={method: own.optimizer for method, own in recipe.suited.items() if own.optimizer},
    )


def of_function(text: str, steps: int | None, optimizer: str = "adamw", *, values: bool = True) -> Workload:
    """The model that FILE.py:FUNCTION returns, alone or with the inputs of one worker's batch.

    Without `values` it draws no first ones, where no step is timed with them.
    """
    if steps is None:
        raise ConfigError(f"a plan for the model of {text} needs the steps of a run; give --steps")
    if optimizer not in OPTIMIZERS:
        raise unknown("optimizer", optimizer, OPTIMIZERS)
    with nullcontext() if values else NoInitialValues():
        built = call_function(text, "model")
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, ())
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"{text} returns {type(model).__name__}; it must return an nn.Module, or one and its inputs: "
            "a tensor, a tuple of arguments, or a dict of them by name"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"the model of {text} has no parameters to train")
    by_name = isinstance(inputs, Mapping)
    return Workload(
        name=_name(text),
        model=model,
        optimizer=OPTIMIZERS[optimizer],
        steps=steps,
        inputs=() if by_name else _tuple(inputs),
        keywords=dict(inputs) if by_name else {},
    )


def _tuple(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


def _name(text: str) -> str:
    return text.rpartition(":")[2]
