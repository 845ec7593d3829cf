"""What each group's changes are multiplied by before they are averaged: rows by who saw them, or all by moments."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from thinwire.methods.averaged import AveragedTensors
from thinwire.methods.context import MethodContext
from thinwire.methods.rows import SeenRows
from thinwire.methods.second_moment import SecondMoment


class ChangeScales:
    """`rows` and `second_moment` of a method whose groups train apart."""

    def __init__(self, config: Any, context: MethodContext, share: float, is_apart: Callable[[], bool]) -> None:
        """`share` is this group's of all workers."""
        self.is_apart = is_apart
        self.moments = SecondMoment(context, config.second_moment, share, is_apart, config.moments_wire)
        self.rows = SeenRows(context.model, context.wire) if config.rows == "seen" else None
        if self.rows is not None:
            context.on_release.append(self.rows.release)

    @property
    def are_used(self) -> bool:
        """Whether changes are multiplied by anything at all."""
        return self.rows is not None or self.moments.kind == "shared"

    def separate(self) -> None:
        """The warm-up is over."""
        if self.is_apart():
            self.moments.separate()

    def forget(self) -> None:
        """Drop what codes left out of moments, and who saw which rows: other values were loaded."""
        self.moments.coded.load_state_dict({})
        if self.rows is not None:
            self.rows.load_state_dict({})

    def of(
        self, sent: Sequence[AveragedTensors], everything: Sequence[AveragedTensors], *, ends_round: bool
    ) -> list[list[Tensor | None]]:
        """For each tensor of those that are sent now; collective. Moments are shared when a round ends."""
        if not (self.is_apart() and self.are_used):
            return [[] for _ in sent]
        weights = [p for fragment in sent for p in fragment.tensors()]
        rows = self.rows.scales(weights, again=not ends_round) if self.rows is not None else {}
        parts = {
            number: [p for p in fragment.tensors() if isinstance(p, nn.Parameter)]
            for number, fragment in enumerate(everything)
            if fragment in sent
        }
        gains = self.moments.exchange(parts) if ends_round else {}
        return [[rows.get(id(p), gains.get(id(p))) for p in fragment.tensors()] for fragment in sent]

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all workers, and what is this worker's."""
        rows = self.rows.state_dict() if self.rows is not None else {}
        return {
            "shared": self.moments.state_dict(),
            "local": {"moments": self.moments.coded.state_dict(), "rows": rows},
        }

    def load_state_dict(self, shared: dict[str, Any], local: dict[str, Any] | None, stays: bool = False) -> None:
        """Errors start again where groups are not as they were, and counts unless this worker `stays`."""
        self.moments.load_state_dict(shared)
        self.moments.coded.load_state_dict(local["moments"] if local and not stays else {})
        if self.rows is not None:
            self.rows.load_state_dict(local["rows"] if local else {})
