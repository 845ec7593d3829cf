"""What plans ask of a method: its place in a cycle of steps."""

from collections.abc import Hashable
from typing import NamedTuple


class Cycle(NamedTuple):
    """A place in a cycle of steps, for plans: equal steps from equal places send the same."""

    place: Hashable
    """Counted from the present step."""
    end: int
    """The step at which this stops being true."""
