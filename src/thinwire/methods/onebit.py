"""1-bit SGD (Seide, Fu, Droppo, Li, Yu, Interspeech 2014)."""

from torch import nn

from thinwire.comm.quantize import OneBitQuantizer, Quantizer, Rows
from thinwire.config import OneBit
from thinwire.methods.compressing import Coded


class OneBitMethod(Coded):
    """A bit for each element of a weight's gradient, in both directions; biases and norms travel as they are."""

    config: OneBit

    @property
    def plain_steps(self) -> int:
        """The warm-up."""
        return self.config.warmup_length

    def is_coded(self, p: nn.Parameter) -> bool:
        """Weights."""
        return p.dim() > 1 and p.numel() > 0

    def rows(self, coded: list[nn.Parameter]) -> list[Rows]:
        """What goes into one output unit, the paper's column."""
        return [Rows(p.shape[0], p.numel() // p.shape[0]) for p in coded]

    def coder(self) -> Quantizer:
        """A bit an element."""
        return OneBitQuantizer()
