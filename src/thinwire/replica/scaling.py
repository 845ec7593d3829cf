"""One scale of the losses for workers that trained apart, where a GradScaler sets it."""

from typing import Any

import torch

from thinwire.comm.wire import Wire


class SharedScale:
    """A scaler whose state is agreed on after each merge; None does nothing."""

    def __init__(self, scaler: Any, wire: Wire) -> None:
        self.scaler = scaler
        self.wire = wire
        self._is_due = False

    def expect(self) -> None:
        """Agree at the next call: a merge happens inside scaler.step, before the scaler's own update."""
        self._is_due = self.scaler is not None

    def agree(self) -> None:
        """The smallest scale and growth tracker of all workers, or each would unscale by its own factor."""
        if not self._is_due:
            return
        self._is_due = False
        state = self.scaler.state_dict()
        if state:
            mine = torch.tensor([-state["scale"], -float(state["_growth_tracker"])], dtype=torch.float64)
            scale, growth = (-self.wire.all_reduce_max(mine, "control")).tolist()
            self.scaler.load_state_dict({**state, "scale": scale, "_growth_tracker": int(growth)})
