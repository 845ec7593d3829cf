"""The dissertation's counts of a run: what was trained, at which size, and what that comes to on the wire.

Trainable parameters and compression are as its tables have them. Its two estimates of traffic are kept beside the
ledger's own figures, for comparison with published ones: they know steps and parameters, and nothing of how a method
packs what it sends.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from thinwire.replica import Replica

BACKWARD_SHARE = 0.54
"""Share of the time spent in the backward pass, as the dissertation measured it for Eq. 5.9."""
ASSUMED_FULL = 0.25
"""Share of training at full rank that its Eq. 5.10 assumes where it is not known."""


@dataclass
class Counts:
    """Steps by the size they were taken at. A step counts as it began."""

    steps: int = 0
    """All of them."""
    full_steps: int = 0
    """Those that all workers took together, with every layer at full rank."""
    apart_steps: int = 0
    """Those in which groups trained alone."""
    synchronised: int = 0
    """Trainable parameters, summed over the steps that all workers took together."""
    trainable: int = 0
    """Trainable parameters now."""
    total: int = 0
    """Parameters now, with those that are frozen."""

    def look(self, replica: Replica) -> None:
        """Take the model's present size."""
        parameters = list(replica.parameters())
        self.total = sum(p.numel() for p in parameters)
        self.trainable = sum(p.numel() for p in parameters if p.requires_grad)

    def count(self, *, together: bool, full: bool) -> None:
        """A step at that size."""
        self.steps += 1
        self.full_steps += full and together
        self.apart_steps += not together
        self.synchronised += self.trainable * together

    def state(self) -> dict[str, int]:
        """As plain values."""
        return asdict(self)


def tell(
    counts: Counts, *, trainable_full: int, full: int, final: int, wall_s: float, factored: bool
) -> dict[str, Any]:
    """The counts of a finished run, with a model of `final` parameters in place of `full`.

    The equations have no term for averages now and then: without factors, groups that train alone have no estimate.
    """
    steps = max(1, counts.steps)
    known = factored or not counts.apart_steps
    share = counts.trainable / trainable_full if trainable_full else 1.0
    # Published figures take what travels: trainable parameters where bases are frozen, else the final size.
    compressed = min(share, final / full)
    at_full = counts.full_steps / steps
    low = max(0.0, 1 - counts.apart_steps / steps - at_full)
    ecr = {
        "full": at_full,
        "compressed": low,
        "fraction": compressed,
        "ecr": 1 - at_full - low * compressed,
        "ecr_assumed": 1 - ASSUMED_FULL - (1 - ASSUMED_FULL) * compressed,
    }
    scaled = {
        "bytes_per_s": 4 * counts.synchronised / max(wall_s, 1e-9) / BACKWARD_SHARE,
        "vs_full": counts.synchronised / (trainable_full * steps) if trainable_full else None,
    }
    return {
        "trainable_full": trainable_full,
        "trainable_final": counts.trainable,
        "trainable_share": share,
        "parameters_in_training": counts.total,
        "ecr": ecr if known else None,
        "scaled_traffic": scaled if known else None,
    }
