"""AllReduce: data-parallel training as PyTorch does it, the baseline; and its codes."""

from dataclasses import dataclass

from thinwire.comm.topology import Topology
from thinwire.config.common import Config, GroupSize
from thinwire.exchange.gradients import Gradients
from thinwire.methods.registry import register
from thinwire.methods.timetable import Phase


@register(
    "allreduce",
    summary="Gradients averaged at every step (PyTorch's DDP), in fp32 or a code",
)
@dataclass(frozen=True, kw_only=True)
class AllReduce(Config):
    """Data-parallel training by PyTorch's own DistributedDataParallel, with its bytes counted."""

    wire: str = "fp32"
    """The code that gradients travel in: fp32, bf16, int8, int4, int2, bit, lowrank:R or topk:D."""

    group_size: GroupSize = None
    """Workers per node, where one machine stands for several. In fp32 and bf16 it changes what is counted, not what is
    computed. Other codes are for the link between groups; inside them gradients are averaged exactly."""

    def timetable(self, topology: Topology) -> list[Phase]:
        return [Phase(name="train", exchanges=[Gradients(self.wire)])]
