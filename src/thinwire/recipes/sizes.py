"""Checks of the sizes that a recipe is given for its model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from thinwire.base.checks import is_number
from thinwire.base.errors import ConfigError, ThinwireError, unknown
from thinwire.train import data, initial
from thinwire.train.task import Recipe


def checked(model: type[nn.Module], sizes: Mapping[str, Any], *of_data: str) -> dict[str, Any]:
    """The sizes, if the model has each of them; those in `of_data` follow from the data and cannot be set."""
    known = {name: p.default for name, p in inspect.signature(model).parameters.items() if name not in of_data}
    for name, value in sizes.items():
        if name not in known:
            raise unknown(f"size of {model.__name__}", name, known)
        if not isinstance(value, bool) and not is_number(value):
            raise ConfigError(f"`{name}`={value!r} must be a number, as it is a size of {model.__name__}")
    whole = known | dict(sizes)
    if "heads" in whole and (whole["heads"] < 1 or whole["width"] % whole["heads"]):
        raise ConfigError(
            f"`heads`={whole['heads']} does not divide `width`={whole['width']} of {model.__name__}; "
            "give a number of heads that does"
        )
    return dict(sizes)


def for_images(model: type[nn.Module], sizes: Mapping[str, Any], source: data.Source) -> dict[str, Any]:
    """The sizes, if the model has enough classes for the data and takes images of the data's size."""
    whole = {name: p.default for name, p in inspect.signature(model).parameters.items()} | dict(sizes)
    classes, side = _of(source)
    if classes > whole["classes"]:
        raise ConfigError(
            f"`classes`={whole['classes']} of {model.__name__} are too few for data with {classes}; "
            "give as many, or leave `classes` out"
        )
    if side and whole.get("image", side) != side:
        raise ConfigError(
            f"`image`={whole['image']} of {model.__name__} is not the size of the data's images, {side}; "
            "give that, or leave `image` out"
        )
    return dict(sizes)


def model_without_values(recipe: Recipe, source: data.Source) -> nn.Module:
    """The recipe's model, on the meta device if possible; raises if it cannot be built at all."""
    try:
        return initial.without_values(lambda: recipe.model(source))
    except ThinwireError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the model of the recipe {recipe.name} cannot be built ({type(error).__name__}: {error}); "
            "fix the sizes that it is given, or what builds it"
        ) from error


def _of(source: data.Source) -> tuple[int, int]:
    """The number of classes and the image size; 0 if unknown."""
    if isinstance(source, data.Images):
        return int(source.y.max()) + 1, source.x.shape[-1]
    return len(getattr(source, "classes", ())), getattr(source, "size", 0)
