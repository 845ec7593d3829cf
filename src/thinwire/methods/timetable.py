"""A method is a timetable: phases, one after the other, and what each consists of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinwire.exchange.gradients import Gradients, Make
from thinwire.exchange.parts import Exchange, Part, UpdateRule
from thinwire.shape.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of a run in which the same is exchanged, and the model has one shape.

    Without exchanges groups train alone. What is named in two phases in a row goes on, with its state.
    """

    name: str
    until: int | Callable[[], bool] | None = None
    """The step at which it ends; or whether it is over after a step, the same on all workers; the last has no end."""
    exchanges: Sequence[Exchange] = ()
    shape: Shape = field(default_factory=Shape)
    rules: Sequence[UpdateRule] = ()

    @property
    def parts(self) -> list[Part]:
        """All of them, in the order in which they begin."""
        return [self.shape, *self.rules, *self.exchanges]

    @property
    def trains_apart(self) -> bool:
        """Whether groups train apart."""
        return all(exchange.trains_apart for exchange in self.exchanges)

    @property
    def make(self) -> Make | None:
        """What builds aggregators of gradients, if the code's own are not used."""
        return next((each.make for each in self.exchanges if isinstance(each, Gradients)), None)


def parts_of(timetable: Sequence[Phase]) -> list[Part]:
    """All parts of all phases, each once."""
    return list(dict.fromkeys(part for phase in timetable for part in phase.parts))


def warmed_up(config: Any, *phases: Phase) -> list[Phase]:
    """These phases behind a warm-up in which the world averages gradients, if there is one."""
    if not config.warmup_length:
        return list(phases)
    warmup = [Gradients(config.warmup_wire)]
    return [Phase(name="warmup", until=config.warmup_length, exchanges=warmup, shape=phases[0].shape), *phases]
