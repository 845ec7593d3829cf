"""Training a recipe from its seed to a finished model: `fit`."""

from thinwire.train.loop import fit
from thinwire.train.task import Recipe, Task

__all__ = ["Recipe", "Task", "fit"]
