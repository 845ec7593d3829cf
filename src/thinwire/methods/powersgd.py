"""PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019; arXiv 1905.13727).

M = gradient + error            of each weight, as an n×m matrix
P = mean over groups of M Q     first all-reduce, together with everything that is not compressed
P = orthogonal basis of P
Q = mean over groups of Mᵀ P    second all-reduce; the next step starts from this Q
applied = P Qᵀ, error = M − P Qᵀ
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.config import PowerSGD
from thinwire.methods.base import Ground
from thinwire.methods.compressing import Compressing, sum_plain


class PowerSGDMethod(Compressing):
    """One step of subspace iteration a step, warm-started, with error feedback."""

    config: PowerSGD

    def __init__(self, config: PowerSGD, ground: Ground) -> None:
        super().__init__(config, ground)
        self.errors: dict[int, Tensor] = {}
        self.qs: dict[int, Tensor] = {}
        self.next_errors: dict[int, Tensor] = {}
        self.next_qs: dict[int, Tensor] = {}
        """What takes their place when the step is taken."""

    @property
    def plain_steps(self) -> int:
        """As the config says."""
        return self.config.start_length

    def prepare(self) -> None:
        """An error and a first Q for every weight that becomes small enough."""
        generator = torch.Generator().manual_seed(0)
        for i, p in enumerate(self.trained):
            if p.dim() < 2 or not p.numel() or len(self.topology.groups) == 1:
                continue
            n, m = p.shape[0], p.numel() // p.shape[0]
            rank = min(self.config.rank, n, m)
            if self.config.min_compression * rank * (n + m) < n * m:
                self.errors[i], self.next_errors[i] = (
                    torch.zeros(n, m, dtype=torch.float32, device=p.device) for _ in range(2)
                )
                self.qs[i] = torch.randn(m, rank, generator=generator, dtype=torch.float32).to(p.device)

    def carried(self) -> list[Tensor]:
        """Errors; Q is in those units too, but only what it spans counts."""
        return list(self.errors.values())

    def exchange(self, healthy: bool, again: bool) -> bool:
        """Both all-reduces."""
        gradients = self.gradients
        if not self.errors:
            return sum_plain(self.wire, gradients, healthy)
        errors, qs = (self.next_errors, self.next_qs) if again else (self.errors, self.qs)
        if healthy:
            for i, error in errors.items():
                torch.add(error, gradients[i].reshape(error.shape), out=self.next_errors[i])
            errors = self.next_errors
        ps = {i: error @ qs[i] for i, error in errors.items()}
        dense = [g.float() for i, g in enumerate(gradients) if i not in ps]
        if not sum_plain(self.wire, [*ps.values(), *dense], healthy):
            return False
        orthogonalise(list(ps.values()))
        self.next_qs = {i: error.T @ ps[i] for i, error in errors.items()}
        sum_plain(self.wire, list(self.next_qs.values()))
        for i, error in errors.items():
            error.sub_(_write_product(ps[i], self.next_qs[i], gradients[i]))
        kept = (g for i, g in enumerate(gradients) if i not in ps)
        for g, mean in zip(kept, dense, strict=True):
            if g is not mean:  # float() of fp32 is the tensor itself
                g.copy_(mean)
        return True

    def commit(self) -> None:
        """Errors, and the Q that the next step starts from."""
        self.errors, self.next_errors = self.next_errors, self.errors
        self.qs = self.next_qs

    def workspace(self) -> list[Tensor]:
        """Errors as they will be."""
        return list(self.next_errors.values())

    def tensors(self) -> dict[str, Tensor]:
        """Every Q, the same on all workers."""
        return {f"q.{i}": q.contiguous() for i, q in self.qs.items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take them back; a save of one group has none."""
        self.qs = {i: tensors.get(f"q.{i}", q) for i, q in self.qs.items()}

    def own_tensors(self) -> dict[str, Tensor]:
        """This group's errors."""
        return {f"error.{i}": error for i, error in self.errors.items()}

    def load_own_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take them back."""
        for i, error in self.errors.items():
            error.copy_(tensors[f"error.{i}"])

    def load_others_tensors(self, everyone: list[dict[str, Tensor]]) -> None:
        """Every group starts from the mean of the old errors; one group alone had none."""
        for i, error in self.errors.items():
            old = [tensors[f"error.{i}"] for tensors in everyone if tensors]
            error.copy_(torch.stack(old).mean(0) if old else torch.zeros_like(error))


def _write_product(p: Tensor, q: Tensor, gradient: Tensor) -> Tensor:
    """P Qᵀ as the gradient; without a copy of it where memory allows."""
    if gradient.is_contiguous() and gradient.dtype == p.dtype:
        return torch.mm(p, q.T, out=gradient.view(len(p), len(q)))
    product = p @ q.T
    gradient.copy_(product.view_as(gradient))
    return product


def orthogonalise(matrices: Sequence[Tensor]) -> None:
    """Replace each matrix by an orthonormal basis of its columns; signs are those of the columns themselves."""
    by_shape: dict[Any, list[Tensor]] = defaultdict(list)
    for matrix in matrices:
        by_shape[matrix.shape].append(matrix)
    for same in by_shape.values():
        if not same[0].is_meta:
            q, r = torch.linalg.qr(torch.stack(same))
            signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
            torch._foreach_copy_(same, list(q * signs.unsqueeze(-2)))
