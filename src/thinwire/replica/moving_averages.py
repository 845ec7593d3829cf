"""torch's moving averages of a model whose layers are factored: they cannot follow, and say what can."""

import functools

from torch import nn
from torch.optim.swa_utils import AveragedModel

from thinwire.base.errors import ThinwireError


@functools.cache
def guard_averages() -> None:
    """Let torch's moving averages say what to use instead where their model has another shape.

    For the class: a model does not know what was copied from it, and a search among all objects takes as long as many
    steps.
    """
    update = AveragedModel.update_parameters

    @functools.wraps(update)
    def checked(self: AveragedModel, model: nn.Module) -> None:
        is_torchs = type(self).update_parameters is checked  # not a subclass that follows, such as thinwire.EMA
        if is_torchs and [p.shape for p in self.module.parameters()] != [p.shape for p in model.parameters()]:
            raise ThinwireError(
                "torch's AveragedModel cannot follow a model whose layers have been factored: use thinwire.EMA(replica,"
                " decay), made after attach(), which averages full weights and goes on through every change of shape"
            )
        update(self, model)

    AveragedModel.update_parameters = checked  # type: ignore[method-assign]
