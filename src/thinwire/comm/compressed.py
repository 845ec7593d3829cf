"""A sum over groups that travels in a few bits both ways, with error feedback on both.

1. Every group cuts its values into as many parts as there are groups, and sends each part's code to its owner.
2. An owner adds up what it received and sends the sum's code to everyone.

What either code leaves out is kept and sent the next time: in `residual` by each group, in `owned` by each owner. What
an owner has of its own part is not coded on its way to the sum.
Both change only when a sum is committed. One that nobody used, because a step was skipped or its gradients were thrown
away, leaves no trace in later ones.
The bytes do not grow with the number of groups. Members of a group carry a share of the values each.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.comm.collectives import Pending, Wire
from thinwire.comm.quantize import Quantizer, Rows, cut, elements, longest

_FLAG = 4


class CompressedSum:
    """One flat vector per worker, summed over groups again and again by the groups' weights."""

    def __init__(
        self,
        wire: Wire,
        rows: Sequence[Rows],
        quantizer: Quantizer,
        device: torch.device,
        purpose: str,
    ) -> None:
        topology = wire.topology
        self.wire = wire
        self.rows = rows
        self.purpose = purpose
        self.groups = len(topology.groups)
        parts = cut(rows, topology.shares * self.groups)
        self.parts = [parts[j * self.groups : (j + 1) * self.groups] for j in range(topology.shares)]
        starts = [0]
        for share in self.parts:
            starts.append(starts[-1] + sum(elements(part) for part in share))
        place = topology.member if wire.carries else topology.shares
        ends = (*starts, starts[-1])
        self.span = ends[place], ends[place + 1]
        """Where this worker's share of the values begins and ends."""
        self.mine = self.parts[topology.member] if wire.carries else [[] for _ in topology.groups]
        self.residual = torch.zeros(self.span[1] - self.span[0], dtype=torch.float32, device=device)
        self.owned = torch.zeros(elements(self.mine[topology.group_index]), dtype=torch.float32, device=device)
        self.next_residual, self.next_owned = torch.zeros_like(self.residual), torch.zeros_like(self.owned)
        """What takes their place when the sum under way is committed."""
        self.size = starts[-1]
        """Values in all rows."""
        self.senders: Sequence[int] | None = None
        """The groups that have something to send; None is all of them."""
        self._pending: Pending | None = None
        self._use(quantizer)

    def _use(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        length = functools.cache(self._length)
        self.length = self.wire.topology.by_groups(length)
        """Bytes of the longest part, and whether the sender is well."""
        self.gathered = self.wire.topology.by_groups(lambda groups: groups * length(groups))
        """Bytes of the parts of all groups."""

    def _length(self, groups: int) -> int:
        most = max(self.quantizer.size(part) for part in longest(self.rows, len(self.parts) * groups))
        return -(-most // 4) * 4 + _FLAG

    @property
    def _sends(self) -> bool:
        return self.senders is None or self.wire.topology.group_index in self.senders

    def add(self, values: Sequence[Tensor], places: Sequence[slice], again: bool = False) -> None:
        """Add values to this worker's share of what was left out; `again` to the share that was sent last."""
        before = self.next_residual if again else self.residual
        for value, place in zip(values, places, strict=True):
            torch.add(before[place], value, out=self.next_residual[place])

    def begin(self, healthy: bool = True) -> None:
        """Send this worker's share, after `add`; an unhealthy worker sends only that it is."""
        sent = torch.zeros(self.groups, self.length, dtype=torch.uint8, device=self.residual.device)
        if not healthy:
            sent[:, -_FLAG:] = 1
        elif not sent.is_meta and self._sends:
            for g, values in enumerate(self._split(self.next_residual)):
                if g != self.wire.topology.group_index:  # its own part it adds exactly
                    self.quantizer.encode(values, self.mine[g], sent[g])
        self._pending = self.wire.all_to_all(sent, self.purpose, self.senders, self.length)

    def middle(self, again: bool = False) -> None:
        """Add up the part this worker owns, and send it on."""
        assert self._pending is not None, "nothing was begun"
        received, topology = self._pending.wait(), self.wire.topology
        part = self.mine[topology.group_index]
        if not again:
            self.next_owned.copy_(self.owned)
        sends = range(self.groups) if self.senders is None else self.senders
        for row, g in zip(received, sends, strict=True) if not received.is_meta else ():
            weight = len(topology.groups[g]) / topology.world_size
            if g == topology.group_index:
                own = self._split(self.next_residual)[g]
                self.next_owned.add_(own, alpha=weight)
                own.zero_()
            else:
                self.quantizer.decode(row, part, self.next_owned, weight)
        out = torch.zeros(self.length, dtype=torch.uint8, device=self.owned.device)
        self.quantizer.encode(self.next_owned, part, out)
        out[-_FLAG:] = received[:, -_FLAG:].amax(0)
        self._pending = self.wire.all_gather(out, self.purpose, [self.length] * len(self.parts))

    def end(self, out: Tensor | None = None) -> Tensor | None:
        """The sum, the same bits on all workers; None if anyone was unhealthy, and then it must not be committed.

        It is written to `out`, if given: as many values as all rows have.
        """
        shape, device = (self.groups, self.length), self.residual.device
        blocks = [torch.empty(shape, dtype=torch.uint8, device=device) for _ in self.parts]
        assert self._pending is not None, "nothing was begun"
        if self.wire.carries:
            blocks[self.wire.topology.member] = self._pending.wait()
        self._pending = None
        for j, block in enumerate(blocks):
            self.wire.broadcast_in_group([block], j, self.purpose, self.gathered)
        result = torch.empty(self.size, dtype=torch.float32, device=device) if out is None else out
        if device.type == "meta":
            return result
        if bool(blocks[0][0, -1]):
            return None
        place = 0
        for block, share in zip(blocks, self.parts, strict=True):
            for payload, part in zip(block, share, strict=True):
                size = elements(part)
                self.quantizer.decode(payload, part, result[place : place + size])
                place += size
        return result

    def run(self, healthy: bool = True, again: bool = False) -> Tensor | None:
        """All three at once."""
        self.begin(healthy)
        self.middle(again)
        return self.end()

    def commit(self) -> None:
        """The last sum was used: what it left out is sent the next time."""
        self.residual, self.next_residual = self.next_residual, self.residual
        self.owned, self.next_owned = self.next_owned, self.owned

    def refine(self, quantizer: Quantizer) -> bool:
        """From the next sum on use this code, if it is finer; both errors go with it."""
        finer = quantizer.size(self.rows) > self.quantizer.size(self.rows)
        if finer:
            self._use(quantizer)
        return finer

    def move(self, device: torch.device) -> None:
        """Hold both errors on a device, while no sum is under way."""
        for name in ("residual", "owned", "next_residual", "next_owned"):
            setattr(self, name, getattr(self, name).to(device))

    def workspace(self) -> list[Tensor]:
        """What it holds beside its state and the result."""
        return [self.next_residual, self.next_owned]

    def state(self) -> dict[str, Tensor]:
        """Both errors, where they belong, and the weight of this worker's group."""
        topology = self.wire.topology
        weight = len(topology.group) / topology.world_size
        before = sum(elements(part) for part in self.mine[: topology.group_index])
        place = torch.tensor([*self.span, self.span[0] + before, weight], dtype=torch.float64)
        return {"residual": self.residual, "owned": self.owned, "place": place}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from a state."""
        self.residual.copy_(state["residual"])
        self.owned.copy_(state["owned"])

    def keep(self, state: dict[str, Tensor]) -> None:
        """Continue from this worker's state, if its share of the values is the same beside other groups.

        Another part may be its own now, so what it had left out of the sums it sends as a part of its own values.
        """
        start, end, own, _ = state["place"].tolist()
        if (int(start), int(end)) == self.span:
            weight = len(self.wire.topology.group) / self.wire.topology.world_size
            place = int(own - start)
            self.residual.copy_(state["residual"])
            self.residual[place : place + len(state["owned"])].add_(state["owned"], alpha=1 / weight)

    def adopt(self, everyone: Sequence[dict[str, Tensor]]) -> None:
        """Continue from the states of all workers of another world: each group starts from their mean."""
        whole = unsent(everyone, self.size)
        self.residual.copy_(whole[self.span[0] : self.span[1]])
        self.owned.zero_()

    def _split(self, share: Tensor) -> list[Tensor]:
        return list(share.split([elements(part) for part in self.mine]))


def unsent(everyone: Sequence[dict[str, Tensor]], size: int) -> Tensor:
    """What the next sums will bring beyond what is added to them, from the states of all workers."""
    whole = everyone[0]["residual"].new_zeros(size)
    for state in everyone:
        start, end, own, weight = state["place"].tolist()
        whole[int(start) : int(end)].add_(state["residual"], alpha=weight)
        whole[int(own) : int(own) + len(state["owned"])].add_(state["owned"])
    return whole
