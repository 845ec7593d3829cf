"""Low-rank products of matrices of which members of a group hold different rows; nobody needs a whole one.

M = rows of tensor + error      this member's
P = mean over groups of M Q     this member's rows, with those who hold the same
P = orthogonal basis of P       of all rows, which the group gathers
Q = mean over groups of Mᵀ P    summed in the group; each member carries a share of it between groups
mean = P Qᵀ, error = M − P Qᵀ   this member's rows
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.buckets import pack, unpack_into
from thinwire.comm.lowrank import LowRank, orthogonalise
from thinwire.comm.sharded import ShardedWire


class ShardedLowRank(LowRank):
    """As `LowRank` of whole matrices, up to rounding."""

    wire: ShardedWire
    _share: Tensor
    """The part of every Q, one after the other, that this member carries."""

    def _rows(self, like: Sequence[Tensor]) -> list[int]:
        """Those of all members; an empty part may be that of a matrix that others hold."""
        own = torch.tensor([len(t) if t.dim() else 0 for t in like], dtype=torch.int64)
        self._rows_of = [part.tolist() for part in self.wire.gather_in_group(own, self.purpose)]
        """By member."""
        return [sum(rows) for rows in zip(*self._rows_of, strict=True)]

    def _find_bases(self, ps: Sequence[Tensor]) -> None:
        counts = [[rows[i] for i in self.errors] for rows in self._rows_of]  # of each member, of each P
        widths = [p.shape[1] for p in ps]
        sizes = [sum(n * r for n, r in zip(rows, widths, strict=True)) for rows in counts]
        parts = [
            flat.split([n * r for n, r in zip(rows, widths, strict=True)])
            for flat, rows in zip(self.wire.gather_in_group(pack(ps), self.purpose, sizes), counts, strict=True)
        ]
        whole = [torch.cat([part[i].view(-1, r) for part in parts]) for i, r in enumerate(widths)]
        orthogonalise(whole)
        member = self.wire.member
        for i, p in enumerate(ps):
            before = sum(rows[i] for rows in counts[:member])
            p.copy_(whole[i][before : before + len(p)])

    def _begin_second(self, qs: Sequence[Tensor]) -> None:
        flat = pack(qs)
        self.wire.sum_in_group(flat, self.purpose)
        self._sizes = [len(share) for share in flat.tensor_split(len(self.wire.topology.group))]
        self._share = flat.split(self._sizes)[self.wire.member].clone()
        self.second.begin([self._share])

    def _end_second(self, qs: Sequence[Tensor]) -> None:
        self.second.end([self._share])
        unpack_into(torch.cat(self.wire.gather_in_group(self._share, self.purpose, self._sizes)), qs)
