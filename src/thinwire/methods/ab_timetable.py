"""When AB's phases begin and end."""

from typing import NamedTuple

from thinwire.config import PaperAB


class Segment(NamedTuple):
    """A phase and the step at which it ends."""

    phase: str
    end: int


def timetable(config: PaperAB) -> list[Segment]:
    """The phases of a run. The last one is full-rank and has no end of its own."""
    segments, step = [Segment("warmup", config.warmup_length)], config.warmup_length
    while step + config.group_length <= config.total_steps:
        segments.append(Segment("groups", step + config.group_length))
        step = min(step + config.group_length + config.rebound_length, config.total_steps)
        segments.append(Segment("rebound", step))
    return [*segments, Segment("final", config.total_steps)]
