"""Matrices as low-rank products (PowerSGD; Vogels, Karimireddy, Jaggi, NeurIPS 2019; arXiv 1905.13727).

M = tensor + error              of each weight, as an n×m matrix
P = mean over groups of M Q     first all-reduce, together with everything that is not compressed
P = orthogonal basis of P
Q = mean over groups of Mᵀ P    second all-reduce; the next mean starts from this Q
mean = P Qᵀ, error = M − P Qᵀ
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.codecs.aggregate import Aggregator, Exact, State
from thinwire.comm.buckets import pack, unpack_into
from thinwire.comm.sharded import ShardedWire
from thinwire.comm.wire import Wire


class LowRank(Aggregator):
    """One step of subspace iteration for each mean, warm-started, with error feedback."""

    rounds = 2

    def __init__(
        self, wire: Wire, like: Sequence[Tensor], purpose: str, rank: int, min_compression: float = 2.0
    ) -> None:
        super().__init__(wire, like, purpose)
        self.errors: dict[int, Tensor] = {}
        self.qs: dict[int, Tensor] = {}
        generator = torch.Generator().manual_seed(0)
        for i, (t, n) in enumerate(zip(like, self._rows(like), strict=True)):
            m = math.prod(t.shape[1:])
            r = min(rank, n, m)
            if t.dim() > 1 and min_compression * r * (n + m) < n * m:
                self.errors[i] = torch.zeros(t.shape[0], m, dtype=torch.float32, device=t.device)
                self.qs[i] = torch.randn(m, r, generator=generator, dtype=torch.float32).to(t.device)
        self.next_errors = {i: torch.zeros_like(error) for i, error in self.errors.items()}
        self.next_qs: dict[int, Tensor] = {}
        """What takes their place when the mean is committed."""
        self.dense = [i for i in range(len(like)) if i not in self.errors]
        self.first = Exact(wire, [], purpose, flagged=True)
        self.second = Exact(wire, [], purpose)
        self._ps: dict[int, Tensor] = {}
        self._means: list[Tensor] = []
        self._steps = 0
        self._halfway = self._healthy = False

    def _rows(self, like: Sequence[Tensor]) -> list[int]:
        """How many rows each matrix has."""
        return [len(t) if t.dim() else 0 for t in like]

    def begin(self, tensors: Sequence[Tensor], *, healthy: bool = True, again: bool = False, steps: int = 0) -> None:
        """P, and what is not compressed."""
        self._steps, self._halfway = steps, False
        errors, qs = (self.next_errors, self.next_qs) if again else (self.errors, self.qs)
        if healthy:
            for i, error in errors.items():
                torch.add(error, tensors[i].reshape(error.shape), out=self.next_errors[i])
        self._ps = {i: error @ qs[i] for i, error in self.next_errors.items()}  # (n, m) @ (m, r)
        self._means = [tensors[i].detach().float() for i in self.dense]
        with self.wire.hidden_behind((steps + 1) // 2):
            self.first.begin([*self._ps.values(), *self._means], healthy=healthy)

    def middle(self) -> None:
        """Q from the basis that all have."""
        if self._halfway:
            return
        self._halfway = True
        ps = list(self._ps.values())
        self._means = [torch.empty_like(t) for t in self._means]
        self._healthy = self.first.end([*ps, *self._means])
        if not self._healthy or not ps:
            return
        self._find_bases(ps)
        # ((r, n) @ (n, m))ᵀ, which reads each error row by row.
        self.next_qs = {i: (self._ps[i].T @ error).T.contiguous() for i, error in self.next_errors.items()}
        with self.wire.hidden_behind(self._steps // 2):
            self._begin_second(list(self.next_qs.values()))

    def _find_bases(self, ps: Sequence[Tensor]) -> None:
        """Replace every P by a basis of it."""
        self.wire.compute(lambda: orthogonalise(ps))

    def _begin_second(self, qs: Sequence[Tensor]) -> None:
        """Send every Q."""
        self.second.begin(qs)

    def _end_second(self, qs: Sequence[Tensor]) -> None:
        """Wait for their means."""
        self.second.end(qs)

    def end(self, out: Sequence[Tensor]) -> bool:
        """The products; what they leave out is the next error."""
        self.middle()
        if not self._healthy:
            return False
        if self.next_qs:
            self._end_second(list(self.next_qs.values()))
        for i, error in self.next_errors.items():
            error.sub_(_write_product(self._ps[i], self.next_qs[i], out[i]))
        for i, mean in zip(self.dense, self._means, strict=True):
            out[i].copy_(mean)
        return True

    def commit(self) -> None:
        """Errors, and the Q that the next mean starts from."""
        self.errors, self.next_errors = self.next_errors, self.errors
        self.qs = self.next_qs

    def residuals(self) -> list[Tensor]:
        """Errors; Q is in those units too, but only what it spans counts."""
        return list(self.errors.values())

    def workspace(self) -> list[Tensor]:
        """Errors as they will be."""
        return list(self.next_errors.values())

    def shared(self) -> State:
        """Every Q."""
        return {f"q.{i}": q for i, q in self.qs.items()}

    def local(self) -> State:
        """This group's errors."""
        return {f"error.{i}": error for i, error in self.errors.items()}

    def load(self, shared: State, local: State) -> None:
        """Take both back; a save of one group has neither."""
        self.qs = {i: shared.get(f"q.{i}", q) for i, q in self.qs.items()}
        for i, error in self.errors.items():
            error.copy_(local.get(f"error.{i}", torch.zeros_like(error)))

    def keep(self, shared: State, local: State) -> None:
        """Both as they are: a group has its errors whole."""
        self.load(shared, local)

    def adopt(self, shared: State, everyone: Sequence[State]) -> None:
        """Every group starts from the mean of the old errors; one group alone had none."""
        self.qs = {i: shared.get(f"q.{i}", q) for i, q in self.qs.items()}
        for i, error in self.errors.items():
            old = [tensors[f"error.{i}"] for tensors in everyone if f"error.{i}" in tensors]
            error.copy_(torch.stack(old).mean(0) if old else torch.zeros_like(error))


def _write_product(p: Tensor, q: Tensor, out: Tensor) -> Tensor:
    """P Qᵀ into `out`; without a copy of it where memory allows."""
    if out.is_contiguous() and out.dtype == p.dtype:
        return torch.mm(p, q.T, out=out.view(len(p), len(q)))
    product = p @ q.T
    out.copy_(product.view_as(out))
    return product


def orthogonalise(matrices: Sequence[Tensor]) -> None:
    """Replace each matrix by an orthonormal basis of its columns; signs are those of the columns themselves."""
    by_shape: dict[Any, list[Tensor]] = defaultdict(list)
    for matrix in matrices:
        by_shape[matrix.shape].append(matrix)
    for same in by_shape.values():
        q, r = torch.linalg.qr(torch.stack(same))
        signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
        torch._foreach_copy_(same, list(q * signs.unsqueeze(-2)))


class ShardedLowRank(LowRank):
    """As `LowRank` of whole matrices, up to rounding, where members of a group hold different rows.

    M = rows of tensor + error      this member's
    P = mean over groups of M Q     this member's rows, with those who hold the same
    P = orthogonal basis of P       of all rows, which the group gathers
    Q = mean over groups of Mᵀ P    summed in the group; each member carries a share of it between groups
    mean = P Qᵀ, error = M − P Qᵀ   this member's rows

    Nobody needs a whole matrix.
    """

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
