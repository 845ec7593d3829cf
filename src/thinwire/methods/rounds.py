"""When groups average: every so many steps, or less and less often as the learning rate falls."""

from typing import Any

from torch import nn

from thinwire.base.errors import ConfigError
from thinwire.comm.fsdp import whole_of
from thinwire.comm.wire import Wire
from thinwire.config.common import Averaged
from thinwire.factor.optimizers import Optimizers


class Round:
    """The steps between two averages of everything."""

    def __init__(self, config: Averaged, optimizers: Optimizers, wire: Wire) -> None:
        self.config = config
        self.optimizers = optimizers
        self.wire = wire
        self.start = 0
        """The step after which it began."""
        self.period = config.round_length
        """Steps in it."""
        self.highest_rate = 0.0
        """The highest learning rate at the beginning of a round so far."""

    def begin(self, step: int, until: int | None = None) -> None:
        """A new round, as long on all workers; one that has grown ends at step `until` if it would pass over it."""
        self.start, self.period = step, self.config.round_length
        rate = self.rate
        self.highest_rate = max(rate, self.highest_rate)
        if self.config.every_max is None:
            return
        own = self.config.every_max if self.highest_rate > 0 else self.config.round_length
        if until is not None and until > step:
            own = max(self.config.round_length, min(own, until - step))
        if rate * rate > 0:
            own = min(own, int(self.config.round_length * (self.highest_rate / rate) ** 2))
        self.period = int(min(row[0] for row in self.wire.all_gather_scalars([float(own)], "control")))

    def resume(self, step: int) -> None:
        """Begin again if the round is long over: a group that was alone has had none. All workers see that alike."""
        if step - self.start >= self.period:
            self.start, self.period = step, self.config.round_length

    @property
    def rate(self) -> float:
        """The highest learning rate of all parameter groups now."""
        return max(self.optimizers.rates)

    def is_annealing(self) -> bool:
        """Whether the learning rate has fallen far below the highest one."""
        return self.rate < 0.25 * self.highest_rate

    def offset(self, index: int, count: int) -> int:
        """Steps from its start to the turn of one of `count` that are spread over it."""
        return self.period * (index + 1) // count

    def has_turn(self, index: int, count: int, step: int) -> bool:
        return step - self.start == self.offset(index, count)

    def turn(self, index: int, count: int, step: int) -> int:
        """The next step at which one of `count` has its turn, if the next round is as long."""
        at = self.start + self.offset(index, count)
        return at if at > step else at + self.period

    def ends(self, step: int) -> bool:
        return step - self.start == self.period

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start, "period": self.period, "highest_rate": self.highest_rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.period, self.highest_rate = state["start"], state["period"], state["highest_rate"]


def fragments_of(model: nn.Module, count: int) -> list[list[nn.Parameter]]:
    """Trained parameters in `count` fragments of nearly the same size, whole layers each.

    The largest layer goes to the fragment that has least so far. Layers of one size thus take turns, and each fragment
    has some from the whole depth of the model.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for layer_of in (_block, lambda name: name.rpartition(".")[0]):
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
    for layer in sorted(layers.values(), key=lambda layer: -_size(layer)):
        least = sizes.index(min(sizes))
        sizes[least] += _size(layer)
        home.update({id(p): least for p in layer})
    return [[p for _, p in trained if home[id(p)] == i] for i in range(count)]


def _size(layer: list[nn.Parameter]) -> int:
    """Of whole weights: members of a group that shards them must cut alike."""
    return sum(whole_of(p).numel() for p in layer)


def _block(name: str) -> str:
    """The entry of a list of modules that a parameter is in, as "h.3" for "h.3.mlp.weight"; else its module."""
    modules = name.split(".")[:-1]
    number = next((i for i, module in enumerate(modules) if module.isdigit()), len(modules))
    return ".".join(modules[: number + 1])
