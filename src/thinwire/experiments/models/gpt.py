"""GPT-2's arithmetic."""

from __future__ import annotations

import torch

from thinwire.train.models import Decoder


class GPT(Decoder):
    """GPT-2: tanh's GELU, and a head that is the embedding of tokens. 124.4 M parameters at a vocabulary of 50,257.

    No library's model replaces it: that of transformers returns an object instead of logits and holds every weight
    transposed, so neither checkpoints nor factors would be the same.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        block: int = 1024,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        dropout: float = 0.0,
    ) -> None:
        sizes = {"vocabulary": vocabulary, "block": block, "width": width, "depth": depth, "heads": heads}
        super().__init__(**sizes, dropout=dropout, gelu="tanh")
        self.head.weight = self.tokens.weight
        with torch.no_grad():  # what 2 · depth branches add to the residual stream should not grow with the depth
            for name, parameter in self.named_parameters():
                if name.endswith(("attention.out.weight", "mlp.2.weight")):
                    parameter.div_((2 * depth) ** 0.5)
