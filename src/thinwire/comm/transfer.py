"""A mean over groups that is on its way while training goes on.

    begin     send; nobody waits
    middle    where the sum itself is coded: add up what came in, and send that on
    end       wait for it, and hand it around inside the group

The ledger has the bytes when they are sent, and of the time only what is waited.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.comm.codec import WIRES, all_finite, size_of
from thinwire.comm.collectives import Pending, Wire
from thinwire.comm.compressed import CompressedSum
from thinwire.comm.dry import DryWire
from thinwire.comm.quantize import Int8Quantizer, Rows
from thinwire.comm.sent import Sent

_BLOCK = 256


def make_transfer(wire: Wire, size: int, rounding: str, device: torch.device, purpose: str) -> "Transfer":
    """For flat vectors of `size` values, again and again; all members of a group carry a share at once."""
    if rounding == "int8" and len(wire.topology.groups) > 1:
        return CodedTransfer(wire, size, device, purpose)
    return Transfer(wire, rounding, purpose)


def make_rotating(wire: Wire, size: int, rounding: str, device: torch.device, purpose: str) -> "Rotating":
    """The same with one member of each group that carries everything, another one each time."""
    if rounding == "int8" and len(wire.topology.groups) > 1:
        room = torch.empty(-(-size // _BLOCK) * _BLOCK, dtype=torch.float32, device=device)
        return Rotating(wire, lambda: CodedTransfer(wire, size, device, purpose, room))
    return Rotating(wire, lambda: Transfer(wire, rounding, purpose))


class Transfer:
    """One flat vector a worker; members of a group hold the same one and carry a share of it each."""

    def __init__(self, wire: Wire, rounding: str, purpose: str) -> None:
        self.wire = wire
        self.rounding = rounding
        self.purpose = purpose
        self._shares: list[Tensor] = []
        self._pending: Pending | None = None
        self._dtype = torch.float32

    def turn(self, steps: int) -> int | None:
        """Steps after `begin` at which `middle` is to be called, if all may take `steps`; None where there is none."""
        return None

    def carries(self, number: int) -> bool:
        """Whether this worker's values are sent at all the `number`th time."""
        return self.wire.carries

    def begin(self, values: Tensor, steps: int, number: int = 0) -> None:
        """Send the group's values, which come back `steps` steps later; `number` is for those that take turns.

        Of a worker that does not carry only how many they are is looked at.
        """
        self._dtype = values.dtype
        topology = self.wire.topology
        if len(topology.groups) == 1:
            self._pending = Pending(values, None, self.wire.ledger, self.purpose, Sent())
            return
        dtype = values.dtype if self.rounding == "fp32" else WIRES[self.rounding]
        travelling = torch.empty_like(values, dtype=dtype)
        if self.wire.carries:  # to the others it comes from those that do
            torch.mul(values, len(topology.group) / topology.world_size, out=travelling)
        self._shares = list(travelling.tensor_split(topology.shares))
        sent = topology.at_once([(topology.crossing(j), size_of(share)) for j, share in enumerate(self._shares)])
        with hidden_behind(self.wire, steps):
            self._pending = self.wire._begin(self._cross, travelling, sent, self.purpose)

    def middle(self) -> None:
        """A sum as it is needs no second half."""

    def end(self) -> Tensor | None:
        """The mean, the same bits on all workers; None if someone's values could not be sent."""
        mean = self.end_narrow()
        return mean.to(self._dtype) if mean is not None else None

    def end_narrow(self) -> Tensor | None:
        """The same as it travelled."""
        assert self._pending is not None, "nothing is on its way"
        mean, self._pending = self._pending.wait(), None
        for j, share in enumerate(self._shares):
            if share.numel():
                self.wire.share_out([share], j, self.purpose)
        self._shares = []
        return mean

    def state(self) -> dict[str, Tensor]:
        """What stays with this worker between two transfers."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` gave."""

    def _cross(self) -> Any:
        member = self.wire.topology.member
        if member < len(self._shares) and self._shares[member].numel():
            return dist.all_reduce(self._shares[member], group=self.wire._cross, async_op=True)
        return None


class CodedTransfer(Transfer):
    """A byte an element and a scale a block both ways, with error feedback; half of the steps for each way."""

    def __init__(self, wire: Wire, size: int, device: torch.device, purpose: str, room: Tensor | None = None) -> None:
        super().__init__(wire, "int8", purpose)
        self.size = size
        self.sum = CompressedSum(wire, [Rows(-(-size // _BLOCK), _BLOCK)], Int8Quantizer(), device, purpose, room)
        self._steps = 0
        self._halfway = False

    def turn(self, steps: int) -> int | None:
        """In the middle."""
        return (steps + 1) // 2

    def begin(self, values: Tensor, steps: int, number: int = 0) -> None:
        """Add the values to what was not said yet, and send that."""
        self._dtype, self._steps, self._halfway = values.dtype, steps, False
        healthy = not self.wire.carries or all_finite([values])
        start, end = self.sum.span[0], min(self.sum.span[1], self.size)
        if healthy and start < end:
            self.sum.add([values[start:end]], [slice(0, end - start)])
        with hidden_behind(self.wire, (steps + 1) // 2):
            self.sum.begin(healthy)

    def middle(self) -> None:
        """Send the sums on."""
        if not self._halfway:
            self._halfway = True
            with hidden_behind(self.wire, self._steps // 2):
                self.sum.middle()

    def end_narrow(self) -> Tensor | None:
        """The mean as all workers heard it, where the next one will be written."""
        self.middle()
        mean = self.sum.end()
        if mean is None:
            return None
        self.sum.commit()
        return mean[: self.size]

    def end(self) -> Tensor | None:
        """A copy of it."""
        mean = self.end_narrow()
        return mean.to(self._dtype, copy=True) if mean is not None else None

    def state(self) -> dict[str, Tensor]:
        """Both errors."""
        return self.sum.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take both back."""
        self.sum.load_state(state)


class Rotating:
    """A transfer for each member that may carry; what one could not say it says when its turn comes again."""

    def __init__(self, wire: Wire, make: Callable[[], Transfer]) -> None:
        self.wire = wire
        self.turns: list[Transfer] = []
        for member in range(wire.topology.shares):
            with wire.carried_by(member):
                self.turns.append(make())
        self._member = 0

    def turn(self, steps: int) -> int | None:
        """As of any of them."""
        return self.turns[0].turn(steps)

    def carries(self, number: int) -> bool:
        """Whether it is this worker's turn."""
        with self.wire.carried_by(number % len(self.turns)):
            return self.wire.carries

    def begin(self, values: Tensor, steps: int, number: int = 0) -> None:
        """Send by the member whose turn the `number`th transfer is."""
        self._member = number % len(self.turns)
        with self.wire.carried_by(self._member):
            self.turns[self._member].begin(values, steps)

    def middle(self) -> None:
        """Of the one under way."""
        with self.wire.carried_by(self._member):
            self.turns[self._member].middle()

    def end_narrow(self) -> Tensor | None:
        """The mean, handed on to its group by who carried it."""
        with self.wire.carried_by(self._member):
            return self.turns[self._member].end_narrow()

    def state(self) -> dict[str, Tensor]:
        """Of all of them."""
        return {f"{name}.{i}": t for i, each in enumerate(self.turns) for name, t in each.state().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take it back."""
        for i, each in enumerate(self.turns):
            own = {name.removesuffix(f".{i}"): t for name, t in state.items() if name.endswith(f".{i}")}
            if own:
                each.load_state(own)


@contextmanager
def hidden_behind(wire: Wire, steps: int) -> Iterator[None]:
    """Tell a plan that nobody waits for what is sent here before so many steps are over."""
    if not isinstance(wire, DryWire):
        yield
        return
    before, wire.overlap = wire.overlap, steps
    try:
        yield
    finally:
        wire.overlap = before
