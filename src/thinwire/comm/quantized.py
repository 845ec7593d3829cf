"""Means over groups in a few bits per element, with error feedback at both ends."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.comm.aggregate import Aggregator, Exact, State, hidden_behind
from thinwire.comm.buckets import unpack_into
from thinwire.comm.collectives import Wire
from thinwire.comm.compressed import CompressedSum
from thinwire.comm.quantize import Quantizer, Rows, quantizer

BLOCK = 256


class Quantized(Aggregator):
    """Matrices in a few bits per element in both directions; what has one dimension stays exact."""

    rounds = 2

    def __init__(
        self,
        wire: Wire,
        like: Sequence[Tensor],
        purpose: str,
        code: Quantizer,
        rows: Callable[[Sequence[Tensor]], list[Rows]] | None = None,
    ) -> None:
        super().__init__(wire, like, purpose)
        self.coded = [i for i, t in enumerate(like) if t.dim() > 1 and t.numel()]
        self.plain = [i for i in range(len(like)) if i not in set(self.coded)]
        self.exact = Exact(wire, [like[i] for i in self.plain], purpose, flagged=not self.coded)
        self.sum: CompressedSum | None = None
        if self.coded:
            coded = [like[i] for i in self.coded]
            self.size = sum(t.numel() for t in coded)
            cut = rows(coded) if rows else [Rows(-(-self.size // BLOCK), BLOCK)]
            self.sum = CompressedSum(wire, cut, code, coded[0].device, purpose)
            self.pieces = pieces([t.numel() for t in coded], self.sum.span)
            self.covered = sum(p.end - p.start for p in self.pieces)
            """Of this worker's share; what fills up the last block is behind it."""
        self._steps = 0
        self._halfway = False

    def begin(self, tensors: Sequence[Tensor], *, healthy: bool = True, again: bool = False, steps: int = 0) -> None:
        """Add to what was left out, and send its code."""
        self._steps, self._halfway, self._again = steps, False, again
        if self.sum is not None:
            coded = [tensors[i] for i in self.coded]
            if healthy and not self.sum.residual.is_meta:
                self.sum.add([piece.of(coded) for piece in self.pieces], [p.slice for p in self.pieces], again)
                self.sum.next_residual[self.covered :] = 0.0  # a code may say something else of it, which nobody needs
            with hidden_behind(self.wire, (steps + 1) // 2):
                self.sum.begin(healthy)
        if self.plain:
            self.exact.begin([tensors[i] for i in self.plain], healthy=healthy, steps=steps)

    def middle(self) -> None:
        """Send the code of the sums on."""
        if self.sum is not None and not self._halfway:
            self._halfway = True
            with hidden_behind(self.wire, self._steps // 2):
                self.sum.middle(self._again)

    def end(self, out: Sequence[Tensor]) -> bool:
        """What the code of the sums says."""
        self.middle()
        coded = [out[i] for i in self.coded]
        direct = self.sum is not None and len(coded) == 1 and self._fits(coded[0])
        total = self.sum.end(coded[0].view(-1) if direct else None) if self.sum is not None else None
        if total is not None and not direct:
            unpack_into(total[: self.size], coded)
        healthy = self.exact.end([out[i] for i in self.plain]) if self.plain else True
        return healthy and (self.sum is None or total is not None)

    def _fits(self, out: Tensor) -> bool:
        """Whether the sum can be decoded right into a tensor."""
        whole = self.sum is not None and out.numel() == self.sum.size
        return whole and out.is_contiguous() and out.dtype == torch.float32

    def choose_senders(self, groups: Sequence[int] | None) -> None:
        """The others keep what they left out before."""
        if self.sum is not None:
            self.sum.senders = groups

    def refine(self) -> bool:
        """Both errors travel in int8."""
        return self.sum is not None and self.sum.refine(quantizer("int8"))

    def move(self, device: torch.device) -> None:
        """Both errors."""
        if self.sum is not None:
            self.sum.move(device)

    def commit(self) -> None:
        """Both errors: this group's, and that of the sums this worker owns."""
        if self.sum is not None:
            self.sum.commit()

    def forget(self) -> None:
        """This group's own error; that of the sums is of all groups."""
        if self.sum is not None:
            self.sum.residual.zero_()

    def residuals(self) -> list[Tensor]:
        """Both errors."""
        return [self.sum.residual, self.sum.owned] if self.sum is not None else []

    def workspace(self) -> list[Tensor]:
        """Both errors as they will be."""
        return self.sum.workspace() if self.sum is not None else []

    def local(self) -> State:
        """Both errors."""
        return self.sum.state() if self.sum is not None else {}

    def load(self, shared: State, local: State) -> None:
        """Take both back."""
        if self.sum is not None and local:
            self.sum.load_state(local)

    def keep(self, shared: State, local: State) -> None:
        """This group's own error, and with it that of the sums this worker owned."""
        if self.sum is not None and local:
            self.sum.keep(local)

    def adopt(self, shared: State, everyone: Sequence[State]) -> None:
        """All that the old world had not sent yet, divided among the new one."""
        if self.sum is not None and everyone[0]:
            self.sum.adopt(everyone)
        else:
            for t in self.residuals():
                t.zero_()


class Piece(NamedTuple):
    """A part of one tensor, and where it lies in a worker's share."""

    tensor: int
    start: int
    end: int
    place: int

    @property
    def slice(self) -> slice:
        """Where it lies in the share."""
        return slice(self.place, self.place + self.end - self.start)

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The part itself, flat."""
        return tensors[self.tensor].reshape(-1)[self.start : self.end]


def pieces(sizes: Sequence[int], span: tuple[int, int]) -> list[Piece]:
    """What of tensors that lie one after the other falls into a span."""
    found, begin = [], 0
    for i, size in enumerate(sizes):
        start, end = max(begin, span[0]), min(begin + size, span[1])
        if start < end:
            found.append(Piece(i, start - begin, end - begin, start - span[0]))
        begin += size
    return found
