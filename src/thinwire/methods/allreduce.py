"""AllReduce: data-parallel training as PyTorch does it, the baseline; and its codes."""

import sys
from collections.abc import Hashable

from thinwire.comm.topology import Topology
from thinwire.config import AllReduce
from thinwire.methods.base import Method
from thinwire.methods.features import Feature, refuses_code
from thinwire.methods.registry import register


@register("allreduce", AllReduce, example=AllReduce)
class AllReduceMethod(Method):
    """Gradients averaged at every step (PyTorch's DDP), in fp32 or a code."""

    only_gradients = True
    config: AllReduce

    @classmethod
    def role(cls, config: AllReduce, topology: Topology) -> Hashable:
        """All workers do the same."""
        return None

    @classmethod
    def refuses(cls, config: AllReduce, feature: Feature) -> str | None:
        return super().refuses(config, feature) or refuses_code(config, "wire", feature)

    def attach(self) -> None:
        self.gradients.together(self.config.wire)

    def after_step(self) -> None:
        """Nothing more."""

    @property
    def next_event(self) -> int:
        """Every step is like every other."""
        return sys.maxsize
