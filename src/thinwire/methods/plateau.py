"""Whether losses have stopped falling."""

from dataclasses import dataclass


@dataclass
class Plateau:
    """What was seen of them so far."""

    patience: int
    threshold: float
    best: float | None = None
    worse: int = 0
    """Losses in a row that were not better."""

    def reached(self, loss: float) -> bool:
        """Look at one more loss; begins to count anew when it says yes."""
        if self.best is None or loss < self.best - self.threshold * abs(self.best):
            self.best, self.worse = loss, 0
        else:
            self.worse += 1
        if self.worse <= self.patience:
            return False
        self.worse = 0
        return True
