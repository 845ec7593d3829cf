"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally, ICLR 2018; arXiv 1712.01887).

    g = gradient, clipped by each group alone
    u = μ u + g              momentum before accumulation, so that what comes late comes as if it had come in time
    v = v + u
    send the largest of v; where something was sent, v = 0 and (masking) u = 0

Every group hears what all have sent, as index and value. Biases and norms travel as they are. Momentum and weight decay
are taken over from `torch.optim.SGD`, whose own are zero from then on: applied after the exchange, momentum would push
once more what has its momentum already. Weight decay needs no sending: its momentum is the same on all workers.
"""

import itertools
import math
import sys
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.codec import unpack_into
from thinwire.comm.quantize import Rows, cut, elements
from thinwire.comm.topology import Topology
from thinwire.config import TopK
from thinwire.methods.base import Ground
from thinwire.methods.compressing import Compressing, Piece, pieces, sum_plain
from thinwire.methods.largest import largest
from thinwire.methods.takeover import Taken, Takeover, with_momentum

_STAGES, _FIRST_DENSITY = 4, 0.25


class TopKMethod(Compressing):
    """The largest accumulated gradients of each weight, by index and value."""

    config: TopK

    def __init__(self, config: TopK, ground: Ground) -> None:
        super().__init__(config, ground)
        self.taken = Takeover(self.optimizers, config.momentum)
        self.u = self.v = self.next_u = self.next_v = torch.zeros(0)
        self.steady: dict[int, Tensor] = {}
        self.decays: dict[int, Tensor] = {}
        self.next_steady: dict[int, Tensor] = {}
        self.next_decays: dict[int, Tensor] = {}

    @classmethod
    def role(cls, config: TopK, topology: Topology) -> Hashable:
        """All do the same, but groups hear from as many as there are."""
        return len(topology.groups)

    @property
    def plain_steps(self) -> int:
        """None: the warm-up sends more, not all."""
        return 0

    @property
    def clips(self) -> bool:
        """If it was told to."""
        return self.config.clip is not None and len(self.topology.groups) > 1

    @property
    def density(self) -> float:
        """The share that is sent now: in the warm-up it falls from a quarter in four stages."""
        length, last = self.config.warmup_length, self.config.density
        if self.step >= length or last >= _FIRST_DENSITY:
            return last
        return _FIRST_DENSITY * (last / _FIRST_DENSITY) ** (self.step * _STAGES // length / _STAGES)

    @property
    def quiet_until(self) -> int:
        """The next stage of the warm-up."""
        length = self.config.warmup_length
        if self.step >= length:
            return sys.maxsize
        return -(-(self.step * _STAGES // length + 1) * length // _STAGES)

    def after_step(self) -> None:
        """The density may have a new stage."""
        super().after_step()
        self._name_phase()

    def prepare(self) -> None:
        """Momentum and velocity of this worker's share of the weights."""
        topology = self.topology
        self.sparse = [i for i, p in enumerate(self.trained) if p.dim() > 1]
        self.dense = [i for i, p in enumerate(self.trained) if p.dim() <= 1]
        if len(topology.groups) == 1:
            return
        self.taken.begin()
        sizes = [self.trained[i].numel() for i in self.sparse]
        self.spans = _spans(sizes, topology.shares)
        self.pieces = [pieces(sizes, span) for span in self.spans]
        own = topology.member if topology.member < topology.shares else None
        self.own_pieces = self.pieces[own] if own is not None else []
        size = self.spans[own][1] - self.spans[own][0] if own is not None else 0
        device = self.trained[0].device
        self.u, self.v, self.next_u, self.next_v = (
            torch.zeros(size, dtype=torch.float32, device=device) for _ in range(4)
        )
        self.applied = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self.scratch = torch.empty(
            max((p.end - p.start for p in self.own_pieces), default=0), dtype=torch.float32, device=device
        )
        self.steady = {i: torch.zeros_like(self.trained[i], dtype=torch.float32) for i in self.dense}
        self.next_steady = {i: torch.zeros_like(u) for i, u in self.steady.items()}
        self.written: dict[int, Tensor] = {}
        self._make_decays()

    def _make_decays(self) -> None:
        self.decays = {i: torch.zeros_like(p) for i, p in enumerate(self.trained) if self._of(i).decay}
        self.next_decays = {i: torch.zeros_like(decay) for i, decay in self.decays.items()}

    def carried(self) -> list[Tensor]:
        """Momentum and velocity, and the momentum of biases and norms."""
        return [self.u, self.v, *self.steady.values()]

    def release(self) -> None:
        """Give momentum and weight decay back."""
        super().release()
        self.taken.give_back()

    # An exchange.

    def exchange(self, healthy: bool, again: bool) -> bool:
        """Accumulate, send the largest, apply what everyone sent."""
        self.taken.look()
        gradients = self.gradients
        if again:
            self._take_away(gradients)
        if healthy:
            self._clip(gradients)
            self._accumulate([gradients[i] for i in self.sparse], again)
        blocks = self._gather(healthy)
        if not blocks[0].is_meta and bool(blocks[0][:, -1].any()):
            return False
        if not sum_plain(self.wire, [gradients[i] for i in self.dense], None if self.sparse else healthy):
            return False
        self._apply(blocks, again)
        unpack_into(self.applied, [gradients[i] for i in self.sparse])
        self._add_momentum(gradients, again)
        self._add_decay(gradients, again)
        return True

    def _of(self, i: int) -> Taken:
        return self.taken.of(self.trained[i])

    def _clip(self, gradients: Sequence[Tensor]) -> None:
        """As if the groups' gradients were independent: their mean then has at most the norm that was asked for."""
        if self.config.clip is None:
            return
        limit = self.config.clip * self._scale / math.sqrt(len(self.topology.groups))
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
        torch._foreach_mul_(list(gradients), (limit / (norm + 1e-6)).clamp(max=1.0))

    def _accumulate(self, gradients: Sequence[Tensor], again: bool) -> None:
        u, v = (self.next_u, self.next_v) if again else (self.u, self.v)
        for piece in self.own_pieces:
            taken, place = self._of(self.sparse[piece.tensor]), piece.slice
            pushed = with_momentum(piece.of(gradients), u[place], taken, again, out=self.next_u[place])
            torch.add(v[place], pushed, out=self.next_v[place])

    def _gather(self, healthy: bool) -> list[Tensor]:
        """What every group sent, one block a share, rows of values, places and a flag."""
        topology, density = self.topology, self.density
        counts = [sum(_count(piece, density) for piece in each) for each in self.pieces]
        groups, device = len(topology.groups), self.applied.device
        blocks = [torch.empty(groups, 2 * n + 1, dtype=torch.int32, device=device) for n in counts]
        places, values = self.v.new_zeros(0, dtype=torch.int64), self.v[:0]
        if healthy:
            places = self._largest(density)
            values = self.next_v[places]
            self.next_v[places] = 0.0
            if self.config.masking:
                self.next_u[places] = 0.0
        elif self.wire.carries:
            places = places.new_zeros(counts[topology.member])
            values = self.v.new_zeros(counts[topology.member])
        flag = places.new_full((1,), not healthy, dtype=torch.int32)
        payload = torch.cat([values.view(torch.int32), places.to(torch.int32), flag])
        received = self.wire.collect(payload, "gradients", [4 * (2 * n + 1) for n in counts]).wait()
        if self.wire.carries:
            blocks[topology.member] = received
        for j, block in enumerate(blocks):
            self.wire.share_out([block], j, "gradients")
        return blocks

    def _largest(self, density: float) -> Tensor:
        """Places of the largest values of each weight in this worker's share."""
        found = [largest(self.next_v[p.slice], _count(p, density), self.scratch) + p.place for p in self.own_pieces]
        return torch.cat([self.v.new_zeros(0, dtype=torch.int64), *found])

    def _apply(self, blocks: Sequence[Tensor], again: bool) -> None:
        """The weighted sum of what groups sent; one group after the other, so that all workers round alike."""
        if self.applied.is_meta:
            return
        if not again:
            self.applied.zero_()
        topology = self.topology
        for (start, end), block in zip(self.spans, blocks, strict=True):
            count = block.shape[1] // 2
            for row, group in zip(block, topology.groups, strict=True):
                values = row[:count].view(torch.float32) * (len(group) / topology.world_size)
                self.applied[start:end].index_add_(0, row[count : 2 * count], values)

    def _add_momentum(self, gradients: Sequence[Tensor], again: bool) -> None:
        """To what travels as it is."""
        for i, u in (self.next_steady if again else self.steady).items():
            pushed = with_momentum(gradients[i], u, self._of(i), again, out=self.next_steady[i])
            self.written[i] = pushed + self.written[i] if again else pushed.clone()
            gradients[i].copy_(self.written[i])

    def _add_decay(self, gradients: Sequence[Tensor], again: bool) -> None:
        for i, p in enumerate(self.trained):
            taken = self._of(i)
            if not taken.decay:
                continue
            if not again:
                before = self.decays.setdefault(i, torch.zeros_like(p))
                decay = self.next_decays.setdefault(i, torch.zeros_like(p))
                torch.mul(before, taken.momentum, out=decay).add_(p, alpha=taken.decay)
            gradients[i].add_(self._decay_now(i))

    def _decay_now(self, i: int) -> Tensor:
        taken, decay = self._of(i), self.next_decays[i]
        if taken.nesterov:
            decay = self.trained[i].detach() * taken.decay + taken.momentum * decay
        return decay * self._scale

    def _take_away(self, gradients: Sequence[Tensor]) -> None:
        """From a gradient that was accumulated over several exchanges, what the last one put there."""
        before = {**self.written, **dict(zip(self.sparse, _like(self.applied, gradients, self.sparse), strict=True))}
        for i, put in before.items():
            gradients[i].sub_(put)
        for i in self.next_decays:
            gradients[i].sub_(self._decay_now(i))

    def commit(self) -> None:
        """Momentum and velocity, that of biases and norms, and that of weight decay."""
        self.u, self.next_u = self.next_u, self.u
        self.v, self.next_v = self.next_v, self.v
        self.steady, self.next_steady = self.next_steady, self.steady
        self.decays, self.next_decays = self.next_decays, self.decays

    def workspace(self) -> list[Tensor]:
        """The same as they will be."""
        return [self.next_u, self.next_v, *self.next_steady.values(), *self.next_decays.values()]

    # Checkpoints.

    def users_optimizer(self) -> AbstractContextManager[None]:
        """With the momentum and weight decay that were taken."""
        return self.taken.lent() if len(self.topology.groups) > 1 else super().users_optimizer()

    def load_state(self, state: dict[str, Any]) -> None:
        """Also the phase's name, which follows the density."""
        super().load_state(state)
        self._name_phase()

    def _name_phase(self) -> None:
        name = "warmup" if self.step < self.config.warmup_length else "train"
        if name != self.phase:
            self._set_phase(name)

    def tensors(self) -> dict[str, Tensor]:
        """Momentum that is the same on all workers."""
        steady = {f"steady.{i}": t for i, t in self.steady.items()}
        return {**steady, **{f"decay.{i}": t for i, t in self.decays.items()}}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take it back, of the weight decay that was loaded; a save of one group has none."""
        self._make_decays()
        for name, kept in self.tensors().items():
            kept.copy_(tensors.get(name, torch.zeros_like(kept)))

    def own_tensors(self) -> dict[str, Tensor]:
        """Momentum and velocity, where they belong, and the weight of this worker's group."""
        topology = self.topology
        if len(topology.groups) == 1 or topology.member >= topology.shares:
            return {}
        span, weight = self.spans[topology.member], len(topology.group) / topology.world_size
        return {"u": self.u, "v": self.v, "place": torch.tensor([*span, weight], dtype=torch.float64)}

    def load_own_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take both back."""
        if tensors:
            self.u.copy_(tensors["u"])
            self.v.copy_(tensors["v"])

    def load_others_tensors(self, everyone: list[dict[str, Tensor]]) -> None:
        """Every group starts from the mean of the old ones."""
        topology = self.topology
        if len(topology.groups) == 1 or topology.member >= topology.shares:
            return
        start, end = self.spans[topology.member]
        for name, kept in (("u", self.u), ("v", self.v)):
            whole = torch.zeros_like(self.applied)
            for tensors in everyone:
                if tensors:
                    first, last, weight = tensors["place"].tolist()
                    whole[int(first) : int(last)].add_(tensors[name], alpha=weight)
            kept.copy_(whole[start:end])


def _count(piece: Piece, density: float) -> int:
    size = piece.end - piece.start
    return min(size, max(1, math.ceil(density * size)))


def _spans(sizes: Sequence[int], shares: int) -> list[tuple[int, int]]:
    """Where each share of the weights begins and ends."""
    ends = [0]
    for part in cut([Rows(size, 1) for size in sizes], shares):
        ends.append(ends[-1] + elements(part))
    return list(itertools.pairwise(ends))


def _like(flat: Tensor, tensors: Sequence[Tensor], which: Sequence[int]) -> list[Tensor]:
    found = [torch.empty_like(tensors[i]) for i in which]
    unpack_into(flat, found)
    return found
