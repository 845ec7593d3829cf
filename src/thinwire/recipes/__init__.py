"""Whole experiments, each a function that returns a `Recipe`."""

from thinwire.recipes.names import call_model, installed, load, load_function, named
from thinwire.recipes.sizes import model_without_values
from thinwire.recipes.small import digits, shakespeare
from thinwire.train.task import MethodOverrides, Recipe

__all__ = [
    "MethodOverrides",
    "Recipe",
    "call_model",
    "digits",
    "installed",
    "load",
    "load_function",
    "model_without_values",
    "named",
    "shakespeare",
]
