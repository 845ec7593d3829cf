"""The dissertation's counts of a run: trained parameters, sizes, and its estimates of traffic.

Trainable parameters and compression are defined as in its tables. Its two estimates of traffic are recorded next to
the ledger's figures, for comparison with published ones. They use steps and parameters only, not how a method packs
what it sends.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from thinwire.replica.replica import Replica

BACKWARD_SHARE = 0.54
"""Fraction of the time spent in the backward pass, as measured in the dissertation for Eq. 5.9."""
ASSUMED_FULL = 0.25
"""Fraction of training at full rank that its Eq. 5.10 assumes where it is not known."""


@dataclass
class Counts:
    """Steps by the model's size. A step counts with the size it started with."""

    steps: int = 0
    """All steps."""
    full_steps: int = 0
    """Steps of all workers together, with every layer at full rank."""
    apart_steps: int = 0
    """Steps in which groups trained alone."""
    synchronised: int = 0
    """Trainable parameters, summed over the steps of all workers together."""
    trainable: int = 0
    """Trainable parameters now."""
    total: int = 0
    """All parameters now, also frozen ones."""

    @classmethod
    def of(cls, state: dict[str, int]) -> Counts:
        """Counts from a state; those of other versions may have other names."""
        return cls(**{name: state.get(name, 0) for name in asdict(cls())})

    def update(self, replica: Replica) -> None:
        """Read the model's present size."""
        parameters = list(replica.parameters())
        self.total = sum(p.numel() for p in parameters)
        self.trainable = sum(p.numel() for p in parameters if p.requires_grad)

    def count(self, *, together: bool, full: bool) -> None:
        """Count one step at that size."""
        self.steps += 1
        self.full_steps += full and together
        self.apart_steps += not together
        self.synchronised += self.trainable * together

    def state(self) -> dict[str, int]:
        return asdict(self)


def figures(
    counts: Counts, *, trainable_full: int, full: int, final: int, wall_s: float, factored: bool
) -> dict[str, Any]:
    """The figures of a finished run, whose model has `final` parameters instead of `full`.

    The equations have no term for occasional averages: groups that train alone have no estimate without factors.
    """
    steps = max(1, counts.steps)
    known = factored or not counts.apart_steps
    share = counts.trainable / trainable_full if trainable_full else 1.0
    # Published figures count what is sent: trainable parameters where bases are frozen, else the final size.
    compressed = min(share, final / full)
    # In whole steps, so that nothing is left over where all of them are accounted for.
    low = steps - counts.apart_steps - counts.full_steps
    ecr = {
        "full": counts.full_steps / steps,
        "compressed": low / steps,
        "fraction": compressed,
        "ecr": (counts.apart_steps + low * (1 - compressed)) / steps,
        "ecr_assumed": (1 - ASSUMED_FULL) * (1 - compressed),
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
