"""1-bit SGD (Seide, Fu, Droppo, Li, Yu, Interspeech 2014): gradients in one bit per element, scales per column."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from thinwire.codecs.aggregate import Aggregator
from thinwire.codecs.quantize import OneBitQuantizer, Rows
from thinwire.codecs.quantized import Quantized
from thinwire.comm.wire import Wire
from thinwire.methods.coded import Coded
from thinwire.methods.registry import register


@register(
    "onebit",
    example={"warmup": 2},
    summary="One bit per element of the gradient, with error feedback (1-bit SGD)",
)
@dataclass(frozen=True, kw_only=True)
class OneBit(Coded):
    """One bit per element and two scales per column, with error feedback (1-bit SGD, Seide et al. 2014)."""

    @property
    def code(self) -> str:
        return "bit"

    def make(self, wire: Wire, like: Sequence[Tensor]) -> Aggregator:
        """Rows are what goes into one output unit, the paper's column."""
        return Quantized(wire, like, "gradients", OneBitQuantizer(), _columns)


def _columns(weights: Sequence[Tensor]) -> list[Rows]:
    return [Rows(w.shape[0], w.numel() // w.shape[0]) for w in weights]
