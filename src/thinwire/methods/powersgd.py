"""PowerSGD (arXiv 1905.13727): engine 1 in the code lowrank:R; `codecs/lowrank.py` has the equations."""

from collections.abc import Sequence

from torch import Tensor

from thinwire.codecs.aggregate import Aggregator
from thinwire.codecs.lowrank import LowRank
from thinwire.comm.wire import Wire
from thinwire.config import PowerSGD
from thinwire.methods.coding import CodedGradients
from thinwire.methods.registry import register


@register("powersgd", PowerSGD, example=lambda **more: PowerSGD(rank=2, warmup=2, **more))
class PowerSGDMethod(CodedGradients):
    """Gradients as low-rank products, with error feedback."""

    config: PowerSGD

    @staticmethod
    def code_of(config: PowerSGD) -> str:
        return f"lowrank:{config.rank}"

    def aggregator(self, wire: Wire, like: Sequence[Tensor]) -> Aggregator:
        """With the config's threshold for weights that are worth it."""
        return LowRank(wire, like, "gradients", self.config.rank, self.config.min_compression)
