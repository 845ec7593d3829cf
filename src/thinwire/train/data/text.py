"""Text held in memory, as ids of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire.base.errors import ConfigError
from thinwire.train.data.source import cut_for_validation, locate, rows_on, unpacked_text
from thinwire.train.step_rng import StepRNG


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text as ids of its tokens; an example is a window of `block` tokens, with the next tokens as targets."""

    train_ids: Tensor
    """Ids of the training part; windows may start anywhere."""
    heldout_ids: Tensor
    """Ids of the held-out part; its windows do not overlap."""
    block: int
    """Tokens in a window."""
    tokens: Sequence[str]
    """The vocabulary, in the order of ids: characters or words."""
    validation_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    """Ids of a validation part; empty if there is none."""

    def __post_init__(self) -> None:
        for part, ids in (("trained on", self.train_ids), ("held out", self.heldout_ids)):
            if len(ids) <= self.block:
                raise ConfigError(
                    f"the part {part} has {len(ids)} tokens, too few for one window of `block` {self.block} and the "
                    "token after it; give more text or a smaller `block`"
                )

    @property
    def vocabulary(self) -> int:
        """The number of different tokens."""
        return len(self.tokens)

    @property
    def characters(self) -> str:
        """The vocabulary of a text by character."""
        return "".join(self.tokens)

    @property
    def train_size(self) -> int:
        return len(self.train_ids) - self.block

    @property
    def pass_size(self) -> int:
        """Windows that cover the training part once."""
        return -(-len(self.train_ids) // self.block)

    @property
    def heldout_size(self) -> int:
        return (len(self.heldout_ids) - 1) // self.block

    @property
    def validation_size(self) -> int:
        return max(0, (len(self.validation_ids) - 1) // self.block)

    def train(self, indices: np.ndarray, rng: StepRNG | None = None) -> tuple[Tensor, Tensor]:
        return _windows(self.train_ids, indices, self.block)

    def heldout(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return _windows(self.heldout_ids, indices * self.block, self.block)

    def validation(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return _windows(self.validation_ids, indices * self.block, self.block)

    def for_validation(self) -> Text:
        """The validation part held out, or the last tenth of the training part where there is none."""
        if self.validation_size:
            return replace(self, heldout_ids=self.validation_ids)
        cut = cut_for_validation(len(self.train_ids))
        return replace(self, train_ids=self.train_ids[:cut], heldout_ids=self.train_ids[cut:])

    def to(self, device: torch.device | str) -> Text:
        """The same text on `device`."""
        parts = ("train_ids", "heldout_ids", "validation_ids")
        return replace(self, **{part: getattr(self, part).to(device) for part in parts})


def _windows(ids: Tensor, starts: np.ndarray, block: int) -> tuple[Tensor, Tensor]:
    begin = rows_on(ids.device, starts)
    places = begin[:, None] + torch.arange(block + 1, device=ids.device)  # (examples, block + 1)
    window = ids[places].long()
    return window[:, :-1], window[:, 1:]


def shakespeare(folder: Path | None = None, *, block: int = 64, heldout: int = 32_768) -> Text:
    """Tiny Shakespeare by characters; the last `heldout` characters are held out."""
    text = unpacked_text(locate("tinyshakespeare.txt.gz", folder))
    characters = "".join(sorted(set(text)))
    number = {c: i for i, c in enumerate(characters)}
    ids = torch.tensor([number[c] for c in text], dtype=torch.uint8)
    return Text(train_ids=ids[:-heldout], heldout_ids=ids[-heldout:], block=block, tokens=characters)
