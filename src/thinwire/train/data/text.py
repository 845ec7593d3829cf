"""Text held in memory, as ids: by character, by word or by byte."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire.train.data.source import locate
from thinwire.train.draws import Draws


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text as ids of its tokens; an example is a window of `block` tokens and the same one further on."""

    train_ids: Tensor
    """Ids of the part that is trained on; windows may begin anywhere in it."""
    heldout_ids: Tensor
    """Ids of the part held out; its windows do not overlap."""
    block: int
    """Tokens in a window."""
    tokens: Sequence[str]
    """The vocabulary, in the order of ids: characters or words."""

    @property
    def vocabulary(self) -> int:
        """How many different tokens there are."""
        return len(self.tokens)

    @property
    def characters(self) -> str:
        """The vocabulary of a text by character."""
        return "".join(self.tokens)

    @property
    def train_size(self) -> int:
        return len(self.train_ids) - self.block

    @property
    def heldout_size(self) -> int:
        return (len(self.heldout_ids) - 1) // self.block

    def train(self, indices: np.ndarray, draws: Draws | None = None) -> tuple[Tensor, Tensor]:
        return _windows(self.train_ids, indices, self.block)

    def heldout(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        return _windows(self.heldout_ids, indices * self.block, self.block)

    def to(self, device: torch.device | str) -> Text:
        """The same text, held on `device`."""
        return replace(self, train_ids=self.train_ids.to(device), heldout_ids=self.heldout_ids.to(device))


def _windows(ids: Tensor, starts: np.ndarray, block: int) -> tuple[Tensor, Tensor]:
    begin = torch.from_numpy(starts).to(ids.device)
    places = begin[:, None] + torch.arange(block + 1, device=ids.device)  # (examples, block + 1)
    window = ids[places].long()
    return window[:, :-1], window[:, 1:]


def shakespeare(folder: Path | None = None, *, block: int = 64, heldout: int = 32_768) -> Text:
    """Tiny Shakespeare by characters; the last `heldout` characters are held out."""
    with gzip.open(locate("tinyshakespeare.txt.gz", folder), "rt", encoding="utf-8") as file:
        text = file.read()
    characters = "".join(sorted(set(text)))
    number = {c: i for i, c in enumerate(characters)}
    ids = torch.tensor([number[c] for c in text], dtype=torch.uint8)
    return Text(train_ids=ids[:-heldout], heldout_ids=ids[-heldout:], block=block, tokens=characters)
