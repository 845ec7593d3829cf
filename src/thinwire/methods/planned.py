"""What plans ask of a method: its place in a cycle of steps, and which workers do the same."""

from collections.abc import Hashable
from typing import NamedTuple

from thinwire.comm.topology import Topology
from thinwire.config.codes import parse_code


class Cycle(NamedTuple):
    """A place in a cycle of steps, for plans: equal steps from equal places send the same."""

    place: Hashable
    """Counted from the present step."""
    end: int
    """The step at which this stops being true."""


def role_by_codes(topology: Topology, *codes: str) -> Hashable:
    """For plans: where values are coded only between groups, it matters how many there are; else all do the same."""
    return len(topology.groups) if any(not parse_code(code).is_exact for code in codes) else None
