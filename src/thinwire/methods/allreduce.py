"""AllReduce: data-parallel training as PyTorch does it, the measure of everything else."""

import sys

from thinwire.methods.base import Method


class AllReduceMethod(Method):
    """Gradients averaged over the world at every step by DistributedDataParallel."""

    phases = ("train",)

    @property
    def gradient_wire(self) -> str:
        """As the config says."""
        return self.config.wire

    def attach(self) -> None:
        """Wrap the model over the world."""
        self.replicated.wrap(self.topology.world)

    @property
    def quiet_until(self) -> int:
        """Every step is like every other."""
        return sys.maxsize

    def after_step(self) -> None:
        """Count it, and agree on the buffers."""
        self.step += 1
        self.replicated.hand_on_buffers()
