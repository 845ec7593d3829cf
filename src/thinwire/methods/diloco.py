"""DiLoCo (arXiv 2311.08105), and its streaming variant (arXiv 2501.18512).

    1. warm-up: the whole world averages gradients at every step
    2. local: each group trains alone, its members averaging their gradients
    3. each part of the model has its turn: groups send how far they came from its outer values, Δ = outer − local
    4. `delay` steps later the mean of Δ is there: an outer Nesterov step, and the group goes on from a mixture of
       its own values and the outer ones

Every worker keeps the outer values and their momentum itself, with the same bits. One part and no delay is DiLoCo as
it was first described. With one group nothing is sent, and the outer steps remain.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.comm.codec import all_finite, pack_wide, unpack_into
from thinwire.comm.transfer import Transfer, make_transfer
from thinwire.config import DiLoCo
from thinwire.errors import ConfigError, DivergedError
from thinwire.methods.base import Cycle, Ground
from thinwire.methods.local_sgd import Apart
from thinwire.methods.merging import average_buffers, put_back


@dataclass
class Part:
    """A part of the model that is sent at once. Flat vectors hold its parameters one after the other."""

    parameters: list[nn.Parameter]
    offset: int
    """It is sent so many steps into each round."""
    transfer: Transfer
    outer: Tensor
    level: int
    """The step at which the model last held the outer values."""
    momentum: Tensor | None = None
    """None before the first outer step."""
    sent: int | None = None
    """The step at which it was sent, while it is under way."""
    received: Tensor | None = None
    """What came back, if it was waited for before its time."""


class DiLoCoMethod(Apart):
    """How far groups came is a gradient for an outer optimizer."""

    complex_wires = ("fp32", "bf16", "int8")
    config: DiLoCo

    def __init__(self, config: DiLoCo, ground: Ground) -> None:
        super().__init__(config, ground)
        self.parts: list[Part] = []
        self.buffers_at = 0

    def attach(self) -> None:
        """Refuse more parts than there are layers before the warm-up, not after it."""
        cut_into_parts(self.model, self.config.fragments)
        super().attach()

    def begin(self) -> None:
        """All groups start from the same outer values."""
        self._make_parts()
        self._agreed()

    def exchange(self) -> None:
        """Take in what is due, then send what is; with the last part of each round goes everything else."""
        for part in self.parts:
            if part.sent is not None and self.step == part.sent + self.config.delay:
                self._arrive(part)
            elif self.step == self._turn(part):
                part.transfer.middle()
        for part in self.parts:
            if (self.local_step - part.offset) % self.config.every == 0:
                self._send(part, self.config.delay)
                if self.config.delay == 0:
                    self._arrive(part)

    def merge(self) -> None:
        """Take in what is under way, then the mean of what groups hold.

        An outer step out of turn would go the momentum's whole way again for a few steps of training.
        """
        if self.spans_world:
            return
        self.check_health()
        for part in self.parts:
            if part.sent is not None:
                self._outer_step(part)
        apart = [part for part in self.parts if part.level != self.step]
        for part in apart:
            self._send(part, 0)
        for part in apart:
            part.outer = part.outer - self._take(part)
            self._go_on(part, 0.0)
        if self.buffers_at != self.step:
            average_buffers(self.wire, self.model.buffers(), self.weight)

    @contextmanager
    def lend_merged(self) -> Iterator[None]:
        """Lend what `merge` would leave; what is under way is waited for, and taken in when it is due."""
        with self.wire.ledger.everything_is("merge"):  # training pays for it, not the evaluation
            self.settle()
        parts = [replace(part) for part in self.parts]
        kept = [{name: t.clone() for name, t in part.transfer.state().items()} for part in parts]
        with put_back(self.model):
            try:
                self.merge()
                yield
            finally:
                self.parts = parts
                for part, state in zip(parts, kept, strict=True):
                    part.transfer.load_state(state)

    @property
    def quiet_until(self) -> int:
        """The end of the warm-up, then the next part that is sent, or comes back."""
        if self.phase == "warmup":
            return self.config.warmup_length
        every, delay = self.config.every, self.config.delay
        ahead = [self.step + every - (self.local_step - part.offset) % every for part in self.parts]
        ahead += [part.sent + delay for part in self.parts if part.sent is not None]
        ahead += [turn for part in self.parts if (turn := self._turn(part)) is not None and turn > self.step]
        return min(ahead)

    @property
    def cycle(self) -> Cycle | None:
        """A round in which each part has its turn."""
        if self.phase == "warmup":
            return None
        parts = [
            (
                None if part.sent is None else self.step - part.sent,
                part.received is None,
                part.momentum is None,
                part.level == self.step,
            )
            for part in self.parts
        ]
        place = self.local_step % self.config.every, self.buffers_at == self.step, *parts
        return Cycle(place, sys.maxsize)

    def shift(self, steps: int) -> None:
        """So much later was everything sent and agreed."""
        super().shift(steps)
        self.buffers_at += steps
        for part in self.parts:
            part.level += steps
            part.sent = None if part.sent is None else part.sent + steps

    # Parts.

    def _make_parts(self) -> None:
        every, fragments = self.config.every, self.config.fragments
        self.parts = [
            self._part(parameters, every * (i + 1) // fragments)
            for i, parameters in enumerate(cut_into_parts(self.model, fragments))
        ]

    def _part(self, parameters: list[nn.Parameter], offset: int) -> Part:
        outer = pack_wide(parameters)
        transfer = make_transfer(self.wire, outer.numel(), self.config.wire, outer.device, "merge")
        return Part(parameters, offset, transfer, outer, level=self.step)

    def _turn(self, part: Part) -> int | None:
        """The step at which a part under way needs a hand."""
        turn = part.transfer.turn(self.config.delay)
        return None if turn is None or part.sent is None or part.received is not None else part.sent + turn

    def _send(self, part: Part, steps: int) -> None:
        part.transfer.begin(part.outer - pack_wide(part.parameters), steps)
        part.sent = self.step

    def _arrive(self, part: Part) -> None:
        is_last = part is self.parts[-1]
        if is_last:
            self.check_counters()
            self.check_health()
        self._outer_step(part)
        if is_last:
            average_buffers(self.wire, self.model.buffers(), self.weight)
            self._agreed()
            self.ground.after_merge()

    def _outer_step(self, part: Part) -> None:
        """As torch.optim.SGD with Nesterov momentum does; tensors that were there before are left as they are."""
        d, mu = self._take(part), self.config.outer_momentum
        if mu:
            part.momentum = d.clone() if part.momentum is None else part.momentum.mul(mu).add_(d)
            d = d.add(part.momentum, alpha=mu)
        part.outer = part.outer.add(d, alpha=-self.config.outer_lr)
        self._go_on(part, self.config.mix if self.config.delay else 0.0)

    def _go_on(self, part: Part, mix: float) -> None:
        """Train from the outer values, or from a mixture with the group's own."""
        if mix == 0:
            part.level = self.step
        values = torch.lerp(part.outer, pack_wide(part.parameters), mix) if mix else part.outer
        # Outer momentum must not move what a lone worker has frozen meanwhile.
        unpack_into(values, [p if p.requires_grad else torch.empty_like(p) for p in part.parameters])

    def _take(self, part: Part) -> Tensor:
        """The mean of how far groups came."""
        mean = part.received if part.received is not None else self._wait(part)
        part.sent = part.received = None
        return mean

    def _wait(self, part: Part) -> Tensor:
        mean = part.transfer.end()
        if mean is None or not all_finite([mean]):
            part.sent = None
            self.check_health()
            raise DivergedError(
                f"differences that groups sent do not add up to finite numbers at step {self.step}; lower the learning "
                "rate or go back to a checkpoint"
            )
        return mean

    def _agreed(self) -> None:
        self.buffers_at = self.step
        self.observed.zero_()

    # Checkpoints.

    def settle(self) -> None:
        """Wait for what is under way; it is taken in when it is due all the same."""
        for part in self.parts:
            if part.sent is not None and part.received is None:
                part.received = self._wait(part)

    def state(self) -> dict[str, Any]:
        """With the steps at which parts were sent and were level, and buffers agreed."""
        places = {"sent": [part.sent for part in self.parts], "level": [part.level for part in self.parts]}
        return {**super().state(), **places, "buffers_at": self.buffers_at}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go to where the save was made; what is under way is dropped unseen, for it may be what diverged."""
        for part in self.parts:
            if part.sent is not None and part.received is None:
                part.transfer.end()
        super().load_state(state)
        self.parts = []
        if self.phase == "local":
            self._make_parts()
        for part, sent, level in zip(self.parts, state["sent"], state["level"], strict=True):
            part.sent, part.level = sent, level
        self.buffers_at = state["buffers_at"]

    def tensors(self) -> dict[str, Tensor]:
        """Outer values and momentum, and what came back but is not due yet."""
        kept = {}
        for i, part in enumerate(self.parts):
            named = {"outer": part.outer, "momentum": part.momentum, "received": part.received}
            kept.update({f"{name}.{i}": t for name, t in named.items() if t is not None})
        return kept

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take them back."""
        for i, part in enumerate(self.parts):
            part.outer, part.momentum = tensors[f"outer.{i}"], tensors.get(f"momentum.{i}")
            part.received = tensors.get(f"received.{i}")

    def own_tensors(self) -> dict[str, Tensor]:
        """What this worker could not say in the bits it had."""
        return {f"{name}.{i}": t for i, part in enumerate(self.parts) for name, t in part.transfer.state().items()}

    def load_own_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take it back."""
        for i, part in enumerate(self.parts):
            ending = f".{i}"
            own = {name.removesuffix(ending): t for name, t in tensors.items() if name.endswith(ending)}
            if own:
                part.transfer.load_state(own)


def cut_into_parts(model: nn.Module, count: int) -> list[list[nn.Parameter]]:
    """Trained parameters in so many parts of nearly the same size, whole layers each.

    The largest layer goes to the part that has least so far. Layers of one size are thus dealt out in turn, and each
    part has some from the whole depth of the model.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for layer_of in (_block, _owner):
        layers: dict[str, list[nn.Parameter]] = {}
        for name, p in trained:
            layers.setdefault(layer_of(name), []).append(p)
        if len(layers) >= count:
            break
    else:
        raise ConfigError(
            f"`fragments`={count} is more than the {len(layers)} layers of this model that are trained; "
            f"use at most {len(layers)}"
        )
    sizes = [0] * count
    home: dict[int, int] = {}
    for layer in sorted(layers.values(), key=lambda layer: -sum(p.numel() for p in layer)):
        least = sizes.index(min(sizes))
        sizes[least] += sum(p.numel() for p in layer)
        home.update({id(p): least for p in layer})
    return [[p for _, p in trained if home[id(p)] == i] for i in range(count)]


def _block(name: str) -> str:
    """The entry of a list of modules that a parameter is in, as "h.3" for "h.3.mlp.weight"; else its module."""
    modules = name.split(".")[:-1]
    number = next((i for i, module in enumerate(modules) if module.isdigit()), len(modules))
    return ".".join(modules[: number + 1])


def _owner(name: str) -> str:
    """The module that holds a parameter."""
    return name.rpartition(".")[0]
