"""Means over groups of lists of tensors, again and again, in a code.

    begin     send what this group has; nobody waits
    middle    where a code takes two rounds: use what came in, and send on
    end       wait, and write the mean, the same bits on all workers

All members of a group hold the same tensors and carry one share each over the slow link. What a code leaves out is kept
and sent the next time: error feedback. It changes only at `commit`, so a mean that nobody used leaves no trace. The
ledger has the bytes when they are sent, and of the time only what is waited for.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.comm.buckets import WIRES, pack_wide, unpack_into
from thinwire.comm.wire import Pending, Wire

State = dict[str, Tensor]


class Aggregator(ABC):
    """One way of averaging tensors like these over groups."""

    rounds: ClassVar[int] = 1

    def __init__(self, wire: Wire, like: Sequence[Tensor], purpose: str) -> None:
        self.wire = wire
        self.like = list(like)
        self.purpose = purpose

    @abstractmethod
    def begin(self, tensors: Sequence[Tensor], *, healthy: bool = True, again: bool = False, steps: int = 0) -> None:
        """Send tensors, whose mean is waited for `steps` steps later; an unhealthy worker sends only that it is.

        `again` is one more exchange of the same step: the last mean is in these tensors, and more.
        """

    @abstractmethod
    def end(self, out: Sequence[Tensor]) -> bool:
        """Write the mean; False if any worker was unhealthy, and then `out` is undefined."""

    def take_back(self, tensors: Sequence[Tensor]) -> None:  # noqa: B027
        """Before one more exchange of the same step: subtract the last mean, where more than a sum is made of it."""

    def middle(self) -> None:  # noqa: B027
        """The second round, if there is one; `end` makes up for a call that was left out."""

    def turn(self, steps: int) -> int | None:
        """How many steps after `begin` to call `middle`, if all may take `steps`; None if there is no second round."""
        return (steps + 1) // 2 if self.rounds > 1 else None

    def run(self, tensors: Sequence[Tensor], *, healthy: bool = True, again: bool = False) -> bool:
        """Replace tensors by their mean."""
        self.begin(tensors, healthy=healthy, again=again)
        return self.end(tensors)

    def choose_senders(self, groups: Sequence[int] | None) -> None:  # noqa: B027
        """From now on only these groups have anything but zeros, and need not send; None is all of them."""

    def refine(self) -> bool:
        """Use a finer code from now on, so that next to nothing is left out; False if this one is as fine as any."""
        return False

    def move(self, device: torch.device) -> None:  # noqa: B027
        """Hold what is kept from one mean to the next on a device, while nothing is under way."""

    def commit(self) -> None:  # noqa: B027
        """The last mean was used: keep what it left out."""

    def forget(self) -> None:
        """Drop what this group has left unsent, while nothing is under way."""
        for t in self.residuals():
            t.zero_()

    def residuals(self) -> list[Tensor]:
        """What is kept from one mean to the next, in the units of the tensors."""
        return []

    def workspace(self) -> list[Tensor]:
        """What it holds beside its state."""
        return []

    def shared(self) -> State:
        """What is the same on all workers."""
        return {}

    def local(self) -> State:
        """What is this worker's own."""
        return {}

    def load(self, shared: State, local: State) -> None:  # noqa: B027
        """Continue from a state."""

    def keep(self, shared: State, local: State) -> None:  # noqa: B027
        """Continue from this worker's own state, beside other groups than before; what does not fit is dropped."""

    def adopt(self, shared: State, everyone: Sequence[State]) -> None:  # noqa: B027
        """Continue from the states of all workers of another world."""


class Exact(Aggregator):
    """An all-reduce, in fp32 or wider, or rounded to bf16."""

    def __init__(
        self, wire: Wire, like: Sequence[Tensor], purpose: str, rounding: str = "fp32", flagged: bool = False
    ) -> None:
        super().__init__(wire, like, purpose)
        self.rounding = rounding
        self.weighted = False
        """Whether tensors come with their group's weight; else that is its share of all workers."""
        self.flagged = flagged
        """Whether it says if the sender is healthy; else non-finite values are for the caller to find."""
        self._flat = torch.empty(0)
        self._pending: Pending | None = None

    def begin(self, tensors: Sequence[Tensor], *, healthy: bool = True, again: bool = False, steps: int = 0) -> None:
        """Send each tensor times the group's weight."""
        topology = self.wire.topology
        if len(topology.groups) == 1:
            self._flat = pack_wide(tensors)
            return
        self._flat = self._weigh(tensors, healthy)
        with self.wire.hidden_behind(steps):
            self._pending = self.wire.begin_sum(self._flat, self.purpose)

    def _weigh(self, tensors: Sequence[Tensor], healthy: bool) -> Tensor:
        topology = self.wire.topology
        share = 1.0 if self.weighted else len(topology.group) / topology.world_size
        is_flat = len(tensors) == 1 and tensors[0].dtype in (torch.float32, torch.float64)
        values = tensors[0].detach().reshape(-1) if is_flat else pack_wide(tensors)
        dtype = values.dtype if self.rounding == "fp32" else WIRES[self.rounding]
        count = values.numel()
        flat = values.new_empty(count + self.flagged, dtype=torch.promote_types(dtype, WIRES[self.rounding]))
        if self.wire.carries:  # the others receive it from those that do
            torch.mul(values, share, out=flat[:count])
            flat[count:] = float(not healthy)
        return flat

    def end(self, out: Sequence[Tensor]) -> bool:
        """Receive the sum and hand it around inside the group."""
        if self._pending is not None:
            self._pending.wait()
            self.wire.share_in_group(self._flat, self.purpose)
        flat, self._flat, self._pending = self._flat, torch.empty(0), None
        flagged = self.flagged and len(self.wire.topology.groups) > 1
        if flagged and self.wire.read(lambda: bool(flat[-1]), False):
            return False
        self.wire.compute(lambda: unpack_into(flat[: len(flat) - flagged], out))
        return True


class Rotating(Aggregator):
    """One member of each group carries everything, another one each time; each keeps what it left out itself."""

    def __init__(self, wire: Wire, make: Callable[[], Aggregator]) -> None:
        self.turns: list[Aggregator] = []
        for member in range(wire.topology.shares):
            with wire.carried_by(member):
                self.turns.append(make())
        super().__init__(wire, self.turns[0].like, self.turns[0].purpose)
        self.number = -1

    @property
    def _member(self) -> int:
        return self.number % len(self.turns)

    def begin(self, tensors: Sequence[Tensor], *, healthy: bool = True, again: bool = False, steps: int = 0) -> None:
        """Send by the member whose turn it is."""
        self.number += 1
        with self.wire.carried_by(self._member):
            self.turns[self._member].begin(tensors, healthy=healthy, again=again, steps=steps)

    def middle(self) -> None:
        """Of the one under way."""
        with self.wire.carried_by(self._member):
            self.turns[self._member].middle()

    def turn(self, steps: int) -> int | None:
        """As of any of them."""
        return self.turns[0].turn(steps)

    def end(self, out: Sequence[Tensor]) -> bool:
        """The mean, handed on to its group by the member that carried it."""
        with self.wire.carried_by(self._member):
            return self.turns[self._member].end(out)

    def commit(self) -> None:
        """Of the last one."""
        self.turns[self._member].commit()

    def forget(self) -> None:
        """Of all of them."""
        for each in self.turns:
            each.forget()

    def workspace(self) -> list[Tensor]:
        """Of all of them."""
        return [t for each in self.turns for t in each.workspace()]

    def residuals(self) -> list[Tensor]:
        """Of all of them."""
        return [t for each in self.turns for t in each.residuals()]

    def shared(self) -> State:
        """Whose turn it is, and what all of them share."""
        return {"number": torch.tensor(self.number), **self._numbered([each.shared() for each in self.turns])}

    def local(self) -> State:
        """Of all of them."""
        return self._numbered([each.local() for each in self.turns])

    def load(self, shared: State, local: State) -> None:
        """Take it back."""
        self.number = int(shared["number"])
        for i, each in enumerate(self.turns):
            each.load(_part(i, shared), _part(i, local))

    def keep(self, shared: State, local: State) -> None:
        """Whose turn it is must be the same in all groups."""
        self.number = int(shared.get("number", -1))
        for i, each in enumerate(self.turns):
            each.keep(_part(i, shared), _part(i, local))

    @staticmethod
    def _numbered(states: Sequence[State]) -> State:
        return {f"{i}/{name}": t for i, state in enumerate(states) for name, t in state.items()}


def _part(number: int, states: State) -> State:
    """The states of one of them, by their own names."""
    start = f"{number}/"
    return {name.removeprefix(start): t for name, t in states.items() if name.startswith(start)}
