"""Momentum before gradients are made sparse: the exchange of Deep Gradient Compression.

    g = gradient, clipped by each group alone
    u = μ u + g              momentum before accumulation, so that a late update has the effect of one in time
    v = v + u
    send the largest of v; where something was sent, v = 0 and (masking) u = 0

Momentum and weight decay are taken over from `torch.optim.SGD`, whose own are zero from then on: otherwise momentum
would be applied twice, before and after the exchange. Weight decay is not sent: its momentum is the same on all
workers. Biases and norms are sent as they are.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from thinwire.base.errors import ConfigError
from thinwire.codecs.aggregate import Aggregator, State
from thinwire.codecs.sparse import Sparse
from thinwire.comm.fsdp import whole_of
from thinwire.comm.wire import Wire
from thinwire.exchange.gradients import Gradients
from thinwire.exchange.parts import Feature, PartState, Run, Schedule, UpdateRule, joins_not
from thinwire.factor.optimizers import Optimizers

_STAGES, _FIRST_DENSITY = 4, 0.25


@dataclass
class Settings:
    """What was taken from one parameter group."""

    momentum: float = 0.0
    nesterov: bool = False
    decay: float = 0.0
    used: bool = False
    """Whether there ever was momentum."""


class MomentumHandover:
    """The settings taken from SGD optimizers; other optimizers keep theirs."""

    def __init__(self, optimizers: Optimizers, given: float | None) -> None:
        self.optimizers = optimizers
        self.given = given
        self.taken: list[Settings] = []
        self.group_of: dict[int, int] = {}
        self._places: list[int] = []
        self._find_groups()

    def begin(self) -> None:
        """Refuse what cannot be taken over, then take."""
        self.check()
        self.update()

    def check(self) -> None:
        """Refuse what would be applied twice or is not known."""
        for optimizer, group in self.optimizers.groups:
            kind, is_sgd = type(optimizer).__name__, isinstance(optimizer, SGD)
            if is_sgd and (group["dampening"] or group["maximize"]):
                raise ConfigError(
                    "SGD with dampening or maximize cannot be taken over: set dampening=0 and maximize=False"
                )
            if self.given and (not is_sgd or group["momentum"]):
                raise ConfigError(
                    f"`momentum`={self.given} would be applied twice: {kind} has its own; leave the field out, then it "
                    "is taken over from torch.optim.SGD, and other optimizers keep theirs"
                )

    def update(self) -> None:
        """Take the present settings; at every step, because a scheduler may have set momentum again."""
        self._find_groups()
        for (optimizer, group), taken in zip(self.optimizers.groups, self.taken, strict=True):
            if not isinstance(optimizer, SGD):
                continue
            if self.given is not None:
                taken.momentum = self.given
            elif group["momentum"]:
                taken.momentum, taken.nesterov = group["momentum"], group["nesterov"]
                group["momentum"], group["nesterov"] = 0.0, False
            taken.used = taken.used or bool(taken.momentum)
            if group["weight_decay"] and taken.momentum:
                taken.decay, group["weight_decay"] = group["weight_decay"], 0.0

    def _find_groups(self) -> None:
        """Find parameter groups again, in case one was added."""
        groups = self.optimizers.groups
        if len(groups) != len(self.taken):
            known = dict(zip(self._places, self.taken, strict=True))
            self._places = [id(group) for _, group in groups]
            self.taken = [known.get(place, Settings()) for place in self._places]
            self.group_of = {id(p): i for i, (_, group) in enumerate(groups) for p in group["params"]}

    def of(self, parameter: nn.Parameter) -> Settings:
        """The settings for a parameter; one that the optimizer does not hold has no momentum."""
        place = self.group_of.get(id(whole_of(parameter)))
        return self.taken[place] if place is not None else Settings()

    def give_back(self) -> None:
        """Leave the optimizers as they were."""
        for (_, group), taken in zip(self.optimizers.groups, self.taken, strict=True):
            if self.given is None and taken.momentum:
                group["momentum"], group["nesterov"] = taken.momentum, taken.nesterov
            if taken.decay:
                group["weight_decay"] = taken.decay
        self.taken = [Settings() for _ in self.taken]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the user's settings back inside the block, and take them again at the end."""
        self.update()
        self.give_back()
        try:
            yield
        finally:
            self.update()


def with_momentum(g: Tensor, u: Tensor, taken: Settings, again: bool, out: Tensor) -> Tensor:
    """What SGD would make of a gradient; `again` is one more of the same step. The new momentum is `out`."""
    if not taken.momentum:
        if taken.used and not again:
            out.copy_(u)
        return g
    torch.add(g, u, alpha=1.0 if again else taken.momentum, out=out)
    if taken.nesterov:
        return g + taken.momentum * (g if again else out)
    return g if again else out


class TakesMomentum(UpdateRule):
    """Takes momentum over from SGD, gives it back in the end, and clips the gradients of each group."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def attach(self, run: Run) -> None:
        """Refuse momentum that would be applied twice: at once, not after the warm-up."""
        super().attach(run)
        self.handover = MomentumHandover(run.optimizers, self.config.momentum)
        run.context.on_release.append(self.handover.give_back)
        if len(run.topology.groups) > 1:
            self.handover.check()
            if self.config.clip is not None:
                run.context.clips = True
                run.gradients.prepare = self._clip

    def _clip(self, gradients: Sequence[Tensor]) -> None:
        """As if the groups' gradients were independent: their mean then has at most the norm that was asked for."""
        limit = self.config.clip * self.run.gradients.scale / math.sqrt(len(self.run.topology.groups))
        own = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
        norm = self.run.wire.norms_of_group(own)
        torch._foreach_mul_(list(gradients), (limit / (norm + 1e-6)).clamp(max=1.0))

    def refuses(self, feature: Feature, config: Any) -> str | None:
        """A worker without batches would go on sending its momentum."""
        return joins_not("TopK, whose workers have momentum of their own") if feature is Feature.JOIN else None

    def load_state_dict(self, state: PartState, *, stays: bool) -> None:
        """The save may be from before momentum was taken over."""
        self.handover.give_back()
        self.run.context.users_optimizers = nullcontext


class SparseGradients(Gradients):
    """The largest values after momentum, of which fewer are sent as a ramp goes on."""

    def __init__(self, config: Any, rule: TakesMomentum) -> None:
        super().__init__(f"topk:{config.density}", self._aggregator)
        self.config, self.rule = config, rule

    @property
    def handover(self) -> MomentumHandover:
        return self.rule.handover

    def attach(self, run: Run) -> None:
        super().attach(run)
        self.schedule = Ramp(self)

    def _aggregator(self, wire: Wire, like: Sequence[Tensor]) -> Aggregator:
        """With momentum and weight decay, which are taken over now."""
        self.handover.begin()
        self.run.context.users_optimizers = self.handover.restored
        return MomentumSparse(wire, like, self)

    @property
    def density(self) -> float:
        """The share that is sent now: in the ramp it falls from a quarter in four stages."""
        length, last = self.config.ramp_length, self.config.density
        since = self.run.step - self.config.warmup_length
        if since >= length or last >= _FIRST_DENSITY:
            return last
        return _FIRST_DENSITY * (last / _FIRST_DENSITY) ** (since * _STAGES // length / _STAGES)


class Ramp(Schedule):
    """When the density has a new stage."""

    of: SparseGradients

    @property
    def next_event(self) -> int:
        config = self.of.config
        length, since = config.ramp_length, self.run.step - config.warmup_length
        if since >= length:
            return super().next_event
        return config.warmup_length - (-(since * _STAGES // length + 1) * length // _STAGES)


class MomentumSparse(Sparse):
    """The largest values after momentum."""

    def __init__(self, wire: Wire, like: Sequence[Tensor], gives: "SparseGradients") -> None:
        super().__init__(wire, like, "gradients", gives.density)
        self.gives = gives
        by_place = {p.data_ptr(): p for p in gives.run.model.parameters()}
        self.parameters: list[nn.Parameter] = [by_place[t.data_ptr()] for t in like]
        self.u, self.next_u = torch.zeros_like(self.v), torch.zeros_like(self.v)
        self.steady = {i: torch.zeros_like(like[i], dtype=torch.float32) for i in self.dense}
        """Momentum of what travels as it is."""
        self.next_steady = {i: torch.zeros_like(u) for i, u in self.steady.items()}
        self.written: dict[int, Tensor] = {}
        self._make_decays()

    def _make_decays(self) -> None:
        """Momentum of weight decay."""
        self.decays = {i: torch.zeros_like(p) for i, p in enumerate(self.like) if self._of(i).decay}
        self.next_decays = {i: torch.zeros_like(decay) for i, decay in self.decays.items()}

    def _of(self, i: int) -> Settings:
        return self.gives.handover.of(self.parameters[i])

    def begin(self, tensors: Sequence[Tensor], *, healthy: bool = True, again: bool = False, steps: int = 0) -> None:
        """Clip, then momentum, then as any sparse code."""
        self.gives.handover.update()
        self.density = self.gives.density
        super().begin(tensors, healthy=healthy, again=again, steps=steps)

    def accumulate(self, tensors: Sequence[Tensor], again: bool) -> None:
        """What SGD would make of the gradient."""
        u, v = (self.next_u, self.next_v) if again else (self.u, self.v)
        for piece in self.own_pieces:
            settings, place = self._of(self.sparse[piece.tensor]), piece.slice
            pushed = with_momentum(piece.of(tensors), u[place], settings, again, out=self.next_u[place])
            torch.add(v[place], pushed, out=self.next_v[place])

    def sent(self, places: Tensor) -> None:
        """Reset what was sent; with masking, its momentum too."""
        super().sent(places)
        if self.gives.config.masking:
            self.next_u[places] = 0.0

    def end(self, out: Sequence[Tensor]) -> bool:
        """Add the momentum of what travels as it is, and weight decay."""
        if not super().end(out):
            return False
        self._add_momentum(out)
        self._add_decay(out)
        return True

    def _add_momentum(self, gradients: Sequence[Tensor]) -> None:
        again = self._again
        for i, u in (self.next_steady if again else self.steady).items():
            pushed = with_momentum(gradients[i], u, self._of(i), again, out=self.next_steady[i])
            self.written[i] = pushed + self.written[i] if again else pushed.clone()
            gradients[i].copy_(self.written[i])

    def _add_decay(self, gradients: Sequence[Tensor]) -> None:
        for i, p in enumerate(self.like):
            settings = self._of(i)
            if not settings.decay:
                continue
            if not self._again:
                before = self.decays.setdefault(i, torch.zeros_like(p))
                decay = self.next_decays.setdefault(i, torch.zeros_like(p))
                torch.mul(before, settings.momentum, out=decay).add_(p, alpha=settings.decay)
            gradients[i].add_(self._decay_now(i))

    def _decay_now(self, i: int) -> Tensor:
        settings, decay = self._of(i), self.next_decays[i]
        if settings.nesterov:
            decay = self.like[i] * settings.decay + settings.momentum * decay
        return decay * self.gives.run.gradients.scale

    def take_back(self, tensors: Sequence[Tensor]) -> None:
        """Also momentum and weight decay."""
        super().take_back(tensors)
        for i, put in self.written.items():
            tensors[i].sub_(put)
        for i in self.next_decays:
            tensors[i].sub_(self._decay_now(i))

    def commit(self) -> None:
        """Momentum and velocity, that of biases and norms, and that of weight decay."""
        super().commit()
        self.u, self.next_u = self.next_u, self.u
        self.steady, self.next_steady = self.next_steady, self.steady
        self.decays, self.next_decays = self.next_decays, self.decays

    def residuals(self) -> list[Tensor]:
        """Momentum and velocity, and the momentum of biases and norms."""
        return [self.u, self.v, *self.steady.values()]

    def shared(self) -> State:
        """Momentum that is the same on all workers."""
        return {f"{i}.{n}": t for n, kept in (("steady", self.steady), ("decay", self.decays)) for i, t in kept.items()}

    def local(self) -> State:
        """Momentum and velocity."""
        return {**super().local(), "u": self.u} if self.wire.carries else {}

    def load(self, shared: State, local: State) -> None:
        """Take both back, with the weight decay that was loaded."""
        super().load(shared, local)
        if local:
            self.u.copy_(local["u"])
        self._load_shared(shared)

    def keep(self, shared: State, local: State) -> None:
        """Also momentum, that of the same share."""
        super().keep(shared, local)
        if self._is_mine(local):
            self.u.copy_(local["u"])
        self._load_shared(shared)

    def adopt(self, shared: State, everyone: Sequence[State]) -> None:
        """Every group starts from the mean of the old ones; a save of one group has none."""
        super().adopt(shared, everyone)
        self.u.copy_(self.mean_of("u", everyone))
        self._load_shared(shared)

    def _load_shared(self, shared: State) -> None:
        self.gives.handover.update()
        self._make_decays()
        for name, kept in self.shared().items():
            kept.copy_(shared.get(name, torch.zeros_like(kept)))
