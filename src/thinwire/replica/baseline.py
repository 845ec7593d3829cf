"""What fp32 all-reduce, and an ideal one, would have sent by now: what a method's bytes are compared with."""

from dataclasses import replace

from torch import nn

from thinwire.comm.buckets import by_dtype, size_of
from thinwire.comm.topology import Topology


class Baseline:
    """Bytes per node of the steps so far; a world of another size may have taken the first ones."""

    def __init__(self, trained: int) -> None:
        self._trained = trained
        self._earlier, self._earlier_steps = {"allreduce_fp32": 0, "ideal_fp32": 0}, 0
        self._usual: tuple[Topology, float] | None = None

    def begin(self, earlier: dict[str, int], step: int) -> None:
        """Go on from what was counted until this step, whoever took the steps."""
        self._earlier, self._earlier_steps = earlier, step

    def until(self, step: int, model: nn.Module, topology: Topology) -> dict[str, int]:
        """Slow bytes per node by this step, if these workers take the rest."""
        steps = step - self._earlier_steps
        # Counted once per topology: it asks every node, and trackers want it often.
        if self._usual is None or self._usual[0] is not topology:
            self._usual = topology, _step_of_allreduce(model, topology, self._trained)
        return {
            "allreduce_fp32": self._earlier["allreduce_fp32"] + round(steps * self._usual[1]),
            "ideal_fp32": self._earlier["ideal_fp32"] + steps * _step_of_ideal(topology, self._trained),
        }


def _step_of_allreduce(model: nn.Module, topology: Topology, trained: int) -> float:
    """Slow bytes of one step of fp32 data-parallel training, gradients and buffers, as the mean over nodes."""
    total = 0
    for node in topology.nodes:
        seen_from = replace(topology, rank=node[0])
        total += seen_from.all_reduce(topology.world, 4 * trained).slow
        for bucket in by_dtype(model.buffers()):
            total += seen_from.broadcast(topology.world, sum(size_of(b) for b in bucket), 0).slow
    return total / len(topology.nodes)


def _step_of_ideal(topology: Topology, trained: int) -> int:
    """What the best fp32 all-reduce between nodes sends for the same gradients, per node."""
    nodes = len(topology.nodes)
    return round(2 * (nodes - 1) / nodes * 4 * trained)
