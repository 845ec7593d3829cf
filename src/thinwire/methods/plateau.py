"""Whether losses have stopped falling."""

from dataclasses import dataclass


@dataclass
class Plateau:
    """The best loss so far, and how many since were not better."""

    patience: int
    threshold: float
    best: float | None = None
    worse: int = 0
    """Losses in a row that were not better."""

    def reached(self, loss: float) -> bool:
        """Add a loss; counting starts again when this returns True."""
        if self.best is None or loss < self.best - self.threshold * abs(self.best):
            self.best, self.worse = loss, 0
        else:
            self.worse += 1
        if self.worse <= self.patience:
            return False
        self.worse = 0
        return True
