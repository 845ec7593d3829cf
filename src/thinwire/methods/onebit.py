"""1-bit SGD (Seide, Fu, Droppo, Li, Yu, Interspeech 2014): engine 1 in one bit per element, scales per column."""

from collections.abc import Sequence

from torch import Tensor

from thinwire.codecs.aggregate import Aggregator
from thinwire.codecs.quantize import OneBitQuantizer, Rows
from thinwire.codecs.quantized import Quantized
from thinwire.comm.wire import Wire
from thinwire.config import OneBit
from thinwire.methods.coding import CodedGradients
from thinwire.methods.registry import register


@register("onebit", OneBit, example=lambda **more: OneBit(warmup=2, **more))
class OneBitMethod(CodedGradients):
    """One bit per element of the gradient, with error feedback (1-bit SGD)."""

    config: OneBit

    @staticmethod
    def code_of(config: OneBit) -> str:
        return "bit"

    def aggregator(self, wire: Wire, like: Sequence[Tensor]) -> Aggregator:
        """Rows are what goes into one output unit, the paper's column."""
        return Quantized(wire, like, "gradients", OneBitQuantizer(), _columns)


def _columns(weights: Sequence[Tensor]) -> list[Rows]:
    return [Rows(w.shape[0], w.numel() // w.shape[0]) for w in weights]
