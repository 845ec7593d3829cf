"""From a code's name to what averages tensors in it."""

from collections.abc import Sequence

from torch import Tensor

from thinwire.codecs.aggregate import Aggregator, Exact
from thinwire.codecs.lowrank import LowRank, ShardedLowRank
from thinwire.codecs.quantize import quantizer
from thinwire.codecs.quantized import Quantized
from thinwire.codecs.sparse import Sparse
from thinwire.comm.wire import Wire
from thinwire.config.common import parse_code


def aggregator(code: str, wire: Wire, like: Sequence[Tensor], purpose: str) -> Aggregator:
    """An aggregator for tensors of these shapes, used repeatedly."""
    kind, number = parsed = parse_code(code)
    if parsed.is_exact or len(wire.topology.groups) == 1:
        return Exact(wire, like, purpose, kind if kind == "bf16" else "fp32")
    if kind == "lowrank":
        return low_rank(wire, like, purpose, int(number))
    if kind == "topk":
        return Sparse(wire, like, purpose, number)
    return Quantized(wire, like, purpose, quantizer(kind))


def low_rank(wire: Wire, like: Sequence[Tensor], purpose: str, rank: int, min_compression: float = 2.0) -> Aggregator:
    """Products of this rank, of weights that become smaller by this factor."""
    kept = ShardedLowRank if wire.is_sharded else LowRank
    return kept(wire, like, purpose, rank, min_compression)
