"""What shapes share that factor layers: which layers, in what order, warnings, and how far an update moves them."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from thinwire.base import units
from thinwire.base.errors import ConfigError
from thinwire.comm.fsdp import local, refuse_reshaping, with_modules
from thinwire.exchange.parts import MethodContext, PartState, Run, Schedule
from thinwire.factor import moments
from thinwire.factor.convert import Layer, OrderOfUse, find_layers, warn_unmatched_patterns
from thinwire.factor.matrix import smallest_cutoff
from thinwire.shape.agree import gathered_layer
from thinwire.shape.shape import Shape

log = logging.getLogger("thinwire")


class Factoring(Shape, ABC):
    """Layers that change; its config has `total_steps`, `keep`, `keep_first` and `keep_last`."""

    changes = True
    must_factor = True

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.found_by: list[str] = []
        """The order of use by which the present layers were found; it may become known only later."""

    def attach(self, run: Run) -> None:
        super().attach(run)
        if self.must_factor and run.wire.is_sharded:
            refuse_reshaping(run.model)
        self.schedule = Watching(self)
        self.usage: OrderOfUse = OrderOfUse(run.model)
        run.context.on_release.append(self.usage.stop)

    def begin(self, *, again: bool) -> None:
        """Find the layers, and watch the order in which a forward pass uses them."""
        if not again:
            self.find_layers()
            if self.must_factor:
                self.refuse_nothing_to_factor()
            warn_unmatched_patterns(self.run.model, self.config.keep)
            self.usage.watch()

    def refuse_nothing_to_factor(self) -> None:
        """Refuse a model without layers to factor."""
        if not self.layers:
            reasons = ", ".join(f"{kept.name} ({kept.why})" for kept in self.kept) or "it has no weight matrices"
            raise ConfigError(f"nothing to factor in this model: {reasons}; {self._remedy()}")

    def _remedy(self) -> str:
        """What would leave something to factor: only settings that keep one of these layers."""
        whys = [kept.why for kept in self.kept]
        if whys == ["first layer"] and self.config.keep_last:  # the only one is the last too
            return "a model of one layer may want `keep_first=False` and `keep_last=False`"
        found = [f"`keep_{end}=False`" for end in ("first", "last") if f"{end} layer" in whys]
        found += ["another `keep`"] if any(why.startswith("kept by pattern") for why in whys) else []
        return f"a small model may want {' or '.join(found)}" if found else "train it by a method that factors nothing"

    def after_step(self) -> None:
        """From the first step on the order of use is known."""
        self.agree_on_order()

    def warn_if_nothing_factored(self, cutoff: float) -> None:
        """Warn if the first decomposition made nothing smaller, and name the cutoff that would."""
        nothing = bool(self.layers) and not self.factored
        if not self.run.wire.read(lambda: nothing, False):  # ranks of a plan are predicted
            return
        if self.run.topology.rank and not self.run.wire.is_sharded:  # of a sharded layer all members gather the whole
            return
        needed = sorted(smallest_cutoff(gathered_layer(layer, self.run.wire).matrix()) for layer in self.layers)
        if self.run.topology.rank:
            return
        half = math.ceil(100 * needed[len(needed) // 2]) / 100
        log.warning(
            "none of %s could be factored at cutoff %s after step %d: ranks are so high that factors would be larger, "
            "so the model stays as large as it is. A cutoff of %.2f would factor %s now; raise `cutoff`, or factor "
            "later, when training has lowered the ranks",
            *(
                units.count(len(self.layers), "weight"),
                cutoff,
                self.run.step,
                half,
                "half" if len(needed) > 1 else "it",
            ),
        )

    def find_layers(self) -> None:
        """Which layers there are to factor, in order of use, and which are kept; only while all are full."""
        c = self.config
        self.found_by = list(self.usage.order)
        self.layers, self.kept = find_layers(
            with_modules(self.run.model),
            trained=self.run.optimizers.parameters,
            order=self.usage.order,
            keep_first=c.keep_first,
            keep_last=c.keep_last,
            keep=c.keep,
        )

    def agree_on_order(self) -> None:
        """Take rank 0's order of use on all ranks; it may have evaluated alone."""
        if self.usage.is_watching:
            self.usage.order = self.run.wire.all_gather_object(self.usage.order)[0]
            self.usage.stop()

    def free_memory(self) -> None:
        """Drop gradients that the last step used up and the wrapper's buckets, before both shapes are in memory."""
        self.run.gradients.unwrap()
        for layer in self.layers:
            for p in layer.parameters:
                p.grad = None

    @property
    def factored(self) -> list[Layer]:
        return [layer for layer in self.layers if layer.is_factored]

    @abstractmethod
    def to_full(self, layer: Layer) -> None:
        """Give a layer a full weight, and the optimizer what it needs for it; its values are loaded next."""

    @abstractmethod
    def to_rank(self, layer: Layer, rank: int) -> None:
        """Give a layer factors of this rank, likewise."""

    def state_dict(self) -> PartState:
        """Order of use, the one that layers were found by, and ranks."""
        ranks = {layer.key: layer.rank for layer in self.factored}
        own = {"order": self.usage.order, "found_by": self.found_by, "ranks": ranks}
        return PartState(super().state_dict().shared | own)

    def load_state_dict(self, state: PartState, *, stays: bool) -> None:
        """Layers have the ranks and the order of use that they had."""
        super().load_state_dict(state, stays=stays)
        shared = state.shared
        if stays and self.factored and shared["ranks"] == {layer.key: layer.rank for layer in self.factored}:
            return  # it is this very model
        for layer in self.factored:
            self.to_full(layer)
        self.usage.order = shared["found_by"]
        self.find_layers()
        self.usage.order = shared["order"]
        if self.run.step:
            self.agree_on_order()
        elif not self.usage.is_watching:
            self.usage.watch()
        for layer in self.layers:
            if rank := shared["ranks"].get(layer.key):
                self.to_rank(layer, rank)


class Watching(Schedule):
    """While the order of use is not known, workers meet to agree on it."""

    of: Factoring

    @property
    def meets_next(self) -> bool:
        return self.of.usage.is_watching or super().meets_next


Scale = Callable[[], float | Tensor | None]
"""By how much to multiply an update; None leaves it alone."""


_BY_NORM = ("lamb", "lars")
_BY_ELEMENT = ("adam", "lion")
"""Of whatever package, and whatever they call their state."""


class RateMatching:
    """Multiplies the updates of some parameters, without weight decay, so that a weight moves as at full rank.

    Adam's updates have one size per element. What a weight makes of that depends on the factor's shape and on the
    factors beside it, so a shape says by how much the updates of each factor are multiplied.
    """

    def __init__(self, context: MethodContext, scales: Callable[[], Iterable[tuple[nn.Parameter, Scale]]]) -> None:
        """`scales` gives the parameters that are trained now."""
        self.optimizers = context.optimizers
        self.scales = scales
        self._before: list[tuple[Tensor, Tensor, float, Scale]] = []
        context.before_update.append(self._before_update)
        context.after_update.append(self._after_update)

    def _before_update(self, optimizer: Optimizer) -> None:
        """Keep copies; a closure may still have to compute gradients."""
        decay = decoupled_decay(optimizer)
        own = [(p, local(p.detach()), scale) for p, scale in self.scales() if id(p) in decay]
        self._before = [(now, now.clone(), decay[id(p)], scale) for p, now, scale in own]

    @torch.no_grad()
    def _after_update(self, optimizer: Optimizer) -> None:
        for p, before, decay, find in self._before:
            if (scale := find()) is not None:
                start = before * (1 - decay)
                larger = start + (p - start) * scale
                # What the optimizer left alone stays: without a gradient, or a fused update that a scaler skipped.
                p.copy_(torch.where((p != before).any(), larger, p))
        self._before = []

    def is_normalised(self, p: nn.Parameter) -> bool:
        """Whether an update has one size per element, as Adam's and Lion's: it follows neither from gradients, nor from
        the size of the parameter, as LAMB's and LARS's do."""
        kind = type(self.optimizers.of(p)).__name__.lower()
        if any(name in kind for name in _BY_NORM):
            return False
        by_name = any(name in kind for name in _BY_ELEMENT)
        return by_name or any(name in moments.QUADRATIC for name in self.optimizers.state_of(p))


_DECOUPLED = ("decoupled_weight_decay", "weight_decouple")
"""What torch and pytorch_optimizer call it."""


def decoupled_decay(optimizer: Optimizer) -> dict[int, float]:
    """The factor by which the next update shrinks each parameter by decoupled weight decay, as AdamW does; by id."""
    found = {}
    for group in optimizer.param_groups:
        decoupled = isinstance(optimizer, AdamW) or any(group.get(name) for name in _DECOUPLED)
        rate = 1.0 if group.get("fixed_decay") else group["lr"]
        share = float(rate * group.get("weight_decay", 0.0)) if decoupled else 0.0
        found.update({id(p): share for p in group["params"]})
    return found
