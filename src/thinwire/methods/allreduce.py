"""AllReduce: data-parallel training as PyTorch does it, the measure of everything else; and its int8 wire."""

from collections.abc import Hashable

from torch import nn

from thinwire.comm.quantize import Int8Quantizer, Quantizer, Rows
from thinwire.comm.topology import Topology
from thinwire.config import AllReduce
from thinwire.methods.compressing import Coded

_BLOCK = 256


class AllReduceMethod(Coded):
    """Gradients averaged over the world at every step, by DistributedDataParallel unless they travel as int8."""

    phases = ("train",)
    config: AllReduce

    @classmethod
    def role(cls, config: AllReduce, topology: Topology) -> Hashable:
        """Parts of a sum are owned only where it is coded."""
        return super().role(config, topology) if config.wire == "int8" else None

    @property
    def gradient_wire(self) -> str:
        """As the config says; int8 is not for the fast link."""
        return "fp32" if self.config.wire == "int8" else self.config.wire

    @property
    def plain_steps(self) -> int:
        """None."""
        return 0

    @property
    def _compresses(self) -> bool:
        return self.config.wire == "int8" and super()._compresses

    def is_coded(self, p: nn.Parameter) -> bool:
        """All of them."""
        return self.config.wire == "int8"

    def rows(self, coded: list[nn.Parameter]) -> list[Rows]:
        """Blocks, without regard to where a parameter ends."""
        return [Rows(-(-sum(p.numel() for p in coded) // _BLOCK), _BLOCK)]

    def coder(self) -> Quantizer:
        """A byte an element."""
        return Int8Quantizer()
