"""A wire that counts what would be sent and sends nothing, for workers that are not there.

A method runs on it as on the real one, so what a plan says is the method's own arithmetic. Tensors may be on
the meta device: nothing is ever read from them.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thinwire.comm.codec import size_of
from thinwire.comm.collectives import Pending, Wire
from thinwire.comm.ledger import Ledger
from thinwire.comm.sent import Sent
from thinwire.comm.topology import Topology


class Call(NamedTuple):
    """A collective that everybody waits for."""

    phase: str
    purpose: str
    sent: Sent
    calls: int
    """Calls that it is made of."""
    overlap: int = 0
    """Steps that go on before anybody waits for it."""


class Exchange(NamedTuple):
    """A collective in parts that start while the backward pass still computes."""

    phase: str
    parts: tuple[Sent, ...]


class DryWire(Wire):
    """One worker's end of a wire that is not there."""

    is_dry = True

    def __init__(self, topology: Topology, ledger: Ledger) -> None:
        self.topology = topology
        self.ledger = ledger
        self._group = self._cross = self._control = None
        self.changing: set[int] = set()
        """Identities of tensors that training makes different on different workers."""
        self.repeat = 1
        """How often what is counted now would happen."""
        self.overlap = 0
        """Steps that go on before anybody waits for what is counted now."""
        self.calls: Counter[Call] = Counter()
        self.exchanges: Counter[Exchange] = Counter()

    def count(self, purpose: str, sent: Sent, calls: int = 1) -> None:
        """Book it, and keep its shape: how long it takes depends on links that are chosen later."""
        self.ledger.record(purpose, sent, calls, self.repeat)
        self.calls[Call(self.ledger.phase, self.ledger.booked_as(purpose), sent, calls, self.overlap)] += self.repeat

    def count_overlapped(self, purpose: str, parts: Sequence[Sent]) -> None:
        """Book the parts of an exchange."""
        for sent in parts:
            self.ledger.record(purpose, sent, 1, self.repeat)
        self.exchanges[Exchange(self.ledger.phase, tuple(parts))] += self.repeat

    def differing(self, contents: Sequence[Sequence[Tensor]], purpose: str) -> list[int]:
        """Those that training makes different."""
        if self.topology.world_size == 1:
            return []
        self._reduce(torch.empty(2 * len(contents), dtype=torch.int64), None, purpose)
        return [i for i, tensors in enumerate(contents) if any(id(t) in self.changing for t in tensors)]

    def checksum(self, tensors: Sequence[Tensor]) -> tuple[int, int]:
        """There are no values."""
        return 0, 0

    def _reduce(self, tensor: Tensor, op: Any, purpose: str) -> Tensor:
        if self.topology.world_size > 1:
            self.count(purpose, self.topology.all_reduce(self.topology.world, size_of(tensor)))
        return tensor

    def _gather_rows(self, rows: Tensor, mine: Tensor) -> Any:
        return None  # everybody says the same, and the rows hold it already

    def _gather_objects(self, told: list[Any], what: Any) -> None:
        told[:] = [what] * len(told)

    def _begin(self, call: Any, result: Tensor, sent: Sent, purpose: str) -> Pending:
        self.count(purpose, sent)
        return Pending(result, None, self.ledger, purpose, sent)

    def _timed(self, call: Any, sent: Sent, purpose: str) -> None:
        self.count(purpose, sent)
