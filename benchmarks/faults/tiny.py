"""A recipe that trains in a fraction of a second: few digits, a convolution and three Linears."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from thinwire.recipes import Recipe
from thinwire.recipes import digits as digits_recipe
from thinwire.train.data import Images, digits


class Tiny(nn.Module):
    """`middle` and `hidden` get factored."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.middle = nn.Conv2d(4, 16, 2, stride=2)
        self.hidden = nn.Linear(16 * 16, 24)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.norm(self.stem(x)).relu()).relu().flatten(1)
        return self.head(self.hidden(x).relu())


def few(folder: Path | None = None) -> Images:
    """Some of the digits."""
    whole = digits(folder)
    return replace(whole, train_rows=whole.train_rows[:128], heldout_rows=whole.heldout_rows[:32])


def tiny() -> Recipe:
    """The digits recipe with less of everything."""
    return digits_recipe().replace(name="tiny", source=few, model=lambda source: Tiny(), steps=14, batch=16)
