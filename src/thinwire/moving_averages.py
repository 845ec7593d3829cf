"""torch's moving averages of a model whose layers are factored: they cannot follow, and say what can."""

import functools
import gc
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from thinwire.errors import ThinwireError


def guard_averages() -> None:
    """Let each of torch's moving averages say what to use instead, once its model has another shape.

    They are found among all objects, since a model does not know what was copied from it.
    """
    kinds: set[type[AveragedModel]] = {AveragedModel, *AveragedModel.__subclasses__()}
    torchs = {kind for kind in kinds if kind.update_parameters is AveragedModel.update_parameters}  # not thinwire.EMA
    averages: list[Any] = [each for each in gc.get_objects() if type(each) in torchs]
    for average in averages:
        average.update_parameters = functools.partial(_update, average)


def _update(average: AveragedModel, model: nn.Module) -> None:
    if [p.shape for p in average.module.parameters()] != [p.shape for p in model.parameters()]:
        raise ThinwireError(
            "torch's AveragedModel cannot follow a model whose layers have been factored: use thinwire.EMA(replica, "
            "decay), made after attach(), which averages full weights and goes on through every change of shape"
        )
    AveragedModel.update_parameters(average, model)
