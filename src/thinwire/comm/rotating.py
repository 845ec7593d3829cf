"""Means over groups that one member of each group carries, another one each time."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thinwire.comm.aggregate import Aggregator, State
from thinwire.comm.collectives import Wire


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
