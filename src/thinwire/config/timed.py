"""Fields that follow the length of a run."""

from collections.abc import Mapping
from typing import Any, ClassVar


class Timed:
    """What configs share whose `total_steps` decides what happens when."""

    total_steps: int | None
    usual: ClassVar[Mapping[str, Any]] = {}
    """What fields are that are "auto", in a run that is long enough."""

    @property
    def in_force(self) -> dict[str, Any]:
        """What fields are that are "auto", in this run."""
        return {}

    @property
    def chosen(self) -> str:
        """Which fields differ from the usual ones since the run is short; for the log."""
        chosen = {name: value for name, value in self.in_force.items() if value != self.usual[name]}
        if not chosen:
            return ""
        usual = {name: self.usual[name] for name in chosen}
        return f"total_steps={self.total_steps} is short for {listed(usual)}: {listed(chosen)} instead"

    @property
    def idle(self) -> str:
        """What the method never does in so few steps, and why; for the log."""
        return ""


def listed(fields: Mapping[str, Any]) -> str:
    """Fields and values, as one would write them."""
    return ", ".join(f"{name}={value}" for name, value in fields.items())
